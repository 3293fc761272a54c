"""How many steps are left alone before some are timed: until the loop has used the batches that were fetched ahead.

While a step is counted, the loader's workers run ahead, and the next steps find batches ready. If those steps were
timed, they would show less waiting than there is in the long run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_flops.instrument.timing.loader_queue import Feed, FeedState

_LIMIT_FACTOR = 10
"""The limit of steps left alone is this many times the steps to leave alone or to time, whichever is more."""


_LEAST_STEPS = 2
"""Least steps to leave alone after a counted one, whatever feeds the loop."""


def steps_to_settle(*, batches_ahead: int, batches_a_step: int) -> int:
    """Steps to leave alone after a counted one: until the batches that were fetched ahead meanwhile are used up.

    This assumes that the loader makes nothing after it. A ``Feed`` says how long it takes in reality.

    Args:
        batches_ahead: most batches that the loader fetches ahead.
        batches_a_step: batches that a step uses.
    """
    return max(_LEAST_STEPS, math.ceil(batches_ahead / batches_a_step))


class Settling:
    """Counts the steps that are left alone.

    Args:
        steps: how many to leave alone at least, but not more than are timed.
        timing_steps: how many are to be timed.
        feed: says whether the loop still uses batches that were fetched ahead; None if not known.
        note: gets a sentence for the report if the loop did so until the limit.
    """

    def __init__(self, *, steps: int, timing_steps: int, feed: Feed | None, note: Callable[[str], object]) -> None:
        self.steps = min(steps, timing_steps)
        """How many to leave alone at least."""
        self._most = timing_steps
        self._limit = _LIMIT_FACTOR * max(steps, timing_steps)
        self._feed = feed
        self._note = note
        self._done = 0
        self._rhythm: int | None = None
        self._drained_at = 0

    def at_least(self, steps: int) -> None:
        """Leave at least *steps* alone, but not more than are timed."""
        self.steps = min(max(self.steps, steps), self._most)

    def step_ends(self) -> bool:
        """A step that was left alone is over; returns whether it was the last."""
        self._done += 1
        return self._done >= self.steps and not self._must_drain()

    def in_whole_rounds(self, steps: int) -> int:
        """*steps*, rounded up to whole rounds of the loader's workers."""
        return steps if self._rhythm is None else -(-steps // self._rhythm) * self._rhythm

    def was_too_early(self) -> bool:
        """Whether it turns out, after steps were timed, that the loader is slower than the loop after all.

        Its workers have fallen behind meanwhile: the timed steps were using up the queue.
        """
        return self._rhythm is None and self._must_drain()

    def _must_drain(self) -> bool:
        """Whether the loop uses, or may use, batches that were fetched ahead, and we may still wait for their end."""
        feed = self._feed
        if feed is None:
            return False
        if self._rhythm is None and feed.state() is FeedState.EMPTY:
            self._rhythm, self._drained_at = feed.rhythm_steps(), self._done
        if self._rhythm is not None:
            # In the first round after the last ready batch, there are still batches that were begun before.
            return self._done < self._drained_at + self._rhythm
        if self._done >= feed.least_steps() and feed.state() is not FeedState.DRAINING:
            return False
        if self._done < self._limit:
            return True
        self._note(
            f"Batches that were fetched ahead were not used up within {self._done} steps, although the data loader "
            "is slower than the training: in the long run it waits more than what was timed."
        )
        return False
