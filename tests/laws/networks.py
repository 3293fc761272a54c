"""Small random networks: what to build is a value that hypothesis can shrink, and building it is separate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
"""Numbers at each position of the sequences that the networks map to sequences of the same shape."""
SEQUENCE = 5


@dataclass(frozen=True, slots=True)
class Perceptron:
    """To *hidden* numbers and back, at every position."""

    hidden: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention in separate products, over *heads* heads."""

    heads: int


@dataclass(frozen=True, slots=True)
class Convolution:
    """Along the sequence, over *kernel* (odd) positions, in *groups* groups."""

    kernel: int
    groups: int


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A GRU along the sequence."""

    bidirectional: bool


@dataclass(frozen=True, slots=True)
class Residual:
    """The input is added to what *inner* makes of it."""

    inner: Spec


@dataclass(frozen=True, slots=True)
class Repeated:
    """The same module *times* times."""

    inner: Spec
    times: int


@dataclass(frozen=True, slots=True)
class Frozen:
    """No parameter of *inner* is trained."""

    inner: Spec


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """The backward runs *inner* again."""

    inner: Spec


@dataclass(frozen=True, slots=True)
class Chain:
    """One after the other."""

    parts: tuple[Spec, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """All of them on the same input, added up."""

    parts: tuple[Spec, ...]


Spec: TypeAlias = (
    Perceptron | Attention | Convolution | Recurrent | Residual | Repeated | Frozen | Checkpointed | Chain | Sum
)

_LEAVES = st.one_of(
    st.builds(Perceptron, st.integers(2, 9)),
    st.builds(Attention, st.sampled_from([1, 2, 3])),
    st.builds(Convolution, st.sampled_from([1, 3]), st.sampled_from([1, 2, 3, 6])),
    st.builds(Recurrent, st.booleans()),
)


def _around(inner: st.SearchStrategy[Spec], *, checkpoints: bool) -> st.SearchStrategy[Spec]:
    parts = st.lists(inner, min_size=1, max_size=3).map(tuple)
    shapes: list[st.SearchStrategy[Spec]] = [
        st.builds(Residual, inner),
        st.builds(Repeated, inner, st.integers(1, 3)),
        st.builds(Frozen, inner),
        st.builds(Chain, parts),
        st.builds(Sum, parts),
    ]
    if checkpoints:
        shapes.append(st.builds(Checkpointed, inner))
    return st.one_of(shapes)


def specs(*, checkpoints: bool = True) -> st.SearchStrategy[Spec]:
    """Networks of up to a handful of layers; without *checkpoints* nothing in them runs twice."""
    return st.recursive(_LEAVES, lambda inner: _around(inner, checkpoints=checkpoints), max_leaves=5)


class _Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, WIDTH // self.heads)).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = torch.softmax(query @ key.transpose(-1, -2), dim=-1) @ value
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class _Convolution(nn.Module):
    def __init__(self, kernel: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, kernel, padding=kernel // 2, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return result


class _Recurrent(nn.Module):
    def __init__(self, bidirectional: bool) -> None:
        super().__init__()
        directions = 2 if bidirectional else 1
        self.gru = nn.GRU(WIDTH, WIDTH // directions, batch_first=True, bidirectional=bidirectional)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.gru(x)[0]
        return result


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.inner(x)
        return result


class _Repeated(nn.Module):
    def __init__(self, inner: nn.Module, times: int) -> None:
        super().__init__()
        self.inner = inner
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.inner(x)
        return x


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return result


class _Sum(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts]).sum(dim=0)


def build(spec: Spec) -> nn.Module:
    """The network that *spec* describes, from (batch, SEQUENCE, WIDTH) to the same shape."""
    match spec:
        case Perceptron(hidden):
            return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH))
        case Attention(heads):
            return _Attention(heads)
        case Convolution(kernel, groups):
            return _Convolution(kernel, groups)
        case Recurrent(bidirectional):
            return _Recurrent(bidirectional)
        case Residual(inner):
            return _Residual(build(inner))
        case Repeated(inner, times):
            return _Repeated(build(inner), times)
        case Frozen(inner):
            return build(inner).requires_grad_(False)
        case Checkpointed(inner):
            return _Checkpointed(build(inner))
        case Chain(parts):
            return nn.Sequential(*map(build, parts))
        case Sum(parts):
            return _Sum([build(part) for part in parts])


def without_checkpoints(spec: Spec) -> Spec:
    """The same network, nothing in it run again."""
    match spec:
        case Checkpointed(inner):
            return without_checkpoints(inner)
        case Residual(inner):
            return Residual(without_checkpoints(inner))
        case Repeated(inner, times):
            return Repeated(without_checkpoints(inner), times)
        case Frozen(inner):
            return Frozen(without_checkpoints(inner))
        case Chain(parts):
            return Chain(tuple(map(without_checkpoints, parts)))
        case Sum(parts):
            return Sum(tuple(map(without_checkpoints, parts)))
        case _:
            return spec
