"""What a run's monitor adds up, by a clock in the test's hands."""

from __future__ import annotations

import pytest

from lightning_flops.records import BatchTokens, Extremes
from lightning_flops.run.throughput import Monitor, Stretches
from tests.analysis.in_memory import known
from tests.fake_clock import FakeNow


@pytest.fixture
def now() -> FakeNow:
    return FakeNow()


@pytest.fixture
def monitor(now: FakeNow) -> Monitor:
    found = Monitor(now)
    found.go_on()
    return found


def batch(monitor: Monitor, *, profiled: bool = False, ends_step: bool = True) -> float:
    return monitor.batch(samples=8, tokens=BatchTokens(8, 6, 36), profiled=profiled, ends_step=ends_step)


def test_a_validation_is_in_no_second_of_the_throughput(monitor: Monitor, now: FakeNow) -> None:
    for _ in range(3):
        now.sleep(2.0)
        assert batch(monitor) == 2.0
        monitor.outside()
        now.sleep(50.0)
        monitor.inside()
    reading, totals = monitor.read(), monitor.totals()
    assert (known(reading.seconds).total, reading.batches, reading.samples) == (6.0, 3, 24)
    assert totals.seconds == Extremes(number=3, total=6.0, least=2.0, greatest=2.0)
    assert totals.samples_per_sec == Extremes(number=3, total=12.0, least=4.0, greatest=4.0)
    assert monitor.read().batches == 0


def test_a_batch_that_ends_amid_a_validation_has_the_seconds_around_it(monitor: Monitor, now: FakeNow) -> None:
    now.sleep(1.0)
    monitor.outside()
    now.sleep(50.0)
    assert batch(monitor) == 1.0
    now.sleep(50.0)
    monitor.inside()
    now.sleep(3.0)
    assert batch(monitor) == 3.0


def test_what_the_profiler_slowed_down_is_in_no_rate_and_its_tokens_are_the_runs(
    monitor: Monitor, now: FakeNow
) -> None:
    now.sleep(9.0)
    batch(monitor, profiled=True)
    now.sleep(1.0)
    batch(monitor)
    assert (known(monitor.read().seconds).total, monitor.totals().batches) == (1.0, 1)
    assert monitor.all_tokens == BatchTokens(16, 12, 72)


def test_a_step_has_the_seconds_of_all_its_batches(monitor: Monitor, now: FakeNow) -> None:
    for ends_step, seconds in ((False, 1.0), (True, 2.0), (True, 1.0)):
        now.sleep(1.0)
        assert batch(monitor, ends_step=ends_step) == seconds


def test_a_wait_inside_another_one_is_waited_once(monitor: Monitor, now: FakeNow) -> None:
    assert monitor.fetch_begins()
    now.sleep(1.0)
    assert not monitor.fetch_begins()  # a loader that reads another one
    now.sleep(1.0)
    assert not monitor.fetch_ends()
    now.sleep(1.0)
    assert monitor.fetch_ends()
    now.sleep(1.0)
    assert batch(monitor) == 4.0
    assert known(monitor.read().reader_sec).total == 3.0


def test_stretches_of_a_long_run_are_of_equally_many_batches() -> None:
    stretches = Stretches()
    for number in range(128):
        stretches.add(float(number), 0.5)
    # 64 single batches become 32 pairs; 64 pairs, after 128 batches, 32 fours: of 0 to 3, of 4 to 7, ...
    means = stretches.means()
    assert stretches.length == 4 and means == tuple((4 * place + 1.5, 0.5) for place in range(32))


def test_a_batch_of_unknown_size_leaves_samples_unknown(monitor: Monitor, now: FakeNow) -> None:
    now.sleep(1.0)
    monitor.batch(samples=None, tokens=None, profiled=False, ends_step=True)
    now.sleep(1.0)
    batch(monitor)
    assert monitor.totals().samples is None
    assert known(monitor.totals().seconds).total == 2.0
