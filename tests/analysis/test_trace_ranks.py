from __future__ import annotations

from typing import Any

import pytest

from lightning_flops.analysis.trace import (
    RanksError,
    Trace,
    analyze_traces,
    collective_table,
    compare_ranks,
    overlap,
)
from tests.analysis.trace_events import Event, kernel, launch, operator, scope, span, step, trace

GATHERED: dict[str, Any] = {"Out msg nelems": 512, "dtype": "BFloat16"}
NAME = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def collective(number: int, start: float, length: float, *, name: str = "allreduce", **more: Any) -> tuple[Event, ...]:
    """A launch 1 before *start*, and its communication kernel of 256 floats."""
    arguments: dict[str, Any] = {
        "Collective name": name,
        "In msg nelems": 256,
        "Out msg nelems": 256,
        "dtype": "Float",
        "Process Group Ranks": "[0, 1]",
        **more,
    }
    return launch(number, start - 1), kernel(number, start, length, name=NAME, stream=20, **arguments)


def of_rank(rank: int, *events: Event) -> Trace:
    return trace(*events, distributedInfo={"backend": "nccl", "rank": rank, "world_size": 2})


def test_bytes_of_a_collective_are_those_of_its_larger_side() -> None:
    loaded = trace(
        *collective(1, 10, 5, name="_allgather_base", **GATHERED),
        *collective(2, 20, 5, name="_allgather_base", **GATHERED),
        *collective(3, 30, 50, name="_reduce_scatter_base", **{"In msg nelems": 1024}),
        *collective(4, 90, 1, name="broadcast", **{"dtype": "Unheard"}),
    )
    found = {row.name: (row.calls, row.bytes, row.latency.total_us) for row in collective_table(loaded) or ()}
    assert found == {
        "_reduce_scatter_base": (1, 1024 * 4, 50),
        "_allgather_base": (2, 2 * 512 * 2, 10),
        "broadcast": (1, None, 1),
    }


def test_a_kernel_named_as_a_collective_by_its_arguments_is_one() -> None:
    named: dict[str, Any] = {"Collective name": "allreduce"}
    (found,) = collective_table(trace(kernel(1, 0, 5, name="my_symmetric_memory_kernel", **named))) or ()
    assert (found.name, found.calls) == ("allreduce", 1)


def test_a_trace_of_one_process_has_no_collectives() -> None:
    assert collective_table(trace(kernel(1, 0, 5))) is None


def test_each_call_transfers_as_long_as_on_the_fastest_rank_and_waits_the_rest() -> None:
    first = of_rank(0, step(1, 0, 100), *collective(1, 10, 8), *collective(2, 50, 3))
    second = of_rank(1, step(1, 5000, 100), *collective(1, 5012, 5), *collective(2, 5040, 9))
    rows = compare_ranks([first, second]).ranks
    assert [(row.transfer_us, row.wait_us) for row in rows] == [(5 + 3, 3 + 0), (5 + 3, 0 + 6)]


def test_collectives_are_matched_within_steps_so_that_a_missing_one_spoils_no_other() -> None:
    first = of_rank(
        0, step(1, 0, 100), *collective(1, 10, 8), *collective(2, 50, 3), step(2, 100, 100), *collective(3, 110, 4)
    )
    second = of_rank(1, step(1, 0, 100), *collective(1, 10, 6), step(2, 100, 100), *collective(3, 110, 7))
    found = compare_ranks([first, second])
    (row,) = found.ranks[0].collectives
    assert (row.calls, row.matched_calls, row.latency_us, row.transfer_us, row.wait_us) == (3, 1, 15, 4, 0)
    (row,) = found.ranks[1].collectives
    assert (row.calls, row.matched_calls, row.transfer_us, row.wait_us) == (2, 1, 4, 3)
    assert found.notes == (
        "Calls of allreduce without a counterpart in the other traces, whose waiting is not known: 3.",
    )


def test_collectives_of_different_groups_are_not_matched() -> None:
    first = of_rank(0, *collective(1, 10, 8, **{"Process Group Ranks": "[0, 2]"}))
    second = of_rank(1, *collective(1, 10, 8, **{"Process Group Ranks": "[1, 3]"}))
    found = compare_ranks([first, second])
    assert [(row.transfer_us, row.wait_us) for row in found.ranks] == [(None, None), (None, None)]


