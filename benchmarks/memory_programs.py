"""Training programs whose memory is predicted: models, batches and optimizers, small enough for two cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

Make = Callable[[], nn.Module]
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A model with its loss, what it is trained on, and how."""

    name: str
    model: Make
    batch: Callable[[int], tuple[Tensor, ...]]  #: In a batch size.
    optimizer: Optimizer
    size: int  #: Batch size.
    accumulate: int = 1
    autocast: torch.dtype | None = None


class WithLoss(nn.Module):
    """A body, its classes and their loss."""

    def __init__(self, body: nn.Module, width: int, classes: int = 10) -> None:
        super().__init__()
        self.body, self.out = body, nn.Linear(width, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        return cross_entropy(self.out(self.body(x)), y)


class Call(nn.Module):
    """A function as a module, of modules that are its own."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = function

    def forward(self, *args: Any) -> Any:
        """What the function returns."""
        return self.function(self, *args)


def adam(kind: str = "AdamW", **settings: Any) -> Optimizer:
    """An optimizer of torch's that has a learning rate."""
    return lambda model: getattr(torch.optim, kind)(model.parameters(), lr=1e-3, **settings)


LOOP, FOREACH, FUSED = (adam(foreach=False), adam(foreach=True), adam(fused=True))
SGD, MOMENTUM = adam("SGD", foreach=False), adam("SGD", momentum=0.9, foreach=False)
ADAFACTOR = adam("Adafactor", foreach=False)


def rows(width: int, size: int) -> tuple[Tensor, Tensor]:
    """Rows and their classes."""
    return torch.randn(size, width), torch.zeros(size, dtype=torch.long)


def images(side: int, size: int) -> tuple[Tensor, Tensor]:
    """Images and their classes."""
    return torch.randn(size, 3, side, side), torch.zeros(size, dtype=torch.long)


def sequences(length: int, width: int, size: int) -> tuple[Tensor, Tensor]:
    """Sequences of vectors and their classes."""
    return torch.randn(size, length, width), torch.zeros(size, dtype=torch.long)


def tokens(length: int, size: int) -> tuple[Tensor]:
    """Tokens."""
    return (torch.zeros(size, length, dtype=torch.long),)


# ---- networks


def mlp() -> nn.Module:
    """Three layers, two activations and a norm."""
    layers = nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024)
    return WithLoss(nn.Sequential(*layers), 1024)


def cnn() -> nn.Module:
    """Two convolutions."""
    first = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return WithLoss(nn.Sequential(*first, *second), 64)


def _conv(inputs: int, outputs: int, *, size: int = 3, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def _residual(width: int) -> nn.Module:
    return Call(lambda self, x: x + self.two(self.one(x)), one=_conv(width, width), two=_conv(width, width))


def resnet() -> nn.Module:
    """Residual blocks of batch-normalized convolutions, ReLUs in place."""
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return WithLoss(
        nn.Sequential(_conv(3, 32), _residual(32), nn.MaxPool2d(2), _residual(32), _residual(32), *ends), 32
    )


def separable() -> nn.Module:
    """Depthwise separable convolutions."""
    blocks = [part for _ in range(3) for part in (_conv(32, 32, groups=32), _conv(32, 32, size=1))]
    return WithLoss(nn.Sequential(_conv(3, 32), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()), 32)


def unet() -> nn.Module:
    """A U-Net of three levels."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        one = self.down_1(x)
        two = self.down_2(nn.functional.max_pool2d(one, 2))
        low = self.up_1(self.middle(nn.functional.max_pool2d(two, 2)))
        low = self.up_2(self.join_1(torch.cat((low, two), 1)))
        found = self.out(self.join_2(torch.cat((low, one), 1)))
        return cross_entropy(found.mean((2, 3)), y)

    ups = {"up_1": nn.ConvTranspose2d(64, 32, 2, 2), "up_2": nn.ConvTranspose2d(32, 16, 2, 2)}
    downs = {"down_1": _conv(3, 16), "down_2": _conv(16, 32), "middle": _conv(32, 64)}
    return Call(forward, **ups, **downs, join_1=_conv(64, 32), join_2=_conv(32, 16), out=nn.Conv2d(16, 10, 1))


def _mean(self: Any, x: Tensor) -> Tensor:
    return x.mean(1)


def encoder() -> nn.Module:
    """An encoder of torch's."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
    return WithLoss(nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), Call(_mean)), 128)


