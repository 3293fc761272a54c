from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_flops.config import TraceSchedule
from lightning_flops.measure.tracing.step_tracer import StepTracer
from lightning_flops.records import StepSignature, TracedStepRecord


def signature(name: str = "same") -> StepSignature:
    return StepSignature(batches=(name,), forwards=1, backwards=1, updates=1)


class Cycles(StepTracer):
    """Records nothing."""

    def __init__(self, schedule: TraceSchedule) -> None:
        super().__init__(nn.Linear(1, 1), device=torch.device("cpu"), schedule=schedule)

    def warm_up(self) -> None: ...

    def start(self, index: int) -> None: ...

    def stop(self, *these: StepSignature) -> TracedStepRecord:
        return TracedStepRecord(index=0, signatures=these, path="")


def alike(one: StepSignature) -> bool:
    return one == signature()


def steps_of(cycles: Cycles, *signatures: StepSignature, operators: int = 0) -> list[int]:
    """Indexes of the steps that ran until the cycles were over."""
    ran = []
    for (index, one), _ in zip(enumerate(signatures), cycles.steps(alike, operators=operators), strict=False):
        cycles.batch_begins(index)
        cycles.step_ends(one)
        ran.append(index)
    return ran


@pytest.mark.parametrize(("operators", "steps"), [(0, 5), (20_000, 5), (20_001, 4), (1_000_000, 1)])
def test_of_large_steps_fewer_are_traced_by_default(operators: int, steps: int) -> None:
    default = TraceSchedule()
    for active, schedule in ((min(default.active, steps), default), (7, TraceSchedule(active=7))):
        cycles = Cycles(schedule)
        assert steps_of(cycles, *[signature()] * 20, operators=operators) == list(range(1 + active))


def test_a_step_unlike_the_counted_one_is_tried_again_three_times_in_all() -> None:
    odd = signature("last batch of an epoch")
    cycles = Cycles(TraceSchedule(warmup=0, active=1))
    assert steps_of(cycles, odd, signature(), signature()) == [0, 1]
    assert [record.signatures for record in cycles.traces] == [(odd,), (signature(),)]
    cycles = Cycles(TraceSchedule(warmup=0, active=1))
    assert steps_of(cycles, *[odd] * 9) == [0, 1, 2]
