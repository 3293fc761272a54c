"""The window beside a loader that is slower, as fast, or faster than the steps: simulated workers, a clock in hand."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_flops.instrument.notes import Notes
from lightning_flops.instrument.recorder import Recorder
from lightning_flops.instrument.timing.clocks import WallClock
from lightning_flops.instrument.timing.loader_queue import (
    Backlog,
    FeedState,
    LoaderQueue,
    backlogs_of,
)
from lightning_flops.instrument.timing.settling import steps_to_settle
from lightning_flops.instrument.torch_private.loading import fetched_ahead
from lightning_flops.records import FlopRecord, PhaseFlops, RunContext, WindowRecord
from tests.fake_clock import FakeNow

CONTEXT = RunContext(
    framework="test", framework_version="1", torch_version="2", device_type="cpu", device_name="cpu", precision="32"
)
SHAPES = ((4, 3), (4,))


class SimulatedLoader:
    """A DataLoader's workers: each makes one batch after the other, ordered in turn, *prefetch* ahead for each.

    Args:
        now: the clock.
        workers: how many there are.
        batch_sec: seconds a worker needs for a batch.
        jitter: share of *batch_sec* by which that varies at random.
        prefetch: batches ordered from each worker ahead.
    """

    def __init__(self, now: FakeNow, *, workers: int, batch_sec: float, jitter: float = 0.0, prefetch: int = 2) -> None:
        self.now = now
        self.workers = workers
        self._random = random.Random(0)
        self._batch_sec, self._jitter = batch_sec, jitter
        self._free_at = [now()] * workers
        self._done_at: list[float] = []
        self._consumed = 0
        for _ in range(workers * prefetch):
            self._order()

    def _order(self) -> None:
        worker = len(self._done_at) % self.workers
        seconds = self._batch_sec * (1 + self._jitter * self._random.uniform(-1, 1))
        self._free_at[worker] = max(self._free_at[worker], self.now()) + seconds
        self._done_at.append(self._free_at[worker])

    def fetch(self) -> None:
        """Wait for the next batch; another one is ordered in its place."""
        self.now.sleep(max(0.0, self._done_at[self._consumed] - self.now()))
        self._consumed += 1
        self._order()

    def backlog(self) -> Backlog:
        ordered = self._done_at[self._consumed :]
        ready = sum(done <= self.now() for done in ordered)
        return Backlog(ready=ready, behind=len(ordered) - ready, workers=self.workers)


class NoCounter:
    """Counts nothing."""

    compile_sec = 0.0

    def __enter__(self) -> None: ...
    def __exit__(self, *exc: object) -> None: ...
    def take_data_dependent(self) -> bool:
        return False

    def sweep(self) -> None: ...
    def total(self) -> PhaseFlops:
        return PhaseFlops()

    def record(self) -> FlopRecord:
        return FlopRecord()

    def pause(self) -> AbstractContextManager[None]:
        return nullcontext()

    in_root = in_optimizer = pause


def window_over(
    loader: SimulatedLoader, now: FakeNow, *, step_sec: float, timing_steps: int, accumulate: int = 1
) -> WindowRecord:
    """A window whose counted step, the third, takes a hundred times as long as the others."""
    prefetched = 2 * loader.workers
    recorder = Recorder(
        nn.Linear(1, 1),
        profile_step=3,
        timing_steps=timing_steps,
        settle_steps=max(2, -(-prefetched // accumulate)),
        feed=LoaderQueue(lambda: [loader.backlog()], batches_a_step=accumulate),
        clock=WallClock(now),
        new_counter=lambda root: NoCounter(),
        notes=Notes(),
    )
    for _ in range(100_000):
        if recorder.closed:
            break
        for batch in range(accumulate):
            with recorder.batch_scope():
                if recorder.timer is not None:
                    recorder.enter("data_wait")
                loader.fetch()
                if recorder.timer is not None:
                    recorder.leave()
                now.sleep(step_sec / accumulate * (100 if recorder.counting else 1))
                recorder.end_batch(shapes=SHAPES, samples=4, tokens=None, ends_step=batch == accumulate - 1)
    window = recorder.close(context=CONTEXT)
    assert window is not None
    return window


def waiting(window: WindowRecord) -> float:
    """Share of the timed steps that was waiting."""
    seconds = [step.seconds for step in window.timed_steps if step.seconds is not None]
    return sum(one.data_wait for one in seconds) / sum(one.total for one in seconds)


@pytest.mark.parametrize("timing_steps", [1, 2, 5, 7, 20, 33, 50])
@pytest.mark.parametrize("jitter", [0.0, 0.02])
def test_a_loader_half_as_fast_as_the_steps_is_half_of_the_time_whatever_the_windows_length(
    timing_steps: int, jitter: float
) -> None:
    now = FakeNow()
    loader = SimulatedLoader(now, workers=4, batch_sec=0.040, jitter=jitter)
    window = window_over(loader, now, step_sec=0.005, timing_steps=timing_steps)
    assert waiting(window) == pytest.approx(0.5, abs=0.03)
    assert len(window.timed_steps) == -(-timing_steps // 4) * 4  # whole rounds of the four workers
    assert window.notes == ()


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("step_ms", [1.0, 5.0, 7.5, 9.0])
def test_the_wait_of_the_long_run_is_timed_for_any_number_of_workers(workers: int, step_ms: float) -> None:
    now = FakeNow()
    loader = SimulatedLoader(now, workers=workers, batch_sec=0.010 * workers)
    window = window_over(loader, now, step_sec=step_ms / 1e3, timing_steps=10)
    assert waiting(window) == pytest.approx(1 - step_ms / 10, abs=0.03)


def test_with_accumulation_the_rounds_are_of_batches() -> None:
    now = FakeNow()
    loader = SimulatedLoader(now, workers=4, batch_sec=0.040)
    window = window_over(loader, now, step_sec=0.030, timing_steps=5, accumulate=6)
    # Six batches of 10 ms each against 30 ms of work; after two steps the loop has gone around the workers three times.
    assert waiting(window) == pytest.approx(0.5, abs=0.03)
    assert len(window.timed_steps) == 6


@pytest.mark.parametrize("timing_steps", [1, 5, 20])
def test_a_loader_that_keeps_up_delays_nothing(timing_steps: int) -> None:
    now = FakeNow()
    loader = SimulatedLoader(now, workers=4, batch_sec=0.040)
    window = window_over(loader, now, step_sec=0.020, timing_steps=timing_steps)
    assert waiting(window) == 0.0
    assert len(window.timed_steps) == timing_steps
    # As many steps are left alone as would empty a queue that nobody fills, or as there are steps to time, and enough
    # for every worker to have something to do.
    assert window.timed_steps[0].index == 4 + max(min(8, timing_steps), 5)


def test_a_queue_that_does_not_run_empty_in_time_is_told() -> None:
    now = FakeNow()
    loader = SimulatedLoader(now, workers=4, batch_sec=0.040)
    window = window_over(loader, now, step_sec=0.00999, timing_steps=5)
    assert any("were not used up within 80 steps" in note for note in window.notes)
    assert len(window.timed_steps) == 5


class FiveRows(Dataset[torch.Tensor]):
    """Rows that come at once."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(3)


