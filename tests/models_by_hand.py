"""Models that are trained on batches of ever new sizes, and what a step of each costs, worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.corpus.transformers_parts import (
    above_the_diagonal,
    attention_scores,
    convolution,
    decoder_layer,
    encoder_layer,
    linear,
    stack,
    tiny,
    tokens,
)

VOCABULARY = 31

Batch = dict[str, torch.Tensor]
"""Arguments of a model by name; the model returns its loss under the name ``loss``."""

Sizes = tuple[int, ...]
"""Whatever a step's FLOPs depend on."""


class StepCost(NamedTuple):
    """FLOPs of one step."""

    forward: int
    backward: int
    recompute: int = 0
    skipped: int = 0

    @property
    def model(self) -> int:
        """Forward and backward, over the full matrix of scores."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """Model FLOPs and what the backward repeats."""
        return self.forward + self.backward + self.recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """A model, batches for it, and what they cost."""

    name: str
    make: Callable[[], nn.Module] = nn.Identity  #: The model, where one is run.
    sizes: Callable[[random.Random], Sizes]  #: Draws the sizes of one batch.
    batch: Callable[..., Batch] = dict  #: A batch of these sizes, where a model is run.
    cost: Callable[..., StepCost]  #: What a step on a batch of these sizes costs.
    has_formula: bool = True  #: A step's FLOPs are a polynomial of its sizes.


def lengths(numbers: random.Random) -> Sizes:
    """Samples and tokens of each."""
    return numbers.randint(1, 5), numbers.randint(5, 40)


def sentences(batch: int, sequence: int) -> Batch:
    """Random tokens, of which the labels are the same."""
    ids = tokens(VOCABULARY, batch, sequence)
    return {"input_ids": ids, "labels": ids.clone()}


def padded(batch: int, sequence: int) -> Batch:
    """The same; each row but the first may end in padding."""
    rows = sentences(batch, sequence)
    real = torch.randint(1, sequence + 1, (batch,))
    real[0] = sequence
    mask = (torch.arange(sequence) < real[:, None]).long()
    return {"input_ids": rows["input_ids"], "attention_mask": mask, "labels": rows["labels"]}


# ---- transformers


def bert() -> nn.Module:
    """One layer, whose attention is written out."""
    return tiny("BertForMaskedLM", vocab_size=VOCABULARY, max_position_embeddings=64, **stack(12, 1, 3, 20))


def bert_cost(batch: int, sequence: int) -> StepCost:
    """The layer; the transform before the head; the head."""
    rows = batch * sequence
    forward = encoder_layer(batch, sequence, 12, 3, 20) + linear(rows, 12, 12) + linear(rows, 12, VOCABULARY)
    return StepCost(forward, 2 * forward)


def checkpointed_bert_cost(batch: int, sequence: int) -> StepCost:
    """BERT with all of its layer again: its last operator, a normalization, needs what the last product gave."""
    plain = bert_cost(batch, sequence)
    return plain._replace(recompute=encoder_layer(batch, sequence, 12, 3, 20))


def gpt2() -> nn.Module:
    """One layer of fused masked attention, which has no dropout: with it, torch on a CPU would not fuse it."""
    return tiny(
        "GPT2LMHeadModel", vocab_size=VOCABULARY, n_positions=64, n_embd=12, n_layer=1, n_head=2,
        n_inner=20, bos_token_id=0, eos_token_id=1, attn_pdrop=0.0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip


def gpt2_cost(batch: int, sequence: int, padded: int = 0) -> StepCost:
    """The backward of fused attention repeats the scores.

    A kernel with the causal flag skips what is above the diagonal: in both products of the forward, in the four of the
    backward, and in the repeated one. With padding transformers gives it a mask in place of that: it skips nothing.
    """
    scores = attention_scores(batch, 2, sequence, sequence, 6)
    forward = encoder_layer(batch, sequence, 12, 2, 20) + linear(batch * sequence, 12, VOCABULARY)
    skipped = 0 if padded else (2 + 4 + 1) * 2 * batch * 2 * above_the_diagonal(sequence) * 6
    return StepCost(forward, 2 * forward, recompute=scores, skipped=skipped)


def lengths_and_padding(numbers: random.Random) -> Sizes:
    """Samples, tokens of each, and whether one of them is padding."""
    batch, sequence = lengths(numbers)
    return batch, sequence, int(batch > 1 and numbers.random() < 0.8)


def t5() -> nn.Module:
    """One layer on each side."""
    return tiny(
        "T5ForConditionalGeneration", vocab_size=VOCABULARY, d_model=12, d_kv=5, d_ff=20, num_layers=1,
        num_decoder_layers=1, num_heads=3, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip


def t5_lengths(numbers: random.Random) -> Sizes:
    """Samples, and the tokens of each on both sides."""
    return numbers.randint(1, 5), numbers.randint(5, 40), numbers.randint(5, 25)


def pairs(batch: int, source: int, target: int) -> Batch:
    """Sentences and their translations."""
    return {"input_ids": tokens(VOCABULARY, batch, source), "labels": tokens(VOCABULARY, batch, target)}


def t5_cost(batch: int, source: int, target: int) -> StepCost:
    """The encoder's layer; the decoder's attention to itself and to the encoder, its perceptron; the head."""
    encoder = encoder_layer(batch, source, 12, 3, 20, inner=15)
    decoder = decoder_layer(batch, target, source, 12, 3, 20, inner=15)
    forward = encoder + decoder + linear(batch * target, 12, VOCABULARY)
    return StepCost(forward, 2 * forward)


def grouped_query_attention(batch: int, sequence: int) -> int:
    """12 channels, 6 heads of 4, which share 2 heads of keys and values."""
    rows = batch * sequence
    return (
        linear(rows, 12, 24)
        + 2 * linear(rows, 12, 8)
        + 2 * attention_scores(batch, 6, sequence, sequence, 4)
        + linear(rows, 24, 12)
    )


def mixtral() -> nn.Module:
    """One layer, which sends every token to two of four experts."""
    return tiny(
        "MixtralForCausalLM", vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=4, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=64, use_cache=False, experts_implementation="batched_mm",
        **stack(12, 1, 6, 20),
    )  # fmt: skip


def mixtral_cost(batch: int, sequence: int) -> StepCost:
    """Attention, the router, two experts a token, and the head."""
    rows = batch * sequence
    experts = 2 * (linear(rows, 12, 40) + linear(rows, 20, 12))
    attention = grouped_query_attention(batch, sequence)
    forward = attention + linear(rows, 12, 4) + experts + linear(rows, 12, VOCABULARY)
    return StepCost(forward, 2 * forward)


class Images(nn.Module):
    """A ViT whose images may have any size."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = tiny(
            "ViTForImageClassification", image_size=(8, 8), patch_size=4, num_channels=2, num_labels=5,
            **stack(12, 1, 2, 20),
        )  # fmt: skip

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.vit(pixel_values=pixel_values, labels=labels, interpolate_pos_encoding=True)


