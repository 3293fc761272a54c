"""Which batches make a step, and what the step is known by."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_flops.analysis.step_keys import StepKey
from lightning_flops.records import Shapes


class StepBook:
    """Books batches to the step that is running.

    Args:
        last: the key of the step that ended last, if the run goes on.
    """

    def __init__(self, *, last: StepKey | None) -> None:
        self.steps_done = 0
        """Steps of the run that have ended."""
        self.last = last
        """What the step that ended last is known by; None if there is none yet."""
        self._shapes: list[Shapes] = []
        self._updates = 0

    @property
    def batches(self) -> int:
        """Batches of the running step that have ended."""
        return len(self._shapes)

    def book(self, shapes: Shapes, updates: int, ends_step: bool) -> StepKey | None:
        """Book a batch to the running step.

        Args:
            shapes: shapes of its tensors.
            updates: optimizer attempts that belong to it.
            ends_step: a global step ends with it.

        Returns:
            What the step is known by, if it ends here.
        """
        self._shapes.append(shapes)
        self._updates += updates
        if not ends_step:
            return None
        self.last = key = (tuple(self._shapes), self._updates)
        self.steps_done += 1
        self._shapes.clear()
        self._updates = 0
        return key

    def book_if_steps(self, shapes: Sequence[Shapes], updates: Sequence[int], ends_step: Sequence[bool]) -> bool:
        """Book several batches, as ``book``, if each of them is a whole step; returns whether that is so."""
        if self._shapes or self._updates or not all(ends_step):
            return False
        self.steps_done += len(shapes)
        self.last = ((shapes[-1],), updates[-1])
        return True

    def drop_running(self) -> None:
        """The running step begins anew: what was booked to it is of none."""
        self._shapes.clear()
        self._updates = 0

    def book_all(
        self, shapes: Sequence[Shapes], updates: Sequence[int], ends_step: Sequence[bool]
    ) -> Sequence[StepKey]:
        """As ``book``, for several batches at once. Each step that ends with one of them is in the result."""
        booked = map(self.book, shapes, updates, ends_step)
        return [key for key in booked if key is not None]
