from __future__ import annotations

import pytest

from lightning_flops.measure.timing.processor_wait import Counters, ProcessorWatch
from tests.fake_clock import FakeNow


def test_what_two_timed_batches_had_and_waited_for() -> None:
    """A thread waited 0.5 s of 2; another began to count at 5 s and waited no more; 300 ticks of 400 were busy."""
    shown = iter([Counters({"1": 1.0, "2": 5.0}, 1000, 50), Counters({"1": 1.5, "2": 5.0, "3": 9.0}, 1300, 150)])
    now, spent = FakeNow(), iter([1.0, 1.5, 1.75])
    watch = ProcessorWatch(lambda: next(shown), now, lambda: next(spent))
    watch.follow(timed=False)
    for _ in range(2):
        watch.follow(timed=True)
        now.sleep(1.0)
    loss = watch.loss()
    assert loss is not None and (loss.seconds, loss.batches_sec) == (2.0, (0.5, 0.25))
    assert (loss.waited_share, loss.busy_share) == (0.25, 0.75)


@pytest.mark.parametrize("seconds", [0.1, 2.0])  # a tick is 10 ms
def test_where_the_system_does_not_count_nothing_is_known(seconds: float) -> None:
    now = FakeNow()
    watch = ProcessorWatch(lambda: Counters({}, 5, 5) if seconds < 1 else Counters({}), now)
    watch.follow(timed=True)
    now.sleep(seconds)
    loss = watch.loss()
    assert loss is not None and (loss.waited_share, loss.idle_cores, loss.busy_share) == (None, None, None)
