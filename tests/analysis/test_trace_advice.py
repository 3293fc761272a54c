"""The advice that traces support by themselves; every share is worked out by hand from the events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_flops.config import AdviceThresholds
from lightning_flops.report.trace_text import render_traces
from lightning_flops.schema.trace import TracesReport
from lightning_flops.trace.columns import Trace
from tests.analysis.in_memory import analyze_traces
from tests.analysis.trace_events import Event, kernel, launch, operator, scope, step, trace

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
FULL: dict[str, Any] = {"blocks per SM": 4.0, "est. achieved occupancy %": 60}


def busy(rank: int, kernel_us: float) -> Trace:
    """One step of 10,000 us of this rank, of which one kernel takes *kernel_us*."""
    events = (step(1, 0, 10_000), launch(1, 1, 1), kernel(1, 10, kernel_us, **FULL))
    return trace(*events, distributedInfo={"backend": "nccl", "rank": rank, "world_size": 3})


def called_straggler(report: TracesReport) -> str:
    """Who is called a straggler, as the text has it."""
    (line,) = (line for line in render_traces(report).splitlines() if line.startswith("straggler:"))
    return line.removeprefix("straggler:").strip()


def test_a_step_that_waits_for_data_is_told_so() -> None:
    waits = scope("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 400)
    (advice,) = analyze_traces([trace(step(1, 0, 1000), waits, operator("aten::mm", 400, 600))]).advice
    assert (advice.rule, advice.ceiling) == ("data_wait_short", 0.4)
    assert advice.fact == "The step waits 400 us a batch for data (40.00%)."


def communicating(rank: int, *starts: float, ranks: int = 2, of_kernel: Mapping[str, Any] = FULL) -> Trace:
    """One step of 10,000 us of this rank: it computes until each start, and then communicates until the next end.

    The ends lie evenly up to 9,000 us, so ranks with other starts wait for each other there.
    """
    group: dict[str, Any] = {"Collective name": "allreduce", "Process Group Ranks": str(list(range(ranks)))}
    events, begin = [step(1, 0, 10_000)], 0.0
    for number, start in enumerate(starts):
        end = 9_000 * (number + 1) / len(starts)
        events += [
            launch(2 * number, begin, 1),
            kernel(2 * number, begin, start - begin, **of_kernel),
            launch(2 * number + 1, begin + 5, 1),
            kernel(2 * number + 1, start, end - start, name=ALL_REDUCE, stream=20, **group),
        ]
        begin = end
    return trace(*events, distributedInfo={"backend": "nccl", "rank": rank, "world_size": ranks})


def test_a_straggler_is_told_of_where_all_ranks_are_at_hand() -> None:
    report = analyze_traces([communicating(rank, start, ranks=3) for rank, start in enumerate((6_000, 6_000, 7_600))])
    (advice,) = (one for one in report.advice if one.rule == "straggler")
    assert advice.fact == (
        "The other ranks wait 1.6 ms a step (16.00% of it) for rank 2: what is in no named part of its step takes "
        "1.6 ms longer than theirs."
    )
    assert advice.ceiling is not None
    assert round(advice.ceiling, 9) == 0.16  # 1.6 of the step's 10 ms
    assert called_straggler(report) == "rank 2"


def test_who_computes_longest_is_no_straggler_by_less_than_the_thresholds() -> None:
    traces = [communicating(rank, start, ranks=3) for rank, start in enumerate((6_000, 6_000, 6_400))]
    report = analyze_traces(traces)
    assert not any(one.rule == "straggler" for one in report.advice)
    assert report.ranks is not None
    assert report.ranks.ranks[2].compute_over_median == max(one.compute_over_median or 0 for one in report.ranks.ranks)
    assert called_straggler(report) == "none"
    lower = AdviceThresholds(straggler=1.03, straggler_sec=0.0003)
    assert any(one.rule == "straggler" for one in analyze_traces(traces, thresholds=lower).advice)


def test_what_several_ranks_show_is_told_once_with_the_rank_that_has_the_largest_saving() -> None:
    report = analyze_traces([busy(0, 3000), busy(1, 2000), busy(2, 2500)])
    (advice,) = (one for one in report.advice if one.rule == "idle")
    assert advice.fact.startswith("Rank 1: The device is idle for 80.00% of the step")


def test_what_is_advised_to_a_trace_is_for_the_device_that_its_kernels_ran_on() -> None:
    def advised(*devices: tuple[str, int, int], on: int = 0) -> str | None:
        listed = [
            {"id": index, "name": name, "computeMajor": major, "computeMinor": minor}
            for index, (name, major, minor) in enumerate(devices)
        ]
        events: tuple[Event, ...] = (
            step(1, 0, 1000),
            operator("aten::mm", 0, 10),
            launch(1, 1, 1),
            kernel(1, 10, 900, name="volta_sgemm_128x64_nn", device=on, **FULL),
        )
        report = analyze_traces([trace(*events, deviceProperties=listed)])
        return next((one.remedy for one in report.advice if one.rule == "tensor_core_eligible"), None)

    volta, ampere, pascal = ("Tesla V100-SXM2-16GB", 7, 0), ("NVIDIA A100-SXM4-40GB", 8, 0), ("Tesla P100", 6, 0)
    assert advised() is None
    assert advised(volta) == "Train with automatic mixed precision in float16."
    assert advised(ampere) == "Train with automatic mixed precision in bfloat16."
    assert advised(pascal) is None
    assert advised(ampere, volta, on=1) == advised(volta)
    # ROCm's numbers are no compute capabilities, and a device without a name may be one of ROCm's.
    assert advised(("AMD Instinct MI250X", 9, 0)) is None
    assert advised(("", 9, 0)) is None
    assert advised(volta, on=3) is None


def test_waiting_for_another_rank_is_no_reason_for_larger_batches() -> None:
    def ceilings(*ranks: Sequence[float]) -> dict[str, float | None]:
        report = analyze_traces([communicating(rank, *starts) for rank, starts in enumerate(ranks)])
        return {one.rule: None if one.ceiling is None else round(one.ceiling, 9) for one in report.advice}

    # The calls end at 4,500 and at 9,000 us. Rank 0 waits 1,500 us in the first, rank 1 in the second; 1,000 us of
    # each are transfer. Both have as much work of their own, so none of them is a straggler.
    found = ceilings((2_000, 8_000), (3_500, 6_500))
    assert (found["exposed_communication"], found["waiting"]) == (0.2, 0.15)
    assert "straggler" not in found
    # Here rank 1 is one, and what rank 0 waits is for it: 3 ms of 10.
    found = ceilings((4_000,), (7_000,))
    assert (found["exposed_communication"], found["straggler"]) == (0.2, 0.3)
    assert "waiting" not in found
