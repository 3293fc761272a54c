"""Which steps outside windows are counted, within what counting may cost the run."""

from __future__ import annotations

import random
from collections import deque

_FREE = 8
"""Steps that are counted whatever they cost."""

_SHARE = 0.005
"""Of the run's time, what counting further steps may add."""

_FIRST_GAP, _GROWTH = 4.0, 1.25
"""Steps between the first, free checks, and the growth of these gaps: six checks in about fifty steps."""

_LEAST_GAP = 0.01
"""Of the steps so far: cheap checks are no denser, so that there are some hundreds in the longest run."""


class CountSchedule:
    """Draws checks at random, and says when a step of a new shape may be counted.

    Args:
        seed: of a generator of our own.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.stands_for = 1
        """Steps since the random check before the latest one, which is the only one of these."""
        self._steps = self._drawn_at = 0
        self._gap = _FIRST_GAP
        self._next_at = self._later(_FIRST_GAP)
        self._checks = self._learned = 0
        self._is_paid = False
        """The running step is counted, and not for free."""
        self._seconds = self._added = 0.0
        self._usual_seconds, self._usual_steps = 0.0, 0
        self._costs: deque[float] = deque(maxlen=3)
        """What the latest counts added; the least is what the next one costs, as torch compiles in some."""

    def draws_check(self) -> bool:
        """Whether the step that begins now is a random check; called at the start of every step outside windows."""
        self._steps += 1
        self._is_paid = False
        if self._steps < self._next_at:
            return False
        if drawn := self._may_count():
            self._checks += 1
            self.stands_for, self._drawn_at = self._steps - self._drawn_at, self._steps
        if self._is_free:
            self._gap *= _GROWTH
            self._next_at = self._later(self._gap)
        else:
            self._next_at = self._later(max(self._steps_to_afford(), _FIRST_GAP, _LEAST_GAP * self._steps))
        return drawn

    def learns(self) -> bool:
        """Whether to count the running step because its shape is new; no more such steps are counted than checks."""
        learns = self._learned <= self._checks and self._may_count()
        self._learned += learns
        return learns

    def ran(self, seconds: float) -> None:
        """An unprofiled step took so long."""
        self._seconds += seconds
        self._usual_seconds += seconds
        self._usual_steps += 1

    def counted(self, seconds: float) -> None:
        """A step that was counted took so long, in a window or outside."""
        self._seconds += seconds
        if self._usual_steps:
            self._costs.append(max(0.0, seconds - self._usual_seconds / self._usual_steps))
            if self._is_paid:
                self._added += self._costs[-1]

    @property
    def _is_free(self) -> bool:
        return self._checks + self._learned < _FREE

    def _may_count(self) -> bool:
        self._is_paid = not self._is_free
        return self._is_free or self._missing() <= 0

    def _missing(self) -> float:
        """Seconds that the next count would add beyond what it may."""
        return self._added + min(self._costs, default=0.0) - _SHARE * self._seconds

    def _steps_to_afford(self) -> float:
        usual = self._usual_seconds / max(1, self._usual_steps)
        return max(0.0, self._missing()) / (_SHARE * usual) if usual > 0 else 0.0

    def _later(self, gap: float) -> int:
        return self._steps + 1 + int(gap * self._random.uniform(0.5, 1.5))
