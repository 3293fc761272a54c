"""Seconds of the parts of a step, by a clock in the test's hands."""

from __future__ import annotations

from lightning_flops.measure.timing.phase_timer import PhaseTimer, WallClock
from lightning_flops.records import PhaseSeconds
from tests.fake_clock import FakeNow
from tests.measure.timing.steps import read


def test_only_what_no_part_ran_in_is_claimed() -> None:
    now = FakeNow()
    timer = PhaseTimer(WallClock(now))
    timer.begin()
    now.sleep(1.0)
    timer.claim("backward")  # nothing ran as a part: this second was
    timer.enter("forward")
    now.sleep(2.0)
    timer.claim("backward")  # a forward ran, and goes on
    now.sleep(4.0)
    timer.leave()
    now.sleep(8.0)
    seconds, _ = read(timer)
    assert seconds == PhaseSeconds(backward=1.0, forward=6.0, other=8.0)


def test_what_is_inside_of_what_belongs_to_no_step_does_not_either() -> None:
    now = FakeNow()
    timer = PhaseTimer(WallClock(now))
    timer.begin()
    timer.enter("validation")
    now.sleep(1.0)
    timer.enter("forward")
    now.sleep(2.0)
    timer.leave()
    now.sleep(4.0)
    timer.leave()
    now.sleep(8.0)
    seconds, times = read(timer)
    assert (seconds, times.excluded_sec) == (PhaseSeconds(other=8.0), {"validation": 7.0})


def test_a_step_goes_on_where_it_is_and_begins_anew_only_before_anything_ran() -> None:
    now = FakeNow()
    timer = PhaseTimer(WallClock(now))
    timer.begin()
    now.sleep(1.0)
    timer.go_on()  # until here only the profiler ran
    timer.enter("forward")
    now.sleep(2.0)
    timer.leave()
    timer.go_on()
    now.sleep(4.0)
    assert read(timer)[0] == PhaseSeconds(forward=2.0, other=4.0)
