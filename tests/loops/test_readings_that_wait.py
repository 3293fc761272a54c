"""Readings of the monitor that nobody gets are made rarely where steps are short, and no figure is another."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import profile_training
from lightning_flops.instrument.timing.monitor import Monitor
from lightning_flops.session.run_reports import RunReports
from tests.fake_clock import FakeNow

STEP_SEC = 2.0**-10
STEPS, EVERY = 2000, 8
WIDE, NARROW, ROWS = 6, 2, 4
# A linear layer: one product forward, and one backward, for its weights alone; the bias is no product.
FLOPS = 2 * (2 * ROWS * WIDE * NARROW)


class Slow(nn.Linear):
    """A forward takes its time."""

    def __init__(self, now: FakeNow) -> None:
        super().__init__(WIDE, NARROW)
        self._now = now

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self._now.sleep(STEP_SEC)
        return super().forward(rows)


@pytest.fixture
def readings(now: FakeNow, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of steps in each reading that is made."""
    monkeypatch.setattr("lightning_flops.session.samples.MOST", 0)  # no step is counted beside the window
    monkeypatch.setattr("lightning_flops.session.session.Monitor", functools.partial(Monitor, now))
    made: list[int] = []
    plain = RunReports.of_reading

    def of_reading(self: RunReports, reading: Any, steps: Any, *, at: float) -> bool:
        made.append(reading.steps)
        return plain(self, reading, steps, at=at)

    monkeypatch.setattr(RunReports, "of_reading", of_reading)
    return made


def train(now: FakeNow, **settings: Any) -> Any:
    model = Slow(now)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches: DataLoader[Any] = DataLoader([torch.ones(ROWS, WIDE)] * STEPS, batch_size=None)  # type: ignore[arg-type]
    with profile_training(
        model, optimizer, profile_step=0, timing_steps=1, trace=False, log_every_n_steps=EVERY, **settings
    ) as profiler:
        for rows in batches:
            model(rows).sum().backward()
            optimizer.step()
    return profiler.throughput


def test_where_nobody_gets_them_they_wait_for_half_a_second(now: FakeNow, readings: list[int]) -> None:
    run = train(now)
    # Twenty in a row had FLOPs of all their steps. The next one is made at the first log that comes 512 steps later, or
    # later still where a step had to be told at once.
    assert set(readings[1:20]) == {EVERY}
    assert all(512 <= steps <= 520 for steps in readings[20:]) and len(readings) == 20 + (STEPS - 20 * EVERY) // 520
    assert (run.model_flops, run.steps_counted + run.steps_predicted, run.steps_unknown) == (STEPS * FLOPS, STEPS, 0)
    assert run.batch_cost_sec.average == STEP_SEC == run.batch_cost_sec.maximum


def test_a_writer_gets_every_one(now: FakeNow, readings: list[int]) -> None:
    written: list[int] = []

    def write(scalars: dict[str, float], step: int) -> None:
        if "flops_monitor/samples_per_sec" in scalars:
            assert scalars["flops_monitor/samples_per_sec"] == ROWS / STEP_SEC
            written.append(step)

    run = train(now, writer=write)
    assert len(readings) == STEPS // EVERY
    assert written == list(range(EVERY, STEPS + 1, EVERY))[-len(written) :] and len(written) >= len(readings) - 2
    assert (run.model_flops, run.steps_unknown) == (STEPS * FLOPS, 0)
