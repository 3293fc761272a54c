"""A worker whose jobs are done when they are submitted: what a run reports does not depend on how quick a thread is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from lightning_flops.run.worker import Job


class PromptWorker:
    def __init__(self) -> None:
        self._made: deque[Callable[[], None]] = deque()

    @property
    def made(self) -> bool:
        return bool(self._made)

    def submit(self, job: Job, what: str = "a report") -> None:
        made = job()
        if made is not None:
            self._made.append(made)

    def deliver(self) -> None:
        while self._made:
            self._made.popleft()()

    def finish(self, within_sec: float = 10.0) -> bool:
        self.deliver()
        return True
