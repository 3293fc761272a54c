"""A tracer without a profiler."""

from __future__ import annotations

from lightning_flops.records import ModuleSecondsRecord, StepSignature, TracedStepRecord


class FakeTracer:
    """Writes down what it is told; is lost when the test says so."""

    def __init__(self, *, lost_at: str = "") -> None:
        self.calls: list[str] = []
        self.record: TracedStepRecord | ModuleSecondsRecord | None = None
        self.lost: str | None = None
        self.lost_at = lost_at
        self.first: int | None = None

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name.partition(" ")[0] == self.lost_at:
            self.lost = f"Lost at {name}."

    def warm_up(self) -> None:
        self._call("warm_up")

    def start(self, index: int) -> None:
        self.first = index if self.first is None else self.first
        self._call(f"start {index}")

    def enter(self, part: str) -> None:
        self._call(f"enter {part}")

    def leave(self) -> None:
        self._call("leave")

    def stop(self, signature: StepSignature) -> None:
        assert self.first is not None
        self.record = TracedStepRecord(index=self.first, signature=signature, process=1, path="")
        self.first = None
        self._call("stop")

    def give_up(self) -> None:
        self.calls.append("give_up")
