"""Which of a loop's optimizers ends its steps: the last of those that take turns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_flops.doors.loop_search import PATIENCE

MANY_UPDATES = 100
"""So many updates before the first step ends are enough to know that it waits in vain for some optimizer."""


class Turns:
    """Hears of the updates of a loop's optimizers, and says where its steps end.

    They end with the optimizer that was the last one to make its first update: many list a generator before its
    discriminator, and update the discriminator first. If the one at the end of the list has made several updates
    before others made any, these may begin later, or never, and steps end with that one. Whatever their order, after
    many updates nobody is waited for any more.

    Args:
        optimizers: those of the loop.
        in_order: they are listed in the order of their updates, which others have seen.
    """

    def __init__(self, optimizers: Iterable[Any], *, in_order: bool) -> None:
        listed = list(optimizers)
        self.updates = 0
        """Updates that were made before it was known where steps end."""
        self.late: tuple[str, ...] = ()
        """The classes of those that had made no update when nobody was waited for any more."""
        self._listed = listed
        self._last = listed[-1] if listed else None
        self._of_last = 0
        self._awaited = [] if in_order or len(listed) < 2 else listed

    @property
    def awaited(self) -> tuple[str, ...]:
        """The classes of those that have made no update, if that is why no step has ended."""
        return tuple(type(one).__name__ for one in self._awaited) if self.updates else ()

    def ends_step(self, optimizer: Any) -> bool:
        """*optimizer* has made its update; returns whether the step ends with it."""
        if not self._awaited:
            return optimizer is self._last
        self.updates += 1
        self._of_last += optimizer is self._last
        self._awaited = [one for one in self._awaited if one is not optimizer]
        if not self._awaited:
            self._last = optimizer
        elif self._of_last == PATIENCE or self.updates == MANY_UPDATES:
            self._last = next(one for one in reversed(self._listed) if not any(one is late for late in self._awaited))
            if self.updates == MANY_UPDATES:
                self.late = self.awaited
            self._awaited = []
        return not self._awaited and optimizer is self._last
