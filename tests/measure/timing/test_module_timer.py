"""Seconds of each module's forward, from clocks whose time the test decides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_flops.measure.timing.clocks import CudaEventClock, WallClock
from lightning_flops.measure.timing.module_timer import ModuleTimer
from tests.fake_clock import FakeEvent, FakeNow


class Working(nn.Module):
    """Takes so many seconds of the clock before the modules inside it run, and as many after them."""

    def __init__(self, now: FakeNow, seconds: float, *inside: nn.Module) -> None:
        super().__init__()
        self.now = now
        self.seconds = seconds
        self.inside = nn.ModuleList(inside)

    def forward(self, x: Tensor) -> Tensor:
        self.now.sleep(self.seconds)
        for module in self.inside:
            x = module(x)
        self.now.sleep(self.seconds)
        return x


def test_own_seconds_are_those_between_a_modules_borders_and_its_childrens() -> None:
    now = FakeNow()
    model = Working(now, 1.0, Working(now, 2.0), Working(now, 4.0, Working(now, 8.0)))
    timer = ModuleTimer(model, WallClock(now))
    with timer:
        model(torch.ones(1))
        now.sleep(100.0)
        model(torch.ones(1))
    model(torch.ones(1))
    expected = {"": 2.0, "inside.0": 4.0, "inside.1": 8.0, "inside.1.inside.0": 16.0}
    assert timer.seconds() == {name: 2 * seconds for name, seconds in expected.items()}
    assert timer.outermost_calls == 2


def test_on_a_device_the_time_is_the_events_with_one_synchronization() -> None:
    now = FakeNow()
    events: list[FakeEvent] = []

    def new_event() -> FakeEvent:
        events.append(FakeEvent(now, lag=0.5 * len(events)))  # the device falls behind, half a second an event
        return events[-1]

    model = Working(now, 1.0, Working(now, 2.0))
    timer = ModuleTimer(model, CudaEventClock(new_event=new_event, now=now))
    with timer:
        model(torch.ones(1))
    # Hooks at 0, 1, 5 and 6 s of the host are from 0 to 0.5, 2 to 2.5, 7 to 7.5 and 9 to 9.5 s of the device.
    assert timer.seconds() == pytest.approx({"": 1.5 + 1.5, "inside.0": 4.5}, abs=1e-9)
    assert [event.synchronized for event in events] == [0] * 7 + [1]


def test_a_call_that_is_no_forward_is_the_roots_time() -> None:
    now = FakeNow()
    model = nn.Sequential(Working(now, 1.0))
    timer = ModuleTimer(model, WallClock(now))
    with timer, timer.in_root():
        now.sleep(5.0)
        model[0](torch.ones(1))
        now.sleep(5.0)
    assert timer.seconds() == {"": 10.0, "0": 2.0}
    assert timer.outermost_calls == 1
