"""Times on a device, from clocks and events whose time the test decides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_flops.measure.timing.clocks import CudaEventClock
from lightning_flops.measure.timing.module_timer import ModuleTimer
from lightning_flops.measure.timing.phase_timer import PhaseTimer
from tests.fake_clock import FakeEvent, FakeNow


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
    timer = ModuleTimer(model, CudaEventClock(new_event=new_event, now=now))
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
    timer = PhaseTimer(CudaEventClock(new_event=lambda: FakeEvent(now, next(lags)), now=now))
    timer.begin()
    timer.enter("data_wait")
    now.sleep(2.5)
    timer.leave()
    times = timer.read(timer.cut())
    assert times.reader_sec == 2.5
    assert times.seconds.data_wait == 0.5
