from __future__ import annotations

import sys
import threading

import pytest

from lightning_flops.instrument.timing.processor_wait import Counters, ProcessorWatch, read_counters
from tests.fake_clock import FakeNow


def counters(waited: float | None, wanted: int | None, stolen: int | None) -> Counters:
    """One thread that has waited so long, and another that began to count at 5 s and has not waited since."""
    return Counters({} if waited is None else {"1": waited, "2": 5.0}, wanted, stolen)


def watched(now: FakeNow, before: Counters, after: Counters, *, seconds: float) -> ProcessorWatch:
    shown, spent = iter([before, after]), iter([1.0, 1.5, 1.75])
    watch = ProcessorWatch(lambda: next(shown), now, lambda: next(spent))
    watch.follow(timed=False)
    watch.follow(timed=True)
    now.sleep(seconds / 2)
    watch.follow(timed=True)
    now.sleep(seconds / 2)
    return watch


def test_a_thread_that_waited_for_a_processor_is_told() -> None:
    (sentence,) = watched(FakeNow(), counters(1.0, 1000, 10), counters(1.5, 1400, 20), seconds=2.0).sentences()
    assert "had no processor for 25% of the time" in sentence


def test_time_that_a_hypervisor_gave_away_is_told() -> None:
    (sentence,) = watched(FakeNow(), counters(1.0, 1000, 10), counters(1.0, 1400, 50), seconds=2.0).sentences()
    assert "the hypervisor gave other machines 10% of the processor time that this one asked for" in sentence


@pytest.mark.parametrize(
    ("after", "seconds"),
    [
        (counters(1.0625, 1400, 26), 2.0),  # 3% and 4%
        (counters(1.125, 1400, 50), 0.25),  # half of the time, but too short a time
        (counters(None, None, None), 2.0),
    ],
)
def test_nothing_is_told_of_what_is_little_or_short_or_unknown(after: Counters, seconds: float) -> None:
    assert watched(FakeNow(), counters(1.0, 1000, 10), after, seconds=seconds).sentences() == ()


def test_of_a_short_time_the_share_and_the_processor_time_of_each_batch_are_kept() -> None:
    loss = watched(FakeNow(), counters(1.0, 1000, 10), counters(1.125, 1400, 50), seconds=0.25).loss()
    assert loss is not None and loss.batches_sec == (0.5, 0.25)
    assert (loss.seconds, loss.waited_share, loss.stolen_share, loss.lost_share) == (0.25, 0.5, None, 0.5)


@pytest.mark.skipif(sys.platform != "linux", reason="these counters are Linux's")
def test_the_counters_are_the_calling_threads_and_the_machines() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    here = read_counters()
    done.set()
    thread.join()
    assert here.wanted_ticks is not None and here.stolen_ticks is not None
    assert here.wanted_ticks > here.stolen_ticks >= 0
    if not here.waited_sec:
        pytest.skip("this kernel keeps no counts of its threads")
    # A thread that has just begun cannot have waited since the system was started.
    assert here.waited_sec[str(thread.native_id)] < 60.0
