"""A GPT with a formula for its FLOPs, worked out from its sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .here import Here


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a GPT is made of, and what it is trained on."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        """Of a batch."""
        return self.batch * self.length

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
        matrices = self.layers * 12 * self.width**2 + self.vocabulary * self.width
        attention = self.layers * 4 * self.length * self.width
        return self.tokens * (2 * matrices + attention)

    @property
    def model_flops(self) -> int:
        """Forward and backward: every product has two in the backward, since all inputs of products need gradients."""
        return 3 * self.forward_flops


LARGE = Size(layers=24, width=1024, heads=16, vocabulary=50_304, batch=8, length=1024)
"""354 M parameters."""
TINY = Size(layers=2, width=32, heads=2, vocabulary=64, batch=2, length=16)


def size_for(here: Here) -> Size:
    """The size that is trained here."""
    return TINY if here.small else LARGE


class Block(nn.Module):
    """Attention and an MLP, each with a norm before it."""

    def __init__(self, size: Size) -> None:
        """Makes the layers."""
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The input and what was made of it."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Embedding, blocks, and a head that is the embedding again."""

    def __init__(self, size: Size) -> None:
        """Makes the layers."""
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for every token."""
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embed.weight)


def gpt_on(here: Here, size: Size) -> GPT:
    """A GPT of *size*, made on the device: there it takes no time."""
    with here.device:
        return GPT(size)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of every token but the first of each sequence, given those before it."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def batches_of(size: Size, here: Here, number: int) -> list[Tensor]:
    """*number* times one batch of random tokens, on the device."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, size.vocabulary, (size.batch, size.length), generator=generator)
    return [tokens.to(here.device)] * number
