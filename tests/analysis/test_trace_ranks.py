from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from lightning_flops.analysis.ranks import compare
from lightning_flops.analysis.trace_report import RanksError, analyze_one
from lightning_flops.report.trace_document import render_traces, summary
from lightning_flops.schema.trace import RankComparison
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.steps import overlap
from lightning_flops.trace.tables import collective_table
from tests.analysis.in_memory import analyze_traces, known
from tests.analysis.trace_events import (
    Event,
    data_loader,
    kernel,
    launch,
    launched,
    operator,
    scope,
    step,
    trace,
    trace_from_events,
)

UNMATCHED = "Calls of {} whose counterparts in the other traces are not known, so neither is their waiting: {}."
GATHERED: dict[str, Any] = {"Out msg nelems": 512, "dtype": "BFloat16"}
NAME = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def collective(number: int, start: float, length: float, *, name: str = "allreduce", **more: Any) -> tuple[Event, ...]:
    """A launch 1 before *start*, and its communication kernel of 256 floats."""
    sizes: dict[str, Any] = {"In msg nelems": 256, "Out msg nelems": 256, "dtype": "Float"}
    arguments: dict[str, Any] = {"Collective name": name, "Process Group Ranks": "[0, 1]", **sizes, **more}
    return launch(number, start - 1), kernel(number, start, length, name=NAME, stream=20, **arguments)


def compare_ranks(traces: Iterable[Trace]) -> RankComparison:
    return compare([analyze_one(trace) for trace in traces])


def waits_of(traces: Iterable[Trace]) -> list[float | None]:
    return [row.wait_us for row in compare_ranks(traces).ranks]


def of_rank(rank: int, *events: Event, ranks: int = 2) -> Trace:
    return trace(*events, distributedInfo={"backend": "nccl", "rank": rank, "world_size": ranks})


def test_bytes_of_a_collective_are_those_of_its_larger_side() -> None:
    loaded = trace(
        *collective(1, 10, 5, name="_allgather_base", **GATHERED),
        *collective(2, 20, 5, name="_allgather_base", **GATHERED),
        *collective(3, 30, 50, name="_reduce_scatter_base", **{"In msg nelems": 1024}),
        *collective(4, 90, 1, name="broadcast", **{"dtype": "Unheard"}),
        # Its arguments name it a collective, and not its kernel.
        kernel(5, 95, 0.5, name="my_symmetric_memory_kernel", **{"Collective name": "allreduce"}),
    )
    found = [(row.name, row.calls, row.bytes, row.device and row.device.total_us) for row in collective_table(loaded)]
    assert found == [
        ("_reduce_scatter_base", 1, 1024 * 4, 50),
        ("_allgather_base", 2, 2 * 512 * 2, 10),
        ("broadcast", 1, None, 1),
        ("allreduce", 1, None, 0.5),
    ]


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
    assert found.notes == (UNMATCHED.format("allreduce", 3),)


def test_a_group_whose_ranks_are_not_all_at_hand_is_said() -> None:
    of_four: dict[str, Any] = {"Group size": 4}
    traces = [of_rank(rank, *collective(1, 10, 8 + rank, **of_four)) for rank in (0, 1)]
    assert compare_ranks(traces).notes == (
        "Calls of allreduce in groups that have ranks without a trace here, so waiting may be counted as transfer: 1.",
    )


def test_a_collective_that_the_host_performs_is_communication() -> None:
    loaded = trace(
        operator("c10d::allreduce_", 0, 10),
        scope("gloo:all_reduce", 20, 60, thread=2),
        operator("aten::copy_", 30, 10, thread=2),  # a part of the collective
        operator("aten::mm", 50, 50),
    )
    (row,) = collective_table(loaded)
    assert (row.name, row.calls, row.bytes, row.host and row.host.total_us) == ("all_reduce", 1, None, 60)
    share = overlap(loaded)
    # From 20 to 80, of which the product hides what is after 50; what starts the collective computes nothing.
    assert (share.communication_us, share.computation_us, share.overlap_us, share.other_us) == (60, 50, 30, 20)


