"""What the transformers library's models are made of: tiny configurations, and the cost of their layers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from lightning_flops.records import PhaseFlops


def tiny(model: str, *, attn_implementation: str = "eager", **settings: Any) -> nn.Module:
    """The library's class *model* with random weights, in eval mode, from a config with these settings."""
    made: Any = getattr(import_module("transformers"), model)
    built: nn.Module = made(made.config_class(attn_implementation=attn_implementation, **settings)).eval()
    return built


def stack(hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, Any]:
    """Settings of so many layers, as most configs call them."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return dict(zip(names, (hidden, layers, heads, intermediate), strict=True))


def side(name: str, layers: int, heads: int, width: int) -> dict[str, Any]:
    """Settings of an ``encoder`` or a ``decoder``, with so much between the two products of each layer."""
    return {f"{name}_layers": layers, f"{name}_attention_heads": heads, f"{name}_ffn_dim": width}


def linear(rows: int, inputs: int, outputs: int) -> int:
    """One linear layer over so many rows."""
    return 2 * rows * inputs * outputs


def attention_scores(batch: int, heads: int, queries: int, keys: int, head_dim: int) -> int:
    """Q K^T of every head; the weighted values cost the same again."""
    return 2 * batch * heads * queries * keys * head_dim


def above_the_diagonal(sequence: int) -> int:
    """Scores of one head that a causal mask rules out: 0 + 1 + … + (sequence - 1)."""
    return sum(range(sequence))


def trained(forward: int, recompute: int = 0) -> PhaseFlops:
    """A module whose every product needs both gradients."""
    return PhaseFlops(forward=forward, backward=2 * forward, recompute=recompute)


def tokens(vocabulary: int, batch: int, sequence: int) -> torch.Tensor:
    """Random token ids; 0 to 2 are left to special tokens."""
    return torch.randint(3, vocabulary, (batch, sequence))


def convolution(batch: int, filters: int, positions: int, channels: int, taps: int) -> int:
    """A convolution: for every output position and filter a dot product over channels and taps."""
    return 2 * batch * filters * positions * channels * taps


def reads_the_input(forward: int) -> PhaseFlops:
    """A layer whose input needs no gradient: its weight's is all that is computed."""
    return PhaseFlops(forward=forward, backward=forward)


def attention(batch: int, queries: int, keys: int, hidden: int, heads: int, inner: int | None = None) -> int:
    """Two projections of either side's rows to all heads' *inner* channels, *hidden* if not given; both products."""
    inner = inner or hidden
    projections = 2 * linear(batch * queries, hidden, inner) + 2 * linear(batch * keys, hidden, inner)
    return projections + 2 * attention_scores(batch, heads, queries, keys, inner // heads)


def encoder_layer(
    batch: int, sequence: int, hidden: int, heads: int, intermediate: int, inner: int | None = None
) -> int:
    """Self-attention, and a two-layer perceptron."""
    own = attention(batch, sequence, sequence, hidden, heads, inner)
    return own + 2 * linear(batch * sequence, hidden, intermediate)


def decoder_layer(
    batch: int, target: int, source: int, hidden: int, heads: int, intermediate: int, inner: int | None = None
) -> int:
    """Self-attention, attention to a source, and a two-layer perceptron."""
    cross = attention(batch, target, source, hidden, heads, inner)
    return encoder_layer(batch, target, hidden, heads, intermediate, inner) + cross
