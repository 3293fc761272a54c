"""What the programs of ``make bench-advice`` are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from itertools import chain, repeat
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

T = TypeVar("T")


class Clock:
    """Our own account of what a planted statement takes, beside what the profiler says of its line."""

    seconds = 0.0

    def around(self, cause: Callable[..., Any]) -> Callable[..., Any]:
        """*cause*, its time added up here."""

        @wraps(cause)
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = cause(*args)
            self.seconds += time.perf_counter() - began
            return result

        return timed


CLOCK = Clock()


class Step(NamedTuple):
    """Seconds of a step that nothing watched, and of them the planted statement's."""

    seconds: float
    cause_sec: float


def typical(steps: Sequence[Step]) -> Step:
    """The mean of the middle half, as the profiler's typical step is."""
    ordered = sorted(steps)
    middle = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    return Step(*map(fmean, zip(*middle, strict=True)))


PAIRS = 9
"""Blocks of steps with the cause, and as many under the remedy."""


def in_turns(one: Callable[[], T], other: Callable[[], T]) -> Iterator[tuple[T, T]]:
    """What both return, in turns, so that both have the same machine; each is first in every other pair."""
    for number in range(PAIRS):
        if number % 2:
            second = other()
            yield one(), second
        else:
            yield one(), other()


class Program(NamedTuple):
    """What is trained."""

    model: nn.Module
    batches: Iterable[Any]  # One pass; there may be several
    samples: int  # Of a batch
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=1e-4)
    before: Callable[[Any], Any] | None = None  # What the loop does to a batch
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None  # If not the mean of the output's squares
    after: Callable[[nn.Module], object] | None = None  # What the loop does after each backward


class Planted(NamedTuple):
    """A program with a cause, or, given the workers that its remedy names, without it."""

    make: Callable[[int | None], Any]
    rule: str  # The rule that knows it, or how its name begins
    where: str = ""  # What the fact must name: a line's function, a module, a part, a rank


def perceptron(*inside: Callable[[], nn.Module], width: int = 384, layers: int = 4) -> nn.Module:
    """Linear layers, with what *inside* makes after each."""
    made = ((nn.Linear(width, width), *(one() for one in inside)) for _ in range(layers))
    return nn.Sequential(*chain.from_iterable(made))


def same(*shape: int) -> Iterable[torch.Tensor]:
    """Batches that cost nothing to load."""
    return repeat(torch.randn(shape))


class Samples(Dataset[torch.Tensor]):
    """Rows of *width* numbers, each of which takes its time to load."""

    def __init__(self, load: Callable[[], object], width: int) -> None:
        self.load, self.rows = load, torch.randn(4096, width)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        began = time.perf_counter()
        self.load()
        CLOCK.seconds += time.perf_counter() - began
        return self.rows[index]


class WholeBatches(Samples):
    """The same, a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return self.rows[indices]


def loaded(*shape: int) -> Any:
    """The same batch again and again, out of a DataLoader."""
    return DataLoader(_Whole(shape), batch_size=None)


class _Whole(Dataset[torch.Tensor]):
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.batch = torch.randn(shape)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batch
