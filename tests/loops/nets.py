"""A small network whose FLOPs are worked out by hand, and loops over it whose times a test decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.fake_clock import FakeNow

BATCH, WIDE, MIDDLE, NARROW = 8, 16, 32, 4

FIRST = 2 * BATCH * WIDE * MIDDLE
SECOND = 2 * BATCH * MIDDLE * NARROW
FORWARD = FIRST + SECOND
BACKWARD = FIRST + 2 * SECOND  # nothing before the first layer needs a gradient

FORWARD_SEC, BACKWARD_SEC, UPDATE_SEC, FETCH_SEC, LOSS_SEC = 2.0, 4.0, 8.0, 0.5, 32.0


class Slow(torch.autograd.Function):
    """Takes its time in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, now: FakeNow, forward_sec: float, backward_sec: float) -> torch.Tensor:
        ctx.now, ctx.backward_sec = now, backward_sec
        now.sleep(forward_sec)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.now.sleep(ctx.backward_sec)
        return gradients[0], None, None, None


class Net(nn.Module):
    """Two layers."""

    def __init__(self, now: FakeNow) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDE, MIDDLE)
        self.second = nn.Linear(MIDDLE, NARROW)
        self._now = now

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = self.second(self.first(rows).relu())
        result: torch.Tensor = Slow.apply(output, self._now, FORWARD_SEC, BACKWARD_SEC)
        return result


class SlowSGD(torch.optim.SGD):
    """Takes its time in each step, and none in a closure."""

    def __init__(self, parameters: Any, now: FakeNow, sec: float = UPDATE_SEC) -> None:
        super().__init__(parameters, lr=0.1)
        self._now, self._sec = now, sec

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._now.sleep(self._sec)
        return super().step(closure)


class Rows(Dataset[torch.Tensor]):
    """As many rows of numbers; each takes its time."""

    def __init__(self, batches: int, now: FakeNow) -> None:
        self._batches = batches
        self._now = now
        self._rows = torch.randn(batches * BATCH, WIDE, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return self._batches * BATCH

    def __getitem__(self, place: int) -> torch.Tensor:
        self._now.sleep(FETCH_SEC / BATCH)
        return self._rows[place]


def loader(batches: int, now: FakeNow) -> DataLoader[torch.Tensor]:
    return DataLoader(Rows(batches, now), batch_size=BATCH)


def stream(batches: int, now: FakeNow) -> Iterator[torch.Tensor]:
    """Batches that are no DataLoader's."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(batches):
        now.sleep(FETCH_SEC)
        yield torch.randn(BATCH, WIDE, generator=generator)


def loss_of(output: torch.Tensor, now: FakeNow) -> torch.Tensor:
    """A loss that takes its time."""
    now.sleep(LOSS_SEC)
    return output.square().mean()