@pytest.mark.parametrize(
    ("name", "computes"),
    [
        ("aten::mm", 20),
        ("CompiledFunctionBackward", 20),
        ("c10d::barrier", 0),
        ("_c10d_functional::wait_tensor", 0),
        ("autograd::engine::evaluate_function: RegisterPostBackwardFunctionBackward", 0),
    ],
)
def test_what_computes_hides_communication_and_what_waits_or_runs_python_does_not(name: str, computes: int) -> None:
    share = overlap(trace(operator(name, 0, 30), scope("gloo:all_gather", 10, 50, thread=2)))
    assert (share.communication_us, share.overlap_us) == (50, computes)


# ---- process groups, and what goes from one rank to another


def test_groups_of_one_name_with_other_members_are_not_mixed() -> None:
    # Two tensor-parallel pairs, both called "tp": the first waits 3 of 8, the second 0 of 20.
    def of_pair(rank: int, length: float) -> Trace:
        members = "[0, 1]" if rank < 2 else "[2, 3]"
        named: dict[str, Any] = {"Process Group Name": "tp", "Process Group Ranks": members, "Group size": 2}
        return of_rank(rank, *collective(1, 10, length, **named))

    found = compare_ranks([of_pair(rank, length) for rank, length in enumerate((8, 5, 20, 20))])
    assert [(row.transfer_us, row.wait_us) for row in found.ranks] == [(5, 3), (5, 0), (20, 0), (20, 0)]
    assert found.notes == ()


def test_a_rank_waits_no_longer_than_it_communicates() -> None:
    # Two groups' calls at once: each lasts 50 on rank 0 and 10 on rank 1, so rank 0 waits 40 twice within 50.
    def of(rank: int, length: float) -> Trace:
        return of_rank(
            rank, *(one for i in (1, 2) for one in collective(i, 10, length, **{"Process Group Name": f"{i}"}))
        )

    found = compare_ranks([of(0, 50), of(1, 10)])
    assert [(row.overlap.communication_us, row.wait_us, row.transfer_us) for row in found.ranks] == [
        (50, 50, 20),
        (10, 0, 10),
    ]
    assert [row.wait_us for row in found.ranks[0].collectives] == [80]


def test_groups_of_the_same_members_are_told_apart_by_name() -> None:
    # Each group has its own order: what is first in one may be second in the trace.
    gather: dict[str, Any] = {"Process Group Name": "gather"}
    reduce: dict[str, Any] = {"Process Group Name": "reduce"}
    first = of_rank(0, *collective(1, 10, 8, **gather), *collective(2, 30, 2, **reduce))
    second = of_rank(1, *collective(1, 10, 9, **reduce), *collective(2, 30, 4, **gather))
    found = compare_ranks([first, second])
    assert [(row.transfer_us, row.wait_us) for row in found.ranks] == [(4 + 2, 4 + 0), (4 + 2, 0 + 7)]


def host_collective(rank: int, length: float, *groups: list[int]) -> Trace:
    config = [{"pg_name": str(number), "ranks": ranks} for number, ranks in enumerate(groups)]
    job = {"backend": "gloo", "rank": rank, "world_size": 4, "pg_config": config}
    return trace(scope("gloo:all_reduce", 20, length, thread=2), distributedInfo=job)


def test_an_exchange_of_all_with_all_is_a_collective_though_its_kernel_sends_and_receives() -> None:
    def exchange(rank: int, length: float) -> Trace:
        events = collective(1, 10, length, name="all_to_allv")
        events[1]["name"] = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
        return of_rank(rank, *events)

    assert waits_of([exchange(0, 8), exchange(1, 5)]) == [3, 0]


SAYS: dict[str, Any] = {"Collective name": "all_to_allv", "Group size": 2}
SENDS = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)"


def exchanging(rank: int, computes_us: float, *above: Event) -> Trace:
    """A step of 11,000 us: this rank computes, then an exchange of all with all ends for both at 10,110 us."""
    ends = 10_110.0
    communication = launched(2, 220, 100 + computes_us, ends - 100 - computes_us, name=SENDS, stream=20)
    return of_rank(rank, step(1, 0, 11_000), *launched(1, 20, 100, computes_us), *above, *communication)


