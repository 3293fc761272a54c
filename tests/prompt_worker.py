"""Stand-ins that make a run the same each time: reports are there at once, and no step is counted at random."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from lightning_flops.analysis.step_flops import CountSchedule, StepFlops
from lightning_flops.run.worker import Job


class _Never(CountSchedule):
    def draws_check(self) -> bool:
        return False

    def learns(self) -> bool:
        return False


class NoChecks(StepFlops):
    """Has no step counted outside of windows."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = _Never()


class PromptWorker:
    def __init__(self) -> None:
        self.made: deque[Callable[[], None]] = deque()

    def submit(self, job: Job, what: str = "a report") -> None:
        made = job()
        if made is not None:
            self.made.append(made)

    def finish(self, within_sec: float = 10.0) -> bool:
        while self.made:
            self.made.popleft()()
        return True
