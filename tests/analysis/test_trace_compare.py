"""Traces of two runs compared, each value worked out by hand.

A step of run A lasts 100 us: 10 us a loader, then ``aten::mm`` from 20 to 30, which launches ``gemm`` (30 to 70), and
``aten::relu`` from 32 to 36, which launches ``relu`` (2 us after gemm, 8 long). A launch is a call of 1 us: one before
the kernels run, one beside them. So the step is 48 us kernels, 10 loader, 1 runtime, 9 cpu, and 32 nothing of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import pytest

from lightning_flops.analysis.compare import compare_traces
from lightning_flops.analysis.differences import judge
from lightning_flops.analysis.trace_report import AnalyzedTrace, analyze_one
from lightning_flops.errors import ComparisonError
from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.schema.comparison import (
    CalledDifference,
    CausedDifference,
    Comparison,
    FigureDifference,
    TableName,
    TimeDifference,
)
from tests.analysis.in_memory import known
from tests.analysis.trace_events import (
    A100,
    Event,
    data_loader,
    kernel,
    launch,
    launched,
    memory,
    operator,
    shapes,
    step,
    trace,
)

D = TypeVar("D", bound=TimeDifference | FigureDifference | CausedDifference)
US = 1000
"""Nanoseconds."""


def one_step(
    number: int, *, gemm: float = 40, relus: tuple[float, ...] = (8,), shaped: bool = False, mark: bool = True
) -> list[Event]:
    """The events of a step, at 1000 us times its number."""
    at = 1000.0 * number
    events = [
        *([step(number, at, 100)] if mark else []),
        data_loader(at, 10),
        operator("aten::mm", at + 20, 10, **(shapes([2, 3], [3, 4]) if shaped else {})),
        *launched(10 * number, at + 22, at + 30, gemm, name="gemm"),
        operator("aten::relu", at + 32, 4),
    ]
    begin = at + 30 + gemm + 2
    for call, length in enumerate(relus, 10 * number + 1):
        events += [launch(call, at + 33), kernel(call, begin, length, name="relu")]
        begin += length
    return events


def run(
    *gemms: float, rank: int | None = None, first: int = 1, more: Sequence[Event] = (), **of_step: Any
) -> AnalyzedTrace:
    """A run whose steps have these lengths of gemm."""
    steps = [one_step(number, gemm=gemm, **of_step) for number, gemm in enumerate(gemms, first)]
    head: dict[str, Any] = {"deviceProperties": [A100]}
    if rank is not None:
        head["distributedInfo"] = {"rank": rank, "world_size": 2, "backend": "nccl"}
    return analyze_one(trace(*chain(*steps), *more, **head), formulas=recorded_work, stepwise=True)


A = run(40, 40, 40, 40)


def named(rows: Sequence[D]) -> dict[str, D]:
    return {row.name: row for row in rows}


def table(comparison: Comparison, of: TableName) -> dict[str, CalledDifference]:
    return named(comparison.tables[of])


def times(row: TimeDifference) -> tuple[int, int, int]:
    return row.a_ns, row.b_ns, row.difference_ns


def test_parts_add_up_to_the_step_and_a_longer_kernel_is_named() -> None:
    # gemm ends at 110, relu at 120, and the step with it: of the 32 us of nothing, 10 to 20 and 110 to 112 are left.
    comparison = compare_traces([A], [run(80, 80, 80, 80)])
    assert {row.name: (row.a_ns, row.b_ns) for row in comparison.parts} == {
        "kernel": (48 * US, 88 * US), "memcpy": (0, 0), "memset": (0, 0), "runtime": (1 * US, 1 * US),
        "data loader": (10 * US, 10 * US), "cpu": (9 * US, 9 * US), "other": (32 * US, 12 * US),
    }  # fmt: skip
    assert times(comparison.step) == (100 * US, 120 * US, 20 * US)
    gemm, relu = table(comparison, "kernels").values()
    assert (gemm.name, *times(gemm)) == ("gemm", 40 * US, 80 * US, 40 * US)
    assert (relu.name, *times(relu)) == ("relu", 8 * US, 8 * US, 0)
    assert times(table(comparison, "operators")["aten::mm"]) == (10 * US, 10 * US, 0)


def test_with_few_steps_noise_is_not_known_and_a_note_says_so() -> None:
    comparison = compare_traces([A], [run(80, 80, 80)], sources=("before", "after"))
    assert comparison.step.noise_ns is None
    assert all(row.noise_ns is None for rows in comparison.tables.values() for row in rows)
    assert comparison.notes == (
        "after: what is noise is not known: it has 3 traced steps, and less than 4 say nothing of their spread.",
    )
    step_sec = comparison.figures[0]
    assert (step_sec.name, step_sec.ratio, step_sec.ends) == ("global_step_sec", 1.2, None)
    assert step_sec.reason == "single steps are not known, or too few to say what is noise"


def test_without_marks_traces_are_compared_as_a_whole() -> None:
    unmarked = run(40, 40, mark=False), run(80, 80, mark=False)
    comparison = compare_traces([unmarked[0]], [unmarked[1]])
    assert (comparison.step.name, comparison.a.about) == ("whole trace", "NVIDIA A100-SXM4-80GB, no marks of steps")
    assert times(table(comparison, "kernels")["gemm"]) == (80 * US, 160 * US, 80 * US)
    assert "each is compared as a whole" in comparison.notes[0]
    assert comparison.notes[1].startswith(
        "A and B: what is noise is not known: it has 1 step that is the whole trace, "
    )
    with pytest.raises(
        ComparisonError, match=r"^the steps cannot be compared: bare has no marks of steps, .* whole has 4"
    ):
        compare_traces([unmarked[0]], [A], sources=("bare", "whole"))


def test_ranks_are_averaged_in_each_step() -> None:
    ranks = [run(40, 40, 40, 40, rank=0), run(60, 60, 60, 60, rank=1)]
    slower = [run(40, 40, 40, 40, rank=0), run(80, 80, 80, 80, rank=1)]
    comparison = compare_traces(ranks, slower, sources=("before", "after"))
    assert comparison.a.about == comparison.b.about == "NVIDIA A100-SXM4-80GB, 2 ranks, 4 steps"
    assert times(table(comparison, "kernels")["gemm"]) == (50 * US, 60 * US, 10 * US)
    # Rank 1 ends with its relu, at 30 + 60 + 2 + 8 = 100 and at 120; rank 0 both times at 100.
    assert (comparison.step.a_ns, comparison.step.b_ns) == (100 * US, 110 * US)


def test_traces_that_are_not_of_one_run_are_refused() -> None:
    with pytest.raises(ComparisonError, match="before has 2 traces that do not say their ranks"):
        compare_traces([A, run(40, 40)], [A], sources=("before", "after"))
    with pytest.raises(ComparisonError, match="their traces do not have the same steps"):
        compare_traces([run(40, 40, rank=0), run(40, 40, rank=1, first=7)], [A])


def test_utilization_of_the_devices_is_a_figure_without_noise() -> None:
    # Kernels run for 48 of 100 us, then for 68.
    found = named(compare_traces([A], [run(60, 60, 60, 60)]).figures)
    used = found["gpu_utilization"]
    assert [used.a, used.b] == pytest.approx([0.48, 0.68])
    assert used.ends is None and used.reason.startswith("single steps are not known")
    (device,) = known(A.report.device_metrics)
    idle = replace(A, report=replace(A.report, device_metrics=(replace(device, utilization=0.0),)))
    unused = compare_traces([A], [idle])  # no kernel in any step
    assert named(unused.figures)["gpu_utilization"].ends == (0, 0)
    assert judge(unused, "gpu_utilization < 0.9")[0] == "holds"
    assert found["sm_efficiency"].reason.startswith("not known in A: the trace does not say")


def test_flops_and_mfu_are_figures_where_both_have_shapes() -> None:
    a, b = run(40, 40, 40, 40, shaped=True), run(80, 80, 80, 80, shaped=True)
    figures = named(compare_traces([a], [b]).figures)
    # [2, 3] x [3, 4] is 2 x 2 x 3 x 4 FLOPs, of 100 us and of 120 us at 19.5 T a second.
    assert (figures["forward_flops"].a, figures["forward_flops"].ratio) == (48, 1.0)
    assert figures["mfu"].a == pytest.approx(48 / 19.5e12 / 100e-6, rel=1e-12)
    assert figures["mfu"].ratio == pytest.approx(100 / 120, rel=1e-12)
    assert figures["mfu"].noise_factor == pytest.approx(1, rel=1e-9)
    assert (figures["data_wait_ratio"].a, figures["data_wait_ratio"].b) == (0.1, 10 / 120)
    figures = named(compare_traces([a], [A]).figures)
    assert figures["forward_flops"].reason == "not known in B: the trace was taken without record_shapes=True"
    assert figures["mfu"].reason == figures["forward_flops"].reason
    assert b.report.flops is not None
    b = replace(b, report=replace(b.report, flops=replace(b.report.flops, peaks={"float32": 39e12})))
    mfu = named(compare_traces([a], [b]).figures)["mfu"]
    peaks = "19.5 TFLOP/s (float32) in A, 39 TFLOP/s (float32) in B"
    assert (mfu.ratio, mfu.reason) == (None, f"it is of other peaks: {peaks}")


def test_the_most_memory_is_a_figure_where_traces_say_how_much_is_allocated() -> None:
    def with_memory(size: int, total: int | None = None) -> AnalyzedTrace:
        return run(40, 40, 40, 40, more=[memory(1025, size, device=0, total=total)])

    a, b = (with_memory(size, 1000 + size) for size in (1000, 3000))
    figures = [named(compare_traces([a], [one]).figures) for one in (b, with_memory(3000))]
    both, relative = (one["device_memory_peak_bytes"] for one in figures)
    assert (both.a, both.b, both.ratio, both.ends) == (2000, 4000, 2.0, (2.0, 2.0))
    why = "not known in B: the trace does not say how much memory is allocated on the device"
    assert (relative.b, relative.reason) == (None, why)


def test_collectives_are_compared_also_where_one_run_has_none() -> None:
    name, events = "ncclDevKernel_AllReduce_Sum_f32_RING_LL", list[Event]()
    for number in range(1, 5):
        call, at = 10 * number + 9, 1000 * number
        events += [launch(call, at + 40), kernel(call, at + 80, 15, name=name, stream=9)]
    comparison = compare_traces([A], [run(40, 40, 40, 40, more=events)])
    assert times(table(comparison, "collectives")["allreduce"]) == (0, 15 * US, 15 * US)
    assert times(named(comparison.parts)["communication"]) == (0, 15 * US, 15 * US)