@pytest.mark.parametrize(
    ("name", "above"),
    [
        ("alltoall_base", [operator("c10d::alltoall_base_", 200, 60)]),
        ("all_to_all", [operator("c10d::alltoall_base_", 200, 60), scope("nccl:all_to_all", 210, 40)]),
        ("all_to_all", [scope("nccl:all_to_all", 210, 40)]),
        ("gather", [operator("c10d::gather_", 200, 60), scope("nccl:gather", 210, 40)]),
        ("scatter", [operator("c10d::scatter_", 200, 60)]),
        (
            "all_to_allv",
            [
                operator("c10d::alltoall_base_", 200, 60),
                operator("record_param_comms", 205, 50, **SAYS),
                scope("nccl:all_to_all", 210, 40),
            ],
        ),
    ],
)
def test_a_collective_is_what_stands_above_its_kernel_and_so_its_waiting_is_known(
    name: str, above: list[Event]
) -> None:
    """Rank 0 computes 8 ms longer: 10 us are transfer, and rank 1 waits 8,000 us for it."""
    report = analyze_traces([exchanging(0, 10_000, *above), exchanging(1, 2_000, *above)])
    ranks = known(report.ranks)
    assert [(row.collectives[0].name, row.transfer_us, row.wait_us) for row in ranks.ranks] == [
        (name, 10, 0), (name, 10, 8_000)
    ]  # fmt: skip
    assert ranks.notes == ()
    (advice,) = (one for one in report.advice if one.rule == "straggler")
    assert advice.fact == (
        "The other ranks wait 8 ms a step (72.7% of it) for rank 0: its kernel time takes 8 ms longer than theirs."
    )
    assert not {"exposed_communication", "waiting"} & {one.rule for one in report.advice}


@pytest.mark.parametrize("above", [[scope("nccl:send 0->1", 210, 40)], [scope("nccl:coalesced", 210, 40)], []])
def test_what_goes_from_one_rank_to_another_stays_unmatched_and_no_wait_is_said_to_be_left_out(
    above: list[Event],
) -> None:
    report = analyze_traces([exchanging(rank, computes, *above) for rank, computes in enumerate((10_000, 2_000))])
    assert [row.wait_us for row in known(report.ranks).ranks] == [None, None]
    (advice,) = (one for one in report.advice if one.rule == "exposed_communication")
    assert advice.fact.startswith(
        "Rank 1: Communication that no computation hides takes 72.8% of the step, with any wait for other ranks, which"
    )


def test_a_wait_that_is_known_in_part_is_said_to_be_left_out_in_part() -> None:
    other = [*launched(3, 400, 10_200, 600, name=SENDS, stream=21)]  # which nothing above names
    above = [scope("nccl:all_to_all", 210, 40), *other]
    report = analyze_traces([exchanging(0, 7_000, *above), exchanging(1, 7_100, *above)])
    (advice,) = (one for one in report.advice if one.rule == "exposed_communication")
    assert "the wait for other ranks left out as far as it is known" in advice.fact


def test_arguments_above_a_kernel_have_its_bytes_and_group() -> None:
    arguments: dict[str, Any] = {"Collective name": "all_to_allv", "In msg nelems": 6144, "Out msg nelems": 6144}
    arguments |= {"dtype": "Float", "Group size": 4, "Process Group Ranks": "[0, 1, 2, 3]"}
    above = [operator("c10d::alltoall_base_", 200, 60), operator("record_param_comms", 205, 50, **arguments)]
    traces = [exchanging(rank, 2_000, *above) for rank in (0, 1)]
    assert [row.bytes for row in collective_table(traces[0])] == [4 * 6144]
    assert compare_ranks(traces).notes == (
        "Calls of all_to_allv in groups that have ranks without a trace here, so waiting may be counted as transfer: "
        "1.",
    )


def test_a_host_collective_belongs_to_the_only_group_there_is() -> None:
    # Written as none, a group is all four; two groups of the same members, as frameworks make them, are one.
    everyone: list[int] = [0, 1, 2, 3]
    assert waits_of([host_collective(0, 9, [], everyone), host_collective(1, 4, everyone, [1])]) == [5, 0]


