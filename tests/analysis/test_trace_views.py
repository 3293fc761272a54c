"""Views that join tables of a trace: FLOPs by module, what an operator called, kinds of events, the peak's phase."""

from __future__ import annotations

import pytest

from lightning_flops.analysis.trace_report import analyze_one
from lightning_flops.cli import main
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.report.trace_document import render_traces
from lightning_flops.schema.tables import ChildRow
from lightning_flops.schema.trace import TraceReport
from tests.analysis.in_memory import analyze_traces, known
from tests.analysis.trace_events import (
    RESNET,
    Event,
    data_loader,
    kernel,
    launch,
    launched,
    made,
    memory,
    module,
    node,
    on_device,
    operator,
    phase,
    scope,
    shapes,
    span,
    step,
    trace,
)


def report_of(*events: Event, given: ProfilerConfig | None = None) -> TraceReport:
    return analyze_one(trace(*events), formulas=recorded_work, given=given).report


# ---- FLOPs by module


def test_flops_and_share_of_the_peak_are_by_module_forward_and_backward() -> None:
    """Two layers of one product each: 8 x 8 by 8 x 8 is 1,024 FLOPs, on a device of 1 GFLOP/s."""
    sizes = shapes([8, 8], [8, 8])
    report = report_of(
        step(1, 0, 1000), phase("forward", 0, 100), module("", 1, 98), module("a", 2, 40), module("b", 50, 40),
        made(1, 5, 10, name="aten::mm") | {"args": {**sizes, "Sequence number": 1}}, *launched(1, 8, 20, 4),
        made(2, 55, 10, name="aten::mm") | {"args": {**sizes, "Sequence number": 2}}, *launched(2, 58, 70, 8),
        phase("backward", 200, 200),
        node(2, 210, 50, name="MmBackward0", thread=2), operator("aten::mm", 215, 10, thread=2, **sizes),
        *launched(3, 218, 230, 8, thread=2),
        node(1, 300, 50, name="MmBackward0", thread=2), operator("aten::mm", 305, 10, thread=2, **sizes),
        *launched(4, 308, 320, 12, thread=2),
        given=ProfilerConfig(peak_flops_per_sec=1e9),
    )  # fmt: skip
    flops = {row.name: row.flops for row in known(report.modules).rows}
    # a took 4 and 12 us, b 8 and 8; the root has both.
    for name, each in (("a", 1024), ("b", 1024), ("", 2048)):
        found = known(flops[name])
        assert (found.forward, found.backward, found.recompute) == (each, each, 0)
        assert found.flops_per_sec == pytest.approx(2 * 1024 / 16e-6)
        assert found.of_peak == pytest.approx(0.128)
    text = render_traces(analyze_traces([trace(*module_events())], formulas=recorded_work))
    assert "module" in text and "KFLOPs" in text.partition("Modules")[2].partition("---")[2].partition("Operators")[0]


def module_events() -> tuple[Event, ...]:
    call = operator("aten::mm", 5, 10, **shapes([8, 8], [8, 8]))
    return step(1, 0, 100), phase("forward", 0, 50), module("", 1, 40), call, *launched(1, 8, 20, 4)


def test_without_shapes_modules_have_times_alone() -> None:
    events = (step(1, 0, 100), phase("forward", 0, 50), module("", 1, 40), operator("aten::mm", 5, 10))
    assert [row.flops for row in known(report_of(*events).modules).rows] == [None]


# ---- what an operator called and launched


def children_of(operator_name: str, *events: Event) -> dict[str, ChildRow]:
    return {row.name: row for row in known(report_of(*events).children) if row.operator == operator_name}


