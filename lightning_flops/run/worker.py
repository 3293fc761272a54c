"""Stub."""

from __future__ import annotations

from collections.abc import Callable

Job = Callable[[], Callable[[], None] | None]


class Worker:
    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []

    def submit(self, job: Job) -> None:
        made = job()
        if made is not None:
            self._jobs.append(made)

    def deliver(self) -> None:
        while self._jobs:
            self._jobs.pop(0)()

    def finish(self, within_sec: float = 10.0) -> bool:
        self.deliver()
        return True
