from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_flops.instrument.timing.monitor import BatchLog, Monitor, MonitorReading
from lightning_flops.records import UNKNOWN_TOKENS, Shapes
from tests.fake_clock import FakeNow


def one_batch(monitor: Monitor, now: FakeNow, *, wait: float, work: float, ends_step: bool = True) -> None:
    monitor.log.fetch_begins()
    now.sleep(wait)
    monitor.log.fetch_ends()
    now.sleep(work)
    monitor.batch(samples=8, ends_step=ends_step)


def test_a_reading_is_what_went_by_since_the_last() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    for _ in range(3):
        one_batch(monitor, now, wait=0.25, work=0.75)
    assert monitor.read() == MonitorReading(
        seconds=3.0, data_wait_sec=0.75, batches=3, steps=3, samples=24, tokens=UNKNOWN_TOKENS
    )
    one_batch(monitor, now, wait=0.5, work=1.5, ends_step=False)
    one_batch(monitor, now, wait=0.5, work=1.5)
    assert monitor.read() == MonitorReading(
        seconds=4.0, data_wait_sec=1.0, batches=2, steps=1, samples=16, tokens=UNKNOWN_TOKENS
    )


def test_validation_is_not_training_time() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    one_batch(monitor, now, wait=0.0, work=1.0)
    monitor.log.exclude("validation")
    now.sleep(60.0)
    monitor.log.include("validation")
    one_batch(monitor, now, wait=0.0, work=1.0)
    assert monitor.read().seconds == 2.0


def test_an_exclusion_lasts_until_its_own_reason_is_over() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    monitor.log.exclude("epoch restart")
    now.sleep(10.0)
    monitor.log.exclude("checkpoint")
    now.sleep(10.0)
    monitor.log.include("checkpoint")
    now.sleep(10.0)
    monitor.log.include("epoch restart")
    now.sleep(1.0)
    monitor.log.include("validation")  # which never began
    assert monitor.read().seconds == 1.0


def test_a_fetch_inside_an_exclusion_is_excluded_too() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    monitor.log.exclude("epoch restart")
    monitor.log.fetch_begins()
    now.sleep(60.0)
    monitor.log.fetch_ends()
    monitor.log.include("epoch restart")
    one_batch(monitor, now, wait=1.0, work=1.0)
    reading = monitor.read()
    assert (reading.seconds, reading.data_wait_sec) == (2.0, 1.0)


def test_a_reading_inside_an_exclusion_splits_it() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    now.sleep(1.0)
    monitor.log.exclude("validation")
    now.sleep(10.0)
    assert monitor.read().seconds == 1.0
    now.sleep(10.0)
    monitor.log.include("validation")
    now.sleep(2.0)
    assert monitor.read().seconds == 2.0


def test_one_batch_of_unknown_size_makes_the_samples_unknown() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    one_batch(monitor, now, wait=0.0, work=1.0)
    monitor.batch(samples=None, ends_step=True)
    assert monitor.read().samples is None
    one_batch(monitor, now, wait=0.0, work=1.0)
    assert monitor.read().samples == 8


def test_what_was_noted_is_asked_for_in_order_once_it_is_needed() -> None:
    asked: list[object] = []

    def describe(
        shapes: Sequence[Shapes],
        updates: Sequence[int],
        ends_step: Sequence[bool],
        tokens: object,
        nodes: Sequence[int | None],
        sec: Sequence[float],
    ) -> Sequence[int | None]:
        asked.append((*shapes, *updates, *ends_step, *nodes, *sec))
        return [8, 2]

    now = FakeNow()
    monitor = Monitor(now, describe=describe)
    log = monitor.log
    log.nodes = iter((100, 107, 127, 150)).__next__  # twenty of them are the validation's
    log.spare = 2
    log.fetch_begins()
    now.sleep(0.25)
    log.fetch_ends()
    now.sleep(0.75)
    assert log.note(((8, 4),), 0, False)
    log.exclude("validation")
    now.sleep(60.0)
    log.include("validation")
    now.sleep(1.0)
    assert log.note(((2, 4),), 1, True)
    assert not log.note(((2, 4),), 1, True)  # from here on somebody must look
    assert asked == []
    assert monitor.read() == MonitorReading(
        seconds=2.0, data_wait_sec=0.25, batches=2, steps=1, samples=10, tokens=UNKNOWN_TOKENS
    )
    assert asked == [(((8, 4),), ((2, 4),), 0, 1, False, True, 100, 130, 2.0)]
    monitor.add_up()
    assert len(asked) == 1


