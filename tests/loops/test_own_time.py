"""What the profiler takes for itself in the steps that it times, by a clock in the test's hands."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_flops import profile_training
from lightning_flops.adapters.loop import LoopAdapter
from lightning_flops.measure.timing.phase_timer import WallClock
from lightning_flops.run.run import Run
from tests.fake_clock import FakeNow
from tests.loops.nets import (
    BACKWARD_SEC,
    BATCH,
    FETCH_SEC,
    FORWARD_SEC,
    LOSS_SEC,
    UPDATE_SEC,
    Net,
    Rows,
    SlowSGD,
    loss_of,
)

HEARD = [f"{part}_{end}" for part in ("fetch", "forward", "backward", "update") for end in ("begins", "ends")]
PARTS = {
    "data_wait": FETCH_SEC,
    "forward": FORWARD_SEC + LOSS_SEC,
    "backward": BACKWARD_SEC,
    "optimizer": UPDATE_SEC,
}


@pytest.fixture
def ours_sec(now: FakeNow, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds that the profiler takes in a step: 0.25 for each of the things that it hears."""
    for name in HEARD:
        monkeypatch.setattr(LoopAdapter, name, now.slowed(getattr(LoopAdapter, name), 0.25))
    # The parent's step has torch's hooks where an optimizer of its own was ever made, and is heard inside the update.
    torch.optim.SGD([torch.zeros(1)])
    return 0.25 * (len(HEARD) + 2)


def window_of(now: FakeNow, windows: list[Any], *, workers: int = 0, rests: float = 0.0) -> Any:
    """The window of a loop whose loader has so many *workers*, and which *rests* between two steps."""
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    batches = DataLoader(Rows(26, now), batch_size=BATCH, num_workers=workers)
    with profile_training(net, optimizer, profile_step=1, timing_steps=16, trace=False, lines=False):
        for rows in batches:
            loss_of(net(rows), now).backward()
            optimizer.step()
            now.sleep(rests)
    (window,) = windows
    return window


def test_what_the_profiler_takes_is_in_no_step_and_in_no_part_and_what_the_program_takes_is(
    now: FakeNow, windows: list[Any], ours_sec: float
) -> None:
    window = window_of(now, windows, rests=0.125)
    parts = {**dict.fromkeys(window.timed_steps[0].seconds.__slots__, 0.0), **PARTS, "other": 0.125}
    assert [astuple(step.seconds) for step in window.timed_steps] == [tuple(parts.values())] * 8
    assert [step.seconds.total for step in window.plain_steps] == [sum(parts.values())] * 8


def test_beside_the_workers_of_a_loader_it_is_not_taken_off(now: FakeNow, windows: list[Any], ours_sec: float) -> None:
    window = window_of(now, windows, workers=1)
    own_sec = sum(PARTS.values()) - FETCH_SEC  # a worker has a clock of its own
    assert {step.seconds.total for step in window.timed_steps} == {own_sec + ours_sec}
    assert {step.seconds.total for step in window.plain_steps} == {own_sec + ours_sec}


def test_the_clock_goes_on_whatever_interrupts_the_profiler_and_where(now: FakeNow) -> None:
    class Interrupted(WallClock):
        def pause(self) -> None:
            super().pause()
            raise KeyboardInterrupt

    for clock, error in [(WallClock(now), ValueError), (Interrupted(now), KeyboardInterrupt)]:
        failures: list[str] = []
        run: Any = SimpleNamespace(clock=clock, closed=False, unhooked=None, fail=failures.append)
        began = clock.stamp()

        def fails(run: Any = run) -> None:
            Run.does(run, now.sleep, 1.0)  # something of ours inside of something of ours
            now.sleep(2.0)
            raise ValueError

        with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else nullcontext():
            Run.does(run, fails)
        assert bool(failures) is (error is ValueError)
        now.sleep(4.0)
        assert clock.stamp() - began == 4.0


def test_where_a_program_has_left_no_room_for_the_profiler_its_run_goes_on() -> None:
    failures: list[str] = []
    run: Any = SimpleNamespace(clock=None, closed=False, unhooked=None, fail=failures.append)

    def recurses() -> None:
        recurses()

    assert Run.does(run, recurses) is None
    assert not failures
