"""Which batches make a step, and whether a step is like the counted one."""

from __future__ import annotations

from lightning_flops.instrument.batches import Shapes


class StepBook:
    """Books batches to the step that is running."""

    def __init__(self) -> None:
        self.steps_done = 0
        """Steps of the run that have ended."""
        self._shapes: list[Shapes] = []
        self._updates = 0
        self._counted: tuple[tuple[Shapes, ...] | None, int | None] = (None, None)

    @property
    def batches(self) -> int:
        """Batches of the running step that have ended."""
        return len(self._shapes)

    def counted(self, shapes: tuple[Shapes, ...] | None, updates: int | None) -> None:
        """Note the *shapes* and the number of *updates* of a counted step; None: they do not determine its FLOPs."""
        self._counted = (shapes, updates)

    def book(self, shapes: Shapes, updates: int, ends_step: bool) -> bool:
        """Book a batch to the running step.

        Args:
            shapes: shapes of its tensors.
            updates: optimizer attempts that belong to it.
            ends_step: a global step ends with it.

        Returns:
            Whether the step, if it ends here, was like the counted one.
        """
        self._shapes.append(shapes)
        self._updates += updates
        if not ends_step:
            return True
        alike = (tuple(self._shapes), self._updates) == self._counted
        self.steps_done += 1
        self._shapes.clear()
        self._updates = 0
        return alike