def test_a_batch_is_noted_only_while_nobody_has_to_look_and_the_run_trains() -> None:
    now = FakeNow()
    log = BatchLog(now)
    assert not log.note((), 1, True)
    log.spare, log.until = 10, now() + 1.0
    log.exclude("validation")
    assert not log.note((), 1, True)
    log.include("validation")
    assert log.note((), 1, True)
    now.sleep(1.0)
    assert not log.note((), 1, True)
    assert (log.spare, len(log.noted)) == (9, 1)


def test_a_step_takes_as_long_as_its_batches_however_they_were_told() -> None:
    """Of the second step the first batch is told of at once; the others are noted."""
    found: list[float] = []

    def describe(*columns: Sequence[Any]) -> Sequence[int]:
        found.extend(columns[-1])
        return [1] * len(columns[0])

    now = FakeNow()
    monitor = Monitor(now, describe=describe)
    monitor.log.spare = 10
    for seconds, ends_step in ((1.0, False), (2.0, True)):
        now.sleep(seconds)
        monitor.log.note((), 1, ends_step)
    now.sleep(4.0)
    assert monitor.batch(samples=1, ends_step=False) is None
    for seconds, ends_step in ((8.0, False), (16.0, True), (32.0, False)):
        now.sleep(seconds)
        monitor.log.note((), 1, ends_step)
    now.sleep(64.0)
    assert monitor.batch(samples=1, ends_step=True) == 96.0
    assert found == [3.0, 28.0]


def test_a_batch_that_is_left_out_is_in_no_figure_and_the_reading_goes_on() -> None:
    now = FakeNow()
    monitor = Monitor(now)
    one_batch(monitor, now, wait=0.5, work=1.5)
    monitor.log.fetch_begins()
    now.sleep(4.0)
    monitor.log.fetch_ends()
    monitor.log.exclude("checkpoint")
    now.sleep(8.0)
    monitor.log.include("checkpoint")
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
    monitor = Monitor(now, describe=lambda shapes, *others: [8] * len(shapes))
    one_batch(monitor, now, wait=0.25, work=0.75, ends_step=False)
    one_batch(monitor, now, wait=0.25, work=0.75)
    one_batch(monitor, now, wait=0.5, work=1.5, ends_step=False)
    monitor.log.note_late(now(), (), 0, False)
    monitor.drop_open_step()
    assert (monitor.totals().batches, monitor.totals().samples) == (2, 16)
    one_batch(monitor, now, wait=0.5, work=1.5, ends_step=False)
    monitor.drop_open_step()
    monitor.log.note_late(now(), (), 1, True)
    monitor.drop_open_step()
    assert (monitor.totals().batches, monitor.totals().samples) == (3, 24)


def test_steps_before_the_open_one_can_be_dropped_too_as_far_as_they_are_in_no_sum() -> None:
    now = FakeNow()
    monitor = Monitor(now, describe=lambda shapes, *others: [8] * len(shapes))
    one_batch(monitor, now, wait=0.25, work=0.75)
    for _ in range(3):
        now.sleep(2.0)
        monitor.log.note_late(now(), (), 1, True)
    monitor.log.note_late(now(), (), 0, False)
    monitor.drop_open_step(and_before=2)
    assert monitor.read().seconds == 7.0
    totals = monitor.totals()
    assert totals.seconds is not None
    assert (totals.batches, totals.samples, totals.seconds.total) == (2, 16, 3.0)
    monitor.drop_open_step(and_before=2)
    assert monitor.totals().batches == 2
