"""Counting on fake tensors: what it tells, what raises, and that nothing is written or changed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from lightning_flops.pytorch import count_offline

ROW = 2 * 3 * 5  # one row through Linear(3, 5)


class Asking(nn.Module):
    """A layer whose forward is *run*, which is handed the layer, a buffer and the batch."""

    threshold: torch.Tensor

    def __init__(self, run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.register_buffer("threshold", torch.tensor(2))
        self.run = run

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return self.run(self, *batch)


def test_a_grouped_product_in_float32_is_counted() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 8, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ends = torch.tensor([2, 5, 6], dtype=torch.int32)
            result: torch.Tensor = nn.functional.grouped_mm(x, self.weight, offs=ends)
            return result

    product = 2 * 6 * 8 * 16
    counts = count_offline(Experts(), torch.empty(6, 8, requires_grad=True))
    assert (counts.forward, counts.backward) == (product, 2 * product)


ROWS = torch.ones(4, 3)


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: x if m.layer(x).sum() > 0 else -x,
        lambda m, x: x[m.layer(x)[:, 0] > 0],
        lambda m, x: x if torch.rand(1) > 0.5 else -x,
        lambda m, x: m.layer(x[: m.layer(x).argmax().item()]),
    ],
)
def test_a_forward_that_asks_for_values_raises_and_torch_writes_no_trace_of_it(
    run: Callable[..., torch.Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    model, random = Asking(run), torch.get_rng_state()
    loggers = [logging.getLogger(name) for name in ("torch", "torch._subclasses", "torch._subclasses.fake_tensor")]
    before = [(logger.level, logger.disabled, list(logger.filters), list(logger.handlers)) for logger in loggers]
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        count_offline(model, ROWS)
    assert capfd.readouterr() == ("", "")
    assert [(log.level, log.disabled, list(log.filters), list(log.handlers)) for log in loggers] == before
    assert torch.equal(torch.get_rng_state(), random)


def test_what_a_forward_writes_reaches_neither_the_batch_nor_a_buffer() -> None:
    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        module.threshold.add_(1)
        result: torch.Tensor = module.layer(x[:3])
        return result

    model, batch = Asking(run), ROWS.clone()
    assert count_offline(model, batch).forward == 3 * ROW
    assert torch.equal(batch, ROWS)
    assert int(model.threshold) == 2


def test_no_cache_of_a_function_keeps_what_was_computed_on_fake_tensors() -> None:
    @functools.lru_cache(maxsize=1)
    def codes(size: int) -> tuple[torch.Tensor, int]:
        return torch.arange(size) * 2.0, size

    @functools.lru_cache(maxsize=1)
    def other(size: int) -> int:
        return size

    class Coded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * codes(x.shape[-1])[0] * other(1)

    model, batch = Coded(), torch.ones(2, 3)
    count_offline(model, batch)
    assert torch.equal(model(batch), torch.tensor([[0.0, 2.0, 4.0], [0.0, 2.0, 4.0]]))
    assert other.cache_info().currsize == 1
