"""FLOPs of a job from the traces of its ranks: sums and shares that are worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_flops.instrument.counting.recorded_calls import recorded_work
from lightning_flops.report.trace_text import render_traces
from lightning_flops.schema.trace_flops import TracedStepFlops
from lightning_flops.trace.columns import Trace
from tests.analysis.in_memory import analyze_traces
from tests.analysis.trace_events import Event, kernel, launch, operator, product, step, trace


def of_rank(
    rank: int | None, *events: Event, world_size: int | None = 2, device: str = "NVIDIA A100-SXM4-40GB"
) -> Trace:
    place = {"rank": rank, "world_size": world_size}
    return trace(
        *events,
        distributedInfo={name: value for name, value in place.items() if value is not None},
        deviceProperties=[{"id": 0, "name": device}],
    )


FIRST = (step(1, 0, 100), *product(1, 10, rows=100), step(2, 100, 100), *product(2, 110, rows=100))
SECOND = (step(1, 0, 300), *product(1, 10, rows=50), step(2, 300, 100), *product(2, 310, rows=50))


def about(value: float) -> Any:
    """Equal to *value* but for rounding."""
    return pytest.approx(value, rel=1e-12)


def job(*traces: Trace) -> tuple[TracedStepFlops, ...] | None:
    return analyze_traces(traces, formulas=recorded_work).job_steps


def test_a_jobs_step_has_the_flops_of_all_ranks_and_their_share_of_all_peaks() -> None:
    found = job(of_rank(1, *SECOND), of_rank(0, *FIRST))
    # 20,000 and 10,000 FLOPs; at 19.5 TFLOP/s, of 100 us and 300 us, and of 100 us and 100 us.
    assert found == tuple(
        TracedStepFlops(
            step=number,
            forward=30_000,
            backward=0,
            recompute=0,
            optimizer=0,
            skipped=0,
            wall_us=mean_us,
            mfu=about(30_000 / 19.5e12 / (2 * mean_us * 1e-6)),
            hfu=about(30_000 / 19.5e12 / (2 * mean_us * 1e-6)),
            lower_bound=False,
        )
        for number, mean_us in ((1, 200.0), (2, 100.0))
    )


def test_ranks_on_devices_of_two_kinds_have_each_their_own_peak() -> None:
    first, _ = job(of_rank(0, *FIRST), of_rank(1, *FIRST, device="NVIDIA A40")) or ()
    # 20,000 FLOPs of each in 100 us: the mean of the shares of 19.5 and of 37.4 TFLOP/s.
    assert first.mfu == about((20_000 / 19.5e12 + 20_000 / 37.4e12) / 200e-6)


def test_the_peak_of_one_rank_that_is_not_known_leaves_the_jobs_share_unknown() -> None:
    found = job(of_rank(0, *FIRST), of_rank(1, *FIRST, device="NVIDIA X1")) or ()
    assert [(one.forward, one.mfu, one.hfu) for one in found] == [(40_000, None, None)] * 2


def test_a_lower_bound_of_one_rank_is_one_of_the_job() -> None:
    inputs: dict[str, Any] = {"Input Dims": [[4, 4]], "Input type": ["float"]}
    uncounted = operator("mine::matmul_of_mine", 150, 5, **inputs)
    found = job(of_rank(0, *FIRST), of_rank(1, *FIRST, uncounted)) or ()
    assert [one.lower_bound for one in found] == [False, True]


def test_steps_that_not_all_ranks_have_are_left_out() -> None:
    later = (step(2, 0, 100), *product(1, 10, rows=100), step(3, 100, 100), *product(2, 110, rows=100))
    found = job(of_rank(0, *FIRST), of_rank(1, *later)) or ()
    assert [(one.step, one.forward) for one in found] == [(2, 40_000)]


NO_MARKS = tuple(product(1, 10, rows=100))
NO_SHAPES = (step(1, 0, 100), operator("aten::mm", 10, 5), launch(1, 11), kernel(1, 20, 10))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (of_rank(0, *FIRST, world_size=8), of_rank(1, *FIRST, world_size=8)),
        (of_rank(0, *FIRST), of_rank(1, *FIRST, world_size=4)),
        (of_rank(0, *FIRST, world_size=None), of_rank(1, *FIRST, world_size=None)),
        (of_rank(0, *FIRST), of_rank(1, *FIRST, world_size=None)),
        (of_rank(0, *FIRST), of_rank(1, *NO_SHAPES)),
        (of_rank(0, *FIRST), of_rank(1, *NO_MARKS)),
    ],
    ids=["ranks missing", "sizes differ", "no size", "a size missing", "no shapes", "no marks"],
)
def test_what_the_job_spent_is_not_known_and_why(first: Trace, second: Trace) -> None:
    report = analyze_traces([first, second], formulas=recorded_work)
    assert report.job_steps is None
    assert "n/a (it takes a trace of each rank, with FLOPs and marks of steps)" in render_traces(report)


def test_one_trace_and_separate_runs_are_no_job() -> None:
    assert job(of_rank(0, *FIRST)) is None
    assert job(of_rank(None, *FIRST), of_rank(None, *SECOND)) is None


def test_the_text_has_the_jobs_flops_below_the_ranks() -> None:
    text = render_traces(analyze_traces([of_rank(0, *FIRST), of_rank(1, *SECOND)], formulas=recorded_work))
    section = text[text.index("FLOPs of the job") :]
    assert section.index("step 1") < section.index("step 2")
    (line,) = (line for line in section.splitlines() if line.startswith("step 1"))
    # 30,000 FLOPs in 200 us are 150 MFLOP/s.
    assert line.split() == ["step", "1", "200", "us", "30", "K", "0", "0", "0", "150", "M", "0.00%", "0.00%"]
