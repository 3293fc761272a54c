from __future__ import annotations

import pytest

from lightning_flops.config import TraceSchedule
from lightning_flops.instrument.tracing.trace_cycles import TraceCycles
from lightning_flops.records import StepSignature
from tests.instrument.small_run import FakeTracer, Run


def signature(name: str = "same") -> StepSignature:
    return StepSignature(batches=(name,), forwards=1, backwards=1, updates=1)


def steps_of(cycles: TraceCycles, *signatures: StepSignature) -> list[int]:
    """Indexes of the steps that ran until the cycles were over."""
    ran = []
    for index, one in enumerate(signatures):
        if cycles.over:
            break
        cycles.batch_begins(index)
        cycles.step_ends(one)
        ran.append(index)
    return ran


def test_a_cycle_waits_warms_up_and_records_several_steps_as_one_trace() -> None:
    tracer = FakeTracer()
    cycles = TraceCycles(tracer, TraceSchedule(wait=2, warmup=1, active=3))
    cycles.begin(lambda one: True)
    assert steps_of(cycles, *[signature()] * 20) == [0, 1, 2, 3, 4, 5]
    assert tracer.calls == ["warm_up", "start 3", "start 4", "start 5", "stop"]
    assert [record.index for record in cycles.traces] == [3]


def test_cycles_are_repeated_and_every_trace_is_kept() -> None:
    cycles = TraceCycles(FakeTracer(), TraceSchedule(wait=1, warmup=1, active=1, repeat=3))
    cycles.begin(lambda one: True)
    assert steps_of(cycles, *[signature()] * 20) == list(range(9))
    assert [record.index for record in cycles.traces] == [2, 5, 8]


@pytest.mark.parametrize(("operators", "steps"), [(0, 5), (20_000, 5), (20_001, 4), (1_000_000, 1)])
def test_of_large_steps_fewer_are_traced_by_default(operators: int, steps: int) -> None:
    default = TraceSchedule()
    for active, schedule in ((min(default.active, steps), default), (7, TraceSchedule(active=7))):
        cycles = TraceCycles(FakeTracer(), schedule)
        cycles.begin(lambda one: True, operators=operators)
        assert steps_of(cycles, *[signature()] * 20) == list(range(1 + active))


def test_a_step_unlike_the_counted_one_is_tried_again_three_times_in_all() -> None:
    odd = signature("last batch of an epoch")
    cycles = TraceCycles(FakeTracer(), TraceSchedule(warmup=0, active=1))
    cycles.begin(lambda one: one == signature())
    assert steps_of(cycles, odd, signature(), signature()) == [0, 1]
    assert [record.signatures for record in cycles.traces] == [(odd,), (signature(),)]
    cycles = TraceCycles(FakeTracer(), TraceSchedule(warmup=0, active=1))
    cycles.begin(lambda one: one == signature())
    assert steps_of(cycles, *[odd] * 9) == [0, 1, 2]


# In the recorder's window


class TracedRun(Run):
    """A miniature loop whose window traces; counted is step 1, settled step 2, timed steps 3 and 4."""

    def __init__(self, tracer: FakeTracer, schedule: TraceSchedule | None = None) -> None:
        super().__init__(
            timing_steps=2, settle_steps=1, tracing=TraceCycles(tracer, schedule or TraceSchedule(active=1))
        )


def test_the_window_traces_after_the_timed_steps_and_then_closes() -> None:
    tracer = FakeTracer()
    run = TracedRun(tracer)
    while not run.recorder.closed:
        run.batch()
    assert run.states[3:] == ["timing"] * 2 + ["tracing"] * 2
    parts = [call for part in ("data_wait", "forward", "backward", "optimizer") for call in (f"enter {part}", "leave")]
    assert tracer.calls == ["warm_up", *parts, "start 6", *parts, "stop"]
    window = run.close()
    assert [record.index for record in window.traces] == [6]
    assert window.traces[0].signatures == (window.counted_steps[0].signature,)
    assert window.notes == ()


@pytest.mark.parametrize("in_a_step", [False, True])
def test_a_run_that_ends_between_two_traced_steps_keeps_those_before(in_a_step: bool) -> None:
    run = TracedRun(FakeTracer(), TraceSchedule(active=5))
    for _ in range(8):  # steps 6 and 7 are traced
        run.batch()
    if in_a_step:
        run.batch(ends_step=False)
    window = run.close()
    assert [record.index for record in window.traces] == ([] if in_a_step else [6])
    assert window.notes == ("Training ended before all was traced that was to be.",)
