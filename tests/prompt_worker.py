"""A stand-in that makes a run the same each time: reports are there at once."""

from __future__ import annotations

from collections.abc import Callable


class PromptWorker:
    is_busy = is_off = False

    def submit(self, job: Callable[[], None], what: str = "a report") -> None:
        job()

    def finish(self, within_sec: float = 10.0) -> bool:
        return True