def decoder() -> nn.Module:
    """A decoder of torch's, which attends to its input."""
    layer = nn.TransformerDecoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
    return WithLoss(Call(lambda self, x: self.layers(x, x).mean(1), layers=nn.TransformerDecoder(layer, 2)), 128)


def recurrent(kind: Callable[..., nn.Module], **settings: Any) -> nn.Module:
    """A recurrent network."""
    width = 128 * (2 if settings.get("bidirectional") else 1)
    return WithLoss(
        Call(lambda self, x: self.rnn(x)[0].mean(1), rnn=kind(64, 128, batch_first=True, **settings)), width
    )


def checkpointed(*, reentrant: bool = False) -> nn.Module:
    """Six blocks, each repeated in the backward."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=reentrant)
        return cross_entropy(self.out(x), y)

    blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)]
    return Call(forward, first=nn.Linear(256, 256), blocks=nn.ModuleList(blocks), out=nn.Linear(256, 10))


def soft_experts() -> nn.Module:
    """Four experts, all of which see every row."""

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        x = sum(weights[:, place : place + 1] * expert(x) for place, expert in enumerate(self.experts))
        return cross_entropy(self.out(x), y)

    experts = nn.ModuleList([nn.Linear(256, 256) for _ in range(4)])
    return Call(forward, gate=nn.Linear(256, 4), experts=experts, out=nn.Linear(256, 10))


def frozen() -> nn.Module:
    """The network of three layers, of which only the classes are trained."""
    model: Any = mlp()
    model.body.requires_grad_(False)
    return model  # type: ignore[no-any-return]


# ---- of transformers, from small configurations

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1000,
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    **{"use_cache": False, "num_key_value_heads": 2, "pad_token_id": None, "max_position_embeddings": 512},
}
CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("ForMaskedLM", SIZES | {"pad_token_id": 0}),
    "GPT2": (
        "LMHeadModel",
        {"n_layer": 3, "n_head": 4, "n_embd": 128, "vocab_size": 1000, "use_cache": False, "bos_token_id": 0}
        | {"eos_token_id": 0, "attn_pdrop": 0.0},
    ),
    "Llama": ("ForCausalLM", SIZES),
    "Mixtral": ("ForCausalLM", SIZES | {"num_local_experts": 4}),
    "T5": (
        "ForConditionalGeneration",
        {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4, "vocab_size": 1000}
        | {"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0},
    ),
    "ViT": ("ForImageClassification", SIZES | {"image_size": 64, "patch_size": 8, "num_labels": 10}),
}


def of_transformers(
    name: str, *, dtype: torch.dtype = torch.float32, repeats: bool = False, rank: int = 0
) -> nn.Module:
    """A model of transformers with its loss; it *repeats* its blocks in the backward, or has adapters of *rank*."""
    import transformers

    suffix, settings = CONFIGS[name]
    model = (
        getattr(transformers, f"{name}{suffix}")(getattr(transformers, f"{name}Config")(**settings)).to(dtype).train()
    )
    if repeats:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if rank:
        _adapt(model, rank)

    def forward(self: Any, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        if name == "ViT":
            return self.model(pixel_values=inputs, labels=labels).loss  # type: ignore[no-any-return]
        return self.model(input_ids=inputs, labels=inputs).loss  # type: ignore[no-any-return]

    return Call(forward, model=model)


def _adapt(model: nn.Module, rank: int) -> None:
    """Low-rank adapters beside the frozen projections of attention."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for key, child in list(module.named_children()):
            if key in ("q_proj", "v_proj") and isinstance(child, nn.Linear):
                down, up = (
                    nn.Linear(child.in_features, rank, bias=False),
                    nn.Linear(rank, child.out_features, bias=False),
                )
                adapted = Call(lambda self, x: self.base(x) + self.up(self.down(x)), base=child, down=down, up=up)
                setattr(module, key, adapted)


# ---- the programs


