"""Steps that are the one before once more: what they come to is known, and need not be worked out again.

What an event does changes a state by the event's facts alone. So a step that began and ended in the same state
does the same again, as long as the same events come in the same order. Until the first that differs none is applied;
then all are that were left out, and everything goes on as if they had been applied at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MOST_EVENTS = 4096  # a step of more has not ended for long, as where a loop never updates

#: Applies an event to its first argument by the event's facts, the others. What it returns, if anything, is called in
#: its place where the event is left out.
Apply = Callable[..., Callable[[], None] | None]


class Repeats:
    """The events of one loop's steps, which are applied to *owner*.

    Args:
        owner: what events are applied to.
        state: returns a copy of all of the owner's that decides what an event does.
        may_skip: whether events of the step that begins can be left out, if they are those of the one before.
        again: a step is over that has come to the same as the latest.
    """

    def __init__(
        self, owner: Any, *, state: Callable[[], Any], may_skip: Callable[[], bool], again: Callable[[], None]
    ) -> None:
        self._owner, self._state, self._may_skip, self._again = owner, state, may_skip, again
        self.live = True  # what is applied happens now; otherwise it was left out when it happened
        self._events: list[Any] | None = []  # applied in the running step: how, the facts, what is called in its place
        self._known: list[Any] = []  # the same of the step before; empty: it is not to be repeated
        self.at: int | None = None  # events of the running step that were left out; None: nothing is
        self._is_over = False  # the step ends with the event that is applied
        self._is_steady = False  # the running step has begun in the same state as the one before
        self._begun_in: Any = None  # this state, where it was asked for

    def hear(self, apply: Apply, *facts: Any) -> None:
        """An event has come: *apply* it, unless it came at this place in the step before."""
        if self.at is not None:
            known, known_facts, instead = self._known[self.at]
            if known is apply and known_facts == facts:
                self.at += 1
                if instead is not None:
                    instead()
                if self.at == len(self._known):
                    self.at = None
                    self._again()
                    self._begins()
                return
            self._catch_up()
        instead = apply(self._owner, *facts)
        if self._events is not None:
            self._events.append((apply, facts, instead))
            if len(self._events) == _MOST_EVENTS:
                self._events = None
        if self._is_over:
            self._learn()

    def spoil(self) -> None:
        """Something happens, or will, that is no event: all are applied, and the running step is not repeated."""
        if self.at is not None:
            self._catch_up()
        self._events = None

    def ends(self, *, may_repeat: bool) -> None:
        """The running step is over, with the event that is applied now if it *may* be *repeated*."""
        self._is_over = True
        if not may_repeat:
            self._events = None

    def _catch_up(self) -> None:
        left_out, self.at = self._known[: self.at], None
        self._events, self.live = left_out, False
        try:
            for apply, facts, _ in left_out:
                apply(self._owner, *facts)
        finally:
            self.live = True

    def _learn(self) -> None:
        events, self._events, self._is_over = self._events, [], False
        is_alike, self._known = events == self._known, events or []
        if not is_alike:
            self._is_steady, self._begun_in = False, None
        elif not self._is_steady:
            state = self._state()
            self._is_steady, self._begun_in = state == self._begun_in, state
        self._begins()

    def _begins(self) -> None:
        self.at = 0 if self._is_steady and self._may_skip() else None