def image_sizes(numbers: random.Random) -> Sizes:
    """Images, and their pixels in both directions, in whole patches."""
    return numbers.randint(1, 5), 4 * numbers.randint(2, 9), 4 * numbers.randint(2, 9)


def images(batch: int, height: int, width: int) -> Batch:
    """Random images of 2 channels in 5 classes."""
    return {"pixel_values": torch.randn(batch, 2, height, width), "labels": torch.randint(5, (batch,))}


def vit_cost(batch: int, height: int, width: int) -> StepCost:
    """Patches of 4 x 4 pixels, whose product needs no gradient of the image; a layer over them and one more; the head.

    Rows of pixels beyond the last whole patch are left out.
    """
    patches = (height // 4) * (width // 4)
    patching = convolution(batch, 12, patches, 2, 16)
    rest = encoder_layer(batch, patches + 1, 12, 2, 20) + linear(batch, 12, 5)
    return StepCost(patching + rest, patching + 2 * rest)


# ---- of our own


def frames(numbers: random.Random) -> Sizes:
    """Recordings, and the frames of each."""
    return numbers.randint(1, 5), numbers.randint(20, 200)


def conformer_cost(batch: int, frames: int) -> StepCost:
    """Two convolutions that halve the frames, 6 to 8 to 12 channels; an encoder's layer; a depthwise one; classes.

    The first convolution needs no gradient of the features; fused attention repeats its scores.
    """
    halved = (frames - 3) // 2 + 1
    left = (halved - 3) // 2 + 1
    first = convolution(batch, 8, halved, 6, 3)
    scores = attention_scores(batch, 2, left, left, 6)
    rest = (
        convolution(batch, 12, left, 8, 3)
        + encoder_layer(batch, left, 12, 2, 20)
        + convolution(batch, 12, left, 1, 3)
        + linear(batch, 12, 7)
    )
    return StepCost(first + rest, first + 2 * rest, recompute=scores)


class LoRA(nn.Module):
    """A frozen layer, and two thin ones beside it that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.frozen = nn.Linear(12, 12, bias=False)
        self.down, self.up = nn.Linear(12, 3, bias=False), nn.Linear(3, 12, bias=False)
        for module in (self.embed, self.frozen):
            module.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embed(input_ids)
        return {"loss": (self.frozen(hidden) + self.up(self.down(hidden))).square().mean()}


def lora_cost(batch: int, sequence: int) -> StepCost:
    """Backward: of the frozen product nothing; of ``down`` its weight's; of ``up`` its weight's and its input's."""
    rows = batch * sequence
    down, up = linear(rows, 12, 3), linear(rows, 3, 12)
    return StepCost(linear(rows, 12, 12) + down + up, down + 2 * up)


MODELS = (
    ByHand(name="BERT", make=bert, sizes=lengths, batch=padded, cost=bert_cost),
    ByHand(name="GPT-2", make=gpt2, sizes=lengths, batch=sentences, cost=gpt2_cost),
    ByHand(name="GPT-2 with padding", sizes=lengths_and_padding, cost=gpt2_cost),
    ByHand(name="T5", make=t5, sizes=t5_lengths, batch=pairs, cost=t5_cost),
    ByHand(name="Mixtral", make=mixtral, sizes=lengths, batch=padded, cost=mixtral_cost),
    ByHand(name="ViT", make=Images, sizes=image_sizes, batch=images, cost=vit_cost),
    ByHand(name="Conformer", sizes=frames, cost=conformer_cost, has_formula=False),
    ByHand(name="LoRA", make=LoRA, sizes=lengths, batch=sentences, cost=lora_cost),
    ByHand(name="BERT with checkpointing", sizes=lengths, cost=checkpointed_bert_cost),
)
"""Every model, by the names that results have for them."""


def model_named(name: str) -> ByHand:
    """The model of this name."""
    return next(one for one in MODELS if one.name == name)
