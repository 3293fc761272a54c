"""What a timer says of a step."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_flops.measure.timing.phase_timer import Mark, PhaseTimer
from lightning_flops.records import PhaseSeconds, StepRecord, StepSignature

_SIGNATURE = StepSignature(batches=("2x4",), forwards=1, backwards=1, updates=1)


def read(timer: PhaseTimer, marks: Sequence[Mark] | None = None) -> tuple[PhaseSeconds, StepRecord]:
    """The seconds of the step of these *marks*, or of the one that ends here; and all of its times."""
    step = StepRecord(index=0, signature=_SIGNATURE, micro_steps=1, samples=None)
    times = timer.read(step, timer.cut() if marks is None else marks)
    assert times.seconds is not None
    return times.seconds, times
