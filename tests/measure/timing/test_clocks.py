"""Times on a device, from clocks and events whose time the test decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_flops.measure.timing.phase_timer import (
    CudaEventClock,
    Mark,
    ModuleTimer,
    PhaseTimer,
    WallClock,
    clock_for,
)
from tests.fake_clock import FakeEvent, FakeNow
from tests.measure.timing.steps import read


def test_time_of_modules_is_that_between_events_with_one_synchronization() -> None:
    now, events = FakeNow(), list[FakeEvent]()

    class Working(nn.Sequential):
        """Takes a second before the modules inside it run, and one after them."""

        def forward(self, x: Tensor) -> Tensor:
            now.sleep(1.0)
            result: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
            now.sleep(1.0)
            return result

    def new_event() -> FakeEvent:
        events.append(FakeEvent(now, lag=0.5 * len(events)))  # the device falls behind, half a second an event
        return events[-1]

    model = Working(Working(nn.Identity()))
    timer = ModuleTimer(model, CudaEventClock(new_event=new_event, now=now, stream=lambda: "main"))
    with timer:
        model(torch.ones(1))
    # Hooks at 0, 1, 2, 2, 3 and 4 s of the host last, on the device, from 0 to 0.5, 2 to 2.5, 4 to 4.5, 5 to 5.5, 7 to
    # 7.5 and 9 to 9.5 s.
    expected = {"": (2.0 - 0.5) + (9.0 - 7.5), "0": (4.0 - 2.5) + (7.0 - 5.5), "0.0": 5.0 - 4.5}
    assert timer.seconds() == pytest.approx(expected, abs=1e-9)
    assert [event.synchronized for event in events] == [0] * 11 + [1]


def test_the_reader_is_timed_on_the_host_and_the_wait_on_the_device() -> None:
    now = FakeNow()
    # The device runs 3 s behind when the loader is asked and only 1 s behind when it has delivered.
    lags = iter([3.0, 3.0, 1.0, 1.0])
    clock = CudaEventClock(new_event=lambda: FakeEvent(now, next(lags)), now=now, stream=lambda: "main", ready=0)
    timer = PhaseTimer(clock)
    timer.begin()
    timer.enter("data_wait")
    now.sleep(2.5)
    timer.leave()
    seconds, times = read(timer)
    assert times.reader_sec == 2.5
    assert seconds.data_wait == 0.5


def test_marks_of_a_step_are_on_its_stream_and_their_events_are_there_before() -> None:
    now, events, asked = FakeNow(), list[FakeEvent](), list[str]()
    streams = iter(["main", "other"])

    def new_event() -> FakeEvent:
        events.append(FakeEvent(now))
        return events[-1]

    def stream() -> str:
        asked.append(next(streams))
        return asked[-1]

    clock = CudaEventClock(new_event=new_event, now=now, stream=stream, ready=6)
    timer, steps = PhaseTimer(clock), list[list[Mark]]()
    for _ in range(2):
        timer.begin()
        made = len(events)
        timer.enter("forward")
        now.sleep(2.0)
        timer.leave()
        now.sleep(1.0)
        steps.append(timer.cut())
    clock.settle()  # an event that was left on the first stream is waited for as well
    assert sum(event.synchronized for event in events) == 2
    seconds = [read(timer, marks)[0] for marks in steps]
    assert [(one.forward, one.other) for one in seconds] == [(2.0, 1.0)] * 2
    assert asked == ["main", "other"]  # once a step
    assert (made, len(events)) == (6, 8)  # the first step's four, two of the second's, and two more than were ready
    assert [event.stream for event in reversed(events)] == ["other"] * 2 + ["main"] * 4 + ["other"] * 2


def test_marks_are_on_a_stream_of_the_models_device_also_where_another_one_is_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model on the second GPU, of a program that never called ``torch.cuda.set_device``."""
    now, events = FakeNow(), list[FakeEvent]()

    def new_event(*, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        events.append(FakeEvent(now))
        return events[-1]

    monkeypatch.setattr(torch.cuda, "Event", new_event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"current on {device or 'cuda:0'}")
    model = nn.Identity()
    with ModuleTimer(model, clock_for(torch.device("cuda", 1))):
        model(torch.ones(1))
    clock = clock_for(torch.device("cuda", 1))
    assert clock is not None
    PhaseTimer(clock).begin()
    # A record without a stream is on the current one of the current device, which has nothing of the model's to do.
    assert {event.stream for event in events} == {"current on cuda:1"}


def test_a_part_inside_its_own_kind_and_one_of_no_step_make_no_boundary_inside() -> None:
    now, stamps = FakeNow(), list[float]()

    class Counting(WallClock):
        def stamp(self) -> Any:
            stamps.append(now())
            return now()

    timer = PhaseTimer(Counting(now))
    timer.begin()
    for part, sec in (("optimizer", 1.0), ("optimizer", 2.0), ("validation", 4.0), ("forward", 8.0)):
        timer.enter(part)
        now.sleep(sec)
    for sec in (16.0, 32.0, 64.0, 128.0):
        timer.leave()
        now.sleep(sec)
    seconds, times = read(timer)
    assert (seconds.optimizer, seconds.forward, seconds.other) == (1 + 2 + 32 + 64, 0, 128)
    assert times.excluded_sec == {"validation": 4.0 + 8.0 + 16.0}
    assert len(stamps) == 6  # the step's two ends, and where optimizer and validation begin and end
    assert timer.entered == ["optimizer", "optimizer", "validation", "forward"]


def test_a_whole_step_has_two_stamps_and_leaves_out_what_is_of_no_step() -> None:
    now = FakeNow()
    timer = PhaseTimer(WallClock(now))
    timer.whole = True
    timer.begin()
    timer.enter("forward")
    now.sleep(1.0)
    timer.leave()
    plain = timer.cut()
    timer.enter("validation", counts=False)
    now.sleep(2.0)
    timer.leave()
    now.sleep(4.0)
    seconds, times = read(timer)
    assert (len(plain), read(timer, plain)[0].total) == (2, 1.0)
    assert (seconds.total, times.excluded_sec) == (4.0, {"validation": 2.0})
    assert timer.entered == ["forward"]