@pytest.mark.parametrize(
    ("name", "traces"),
    [
        ("send", [of_rank(rank, *collective(1, 10, 8, name="send")) for rank in (0, 1)]),
        # In several groups, host collectives do not say theirs.
        ("all_reduce", [host_collective(0, 9, [], [0, 1]), host_collective(1, 4, [], [0, 1])]),
    ],
)
def test_what_does_not_say_which_ranks_take_part_is_left_unmatched_and_named(name: str, traces: list[Trace]) -> None:
    assert waits_of(traces) == [None, None]
    assert compare_ranks(traces).notes == (UNMATCHED.format(name, 2),)


# ---- traces that do not say their ranks


def test_files_without_a_rank_are_separate_runs_whatever_they_hold() -> None:
    def unnamed(name: str, kernel_us: float) -> Trace:
        events = [step(0, 0, 10_000), launch(0, 0), kernel(0, 1, kernel_us)]
        events += collective(1, 1 + kernel_us, 9_999 - kernel_us)
        return trace_from_events(events, source=f"/logs/{name}.json")

    # As three ranks of one job would be, the third twice as slow: yet three runs would look the same.
    traces = [unnamed("a", 4_000), unnamed("b", 4_000), unnamed("c", 8_000)]
    report = analyze_traces(traces)
    assert (report.ranks, [one.rank for one in report.traces]) == (None, [None] * 3)
    assert "straggler" not in {one.rule for one in report.advice}
    text = render_traces(report)
    assert re.findall(r"^-+ Trace of (\S+) -+$", text, re.MULTILINE) == ["a.json", "b.json", "c.json"]
    assert re.search(r"\brank \d|straggler|Ranks", text) is None


def test_ranks_whose_steps_are_not_marked_accuse_nobody() -> None:
    def of(rank: int, kernel_us: float, *events: Event) -> Trace:
        return of_rank(rank, *events, launch(0, 0), kernel(0, 1, kernel_us), *collective(1, 1 + kernel_us, 100))

    report = analyze_traces([of(0, 4_000, step(1, 0, 9_000)), of(1, 4_000), of(2, 8_000)])
    assert known(report.ranks).notes[0].startswith("No rank is named a straggler: ")
    assert "straggler" not in {one.rule for one in report.advice}


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((1, None), "does not say which rank it is of"), ((0, 0), "are both of rank 0"), ((), "no trace to compare")],
)
def test_traces_that_cannot_be_one_of_each_rank_are_refused(ranks: tuple[int | None, ...], words: str) -> None:
    mm = operator("aten::mm", 0, 1)
    with pytest.raises(RanksError, match=words):
        analyze_traces([trace(mm) if rank is None else of_rank(rank, mm) for rank in ranks])


# ---- the advice that traces support by themselves; every share is worked out by hand from the events

FULL: dict[str, Any] = {"blocks per SM": 4.0, "est. achieved occupancy %": 60}


