"""Room on Python's stack for what we put there, so that a model may be as deep as it may be without us."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STEP = 8
"""Frames by which the limit is raised at a time: to set it at every call of a module would cost more than the call."""

_NEVER = 1 << 62


class StackRoom:
    """Raises Python's recursion limit by the frames that are there because of us, and hardly further.

    Those are the ones that ``take`` is told of, and one for each module that is running while torch's global hooks are
    up: with hooks of any kind torch calls a module's forward through one function more. The limit is the whole
    process's; where several threads run modules they share what all of them need.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._taken: dict[object, int] = {}
        self.levels = 0
        """Modules that are running, on all threads. Torch's module hooks count them here, and call ``follow`` when that
        is due, without a further call of ours: every module call of a step goes through them."""
        self.highest = _NEVER
        """From this number of levels on the limit is too low, and ``follow`` is due."""
        self.lowest = -_NEVER
        """Below this number of levels the limit is higher than it need be, and ``follow`` is due."""
        self._room = 0
        """Levels that the limit has room for."""
        self._found = 0
        """The limit as it was found."""
        self._base = 0
        """The user's limit: as it was found, or as it was set since."""
        self._ours: set[int] = set()
        """The limits that we have set since."""
        self._last = 0
        """The one that we set last."""

    @contextmanager
    def open(self, frames: int) -> Iterator[None]:
        """Inside there is room for *frames*; afterwards the limit is as it was, or as the user has set it meanwhile."""
        holder = object()
        try:
            self.take(holder, frames)
            yield
        finally:
            try:
                self.give_back(holder)
            except BaseException:
                self.give_back(holder)  # it may be called twice, and did not come to its end
                raise

    def take(self, holder: object, frames: int) -> None:
        """Makes room for *frames* until *holder* gives it back."""
        with self._lock:
            if not self._taken:
                self.levels = self._room = 0
                self._found = self._base = self._last = sys.getrecursionlimit()
                self._ours = set()
            self._taken[holder] = frames
            self._follow()

    def give_back(self, holder: object) -> None:
        """The room that *holder* took is needed no more; nothing happens where it took none."""
        with self._lock:
            if holder not in self._taken:
                return
            if len(self._taken) == 1:
                self.levels, self.highest, self.lowest = 0, _NEVER, -_NEVER
                self._see_users_limit()
                self._set(self._base)
            del self._taken[holder]
            if self._taken:
                self._follow()

    def follow(self) -> None:
        """Sets the limit anew, when many modules have begun or ended since it was set."""
        with self._lock:
            if self._taken:
                self._follow()

    def _follow(self) -> None:
        self.levels = levels = max(0, self.levels)
        self._see_users_limit()
        self._room = -(-levels // STEP) * STEP
        # A model that goes to and fro around a step leaves the limit alone.
        self.highest, self.lowest = self._room + 1, max(0, self._room - 2 * STEP)
        self._set(self._base + self._room + sum(self._taken.values()))

    def _set(self, limit: int) -> None:
        with suppress(RecursionError):  # the stack is deeper than that: it stays as it is until a shallower place
            if limit != sys.getrecursionlimit():
                self._ours.add(limit)
                sys.setrecursionlimit(limit)
            self._last = limit

    def _see_users_limit(self) -> None:
        """Take over what the user has set since we did; what was read from us before is the user's own of then."""
        now = sys.getrecursionlimit()
        if now != self._last:
            self._base = self._found if now in self._ours else now


stack_room = StackRoom()
"""The one of this process, as there is one limit."""