def test_what_an_operator_called_and_launched_stands_under_it_with_shares_of_its_time() -> None:
    events = [
        operator("aten::linear", 0, 50), operator("aten::t", 5, 10), operator("aten::addmm", 20, 25),
        launch(1, 30), kernel(1, 100, 30, name="gemm"), launch(2, 31), kernel(2, 140, 10, name="split"),
        operator("aten::linear", 60, 50), operator("aten::addmm", 70, 25),
        launch(3, 75), kernel(3, 160, 40, name="gemm"),
        operator("aten::addmm", 200, 10), launch(4, 205), on_device("gpu_memset", 4, 220, 20, name="Memset (Device)"),
    ]  # fmt: skip
    linear, addmm = children_of("aten::linear", *events), children_of("aten::addmm", *events)
    assert {name: (row.calls, known(row.host).total_us) for name, row in linear.items()} == {
        "aten::t": (1, 10), "aten::addmm": (2, 50)
    }  # fmt: skip
    # Of the 100 us of both calls on the host; all of its device time is its callee's.
    assert known(linear["aten::addmm"].host).ratio == 0.5
    assert known(linear["aten::addmm"].device).ratio == 1
    found = {name: (row.calls, known(row.device).total_us, known(row.device).ratio) for name, row in addmm.items()}
    assert found == {"gemm": (2, 70, 0.7), "split": (1, 10, 0.1), "Memset (Device)": (1, 20, 0.2)}
    assert all(row.host is None for row in addmm.values())


def test_a_call_that_passes_its_arguments_on_is_one_call_and_no_child_of_itself() -> None:
    events = [operator("aten::sum", 0, 50), operator("aten::sum", 5, 40), operator("aten::fill_", 10, 10)]
    assert {*children_of("aten::sum", *events)} == {"aten::fill_"}


def test_children_are_printed_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(RESNET), "--rows", "5"]) == 0
    assert "what they called" not in capsys.readouterr().out
    assert main(["trace", str(RESNET), "--rows", "5", "--children"]) == 0
    section = capsys.readouterr().out.partition("Operators and what they called")[2].splitlines()
    parent, kernel_line = section[3:5]
    assert parent.startswith("aten::cudnn_convolution_backward_weight ")
    assert kernel_line.startswith("  void cudnn::cnn::wgrad_alg0_engine<float, 128")


# ---- time by kind of event


def test_time_of_each_kind_counts_overlaps_once_and_kinds_overlap_one_another() -> None:
    report = report_of(
        step(1, 0, 100), data_loader(0, 20), operator("aten::mm", 20, 30), operator("aten::mul", 30, 10),
        operator("aten::relu", 40, 20, thread=2), *launched(1, 25, 30, 40), *launched(2, 26, 50, 30, stream=8),
        scope("mine", 10, 50), span("python_function", "f", 90, 20), operator("aten::add", 150, 10),
    )  # fmt: skip
    found = {one.name: (one.calls, one.time_us, one.ratio) for one in report.kinds}
    assert found == {
        "kernel": (2, 50, 0.5), "runtime": (2, 2, 0.02), "data loader": (1, 20, 0.2), "cpu": (3, 40, 0.4),
        "user scopes": (1, 50, 0.5), "python": (1, 10, 0.1),
    }  # fmt: skip


# ---- the peak's phase


def test_the_peak_of_memory_lies_in_a_phase_and_the_curve_has_all_of_them() -> None:
    events = [
        step(1, 0, 100), scope("forward", 0, 40), scope("backward", 40, 40),
        memory(10, 100, device=0, total=1100), memory(50, 900, device=0, total=2000),
        memory(70, -900, device=0, total=1100),
    ]  # fmt: skip
    (curve,) = known(report_of(*events).memory_curves)
    assert (curve.peak_us, curve.peak_phase) == (50, "backward")
    assert curve.phases == (("forward", 0, 40), ("backward", 40, 80))
    text = render_traces(analyze_traces([trace(*events)]))
    assert "50 us after the first event, in backward" in text
    # After the last phase it is none's.
    (late,) = known(report_of(*events, memory(90, 5000, device=0, total=6100)).memory_curves)
    assert (late.peak_us, late.peak_phase) == (90, None)
