"""Which batches make a step, and what the step is known by."""

from __future__ import annotations

from lightning_flops.analysis.step_laws import StepKey
from lightning_flops.instrument.batches import Shapes


class StepBook:
    """Books batches to the step that is running."""

    def __init__(self) -> None:
        self.steps_done = 0
        """Steps of the run that have ended."""
        self.last: StepKey | None = None
        """Of the step that ended last."""
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
        if ends_step and not self._shapes:  # most steps have one batch
            self.steps_done += 1
            self.last = ((shapes,), updates + self._updates)
            self._updates = 0
            return self.last
        self._shapes.append(shapes)
        self._updates += updates
        if not ends_step:
            return None
        self.last = key = (tuple(self._shapes), self._updates)
        self.steps_done += 1
        self._shapes.clear()
        self._updates = 0
        return key
