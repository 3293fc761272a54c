"""Which optimizers make one loop, and which of them ends its steps.

They make one if they take turns: each makes its next update before another one has made ``PATIENCE``. A loop is over
when others take turns: others alone, or one more than before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 6
"""If an optimizer makes no update while another one makes so many, it does not take turns with that.

A loop that updates a critic five times for each update of a generator is one loop.
"""

BACK = 2
"""After so many updates in a row of one optimizer, its loop, which was over, has its turn again."""

MANY_UPDATES = 100
"""So many updates before the first step ends are enough to know that it waits in vain for some optimizer."""


@dataclass(slots=True)
class Updates:
    """What one optimizer has done."""

    optimizer: Any
    number: int = 0
    """Updates that it has made."""
    since: Counter[int] = field(default_factory=Counter)
    """Updates of others since its latest, by the id of each."""
    repeats: bool = False
    """It makes several updates in a row, and so no step ends with each of them."""


class TakingTurns:
    """Hears of updates, and knows which optimizers take turns.

    Args:
        optimizers: those that are known to do so.
    """

    def __init__(self, optimizers: Iterable[Any] = ()) -> None:
        self.members = [Updates(one) for one in optimizers]
        """In the order of their first updates."""

    @property
    def in_order(self) -> list[Updates]:
        """In the order of their updates in a step: those that make several come first."""
        return sorted(self.members, key=lambda one: not one.repeats)

    def hears(self, optimizer: Any) -> list[Updates]:
        """*optimizer* has made an update; returns those that take no turns any more."""
        its = self.of(optimizer)
        is_new = its is None
        if its is None:
            self.members.append(its := Updates(optimizer))
        its.repeats = its.repeats or (its.number > 0 and not its.since)
        for one in self.members:
            one.since[id(optimizer)] += 1
        its.number += 1
        its.since.clear()
        over = [one for one in self.members if one.since[id(optimizer)] == PATIENCE]
        self.members = [one for one in self.members if one not in over]
        if is_new or over:
            for one in self.members:
                one.repeats = False  # what one does alone is not what it does in turns
        return over

    def of(self, optimizer: Any) -> Updates | None:
        """What *optimizer* has done; None if it takes no turns."""
        return next((one for one in self.members if one.optimizer is optimizer), None)


class Company:
    """Hears of the updates of a loop and of others, from the first one on that another optimizer makes.

    Args:
        optimizers: those of the loop.
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self.joined = False
        """The loop is another one because an optimizer takes turns with its own, and not because it is over."""
        self.turns = TakingTurns(optimizers)
        self._own = [one.optimizer for one in self.turns.members]
        self._first: list[Any] = []
        self._stayed: list[Any] = []
        """Others that take turns, and after whose updates the loop went on."""
        self._in_a_row = 0

    def another_updates(self, optimizer: Any, *, in_step: bool, patience: int) -> bool:
        """*optimizer*, which is not of the loop, has made an update; returns whether the loop is another one now.

        Then ``turns`` are those of the other one.

        Args:
            optimizer: torch's.
            in_step: a step of the loop has begun, and has not ended.
            patience: so many such updates in a row end the loop.
        """
        if self.turns.of(optimizer) is None and in_step:
            self._first.append(optimizer)
        self._lets_go_of([one.optimizer for one in self.turns.hears(optimizer)])
        self._in_a_row += 1
        self.joined = _has(self._stayed, optimizer)
        if self.joined:
            self.turns.members.sort(key=self._place)
        elif self._in_a_row >= patience:
            self.turns.members = self._others()
        return self.joined or self._in_a_row >= patience

    @property
    def others_were_last(self) -> bool:
        """The latest update was none of the loop's."""
        return self._in_a_row > 0

    def loop_updates(self, optimizer: Any) -> bool:
        """*optimizer* of the loop has made an update; returns whether nobody else takes turns with it any more."""
        self._lets_go_of([one.optimizer for one in self.turns.hears(optimizer)])
        self._in_a_row = 0
        self._stayed = [one.optimizer for one in self._others()]
        return not self._stayed

    def steps(self, optimizer: Any) -> int:
        """Steps that have ended since, if they end with the updates of *optimizer*."""
        its = self.turns.of(optimizer)
        return 0 if its is None else its.number

    def _others(self) -> list[Updates]:
        return [one for one in self.turns.members if not _has(self._own, one.optimizer)]

    def _lets_go_of(self, optimizers: list[Any]) -> None:
        self._first = [one for one in self._first if not _has(optimizers, one)]
        self._stayed = [one for one in self._stayed if not _has(optimizers, one)]

    def _place(self, updates: Updates) -> int:
        """0 for an optimizer that comes before the loop's own, 1 for one of these, 2 for one that comes after."""
        if _has(self._own, updates.optimizer):
            return 1
        return 0 if _has(self._first, updates.optimizer) else 2


def _has(optimizers: list[Any], wanted: Any) -> bool:
    return any(one is wanted for one in optimizers)


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