def programs() -> Iterator[Program]:
    """All of them."""
    for optimizer, name in ((LOOP, "AdamW"), (FOREACH, "AdamW foreach"), (FUSED, "AdamW fused"), (SGD, "SGD")):
        yield Program(name=f"MLP, {name}", model=mlp, batch=partial(rows, 256), optimizer=optimizer, size=64)
    for optimizer, name in ((ADAFACTOR, "Adafactor"), (adam("RMSprop"), "RMSprop"), (adam("Adagrad"), "Adagrad")):
        yield Program(name=f"MLP, {name}", model=mlp, batch=partial(rows, 256), optimizer=optimizer, size=64)
    large = Program(name="MLP, momentum", model=mlp, batch=partial(rows, 256), optimizer=MOMENTUM, size=2048)
    yield large
    yield Program(name="MLP, classes alone", model=frozen, batch=large.batch, optimizer=LOOP, size=2048)
    yield Program(name="soft experts, foreach", model=soft_experts, batch=large.batch, optimizer=FOREACH, size=512)
    yield Program(name="checkpointed, AdamW", model=checkpointed, batch=large.batch, optimizer=LOOP, size=512)
    again = partial(checkpointed, reentrant=True)
    yield Program(name="checkpointed, reentrant", model=again, batch=large.batch, optimizer=LOOP, size=4096)
    yield Program(
        name="checkpointed, 4 accumulated",
        model=checkpointed,
        batch=large.batch,
        optimizer=LOOP,
        size=512,
        accumulate=4,
    )
    for name, make in {"CNN": cnn, "residual CNN": resnet, "separable CNN": separable, "U-Net": unet}.items():
        yield Program(name=f"{name}, momentum", model=make, batch=partial(images, 32), optimizer=MOMENTUM, size=64)
    yield Program(name="CNN, AdamW", model=cnn, batch=partial(images, 32), optimizer=LOOP, size=128)
    wide = partial(sequences, 64, 128)
    yield Program(name="encoder, AdamW", model=encoder, batch=wide, optimizer=LOOP, size=16)
    yield Program(name="decoder, AdamW", model=decoder, batch=wide, optimizer=LOOP, size=16)
    for name, kind, settings in (("LSTM", nn.LSTM, {}), ("GRU", nn.GRU, {}), ("RNN", nn.RNN, {})):
        make = partial(recurrent, kind, **settings)
        yield Program(name=f"{name}, AdamW", model=make, batch=partial(sequences, 32, 64), optimizer=LOOP, size=32)
    make = partial(recurrent, nn.LSTM, num_layers=2, bidirectional=True)
    yield Program(name="LSTM, bidirectional", model=make, batch=partial(sequences, 32, 64), optimizer=LOOP, size=32)
    some = partial(tokens, 128)
    for name in ("Bert", "GPT2", "Llama", "Mixtral", "T5"):
        yield Program(name=f"{name}, AdamW", model=partial(of_transformers, name), batch=some, optimizer=LOOP, size=8)
    vit = partial(of_transformers, "ViT")
    yield Program(name="ViT, AdamW", model=vit, batch=partial(images, 64), optimizer=LOOP, size=16)
    make = partial(of_transformers, "GPT2", repeats=True)
    yield Program(name="GPT2, checkpointed", model=make, batch=some, optimizer=LOOP, size=8)
    make = partial(of_transformers, "Llama", rank=8)
    yield Program(name="Llama, LoRA", model=make, batch=some, optimizer=LOOP, size=8)
    make = partial(of_transformers, "Llama", dtype=torch.bfloat16)
    yield Program(name="Llama, bfloat16, foreach", model=make, batch=some, optimizer=FOREACH, size=8)
    make, half = partial(of_transformers, "GPT2"), torch.bfloat16
    yield Program(name="GPT2, autocast", model=make, batch=some, optimizer=LOOP, size=8, autocast=half)
    yield Program(name="GPT2, Adafactor", model=make, batch=some, optimizer=ADAFACTOR, size=8)
    make = partial(of_transformers, "Bert")
    yield Program(name="Bert, 4 accumulated", model=make, batch=some, optimizer=FUSED, size=8, accumulate=4)
