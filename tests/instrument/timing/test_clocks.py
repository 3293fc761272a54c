from __future__ import annotations

import torch

from lightning_flops.instrument.timing.clocks import CudaEventClock, WallClock, clock_for
from tests.fake_clock import FakeEvent, FakeNow


def test_event_seconds_are_the_devices_and_host_seconds_the_hosts() -> None:
    now = FakeNow()
    lags = iter([0.0, 2.0])
    clock = CudaEventClock(new_event=lambda: FakeEvent(now, next(lags)), now=now)
    start = clock.stamp()
    now.sleep(0.5)
    end = clock.stamp()  # the host is ahead: the device reaches this event two seconds later
    assert clock.host_seconds_between(start, end) == 0.5
    assert clock.seconds_between(start, end) == 2.5


def test_one_synchronization_settles_all_stamps() -> None:
    now = FakeNow()
    events: list[FakeEvent] = []

    def new_event() -> FakeEvent:
        events.append(FakeEvent(now))
        return events[-1]

    clock = CudaEventClock(new_event=new_event, now=now)
    for _ in range(5):
        clock.stamp()
    assert [event.synchronized for event in events] == [0, 0, 0, 0, 0]
    clock.settle()
    assert [event.synchronized for event in events] == [0, 0, 0, 0, 1]


def test_each_device_has_the_clock_that_sees_its_work() -> None:
    of = [type(clock_for(torch.device(name))) for name in ("cpu", "cuda", "mps")]
    assert of == [WallClock, CudaEventClock, type(None)]  # of the last no clock of ours reads events
