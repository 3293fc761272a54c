"""Which steps outside windows are counted, within what counting may cost the run."""

from __future__ import annotations

import random
from collections import deque
from typing import Literal

_FREE = 8
"""Steps that are counted whatever they cost."""

_FREE_TO_LEARN = 4
# Half of them at most learn new shapes, so that at least four are drawn at random, whatever the batches are: with three
# the error is known, from about the twentieth step on. Random steps teach as much as others do: a run of ever new
# shapes learns from all eight, and a run of one shape learns from one and checks with seven.

_SHARE = 0.005
"""Of the run's time, what counting further steps may add; half of it at most for new shapes."""

_MOST_LEARNED = 64
_FIRST_GAP, _GROWTH = 4.0, 1.4
"""Steps between the first, free checks, and the growth of these gaps: five checks in about fifty steps."""

_LEAST_GAP = 0.01
"""Of the steps so far: cheap checks are no denser, so that there are some hundreds in the longest run."""


class CountSchedule:
    """Draws checks at random, and says when a step of a new shape may be counted.

    Args:
        seed: of a generator of our own.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._steps = 0
        self._gap = _FIRST_GAP
        self._next_at = self._steps + self._around(_FIRST_GAP)
        self._asked: Literal["check", "learn"] | None = None
        self._is_free = False
        self._taken = self._learned = 0
        self._seconds = 0.0
        self._usual_seconds, self._usual_steps = 0.0, 0
        self._added = self._added_to_learn = 0.0
        self._costs: deque[float] = deque(maxlen=3)
        """What the latest counts added; the least tells what the next one costs, as torch compiles in some."""

    def draws_check(self) -> bool:
        """Whether the step that begins now is a random check; called at the start of every step outside windows."""
        self._steps += 1
        self._asked = None
        if self._steps < self._next_at:
            return False
        drawn = self._take("check") if self._taken < _FREE or self._affords() else False
        if self._taken < _FREE:
            self._gap *= _GROWTH
            self._next_at = self._steps + self._around(self._gap)
        else:
            gap = max(self._steps_to_afford(), _FIRST_GAP, _LEAST_GAP * self._steps)
            self._next_at = self._steps + 1 + int(gap * self._random.uniform(1.0, 1.5))
        return drawn

    @property
    def may_learn(self) -> bool:
        """Whether a step of a new shape may be counted now."""
        if self._taken < _FREE and self._learned < _FREE_TO_LEARN:
            return True
        half = self._added_to_learn + self._cost <= _SHARE / 2 * self._seconds
        return self._taken >= _FREE and self._learned < _MOST_LEARNED and half and self._affords()

    def learns(self) -> bool:
        """The running step is counted because its shape is new."""
        self._learned += 1
        return self._take("learn")

    def _take(self, asked: Literal["check", "learn"]) -> bool:
        self._asked, self._is_free = asked, self._taken < _FREE
        self._taken += 1
        return True

    def ran(self, seconds: float) -> None:
        """An unprofiled step took so long."""
        self._seconds += seconds
        self._usual_seconds += seconds
        self._usual_steps += 1

    def counted(self, seconds: float) -> None:
        """A step that was counted took so long, in a window or outside."""
        self._seconds += seconds
        asked, self._asked = self._asked, None
        if not self._usual_steps:
            return
        added = max(0.0, seconds - self._usual_seconds / self._usual_steps)
        self._costs.append(added)
        if asked is not None and not self._is_free:
            self._added += added
            self._added_to_learn += added if asked == "learn" else 0.0

    @property
    def _cost(self) -> float:
        return min(self._costs, default=0.0)

    def _affords(self) -> bool:
        return self._added + self._cost <= _SHARE * self._seconds

    def _steps_to_afford(self) -> float:
        missing = self._added + self._cost - _SHARE * self._seconds
        usual = self._usual_seconds / max(1, self._usual_steps)
        return missing / (_SHARE * usual) if missing > 0 and usual > 0 else 0.0

    def _around(self, gap: float) -> int:
        return 1 + int(gap * self._random.uniform(0.5, 1.5))
