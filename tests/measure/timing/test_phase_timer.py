from __future__ import annotations

from lightning_flops.measure.timing.clocks import CudaEventClock, WallClock
from lightning_flops.measure.timing.phase_timer import PhaseTimer
from lightning_flops.records import PhaseSeconds
from tests.fake_clock import FakeEvent, FakeNow


def started() -> tuple[FakeNow, PhaseTimer]:
    now = FakeNow()
    timer = PhaseTimer(WallClock(now))
    timer.begin()
    return now, timer


def test_the_innermost_part_owns_the_time() -> None:
    now, timer = started()
    timer.enter("optimizer")  # Lightning runs forward and backward inside the optimizer's closure
    now.sleep(1.0)
    timer.enter("forward")
    now.sleep(2.0)
    timer.leave()
    timer.enter("backward")
    now.sleep(4.0)
    timer.leave()
    now.sleep(8.0)
    timer.leave()
    assert timer.read(timer.cut()).seconds == PhaseSeconds(forward=2.0, backward=4.0, optimizer=9.0)


def test_time_inside_a_part_that_is_no_phase_is_left_out_and_named() -> None:
    now, timer = started()
    now.sleep(1.0)
    timer.enter("validation")
    now.sleep(2.0)
    timer.enter("forward")  # a forward of the validation is validation
    now.sleep(4.0)
    timer.leave()
    timer.leave()
    now.sleep(8.0)
    times = timer.read(timer.cut())
    assert times.seconds == PhaseSeconds(other=9.0)
    assert times.excluded_sec == {"validation": 6.0}


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
