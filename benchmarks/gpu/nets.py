"""What the parts train: a GPT with a formula for its FLOPs, worked out from its sizes alone, layers, and their fits."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback, Profile
from tests.lightning.nets import ROOT, new_trainer
from tests.listening import listening

from .checks import Here

FIRST_STEP = 3  # The step that is counted: what a first step sets up is over then
SETTLES = 2  # Steps that are left alone after the counted one, without a data loader's workers


# ---- a GPT


@dataclass(frozen=True, slots=True)
class Size:
    """What a GPT is made of, and what it is trained on."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int

    @property
    def parameters(self) -> int:
        """Of the matrices: 12 d² a layer, and the embedding, which is the head too."""
        return self.layers * 12 * self.width**2 + self.vocabulary * self.width

    @property
    def forward_flops(self) -> int:
        """Two FLOPs for each token and parameter of a matrix, and attention over the full score matrix.

        A layer: queries, keys and values 3 d², their projection d², up and down 4 d² each. The head: V d. Attention,
        for each token and layer: its query with all keys, and the scores with all values, 2 · 2 · length · d.
        """
        attention = self.layers * 4 * self.length * self.width
        return self.batch * self.length * (2 * self.parameters + attention)

    @property
    def model_flops(self) -> int:
        """Forward and backward: every product has two in the backward, since all inputs of products need gradients."""
        return 3 * self.forward_flops


LARGE = Size(layers=24, width=1024, heads=16, vocabulary=50_304, batch=8, length=1024)  # 354 M parameters
MEDIUM = Size(layers=4, width=512, heads=8, vocabulary=4096, batch=4, length=512)
TINY = Size(layers=2, width=32, heads=2, vocabulary=64, batch=2, length=16)


def size_for(here: Here, whole: Size = LARGE) -> Size:
    """The size that is trained here."""
    return TINY if here.small else whole


class _Block(nn.Module):
    """Attention and an MLP, each with a norm before it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, self.heads = size.width, size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))  # type: ignore[no-any-return]


class _GPT(nn.Module):
    """Embedding, blocks, and a head that is the embedding again."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(_Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embed.weight)


def gpt_on(here: Here, size: Size) -> nn.Module:
    """A GPT of *size*, made on the device: there it takes no time."""
    with here.device:
        return _GPT(size)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of every token but the first of each sequence, given those before it."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def batches_of(size: Size, here: Here, number: int) -> list[Tensor]:
    """*number* times one batch of random tokens, on the device."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, size.vocabulary, (size.batch, size.length), generator=generator)
    return [tokens.to(here.device)] * number


# ---- layers


class _Layers(nn.Module):
    """Layers one after the other; torch's compiler passes over a Sequential of its own."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def layers(here: Here, width: int, number: int) -> nn.Module:
    """Linear layers of one width, with GELU between them, made on the device."""
    with here.device:
        return _Layers(*(part for _ in range(number) for part in (nn.Linear(width, width), nn.GELU())))


# ---- fits


class Net(LightningModule):
    """A model, its loss and AdamW; it keeps the losses, on the device."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor] | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss or (lambda output, batch: output.float().square().mean())
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """A forward and a loss."""
        loss = self.loss(self.model(batch), batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, in one kernel where the device has it."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=next(self.parameters()).is_cuda)


@dataclass(frozen=True, slots=True)
class Fit:
    """A fit that is over."""

    net: Any
    callback: FlopsProfilerCallback | None
    log: list[str]  # What this project warned of

    @property
    def profile(self) -> Profile:
        """What the profiler measured; raises RuntimeError if there is nothing."""
        if self.callback is None or self.callback.profile is None:
            raise RuntimeError(f"the fit left no profile; the profiler warned: {self.log or 'of nothing'}")
        return self.callback.profile


def profiler(here: Here, **settings: Any) -> FlopsProfilerCallback:
    """The callback, with what keeps a run short, and *settings*."""
    given: dict[str, Any] = {"profile_step": FIRST_STEP, "timing_steps": 5, "trace": False, "monitor": False}
    return FlopsProfilerCallback(**{**given, "html": False, "detailed": False, **settings})


def fit(
    here: Here, net: LightningModule, batches: Sequence[Any] | DataLoader[Any], callback: Any = None,
    *callbacks: Callback, hear: Callable[[str], None] | None = None, **settings: Any,
) -> Fit:  # fmt: skip
    """One epoch over *batches*, with the profiler or without; *hear* gets every warning, without it there are none."""
    settings = {"accelerator": "gpu" if here.on_gpu else "cpu", **settings}
    trainer = new_trainer(ROOT, here.folder, *([] if callback is None else [callback]), *callbacks, **settings)
    loader = batches if isinstance(batches, DataLoader) else DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    with listening("lightning_flops", level=logging.WARNING) as log, warnings.catch_warnings():
        warnings.simplefilter("ignore" if hear is None else "always")
        if hear is not None:
            listener = hear
            warnings.showwarning = lambda message, *_: listener(str(message))
        trainer.fit(net, loader)
    here.settle()
    return Fit(net, callback, log)


def gpt_fit(
    here: Here, size: Size, steps: int, callback: Any, *callbacks: Callback, backend: str = "", **settings: Any
) -> Fit:
    """A fit of a GPT in bfloat16, its blocks compiled by *backend* if there is one."""
    net, batches = Net(gpt_on(here, size), next_token_loss), batches_of(size, here, steps)
    blocks: Any = net.model.blocks
    for block in blocks if backend else ():  # blocks are alike: one is compiled, and serves them all
        block.compile(backend=backend)
    return fit(here, net, batches, callback, *callbacks, precision="bf16-mixed", **settings)


def forget(here: Here) -> None:
    """Give back what earlier fits held of the device's memory."""
    gc.collect()
    if here.on_gpu:
        torch.cuda.empty_cache()
