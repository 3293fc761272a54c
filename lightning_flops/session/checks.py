"""When a step is counted once more outside of windows, to see whether steps spend what is foretold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_flops.analysis.step_laws import StepKey, StepLaws
    from lightning_flops.session.samples import Samples


class Checks:
    """Decides when a check is made: a step is counted from its first moment to its last, whatever its shapes are.

    Shapes may never change and chance may decide all the same what a step runs. Only such a step shows it.

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
        self._laws = laws
        self._samples = samples
        self._wanted = wanted
        self._kinds: Iterable[StepKey] = ()
        self._was_new = False

    def window_closes(self, counted: Iterable[StepKey], *, steps_done: int) -> None:
        """A window has counted steps of these keys: from here on steps like them are checked now and then."""
        self._kinds = tuple(counted)
        self._plan(steps_done=steps_done)

    def _plan(self, *, steps_done: int) -> None:
        self.at = math.inf
        if not self._wanted or self._samples.exhausted or not self._laws.foretells_kinds(self._kinds):
            return
        # If samples are of no use, steps of new shapes are counted by checks, as they come.
        at_once = self._laws.wants_check or (self._laws.believes_samples is False and self._was_new)
        self.at = steps_done if at_once else self._samples.next_check(steps_done=steps_done)

    def hurry(self, *, steps_done: int) -> None:
        """A check now would tell something."""
        if self._wanted and not self._samples.exhausted:
            self.at = min(self.at, steps_done)

    def begins(self, *, steps_done: int) -> bool:
        """Whether the step that begins now is a check."""
        samples = self._samples
        if steps_done < self.at:
            return False
        if samples.exhausted:
            self.at = math.inf
            return False
        if not samples.affords(steps_done=steps_done):
            self.at = samples.affords_at(steps_done=steps_done)
            return False
        if not samples.is_usual(steps_done=steps_done):
            self.at = steps_done + 1
            return False
        self.at = math.inf
        self.running = True
        samples.begins()
        return True

    def counts(self, key: StepKey) -> None:
        """The step of this *key* was counted from its first moment to its last; the laws are told next."""
        self._was_new = not self._laws.is_settled(key)

    def ends(self, *, steps_done: int) -> None:
        """It has ended, or its loop has left it."""
        self.running = False
        self._samples.ends()
        self._plan(steps_done=steps_done)
