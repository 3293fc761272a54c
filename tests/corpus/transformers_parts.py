"""What the transformers library's models are made of: tiny configurations, and the cost of their layers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from lightning_flops.records import PhaseFlops


def tiny(model: str, **settings: Any) -> nn.Module:
    """The library's class *model* with random weights, in eval mode, from a config with these settings."""
    made: Any = getattr(import_module("transformers"), model)
    built: nn.Module = made(made.config_class(**settings)).eval()
    return built


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


def encoder_layer(batch: int, sequence: int, hidden: int, heads: int, intermediate: int) -> int:
    """Self-attention with four square projections, and a two-layer perceptron."""
    rows = batch * sequence
    attention = 4 * linear(rows, hidden, hidden) + 2 * attention_scores(
        batch, heads, sequence, sequence, hidden // heads
    )
    return attention + 2 * linear(rows, hidden, intermediate)


def decoder_layer(batch: int, target: int, source: int, hidden: int, heads: int, intermediate: int) -> int:
    """Self-attention, attention to a source, and a two-layer perceptron."""
    target_rows, source_rows = batch * target, batch * source
    cross = (
        2 * linear(target_rows, hidden, hidden)
        + 2 * linear(source_rows, hidden, hidden)
        + 2 * attention_scores(batch, heads, target, source, hidden // heads)
    )
    return encoder_layer(batch, target, hidden, heads, intermediate) + cross
