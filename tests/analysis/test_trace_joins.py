"""Who launched a kernel: the operator that encloses the call in time, whatever numbers a writer gave to events."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_flops.analysis.trace_report import analyze_one
from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.schema.trace import TraceReport
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.structure import by_process
from tests.analysis.in_memory import known
from tests.analysis.trace_events import Event, kernel, launch, launched, node, operator, shapes, span, step, trace

ALL_ZERO, EXTERNAL = {"correlation": 0}, "External id"


def report_of(found: Trace) -> TraceReport:
    return analyze_one(found, formulas=recorded_work).report


def device_us(found: Trace) -> dict[str, float]:
    """The time of each operator's own kernels."""
    rows = known(report_of(found).operators)
    return {row.name: known(row.device_self).total_us for row in rows if known(row.device_self).total_us}


def notes_of(found: Trace, words: str) -> list[str]:
    return [note for note in report_of(found).notes if words in note]


def moved(event: Event, process: object) -> Event:
    return event | {"pid": process}


def test_amds_external_ids_count_launches_and_not_operators() -> None:
    """A launch and its kernel share one, and operators have others: of four only the times are joined rightly."""
    events, number = [], 0
    sizes = shapes([512, 512], [512, 512], dtype="c10::BFloat16")
    for place, (name, length) in enumerate([("aten::mm", 100), ("aten::add", 30)] * 2, 1):
        at, runs_at = 30 * place, 1000 + 200 * place
        events.append(operator(name, at, 20, **{EXTERNAL: place}, **(sizes if name == "aten::mm" else {})))
        for call, after in (("hipGetDevicePropertiesR0600", 2), ("hipExtModuleLaunchKernel", 5)):
            number += 1
            events.append(span("cuda_runtime", call, at + after, 1, **{EXTERNAL: number}))
        events.append(span("kernel", name, runs_at, length, thread=0, **{EXTERNAL: number}) | {"pid": 2})
    found = trace(*events)
    assert device_us(found) == {"aten::mm": 200, "aten::add": 60}
    flops = known(report_of(found).flops)
    assert (flops.operators[0].flops_per_sec, flops.uncounted) == (2 * 2 * 512**3 / 200e-6, ())


def test_numbers_that_are_all_zero_are_joined_in_the_order_of_one_stream() -> None:
    numbers = (0, 0, 0)
    calls = [operator("aten::add", 0, 10), operator("aten::mm", 20, 10), operator("aten::sum", 40, 10)]
    launches = [launch(number, 20 * place + 2) for place, number in enumerate(numbers)]
    # The host is ahead: all three were launched before the first of them began.
    kernels = [kernel(0, 100, 4), kernel(0, 110, 50), kernel(0, 170, 7)]
    waits = span("cuda_runtime", "cudaDeviceSynchronize", 60, 200, **ALL_ZERO)
    found = trace(*calls, *launches, *kernels, waits)
    assert device_us(found) == {"aten::add": 4, "aten::mm": 50, "aten::sum": 7}
    assert notes_of(found, "launches") == []


def test_what_time_leaves_open_is_of_no_operator_and_said() -> None:
    calls = [operator("aten::add", 0, 10), launch(0, 2), operator("aten::mm", 20, 10), launch(0, 22)]
    # Two streams: either launch can be of either kernel.
    found = trace(*calls, kernel(0, 100, 4, stream=7), kernel(0, 101, 50, stream=8))
    assert device_us(found) == {}
    (note,) = notes_of(found, "launches")
    assert note.startswith("Several launches have the number of 2 of the 2 kernels")
    # Three kernels of two launches, both before the first: one of them is a graph's, and which is not known.
    assert device_us(trace(*calls, kernel(0, 100, 4), kernel(0, 110, 5), kernel(0, 120, 6))) == {}


def test_numbers_that_begin_again_are_joined_to_the_launch_before() -> None:
    found = trace(
        operator("aten::mm", 0, 20, **{EXTERNAL: 1}), launch(1, 5), kernel(1, 30, 50), kernel(1, 90, 2, stream=8),
        operator("aten::add", 1000, 20, **{EXTERNAL: 1}), launch(1, 1005), kernel(1, 1030, 8, stream=8),
    )  # fmt: skip
    assert device_us(found) == {"aten::mm": 52, "aten::add": 8}
    assert notes_of(found, "launches") == []


def test_the_drivers_call_within_the_runtimes_is_the_same_launch() -> None:
    driver = span("cuda_driver", "cuLaunchKernel", 6, 2, correlation=1)
    found = trace(operator("aten::mm", 0, 20), launch(1, 5, 4), driver, kernel(1, 30, 50), kernel(1, 90, 2, stream=8))
    assert device_us(found) == {"aten::mm": 52}


def test_a_kernel_without_its_launch_is_of_no_operator_whatever_its_external_id() -> None:
    number: dict[str, Any] = {EXTERNAL: 5}
    found = trace(operator("aten::mm", 0, 50, **number), operator("aten::add", 60, 5), kernel(77, 100, 40, **number))
    assert device_us(found) == {}
    (note,) = notes_of(found, "No launch")
    assert note.startswith("No launch is in the file of 1 of the 1 kernels")


