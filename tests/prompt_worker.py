"""A stand-in that makes a run the same each time: reports are there at once."""

from __future__ import annotations

from collections.abc import Callable

from lightning_flops import host_clock


class PromptWorker:
    is_busy = is_paused = is_off = False

    def submit(self, job: Callable[[], None], what: str = "a report") -> None:
        job()

    def pause(self, sec: float) -> None:
        host_clock.sleep(sec)

    def finish(self, within_sec: float = 10.0) -> bool:
        return True
