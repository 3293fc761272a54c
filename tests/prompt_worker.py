"""Stand-ins that make a run the same each time: reports are there at once, and no step is counted at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_flops.analysis.step_flops import CountSchedule, StepFlops


class _Never(CountSchedule):
    def draws_check(self) -> bool:
        return False

    def learns(self) -> bool:
        return False


class NoChecks(StepFlops):
    """Has no step counted outside of windows."""

    def __init__(self, **known: Any) -> None:
        super().__init__(**known)
        self.schedule = _Never()


class PromptWorker:
    is_busy = is_off = False

    def submit(self, job: Callable[[], None], what: str = "a report") -> None:
        job()

    def finish(self, within_sec: float = 10.0) -> bool:
        return True
