"""The advice that traces support by themselves; every share is worked out by hand from the events."""

from __future__ import annotations

from typing import Any

from lightning_flops.analysis.trace import Trace, analyze_traces
from tests.analysis.trace_events import Event, kernel, launch, operator, scope, step, trace

V100: dict[str, Any] = {
    "deviceProperties": [{"id": 0, "name": "V100", "numSms": 80, "computeMajor": 7, "computeMinor": 0}]
}
FULL: dict[str, Any] = {"blocks per SM": 4.0, "est. achieved occupancy %": 60}


def busy(rank: int, kernel_us: float) -> Trace:
    """One step of 1,000 us of this rank, of which one kernel takes *kernel_us*."""
    events = (step(1, 0, 1000), launch(1, 1, 1), kernel(1, 10, kernel_us, **FULL))
    return trace(*events, distributedInfo={"backend": "nccl", "rank": rank, "world_size": 3})


def test_a_step_that_waits_for_data_is_told_so() -> None:
    waits = scope("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 400)
    (advice,) = analyze_traces([trace(step(1, 0, 1000), waits, operator("aten::mm", 400, 600))]).advice
    assert (advice.rule, advice.stake) == ("data_wait", 0.4)
    assert advice.evidence == "The step waits for data for 40.00% of its time."


def test_a_trace_of_steps_that_nothing_holds_back_has_no_advice() -> None:
    assert analyze_traces([trace(step(1, 0, 1000), operator("aten::mm", 0, 1000))]).advice == ()


def test_a_straggler_is_told_of_where_all_ranks_are_at_hand() -> None:
    report = analyze_traces([busy(0, 800), busy(1, 800), busy(2, 960)])
    (advice,) = (one for one in report.advice if one.rule == "straggler")
    assert advice.evidence == "Rank 2 computes 1.2 times as long as the median rank."
    assert not any(one.rule == "straggler" for one in analyze_traces([busy(0, 800), busy(1, 800), busy(2, 840)]).advice)


def test_what_several_ranks_show_is_told_once_with_the_rank_that_has_most_at_stake() -> None:
    report = analyze_traces([busy(0, 300), busy(1, 200), busy(2, 250)])
    (advice,) = (one for one in report.advice if one.rule == "gpu_utilization")
    assert advice.evidence.startswith("Rank 1: Kernels run during 20.00% of the time")


def test_unused_tensor_cores_are_told_of_only_where_the_device_is_known_to_have_them() -> None:
    def rules(**head: Any) -> set[str]:
        events: tuple[Event, ...] = (
            step(1, 0, 1000),
            operator("aten::mm", 0, 10),
            launch(1, 1, 1),
            kernel(1, 10, 900, name="volta_sgemm_128x64_nn", **FULL),
        )
        return {one.rule for one in analyze_traces([trace(*events, **head)]).advice}

    assert "tensor_core_eligible" in rules(**V100)
    assert "tensor_core_eligible" not in rules()
