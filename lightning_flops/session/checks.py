"""When a step is counted once more outside of windows, to see whether steps spend what is foretold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_flops.analysis.step_keys import StepKey
    from lightning_flops.analysis.step_laws import StepLaws
    from lightning_flops.session.samples import Samples


_ROUND_NUMBERS = (100, 1000, 10_000)
"""People save, log pictures and draw samples at every so many steps."""

_BESIDE = (0, 1, -1)
"""What they do then may run in the step of that number, or after its update, which is in the next step for us. And some
count their steps from 0, others from 1."""

_TURNS = (2, 3, 5)
"""Steps of the same shapes may take turns, as the heads of a model or the losses of a pair do."""


class Checks:
    """Decides when a check is made: a step is counted from its first moment to its last, whatever its shapes are.

    Shapes may never change and chance may decide all the same what a step runs. Only such a step shows it. Steps at
    which people do more than at others are each looked at once: the first step of an epoch, and those beside round
    numbers.

    Args:
        laws: foretell what steps spend.
        samples: what counting outside of windows may cost.
        wanted: somebody sees what steps spend one by one.
    """

    def __init__(self, laws: StepLaws, samples: Samples, *, wanted: bool) -> None:
        self.at: float = math.inf
        """After so many steps of the run the next one is a check, if the run can afford it."""
        self.running = False
        """A check is running."""
        self.began = 0
        """Steps that were done when the latest one began."""
        self.looks_for_more = False
        """The latest one is of a step at which people do more than at others."""
        self.was_new = False
        """Its step was one that nobody knew."""
        self._laws = laws
        self._samples = samples
        self._wanted = wanted
        self._kinds: Iterable[StepKey] = ()
        self._turns: dict[int, set[int]] = {every: set() for every in _TURNS}
        """Remainders of the numbers of steps that were counted."""
        self._any_turn = False
        """The next check is wanted at once."""
        self._planned: float = math.inf
        self._expected: set[int] = set()
        """Numbers of steps after which the next one is worth a check, whatever its number."""
        self._roundest = dict.fromkeys(_BESIDE, 0)
        """How round the numbers are beside which a step was looked at, on each side."""
        self._round_at: float = math.inf
        """The next step beside a round number that is worth a look."""
        self._ordinary_was_checked = False
        """An ordinary step was checked: that tells more than steps beside round numbers, and comes before them."""

    def counted(self, *, steps_done: int) -> None:
        """A step was counted that began when so many were done."""
        for every, remainders in self._turns.items():
            remainders.add(steps_done % every)

    def _is_another_turn(self, steps_done: int) -> bool:
        return self._any_turn or all(
            len(remainders) == every or steps_done % every not in remainders
            for every, remainders in self._turns.items()
        )

    def window_closes(self, counted: Iterable[StepKey], *, steps_done: int) -> None:
        """A window has counted steps of these keys: from here on steps like them are checked now and then."""
        self._kinds = tuple(counted)
        self._plan(steps_done=steps_done)

    def _plan(self, *, steps_done: int) -> None:
        self._round_at = math.inf
        self._wait_until(math.inf)
        if not self._wanted or self._samples.exhausted or not self._laws.foretells_kinds(self._kinds):
            self._expected.clear()
            return
        self._find_round(after=steps_done)
        # Unless samples are known to be of use, steps of new shapes are counted by checks, as they come.
        self._any_turn = self._laws.wants_check or (not self._laws.believes_samples and self.was_new)
        self._wait_until(steps_done if self._any_turn else self._samples.next_check(steps_done=steps_done))

    def _wait_until(self, planned: float) -> None:
        self._planned = planned
        self.at = min([planned, self._round_at, *self._expected])

    def _find_round(self, *, after: int) -> None:
        """Find the next step beside a round number. A rounder one shows what comes at less round ones, too."""
        self._round_at = math.inf
        if not self._ordinary_was_checked:
            return
        for every in _ROUND_NUMBERS:
            is_small = after >= 10 * every and every != _ROUND_NUMBERS[-1]
            for beside, roundest in self._roundest.items():
                if roundest < every and not is_small:
                    self._round_at = max(1, -((beside - after) // every)) * every + beside
                    return

    def hurry(self, *, steps_done: int) -> None:
        """Make a check as soon as the run can afford it: it would tell something now."""
        if self._wanted and not self._samples.exhausted:
            self._any_turn = True
            self._wait_until(min(self._planned, steps_done))

    def postpone(self, *, steps_done: int) -> None:
        """The step that begins now is measured in another way, so the next check is of a later one."""
        self._expected.discard(steps_done)
        self._find_round(after=steps_done + 1)
        self._wait_until(max(self._planned, steps_done + 1))

    def expect(self, *, after: int) -> None:
        """The step that begins when *after* steps are done is worth a check, whatever its number."""
        if self._wanted and not self._samples.exhausted and self._laws.foretells_kinds(self._kinds):
            self._expected.add(after)
            self._wait_until(self._planned)

    def begins(self, *, steps_done: int) -> bool:
        """Whether the step that begins now is a check."""
        samples = self._samples
        if steps_done < self.at:
            return False
        expected = steps_done == self._round_at or steps_done in self._expected
        self._expected = {one for one in self._expected if one > steps_done}
        self._find_round(after=steps_done + 1)
        if samples.exhausted:
            self._expected.clear()
            self._round_at = math.inf
            self._wait_until(math.inf)
            return False
        if steps_done < self._planned and not expected:
            self._wait_until(self._planned)
            return False
        if not samples.affords(steps_done=steps_done):
            affords_at = samples.affords_at(steps_done=steps_done)
            self._find_round(after=affords_at)
            self._wait_until(max(self._planned, affords_at))
            return False
        is_ordinary = samples.is_usual(steps_done=steps_done) and self._is_another_turn(steps_done)
        if not (expected or is_ordinary):
            self._wait_until(steps_done + 1)
            return False
        self._wait_until(math.inf)
        self.running, self.began = True, steps_done
        self.looks_for_more = expected
        samples.begins()
        return True

    def counts(self, key: StepKey) -> None:
        """The step of this *key* was counted from its first moment to its last; the laws are told next."""
        if self.running:
            self.was_new = not self._laws.is_settled(key)
            self.counted(steps_done=self.began)
            self._ordinary_was_checked |= not self.looks_for_more
            for beside, roundest in self._roundest.items():
                fitting = [every for every in _ROUND_NUMBERS if (self.began - beside) % every == 0]
                self._roundest[beside] = max([roundest, *fitting])

    def found_more(self) -> None:
        """A step at which people do more than at others has spent more: no further one needs to be looked at."""
        self._roundest.clear()

    def ends(self, *, steps_done: int) -> None:
        """The check has ended, or the loop has left its step unfinished."""
        self.running = False
        self._samples.ends()
        self._plan(steps_done=steps_done)