def test_a_group_whose_ranks_are_not_all_at_hand_is_said() -> None:
    of_four: dict[str, Any] = {"Group size": 4}
    traces = [of_rank(rank, *collective(1, 10, 8 + rank, **of_four)) for rank in (0, 1)]
    assert compare_ranks(traces).notes == (
        "Calls of allreduce in groups whose traces are not all here, where waiting may count as transfer: 1.",
    )


def test_the_straggler_computes_longest_per_step() -> None:
    def computing(rank: int, *lengths: float) -> Trace:
        steps = [step(number, 100 * number, 100) for number in range(len(lengths))]
        return of_rank(rank, *steps, *(kernel(n, 100 * n + 10, length) for n, length in enumerate(lengths)))

    found = compare_ranks([computing(0, 20, 20, 20), computing(1, 30), computing(2, 20, 24)])
    assert found.straggler == 1
    assert [row.compute_over_median for row in found.ranks] == [20 / 22, 30 / 22, 22 / 22]
    assert compare_ranks([computing(0, 20), computing(1, 20)]).straggler is None
    alone = compare_ranks([computing(0, 20)])
    assert (alone.straggler, alone.ranks[0].compute_over_median) == (None, None)


def test_a_collective_that_the_host_performs_is_communication() -> None:
    shape = {"Input Dims": [[256]], "Input type": ["float"]}
    loaded = trace(
        operator("c10d::allreduce_", 0, 10),
        scope("gloo:all_reduce", 20, 60, thread=2, **shape),
        operator("aten::copy_", 30, 10, thread=2),  # a part of the collective
        operator("aten::mm", 50, 50),
    )
    (row,) = collective_table(loaded) or ()
    assert (row.name, row.calls, row.bytes, row.latency.total_us) == ("all_reduce", 1, 1024, 60)
    share = overlap(loaded)
    assert (share.communication_us, share.computation_us, share.overlap_us, share.other_us) == (60, 60, 30, 10)


def test_an_nccl_scope_on_the_host_only_launches() -> None:
    loaded = trace(scope("nccl:all_reduce", 0, 10), span("cpu_op", "record_param_comms", 1, 2))
    assert collective_table(loaded) is None


def test_traces_come_out_by_rank_and_name_their_own() -> None:
    report = analyze_traces([of_rank(3, operator("aten::mm", 0, 1)), of_rank(1, operator("aten::add", 0, 1))])
    assert [trace.rank for trace in report.traces] == [1, 3]
    assert report.ranks is not None
    assert [row.rank for row in report.ranks.ranks] == [1, 3]


def test_traces_that_do_not_say_their_rank_are_ranked_as_given() -> None:
    report = analyze_traces([trace(operator("aten::mm", 0, 1)), trace(operator("aten::mm", 0, 1))])
    assert [trace.rank for trace in report.traces] == [0, 1]


def test_two_traces_of_one_rank_are_refused() -> None:
    with pytest.raises(RanksError, match="are both of rank 1: give one trace for each rank"):
        analyze_traces([of_rank(1, operator("aten::mm", 0, 1)), of_rank(1, operator("aten::mm", 0, 1))])
    with pytest.raises(RanksError, match="does not say which rank it is of"):
        analyze_traces([of_rank(1, operator("aten::mm", 0, 1)), trace(operator("aten::mm", 0, 1))])
    with pytest.raises(RanksError, match="no trace to compare"):
        analyze_traces([])


def test_traces_with_different_numbers_of_steps_are_told_of() -> None:
    def steps(rank: int, count: int) -> Trace:
        return of_rank(rank, *(step(number, 100 * number, 100) for number in range(count)))

    assert compare_ranks([steps(0, 2), steps(1, 2)]).notes == ()
    (note,) = compare_ranks([steps(1, 3), steps(0, 2)]).notes
    assert note == (
        "The traces hold different numbers of steps (2 of rank 0, 3 of rank 1): only what is per step compares."
    )
