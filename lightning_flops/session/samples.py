"""Which steps are counted outside of windows, so that the run's FLOPs are known for steps of new shapes."""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.005
"""Of the run's wall time, at most this share is spent in steps that are counted outside of windows."""

MOST = 64
"""At most so many steps are counted outside of windows."""

_GUESS = 10
"""How many times longer than others a counted step is taken to be before the first one."""

_FIRST_CHECK = 100
_FACTOR = 2


class Samples:
    """Decides which steps are worth counting, and what the run can afford.

    Args:
        now: the host's clock, in seconds.
        share: of the wall time.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter, *, share: float = SHARE) -> None:
        self.taken = 0
        """Steps that were counted, or whose counting had begun."""
        self.seconds = 0.0
        """Wall time of those steps."""
        self._now = now
        self._share = share
        self._began = now()
        self._since: float | None = None
        self._longest = 0.0
        self._next_check = _FIRST_CHECK

    @property
    def exhausted(self) -> bool:
        """Whether no more step will be counted."""
        return self.taken >= MOST

    @property
    def elapsed_sec(self) -> float:
        """Wall time of the run so far."""
        return self._now() - self._began

    def affords(self, *, steps_done: int) -> bool:
        """Whether the step that begins now may be counted."""
        return self._now() >= self.affords_from(steps_done=steps_done)

    def affords_from(self, *, steps_done: int) -> float:
        """The time from which on the run affords another step; a guess before the first one was counted."""
        expected = self._longest
        if not expected:
            expected = _GUESS * self.elapsed_sec / max(1, steps_done)
        return self._began + (self.seconds + expected) / self._share

    def check_is_due(self, *, steps_done: int) -> bool:
        """Whether a step that is foretold should be counted once more; each time after twice as many steps."""
        return steps_done >= self._next_check

    def begins(self, *, steps_done: int) -> None:
        """A step begins that is counted."""
        self.taken += 1
        self._since = self._now()
        while self._next_check <= steps_done:
            self._next_check *= _FACTOR

    def ends(self) -> None:
        """It is over, whatever came of it."""
        if self._since is not None:
            taken = self._now() - self._since
            self.seconds += taken
            self._longest = max(self._longest, taken)
            self._since = None
