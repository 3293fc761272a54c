"""Arms of one training, between which it is switched while it runs: what its steps take under each."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import mean, median

BLOCK_STEPS = 50
"""As many as a Trainer logs after. In a shorter block an arm would run with code that the others have driven out of the
processor's cache."""
WARM_UP_STEPS = 4 * BLOCK_STEPS + 1


class Arms:
    """Turns a training from arm to arm, after blocks of steps, and keeps the CPU time of each step.

    Args:
        names: of the arms; their order is drawn anew in each round.
        rounds: blocks of each arm.
        turn_to: switches the training to an arm.
        end: ends the training, switched as it began.
        apart: returns how many steps there were so far that belong in no figure; asked when a step has begun.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        rounds: int,
        turn_to: Callable[[str], None],
        end: Callable[[], None],
        apart: Callable[[], int] = int,
    ) -> None:
        """Draws the order of the arms."""
        self.means: dict[str, list[float]] = {arm: [] for arm in names}
        """CPU microseconds of a step by arm, one figure for each block."""
        self.medians: dict[str, list[float]] = {arm: [] for arm in names}
        self.steps_apart = 0
        """So many steps are in no figure."""
        self._apart = apart
        self._apart_before = 0
        generator = random.Random(0)
        self._plan = [arm for _ in range(rounds) for arm in generator.sample(names, k=len(names))]
        self._turn_to = turn_to
        self._end = end
        self._steps = 0
        self._is_apart = False
        self._in_block = 0
        self._block: list[float] = []
        self._began = 0.0
        self._arm: str | None = None

    def step_begins(self) -> None:
        """Called from inside a step: what follows until the next call is one sample of the present arm."""
        now = time.process_time()
        self._steps += 1
        if self._steps < WARM_UP_STEPS:
            return
        is_apart = self._is_apart
        before, self._apart_before = self._apart_before, self._apart()
        self._is_apart = self._apart_before > before  # what begins there ends with the step that begins now
        if self._arm is not None:
            self._in_block += 1
            if is_apart or self._is_apart:
                self.steps_apart += self._is_apart
            else:
                self._block.append(now - self._began)
        if self._arm is None or self._in_block == BLOCK_STEPS:
            self._end_block()
        self._began = time.process_time()

    def _end_block(self) -> None:
        if self._arm is not None:
            self.means[self._arm].append(1e6 * mean(self._block[1:]))
            self.medians[self._arm].append(1e6 * median(self._block[1:]))
        self._block.clear()
        self._in_block = 0
        if not self._plan:
            self._end()
            return
        self._arm = self._plan.pop()
        self._turn_to(self._arm)


def steps_of(names: Sequence[str], *, rounds: int) -> int:
    """Steps that a training of these arms takes, and some more."""
    return WARM_UP_STEPS + (rounds * len(names) + 2) * BLOCK_STEPS