def test_the_queue_of_a_real_loader_is_seen() -> None:
    notes: list[str] = []
    iterator = iter(DataLoader(FiveRows(), batch_size=2, num_workers=2, prefetch_factor=3))
    next(iterator)
    seen: Sequence[Backlog] = []
    for _ in range(500):  # the workers fill six places
        seen = backlogs_of([iterator, iter([])], note=notes.append)
        if seen[0].ready == 6:
            break
        time.sleep(0.01)
    assert seen == [Backlog(ready=6, behind=0, workers=2)]
    assert seen[0].state is FeedState.KEEPS_UP
    for _ in iterator:
        pass
    assert backlogs_of([iterator], note=notes.append) == [Backlog(ready=0, behind=0, workers=2)]
    assert notes == []


def test_a_queue_that_cannot_be_seen_is_told_and_the_steps_are_left_alone_as_often_as_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_implemented(iterator: Any) -> Backlog:
        raise NotImplementedError("no such count here")

    monkeypatch.setattr("lightning_flops.instrument.timing.loader_queue.backlog_of", not_implemented)
    notes: list[str] = []
    iterator = iter(DataLoader(FiveRows(), batch_size=2, num_workers=1))
    queue = LoaderQueue(lambda: backlogs_of([iterator], note=notes.append), batches_a_step=1)
    assert (queue.state(), queue.least_steps(), queue.rhythm_steps()) == (None, 0, 1)
    assert notes and all("could not be seen (NotImplementedError: no such count here)" in note for note in notes)


def test_a_loader_fetches_ahead_what_its_workers_may_and_nothing_without_any() -> None:
    data = [torch.zeros(1)] * 4
    assert fetched_ahead(DataLoader(data, num_workers=1, prefetch_factor=4)) == 1 * 4  # type: ignore[arg-type]
    assert fetched_ahead(DataLoader(data)) == 0  # type: ignore[arg-type]
    assert fetched_ahead(iter(DataLoader(data, num_workers=2, prefetch_factor=5))) == 2 * 5  # type: ignore[arg-type]
    assert fetched_ahead(iter(DataLoader(data))) == 0  # type: ignore[arg-type]
    assert fetched_ahead(data) == fetched_ahead(None) == 0


def test_the_steps_left_alone_use_up_what_was_fetched_ahead_and_are_two_at_least() -> None:
    assert steps_to_settle(batches_ahead=12, batches_a_step=5) == 3  # two steps consume ten
    assert steps_to_settle(batches_ahead=12, batches_a_step=4) == 3
    assert steps_to_settle(batches_ahead=0, batches_a_step=1) == 2
