"""Clocks whose time the test decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class FakeNow:
    """Stands still until a test lets time go by."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        """Let *seconds* go by."""
        self.seconds += seconds

    def slowed(self, function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        """*function*, which takes so many seconds more."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.sleep(seconds)
            return function(*args, **kwargs)

        return call


class FakeEvent:
    """A device event that takes place *lag* seconds after the host recorded it."""

    def __init__(self, now: FakeNow, lag: float = 0.0) -> None:
        self._now = now
        self._lag = lag
        self.at: float | None = None
        self.stream: Any = None
        self.synchronized = 0

    def record(self, stream: Any = None) -> None:
        self.at, self.stream = self._now() + self._lag, stream

    def synchronize(self) -> None:
        self.synchronized += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.at is not None and end.at is not None
        return (end.at - self.at) * 1e3
