"""What counting steps outside of windows may cost a run, and when a check is due."""

from __future__ import annotations

import math
from collections.abc import Callable

from lightning_flops import host_clock

SHARE = 0.005
"""Of the run's wall time, at most this share is spent in steps that are counted outside of windows."""

MOST = 64
"""At most so many steps are counted outside of windows."""

_GUESS = 10
"""How many times longer than others a counted step is taken to be before one has been seen."""

_FIRST_CHECK = 103
_FACTOR = 2

_ROUND = 10
"""Steps whose number is a multiple of that are like no others: there people validate, save and draw pictures."""


class Samples:
    """Decides which steps are worth counting, and what the run can afford.

    Args:
        now: the host's clock, in seconds.
        share: of the wall time.
    """

    def __init__(self, now: Callable[[], float] = host_clock.now, *, share: float) -> None:
        self.taken = 0
        """Steps that were counted, or whose counting had begun."""
        self.seconds = 0.0
        """Wall time of those steps."""
        self._now = now
        self._share = share
        self._began = now()
        self._since: float | None = None
        """When the running step began, if it is counted outside of windows; later by what is left out of it."""
        self._window_since: float | None = None
        """The same of the first step that a window counts."""
        self._reasons: set[str] = set()
        """Why what runs now is no part of a step."""
        self._pause_began = 0.0
        """While there is a reason: when the pause began, or the running step if that began later."""
        self._longest_sec = 0.0
        """How long the longest step took that was counted; 0 before there was one."""
        self._left_at: float | None = None
        """When the run stopped, if it may go on later."""

    def leave(self) -> None:
        """The run stops here, and may go on later: the time until then is none of its own."""
        self._left_at = self._now()
        self._since = self._window_since = None
        self._reasons.clear()

    def come_back(self) -> None:
        """The run goes on."""
        if self._left_at is not None:
            self._began += self._now() - self._left_at
            self._left_at = None

    @property
    def exhausted(self) -> bool:
        """Whether no more step will be counted."""
        return self.taken >= MOST

    @property
    def elapsed_sec(self) -> float:
        """Wall time of the run so far."""
        return (self._now() if self._left_at is None else self._left_at) - self._began

    def affords(self, *, steps_done: int) -> bool:
        """Whether the step that begins now may be counted."""
        return self._now() >= self.affords_from(steps_done=steps_done)

    def affords_from(self, *, steps_done: int) -> float:
        """The time from which on the run affords another step; a guess before the first one was counted."""
        expected = self._longest_sec
        if not expected:
            expected = _GUESS * self.elapsed_sec / max(1, steps_done)
        return self._began + (self.seconds + expected) / self._share

    def affords_at(self, *, steps_done: int) -> int:
        """About after how many steps of the run it affords another one; at least one later than now."""
        waits = self.affords_from(steps_done=steps_done) - self._now()
        return steps_done + max(1, math.ceil(waits * steps_done / max(self.elapsed_sec, 1e-9)))

    def next_check(self, *, steps_done: int) -> int:
        """After how many steps of the run a step that is foretold should be counted: 103, 206, 412 and so on."""
        check = _FIRST_CHECK
        while check <= steps_done:
            check *= _FACTOR
        return check

    def is_usual(self, *, steps_done: int) -> bool:
        """Whether the step that begins now is none of those at which people do what they do not do at others."""
        # Whether they count from 0 or from 1; after the update of a step is in the next one for us.
        return 1 < steps_done % _ROUND < _ROUND - 1

    def pause(self, reason: str) -> None:
        """What runs from here on is no part of a step, until ``go_on`` is called with the same *reason*."""
        if not self._reasons:
            self._pause_began = self._now()
        self._reasons.add(reason)

    def go_on(self, reason: str) -> None:
        """*reason* is over."""
        if reason in self._reasons:
            self._reasons.remove(reason)
            if not self._reasons:
                self._leave_out(self._now() - self._pause_began)

    def compiled(self, seconds: float) -> None:
        """In the step that is counted torch has compiled something for so many *seconds*, as it does uncounted."""
        self._leave_out(seconds)

    def _leave_out(self, seconds: float) -> None:
        """So many *seconds* of what runs are not what counting has cost."""
        self._since = None if self._since is None else self._since + seconds
        self._window_since = None if self._window_since is None else self._window_since + seconds

    def begins(self) -> None:
        """A step begins that is counted."""
        self.taken += 1
        self._since = self._pause_began = self._now()

    def ends(self) -> None:
        """It is over, whatever came of it."""
        if self._since is not None:
            taken = self._now() - self._since
            self.seconds += taken
            self._longest_sec = max(self._longest_sec, taken)
            self._since = None

    def window_begins(self) -> None:
        """A step begins that a window counts. It shows how long such a step takes, and is not one of these."""
        self._window_since = self._pause_began = self._now()

    def window_has_counted(self) -> None:
        """The first step of a window was counted."""
        if self._window_since is not None:
            self._longest_sec = max(self._longest_sec, self._now() - self._window_since)
            self._window_since = None