def test_a_step_that_waits_for_data_is_told_so() -> None:
    waits = scope("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 400)
    (advice,) = analyze_traces([trace(step(1, 0, 1000), waits, operator("aten::mm", 400, 600))]).advice
    # Of 400 us whole batches leave 20 at least.
    assert advice.rule == "data_wait_short" and advice.saves == pytest.approx(0.38)
    assert advice.fact == "The step waits 400 us a batch for data (40.0%)."


def test_without_marks_a_batch_is_a_call_of_the_loader_and_shares_are_of_the_trace() -> None:
    """Ten batches, each 8 ms in the DataLoader and 1.98 ms of a kernel."""
    events: list[Event] = []
    for batch in range(10):
        at = 10_000 * batch
        events += [data_loader(at, 8_000), operator("aten::relu", at + 8_000, 30)]
        events += launched(batch, at + 8_005, at + 8_020, 1_980, **FULL)
    report = analyze_traces([trace(*events)])
    assert report.advice[0].fact == "The trace waits 8 ms a batch for data (80.0%)."
    assert summary(report)[-1].endswith("It can save up to 80.0% of the trace.")
    # With marks, two batches a step are two batches.
    marked = analyze_traces([trace(*(step(number, 20_000 * number, 20_000) for number in range(5)), *events)])
    assert marked.advice[0].fact == "The step waits 8 ms a batch for data (80.0%)."


def communicating(rank: int, *starts: float, ranks: int = 2) -> Trace:
    """One step of 10,000 us of this rank: it computes until each start, and then communicates until the next end.

    The ends lie evenly up to 9,000 us, so ranks with other starts wait for each other there.
    """
    group: dict[str, Any] = {"Collective name": "allreduce", "Process Group Ranks": str(list(range(ranks)))}
    events, begin = [step(1, 0, 10_000)], 0.0
    for number, start in enumerate(starts):
        end = 9_000 * (number + 1) / len(starts)
        events += [
            *launched(2 * number, begin, begin, start - begin, **FULL),
            *launched(2 * number + 1, begin + 5, start, end - start, name=NAME, stream=20, **group),
        ]
        begin = end
    return of_rank(rank, *events, ranks=ranks)


def test_a_straggler_is_told_of_where_all_ranks_are_at_hand() -> None:
    report = analyze_traces([communicating(rank, start, ranks=3) for rank, start in enumerate((6_000, 6_000, 7_600))])
    (advice,) = (one for one in report.advice if one.rule == "straggler")
    assert advice.fact == (
        "The other ranks wait 1.6 ms a step (16.0% of it) for rank 2: its kernel time takes 1.6 ms longer than theirs."
    )
    assert round(known(advice.saves), 9) == 0.16  # 1.6 of the step's 10 ms


def test_what_several_ranks_show_is_told_once_with_the_rank_that_has_the_largest_saving() -> None:
    def busy(rank: int, kernel_us: float) -> Trace:  # of one step of 10,000 us
        return of_rank(rank, step(1, 0, 10_000), launch(1, 1, 1), kernel(1, 10, kernel_us, **FULL), ranks=3)

    report = analyze_traces([busy(0, 3000), busy(1, 2000), busy(2, 2500)])
    (advice,) = (one for one in report.advice if one.rule == "idle")
    assert advice.fact.startswith("Rank 1: The device is idle for 80.0% of the step")


def test_what_is_advised_to_a_trace_is_for_the_device_that_its_kernels_ran_on() -> None:
    def advised(*devices: tuple[str, int], on: int = 0) -> str | None:
        listed = [
            {"id": index, "name": name, "computeMajor": major, "computeMinor": 0}
            for index, (name, major) in enumerate(devices)
        ]
        ran = launched(1, 1, 10, 900, name="volta_sgemm_128x64_nn", device=on, **FULL)
        report = analyze_traces([trace(step(1, 0, 1000), operator("aten::mm", 0, 10), *ran, deviceProperties=listed)])
        return next((one.remedy for one in report.advice if one.rule == "tensor_core_eligible"), None)

    volta, ampere = ("Tesla V100-SXM2-16GB", 7), ("NVIDIA A100-SXM4-40GB", 8)
    assert advised(volta) == "Train with automatic mixed precision in float16."
    assert advised(ampere) == "Train with automatic mixed precision in bfloat16."
    assert advised(ampere, volta, on=1) == advised(volta)
    # ROCm's numbers are no compute capabilities, and a device without a name may be one of ROCm's.
    for unknown in ((), (("Tesla P100", 6),), (("AMD Instinct MI250X", 9),), (("", 9),)):
        assert advised(*unknown) is None
    assert advised(volta, on=3) is None


def test_waiting_for_another_rank_is_no_reason_for_larger_batches() -> None:
    def ceilings(*ranks: Sequence[float]) -> dict[str, float | None]:
        report = analyze_traces([communicating(rank, *starts) for rank, starts in enumerate(ranks)])
        return {one.rule: None if one.saves is None else round(one.saves, 9) for one in report.advice}

    # The calls end at 4,500 and at 9,000 us. Rank 0 waits 1,500 us in the first, rank 1 in the second; 1,000 us of
    # each are transfer. Both have as much work of their own, so none of them is a straggler.
    found = ceilings((2_000, 8_000), (3_500, 6_500))
    assert (found["exposed_communication"], found["waiting"]) == (0.2, 0.15)
    assert "straggler" not in found
    # Here rank 1 is one, and what rank 0 waits is for it: 3 ms of 10.
    found = ceilings((4_000,), (7_000,))
    assert (found["exposed_communication"], found["straggler"]) == (0.2, 0.3)
    assert "waiting" not in found