def test_a_kernel_that_begins_before_its_launch_shows_that_clocks_differ() -> None:
    found = trace(operator("aten::mm", 100, 20), *launched(1, 105, 60, 50))
    assert device_us(found) == {"aten::mm": 50}
    assert len(notes_of(found, "clocks of host and device differ: 1 of the 1")) == 1


@pytest.mark.parametrize("late", [0, 0.9, 5])
def test_what_begins_in_an_operator_was_called_by_it_though_it_seems_to_end_later(late: float) -> None:
    sizes = shapes([512, 512], [512, 512])
    found = trace(
        operator("aten::linear", 0, 20, **sizes), operator("aten::mm", 10, 10 + late, **sizes), *launched(1, 12, 40, 50)
    )
    flops = known(report_of(found).flops)
    assert flops.steps[0].forward == 2 * 512**3
    rows = {row.name: row for row in known(report_of(found).operators)}
    assert (rows["aten::linear"].host_self.total_us, rows["aten::mm"].host_self.total_us) == (10, 10 + late)
    # What begins where another ends, by rounding a moment before, follows it.
    (first, second) = known(report_of(trace(operator("aten::add", 0, 10.5), operator("aten::mm", 10, 9))).operators)
    assert (first.name, first.host_self.total_us, second.host_self.total_us) == ("aten::add", 10.5, 9)


def rank_of(process: object, on: object, device: int, *, begin: float, kernel_us: float) -> list[Event]:
    """A step of a rank: a product and its backward, with numbers that every rank has."""
    mm = operator("aten::mm", begin, 20, **shapes([8, 8], [8, 8]), **{"Sequence number": 3})
    back = node(3, begin + 50, 20, name="MmBackward0", thread=2)
    inner = operator("aten::mm", begin + 52, 10, thread=2, **shapes([8, 8], [8, 8]))
    kernels = [
        kernel(1, begin + 30, kernel_us, device=device),
        kernel(2, begin + 80, 2 * kernel_us, device=device),
    ]
    host = [step(1, begin, 100), mm, back, inner, launch(1, begin + 5), launch(2, begin + 54, thread=2)]
    return [*(moved(event, process) for event in host), *(moved(event, on) for event in kernels)]


def test_ranks_that_were_merged_into_one_file_stand_each_by_itself() -> None:
    # The second rank's launches come after the first's kernels, and its own kernels after both.
    events = [
        *rank_of("[TP00] 7", "[TP00] 0", 0, begin=0, kernel_us=10),
        *rank_of("[TP01] 7", "[TP01] 0", 1, begin=60, kernel_us=15),
    ]
    found = by_process(trace(*events, distributedInfo={"rank": 0}))
    assert [device_us(one) for one in found] == [{"aten::mm": 30}, {"aten::mm": 45}]
    assert [report_of(one).step_times.mean.wall_us for one in found] == [100, 110]
    assert {one.rank for one in found} == {None}
    assert ["TP00" in found[0].source, "TP01" in found[1].source] == [True, True]
    assert all("2 processes" in one.notes[0] for one in found)


@pytest.mark.parametrize("names", [(11, 12, 0, 1), (11, 12, 11, 12), ("[TP0] 7", "[TP0] 8", "[TP0] 0", "[TP0] 1")])
def test_kernels_that_either_of_two_processes_can_have_launched_are_left_out_and_said(
    names: tuple[object, ...],
) -> None:
    first, second, on_first, on_second = names
    found = by_process(
        trace(
            *rank_of(first, on_first, 0, begin=0, kernel_us=10), *rank_of(second, on_second, 1, begin=60, kernel_us=15)
        )
    )
    assert [(len(one), one.has_device) for one in found] == [(6, False), (6, False)]
    assert all("Left out: 4 kernels" in one.notes[-1] for one in found)


def test_one_process_is_the_trace_as_it_was() -> None:
    found = trace(operator("aten::mm", 0, 20), *launched(1, 5, 30, 50))
    assert by_process(found) == [found]


def test_events_with_a_negative_length_are_left_out_and_said() -> None:
    found = trace(
        operator("aten::mm", 0, 20), *launched(1, 5, 30, 50), kernel(2, 90, -40), operator("aten::add", 25, -7)
    )
    report = report_of(found)
    assert (report.step_times.mean.wall_us, known(report.kernel_summary).calls) == (80, 1)
    assert "Left out: events with a negative length: 2." in report.notes


def test_copies_that_are_named_after_attention_multiply_nothing() -> None:
    names = ("reshape_and_cache_flash_kernel", "SubTensorOpWithCastTensor1d")
    other = [operator("mylib::other", 100 + 50 * place, 20, **shapes([8], dtype="long int")) for place in (0, 1)]
    copies = [
        event for place, name in enumerate(names)
        for event in launched(10 + place, 105 + 50 * place, 130 + 50 * place, 10, name=name)
    ]  # fmt: skip
    mm = operator("aten::mm", 0, 20, **shapes([512, 512], [512, 512]))
    report = report_of(trace(mm, *launched(1, 5, 30, 20, name="ampere_sgemm_128x64_tn"), *other, *copies))
    flops = known(report.flops)
    assert (flops.uncounted, flops.steps[0].lower_bound) == ((), False)
    assert known(report.kernel_summary).tensor_core_ratio == 0
