from __future__ import annotations

from lightning_flops.analysis.step_laws import StepKey
from lightning_flops.instrument.timing.monitor import Monitor, MonitorReading
from lightning_flops.records import UNKNOWN_TOKENS
from tests.fake_clock import FakeNow

KEY: StepKey = ((((8, 4),),), 1)
OTHER: StepKey = ((((4, 4),),), 1)


def one_batch(monitor: Monitor, now: FakeNow, *, wait: float, work: float, ends_step: bool = True) -> None:
    monitor.fetch_begins()
    now.sleep(wait)
    monitor.fetch_ends()
    now.sleep(work)
    monitor.batch(samples=8, ends_step=ends_step, key=KEY if ends_step else None)


def test_a_reading_is_what_went_by_since_the_last() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    for _ in range(3):
        one_batch(monitor, now, wait=0.25, work=0.75)
    assert monitor.read() == MonitorReading(
        seconds=3.0, data_wait_sec=0.75, batches=3, steps=3, samples=24, tokens=UNKNOWN_TOKENS, keys={KEY: 3}
    )
    one_batch(monitor, now, wait=0.5, work=1.5, ends_step=False)
    one_batch(monitor, now, wait=0.5, work=1.5)
    assert monitor.read() == MonitorReading(
        seconds=4.0, data_wait_sec=1.0, batches=2, steps=1, samples=16, tokens=UNKNOWN_TOKENS, keys={KEY: 1}
    )


def test_validation_is_not_training_time() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    one_batch(monitor, now, wait=0.0, work=1.0)
    monitor.exclude("validation")
    now.sleep(60.0)
    monitor.include("validation")
    one_batch(monitor, now, wait=0.0, work=1.0)
    assert monitor.read().seconds == 2.0


def test_an_exclusion_lasts_until_its_own_reason_is_over() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    monitor.exclude("epoch restart")
    now.sleep(10.0)
    monitor.exclude("checkpoint")
    now.sleep(10.0)
    monitor.include("checkpoint")
    now.sleep(10.0)
    monitor.include("epoch restart")
    now.sleep(1.0)
    monitor.include("validation")  # which never began
    assert monitor.read().seconds == 1.0


def test_a_fetch_inside_an_exclusion_is_excluded_too() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    monitor.exclude("epoch restart")
    monitor.fetch_begins()
    now.sleep(60.0)
    monitor.fetch_ends()
    monitor.include("epoch restart")
    one_batch(monitor, now, wait=1.0, work=1.0)
    reading = monitor.read()
    assert (reading.seconds, reading.data_wait_sec) == (2.0, 1.0)


def test_a_reading_inside_an_exclusion_splits_it() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    now.sleep(1.0)
    monitor.exclude("validation")
    now.sleep(10.0)
    assert monitor.read().seconds == 1.0
    now.sleep(10.0)
    monitor.include("validation")
    now.sleep(2.0)
    assert monitor.read().seconds == 2.0


def test_one_batch_of_unknown_size_makes_the_samples_unknown() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    one_batch(monitor, now, wait=0.0, work=1.0)
    monitor.batch(samples=None, ends_step=True, key=None)
    assert monitor.read().samples is None
    one_batch(monitor, now, wait=0.0, work=1.0)
    assert monitor.read().samples == 8


def test_a_reading_tells_which_steps_it_is_of() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    one_batch(monitor, now, wait=0.0, work=1.0)
    monitor.batch(samples=4, ends_step=True, key=OTHER)
    assert monitor.read().keys == {KEY: 1, OTHER: 1}
    one_batch(monitor, now, wait=0.0, work=1.0)
    assert monitor.read().keys == {KEY: 1}


def test_what_passed_is_asked_for_in_order_once_it_is_needed() -> None:
    asked: list[object] = []

    def describe(shapes: object, updates: int, ends_step: bool, tokens: object) -> tuple[int | None, StepKey | None]:
        asked.append(shapes)
        return {((8, 4),): 8, ((2, 4),): 2}.get(shapes), KEY if updates else None  # type: ignore[call-overload]

    now = FakeNow()
    monitor = Monitor(now, describe=describe)
    monitor.fetch_begins()
    now.sleep(0.25)
    monitor.fetch_ends()
    now.sleep(0.75)
    monitor.later((monitor.passed, now(), ((8, 4),), 0, False))
    monitor.exclude("validation")
    now.sleep(60.0)
    monitor.include("validation")
    now.sleep(1.0)
    monitor.later((monitor.passed, now(), ((2, 4),), 1, True))
    assert asked == []
    assert monitor.read() == MonitorReading(
        seconds=2.0, data_wait_sec=0.25, batches=2, steps=1, samples=10, tokens=UNKNOWN_TOKENS, keys={KEY: 1}
    )
    assert asked == [((8, 4),), ((2, 4),)]
    monitor.add_up()
    assert len(asked) == 2


def test_a_batch_that_is_left_out_is_in_no_figure_and_the_reading_goes_on() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    one_batch(monitor, now, wait=0.5, work=1.5)
    monitor.fetch_begins()
    now.sleep(4.0)
    monitor.fetch_ends()
    monitor.exclude("checkpoint")
    now.sleep(8.0)
    monitor.include("checkpoint")
    now.sleep(16.0)
    monitor.leave_out()
    one_batch(monitor, now, wait=0.25, work=0.75)
    reading = monitor.read()
    assert (reading.seconds, reading.data_wait_sec, reading.steps) == (3.0, 0.75, 2)
    totals = monitor.totals()
    assert totals.seconds is not None
    assert (totals.batches, totals.seconds.total, totals.seconds.greatest) == (2, 3.0, 2.0)


def test_what_was_logged_after_the_last_step_can_be_dropped() -> None:
    """Also where the end of that step is in the sums already, and no longer in the log."""
    now = FakeNow()
    monitor = Monitor(now, describe=lambda shapes, updates, ends, tokens: (8, KEY if ends else None))
    one_batch(monitor, now, wait=0.25, work=0.75, ends_step=False)
    one_batch(monitor, now, wait=0.25, work=0.75)
    one_batch(monitor, now, wait=0.5, work=1.5, ends_step=False)
    monitor.later((monitor.passed, now(), (), 0, False, None))
    monitor.drop_open_step()
    assert (monitor.totals().batches, monitor.totals().samples) == (2, 16)
    one_batch(monitor, now, wait=0.5, work=1.5, ends_step=False)
    monitor.drop_open_step()
    monitor.later((monitor.passed, now(), (), 1, True, None))
    monitor.drop_open_step()
    assert (monitor.totals().batches, monitor.totals().samples) == (3, 24)


def test_steps_before_the_open_one_can_be_dropped_too_as_far_as_they_are_in_no_sum() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    one_batch(monitor, now, wait=0.25, work=0.75)
    for _ in range(3):
        one_batch(monitor, now, wait=0.5, work=1.5)
    one_batch(monitor, now, wait=0.5, work=1.5, ends_step=False)
    monitor.drop_open_step(and_before=2)
    assert monitor.read().seconds == 9.0
    assert (monitor.totals().batches, monitor.totals().samples) == (2, 16)
    one_batch(monitor, now, wait=0.5, work=1.5)
    monitor.drop_open_step(and_before=2)
    assert monitor.totals().batches == 2
