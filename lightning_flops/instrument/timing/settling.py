"""How long steps are left alone before some are timed: until the loop lives on what its data loader makes meanwhile.

While a step is counted the loader's workers run ahead, and the steps after it find batches that lie ready: steps of
such a time would show less waiting than there is in the long run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_flops.instrument.timing.loader_queue import Feed, FeedState

_LIMIT_FACTOR = 10
"""At most this many times the steps to leave alone, or to time, whichever are more, are left alone."""


_LEAST_STEPS = 2
"""To leave alone after a counted one, whatever feeds the loop."""


def steps_to_settle(*, batches_ahead: int, batches_a_step: int) -> int:
    """Steps to leave alone after a counted one: until the batches that were fetched ahead meanwhile are used up.

    That is if the loader stands still after it; a ``Feed`` tells how long it takes when it does not.

    Args:
        batches_ahead: batches that the loader fetches ahead at most.
        batches_a_step: batches that a step consumes.
    """
    return max(_LEAST_STEPS, math.ceil(batches_ahead / batches_a_step))


class Settling:
    """Counts the steps that are left alone.

    Args:
        steps: how many to leave alone at least, as far as that is no more than are timed.
        timing_steps: how many are to be timed.
        feed: tells whether the loop still lives on batches that were fetched ahead; None if nobody can tell.
        note: gets a sentence for the report if the loop went on doing so.
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
        """Leave so many alone, as far as that is no more than are timed."""
        self.steps = min(max(self.steps, steps), self._most)

    def step_ends(self) -> bool:
        """A step that was left alone is over; whether it was the last."""
        self._done += 1
        return self._done >= self.steps and not self._must_drain()

    def in_whole_rounds(self, steps: int) -> int:
        """*steps*, or as many more as make whole rounds of the loader's workers."""
        return steps if self._rhythm is None else -(-steps // self._rhythm) * self._rhythm

    def was_too_early(self) -> bool:
        """Whether the loader turns out to be the slower one after all, now that steps have been timed.

        Its workers have fallen behind meanwhile: what was timed was the beginning of the end of the queue.
        """
        return self._rhythm is None and self._must_drain()

    def _must_drain(self) -> bool:
        """The loop lives, or may live, on batches that were fetched ahead, and there is time to wait until they end."""
        feed = self._feed
        if feed is None:
            return False
        if self._rhythm is None and feed.state() is FeedState.EMPTY:
            self._rhythm, self._drained_at = feed.rhythm_steps(), self._done
        if self._rhythm is not None:
            # The first round after the last batch that lay ready still has batches that were begun before.
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
