"""Room on Python's stack for what we put there, so that a model may be as deep as it may be without us."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class StackRoom:
    """Raises Python's recursion limit by the frames that are there because of us, and no further.

    Those are the ones that ``open`` is told of, and one for each module that is running while torch's global hooks are
    up: with hooks of any kind torch calls a module's forward through one function more. The limit is the whole
    process's; where several threads run modules they share what all of them need.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._opened = 0
        self._levels = 0
        self._frames = 0
        self._found = 0
        """The limit as it was found."""
        self._base = 0
        """The user's limit: as it was found, or as it was set since."""
        self._ours = 0
        """The limit that we set last."""

    @contextmanager
    def open(self, frames: int) -> Iterator[None]:
        """Inside there is room for *frames*; afterwards the limit is as it was, or as the user has set it meanwhile."""
        with self._lock:
            if self._opened == 0:
                self._levels = self._frames = 0
                self._found = self._base = self._ours = sys.getrecursionlimit()
            self._opened += 1
            self._follow(self._levels, self._frames + frames)
        try:
            yield
        finally:
            with self._lock:
                self._opened -= 1
                self._follow(self._levels if self._opened else 0, self._frames - frames)

    def deeper(self) -> None:
        """A module begins to run, and torch has a frame on the stack for the hooks."""
        with self._lock:
            if self._opened:
                self._follow(self._levels + 1, self._frames)

    def back(self) -> None:
        """A module ends, or one whose beginning nobody heard of."""
        with self._lock:
            if self._opened:
                self._follow(max(0, self._levels - 1), self._frames)

    def _follow(self, levels: int, frames: int) -> None:
        self._see_users_limit()
        self._levels, self._frames = levels, frames
        limit = self._base + levels + frames
        with suppress(RecursionError):  # the stack is deeper than that: it stays as it is until a shallower place
            sys.setrecursionlimit(limit)
            self._ours = limit

    def _see_users_limit(self) -> None:
        """Take over what the user has set since we did; what was read from us before is the user's own of then."""
        now = sys.getrecursionlimit()
        if now != self._ours:
            self._base = self._found if now == self._found + self._levels + self._frames else now


stack_room = StackRoom()
"""The one of this process, as there is one limit."""
