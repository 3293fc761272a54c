from __future__ import annotations

import sys
import threading
import time

import pytest

from lightning_flops.instrument.timing.processor_wait import Counters, ProcessorWatch, read_counters
from tests.fake_clock import FakeNow


def watched(now: FakeNow, before: Counters, after: Counters, *, seconds: float) -> tuple[str, ...]:
    shown = iter([before, after])
    watch = ProcessorWatch(lambda: next(shown), now)
    watch.follow(timed=False)
    watch.follow(timed=True)
    now.sleep(seconds / 2)
    watch.follow(timed=True)
    now.sleep(seconds / 2)
    return watch.sentences()


def test_a_thread_that_waited_for_a_processor_is_told() -> None:
    (sentence,) = watched(FakeNow(), Counters(1.0, 1000, 10), Counters(1.5, 1400, 20), seconds=2.0)
    assert "had no processor for 25% of the time" in sentence


def test_time_that_a_hypervisor_gave_away_is_told() -> None:
    (sentence,) = watched(FakeNow(), Counters(1.0, 1000, 10), Counters(1.0, 1400, 50), seconds=2.0)
    assert "the hypervisor gave other machines 10% of the processor time that this one asked for" in sentence


@pytest.mark.parametrize(
    ("after", "seconds"),
    [
        (Counters(1.0625, 1400, 26), 2.0),  # 3% and 4%
        (Counters(1.125, 1400, 50), 0.25),  # half of the time, but too short a time
        (Counters(None, None, None), 2.0),
    ],
)
def test_nothing_is_told_of_what_is_little_or_short_or_unknown(after: Counters, seconds: float) -> None:
    assert watched(FakeNow(), Counters(1.0, 1000, 10), after, seconds=seconds) == ()


@pytest.mark.skipif(sys.platform != "linux", reason="these counters are Linux's")
def test_the_counters_are_the_calling_threads_and_the_machines() -> None:
    seen: list[Counters] = []
    thread = threading.Thread(target=lambda: seen.append(read_counters()))
    thread.start()
    thread.join()
    time.sleep(0.05)
    here = read_counters()
    assert here.wanted_ticks is not None and here.stolen_ticks is not None
    assert here.wanted_ticks > here.stolen_ticks >= 0
    if here.waited_sec is None:
        pytest.skip("this kernel keeps no counts of its threads")
    assert seen[0].waited_sec is not None
    # A thread that has just begun cannot have waited since the system was started.
    assert seen[0].waited_sec < 60.0
