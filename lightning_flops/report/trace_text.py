"""The tables of torch traces as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from lightning_flops.analysis.rank_names import name_files
from lightning_flops.analysis.stragglers import are_compared, longest_own_time
from lightning_flops.report import layout
from lightning_flops.report.advice_text import advice_lines
from lightning_flops.report.memory_text import module_memory_table, operator_memory_table
from lightning_flops.report.trace_flops_text import flops_lines, module_flops_cells, module_flops_head
from lightning_flops.report.trace_view import SortKey, View
from lightning_flops.report.traced_text import STEP_PARTS
from lightning_flops.schema.communication import RankComparison
from lightning_flops.schema.trace import TraceReport, TracesReport
from lightning_flops.schema.trace_events import (
    KERNEL_GAP_LIMIT_US,
    SHORT_KERNEL_LIMIT_US,
    ChildRow,
    HeldMemory,
    KernelRow,
    OperatorRow,
    OperatorShapeRow,
)
from lightning_flops.schema.trace_steps import Durations, PhaseRow, StepTime
from lightning_flops.text.printable import page
from lightning_flops.units import NOT_AVAILABLE, duration, percent, plain, si

Row = TypeVar("Row", OperatorRow, OperatorShapeRow)

TOP_ROWS = 20
"""How many rows of a long table are shown unless more are asked for."""

_NAME_CHARS = 56
_OPERATOR_CHARS = 40
_SIZES_CHARS = 44
_PLACE_CHARS = 36
_STATISTICS = ("total", "mean", "max", "min", "ratio")


def render_traces(
    report: TracesReport,
    *,
    top_rows: int | None = TOP_ROWS,
    children: bool = False,
    sort: SortKey | None = None,
    width: int | None = None,
) -> str:
    """Every table of every trace, and the ranks side by side; ends with a line break.

    Args:
        report: what ``analyze_traces`` returned.
        top_rows: rows shown of each long table; None for all.
        children: show below each operator what it called and launched itself.
        sort: what long tables are sorted by, where they have it; None for each table's own order.
        width: columns of the terminal, into which names are cut to fit; None for no limit.
    """
    view = View(rows=top_rows, sort=sort, width=width)
    files = name_files([trace.source for trace in report.traces])
    lines = [
        line
        for trace, file in zip(report.traces, files, strict=True)
        for line in _trace(trace, view, children, file=file)
    ]
    if report.ranks is not None:
        straggles = any(advice.rule == "straggler" for advice in report.advice)
        lines += _ranks(report.ranks, files, view, straggles=straggles)
    lines += ["", *advice_lines(report.advice, width=width)]
    return page([*lines, view.rule()])


def _trace(report: TraceReport, view: View, children: bool, *, file: str) -> list[str]:
    of = _short(file) if report.rank is None else f"rank {report.rank}"
    lines = [view.title(f"Trace of {of}")]
    lines += view.paragraph(f"{report.source}: {plain(report.events)} events, {_steps(report)}.")
    lines += [line for note in report.notes for line in view.paragraph(note)]
    lines += _step_times(report, view)
    lines += _device(report, view)
    lines += flops_lines(report.flops, view)
    lines += _overview(report, view)
    lines += _model_summary(report, view)
    lines += _modules(report, view)
    lines += _communication(report, view)
    lines += _kernels(report, view)
    lines += _operators(report, view, children)
    lines += _memory_over_time(report, view)
    lines += _memory(report, view)
    lines += _module_memory(report, view)
    lines += _transfers(report, view)
    lines += _user_scopes(report, view)
    lines += _idle(report, view)
    lines += _launches(report, view)
    return lines


def _steps(report: TraceReport) -> str:
    times = report.step_times
    if not times.marked:
        return "no profiler steps: the whole trace is taken as one step"
    return f"{len(times.steps)} step{'s' if len(times.steps) > 1 else ''}"


def _step_times(report: TraceReport, view: View) -> list[str]:
    times = report.step_times
    head = ["", "wall", *(label for label, _ in STEP_PARTS)]
    longest = view.sorted(times.steps, total=lambda step: step.wall_us)
    shown = longest[: view.rows] if len(times.steps) > 1 else []
    rows = [_step_row(_step_name(step), step) for step in shown]
    rows.append(_step_row("mean" if len(times.steps) > 1 else _step_name(times.steps[0]), times.mean))
    shares = [_share(times.mean, attribute) for _, attribute in STEP_PARTS]
    rows.append(["ratio", percent(1.0) if times.mean.wall_us else NOT_AVAILABLE, *shares])
    explanation = (
        "Each moment of a step counts once: under the first name from the left that ran then. The parts add up to the "
        "wall time. A step lasts to the end of the last kernel that was launched in it."
    )
    more = _left_out(times.steps, view) if shown else []
    return [*view.section("Step time", explanation), *view.table(head, rows, least_width=8), *more]


def _step_name(step: StepTime) -> str:
    return "whole trace" if step.number is None else f"step {step.number}"


def _step_row(name: str, step: StepTime) -> list[str]:
    return [name, _us(step.wall_us), *(_us(getattr(step, attribute)) for _, attribute in STEP_PARTS)]


def _share(step: StepTime, attribute: str) -> str:
    value: float | None = getattr(step, attribute)
    return percent(value / step.wall_us) if value is not None and step.wall_us else NOT_AVAILABLE


def _device(report: TraceReport, view: View) -> list[str]:
    lines = view.section("Devices", 'Within the steps; from "elapsed" on, over the whole trace.')
    metrics = report.device_metrics
    for device in metrics or ():
        name = f"device {device.device}"
        described = device.name or "not described in the trace"
        lines += view.line(name, described + (f", {device.sm_count} SMs" if device.sm_count else ""))
        lines += view.line(f"{name}: GPU utilization (a kernel ran)", percent(device.utilization))
        lines += view.line(f"{name}: SM efficiency (estimated)", percent(device.sm_efficiency))
        occupancy = None if device.occupancy_percent is None else device.occupancy_percent / 100
        lines += view.line(f"{name}: achieved occupancy (estimated)", percent(occupancy))
        lines += view.line(f"{name}: mean blocks per SM", plain(device.blocks_per_sm))
    if metrics is None:
        lines += view.line("GPU utilization, SM efficiency, occupancy", f"{NOT_AVAILABLE} (no device events)")
    summary = report.device_summary
    lines += view.line("elapsed, first event to last", _us(summary.elapsed_us))
    lines += view.line("CPU (process) = CPU time / elapsed", percent(summary.cpu_process_ratio))
    lines += view.line("CPU (system) = busy / (busy + idle)", percent(summary.cpu_system_ratio))
    for use in summary.devices or ():
        lines += view.line(f"GPU {use.device} = kernels / elapsed", percent(use.utilization))
    return lines


def _overview(report: TraceReport, view: View) -> list[str]:
    ordered = view.sorted(
        report.overview, name=lambda row: row.kind, calls=lambda row: row.calls, total=lambda row: row.time_us
    )
    rows = [[row.kind, row.side, plain(row.calls), _us(row.time_us), percent(row.ratio)] for row in ordered]
    explanation = "Events of one kind are merged: a moment that they share counts once. Kinds overlap."
    table = view.table(["kind", "side", "calls", "time", "of steps"], rows, left=(0, 1))
    return [*view.section("Overview", explanation), *table]


def _model_summary(report: TraceReport, view: View) -> list[str]:
    summary = report.model_summary
    phases: tuple[tuple[str, PhaseRow | None], ...] = (
        ("data loader", summary.data_loader),
        ("forward", summary.forward),
        ("backward", summary.backward),
        ("optimizer", summary.optimizer),
    )

    def rows(times: Callable[[PhaseRow], Durations | None]) -> list[list[str]]:
        timed = [(name, row, None if row is None else times(row)) for name, row in phases]
        ordered = view.sorted(
            timed,
            name=lambda one: one[0],
            calls=lambda one: one[1] and one[1].calls,
            total=lambda one: one[2] and one[2].total_us,
            mean=lambda one: one[2] and one[2].mean_us,
            max=lambda one: one[2] and one[2].max_us,
            min=lambda one: one[2] and one[2].min_us,
        )
        found = [["step", plain(summary.step.calls), *_statistics(times(summary.step))]]
        for name, row, durations in ordered:
            label = f"{name} *" if row is not None and row.source == "operators" else name
            found.append([label, NOT_AVAILABLE if row is None else plain(row.calls), *_statistics(durations)])
        return found

    others = summary.others
    host, device = rows(lambda row: row.host), rows(lambda row: row.device)
    host.append(["others", "", _us(others.host_us), "", "", "", percent(others.host_ratio)])
    device.append(["others", "", _us(others.device_us), "", "", "", percent(others.device_ratio)])
    explanation = (
        "Phases on the host's clock, and the device work launched in them. A phase with * has no scope in the trace "
        "and is found by its operators. A phase that is n/a cannot be found; its time is in others."
    )
    lines = view.section("Model summary", explanation)
    lines += view.table(["host", "calls", *_STATISTICS], host)
    if summary.step.device is not None:
        lines += ["", *view.table(["device", "calls", *_STATISTICS], device)]
    return lines


def _modules(report: TraceReport, view: View) -> list[str]:
    modules = report.modules
    if modules is None:
        return []
    where = "on the device" if modules.clock == "device" else "on the host"
    lines = view.section(
        "Modules",
        f"Time {where}, all steps together; self: without the modules inside. The backward includes what it repeats of "
        "the forward. Gradient accumulation is of the whole model and has its own line.",
    )
    for label, time_us in (
        ("forward", modules.forward_us),
        ("  of it unattributed", modules.unattributed_forward_us),
        ("backward", modules.backward_us),
        ("  of it gradient accumulation", modules.gradient_accumulation_us),
        ("  of it communication", modules.backward_communication_us),
        ("  of it operators outside of autograd's nodes", modules.backward_outside_nodes_us),
        ("  of it unattributed", modules.unattributed_backward_us),
        ("optimizer", modules.optimizer_us),
    ):
        lines += view.line(label, _us(time_us))
    flops = {} if report.flops is None else {row.name: row for row in report.flops.modules or ()}
    longest = view.sorted(
        sorted(modules.rows, key=lambda row: -(row.own_forward_us + row.own_backward_us)),
        name=lambda row: row.name,
        calls=lambda row: row.calls,
        total=lambda row: row.forward_us + row.backward_us,
        self=lambda row: row.own_forward_us + row.own_backward_us,
        flops=lambda row: flops[row.name].forward + flops[row.name].backward if row.name in flops else 0,
        rate=lambda row: flops[row.name].flops_per_sec if row.name in flops else 0,
    )
    with_source = any(row.source is not None for row in modules.rows)
    rows = [
        [
            _short(row.name or "(root)"),
            plain(row.calls),
            *map(_us, (row.own_forward_us, row.forward_us, row.own_backward_us, row.backward_us)),
            *([] if row.forward_kernels is None else [plain(row.forward_kernels), plain(row.backward_kernels)]),
            *module_flops_cells(report.flops, row.name),
            *([_place(row.source)] if with_source else []),
        ]
        for row in longest[: view.rows]
    ]
    head = ["module", "calls", "fwd self", "fwd total", "bwd self", "bwd total"]
    head += ["fwd kernels", "bwd kernels"] if modules.clock == "device" else []
    head += module_flops_head(report.flops)
    head += ["forward is in"] if with_source else []
    return [*lines, "", *view.table(head, rows), *_left_out(modules.rows, view)]


def _communication(report: TraceReport, view: View) -> list[str]:
    share = report.overlap
    if share is None:
        return []
    explanation = "Overlapping events are merged. Computation is every kernel that does not communicate."
    lines = view.section("Communication", explanation)
    for label, time_us in (
        ("computation without communication", share.computation_us - share.overlap_us),
        ("both at once", share.overlap_us),
        ("communication without computation", share.communication_us - share.overlap_us),
        ("neither", share.other_us),
    ):
        part = percent(time_us / share.wall_us) if share.wall_us else NOT_AVAILABLE
        lines += view.line(label, f"{_us(time_us)} ({part} of the steps)")
    lines += view.line("overlap / communication", percent(share.overlap_ratio))
    rows = [
        [_short(row.name), plain(row.calls), _bytes(row.bytes), *_statistics(row.latency)]
        for row in view.sorted(
            report.collectives or (),
            name=lambda row: row.name,
            calls=lambda row: row.calls,
            bytes=lambda row: row.bytes,
            total=lambda row: row.latency.total_us,
            mean=lambda row: row.latency.mean_us,
            max=lambda row: row.latency.max_us,
            min=lambda row: row.latency.min_us,
        )[: view.rows]
    ]
    table = view.table(["collective", "calls", "bytes", *_STATISTICS], rows)
    return [*lines, "", *table, *_left_out(report.collectives or (), view)]


def _kernels(report: TraceReport, view: View) -> list[str]:
    if report.kernels is None or report.kernel_summary is None:
        return []
    summary = report.kernel_summary
    lines = view.section(
        "Kernels", "TC: whether the operator can use tensor cores / whether the kernel's name says that it did."
    )
    lines += view.line("kernels", f"{plain(summary.calls)} in {_us(summary.total_us)}")
    lines += view.line("time on tensor cores", percent(summary.tensor_core_ratio))
    lines += view.line("time in operators that can use them", percent(summary.tensor_core_eligible_ratio))
    short = f"{percent(summary.short_calls_ratio)} of the kernels, {percent(summary.short_time_ratio)} of their time"
    lines += view.line(f"shorter than {SHORT_KERNEL_LIMIT_US} us", short)
    shown = view.sorted(
        report.kernels,
        name=lambda row: row.name,
        calls=lambda row: row.calls,
        total=lambda row: row.device.total_us,
        self=lambda row: row.device.total_us,
        mean=lambda row: row.device.mean_us,
        max=lambda row: row.device.max_us,
        min=lambda row: row.device.min_us,
    )[: view.rows]
    names = layout.shortened_apart([row.name for row in shown], chars=_NAME_CHARS)
    rows = [
        [
            name,
            plain(row.calls),
            *_statistics(row.device),
            f"{_yes(row.tensor_cores_eligible)}/{_yes(row.tensor_cores)}",
            plain(row.blocks_per_sm),
            percent(None if row.occupancy_percent is None else row.occupancy_percent / 100),
        ]
        for name, row in zip(names, shown, strict=True)
    ]
    head = ["kernel", "calls", *_STATISTICS, "TC", "blocks/SM", "occupancy"]
    lines += ["", *view.table(head, rows, least_width=6), *_left_out(report.kernels, view)]
    return [*lines, *_launch_shapes(shown, names, view)]


def _launch_shapes(shown: Sequence[KernelRow], names: Sequence[str], view: View) -> list[str]:
    """How the kernels of the table above were launched; of each the shape that took most time."""
    rows = [
        [
            name,
            plain(len(row.launch_shapes)),
            _axes(row.launch_shapes[0].grid),
            _axes(row.launch_shapes[0].block),
            plain(row.launch_shapes[0].registers),
            plain(row.launch_shapes[0].shared_memory),
            plain(row.launch_shapes[0].calls),
            _us(row.launch_shapes[0].device_us),
        ]
        for name, row in zip(names, shown, strict=True)
        if row.launch_shapes
    ]
    if not rows:
        return []
    head = ["launched most of the time with", "shapes", "grid", "block", "registers", "shared B", "calls", "time"]
    return ["", *view.table(head, rows, least_width=6)]


def _axes(axes: tuple[int, int, int] | None) -> str:
    return NOT_AVAILABLE if axes is None else " x ".join(map(str, axes))


def _operators(report: TraceReport, view: View, children: bool) -> list[str]:
    if report.operators is None:
        return []
    explanation = "Self: without the operators that it called. Ratios are of the self times of all operators."
    if children:
        explanation += " Indented: what it called and launched itself, with its part of the parent's total."
    with_device = any(row.device is not None for row in report.operators)
    head = ["operator", "calls", "host self", "ratio", "host total", "mean", "max", "min"]
    rows = []
    shown = _first_operators(report.operators, view)
    for row in shown:
        cells = [_short(row.name), plain(row.calls), _us(row.host_self.total_us), percent(row.host_self.ratio)]
        cells += [_us(row.host.total_us), _us(row.host.mean_us), _us(row.host.max_us), _us(row.host.min_us)]
        if with_device and row.device is not None and row.device_self is not None:
            cells += [_us(row.device_self.total_us), percent(row.device_self.ratio), _us(row.device.total_us)]
        rows.append(cells)
        if children:
            inside = layout.shortened_apart([child.name for child in row.children], chars=_NAME_CHARS - 2)
            rows += [
                _child(child, name, with_device=with_device) for child, name in zip(row.children, inside, strict=True)
            ]
    if with_device:
        head += ["device self", "ratio", "device total"]
    table = view.table(head, rows, least_width=6)
    return [
        *view.section("Operators", explanation),
        *table,
        *_left_out(report.operators, view),
        *_operators_on_device(shown, view),
        *_operators_by_shape(report, view),
    ]


def _first_operators(rows: Sequence[Row], view: View) -> Sequence[Row]:
    """The rows that are shown, in the order that was asked for."""
    return view.sorted(
        rows,
        name=lambda row: row.name,
        calls=lambda row: row.calls,
        total=lambda row: _lead(row).total_us,
        self=lambda row: (row.device_self or row.host_self).total_us,
        mean=lambda row: _lead(row).mean_us,
        max=lambda row: _lead(row).max_us,
        min=lambda row: _lead(row).min_us,
    )[: view.rows]


def _lead(row: OperatorRow | OperatorShapeRow) -> Durations:
    """The times that rows are compared by: the device's, where there is one."""
    return row.host if row.device is None else row.device


def _operators_on_device(shown: Sequence[OperatorRow], view: View) -> list[str]:
    """What the table above has no room for: the times of a call on the device, and the lines that call most of it."""
    with_device = any(row.device is not None for row in shown)
    with_places = any(row.called_from for row in shown)
    if not with_device and not with_places:
        return []
    head = ["of a call", *(["device mean", "max", "min"] if with_device else [])]
    head += ["called from", "other lines"] if with_places else []
    rows = []
    for row in shown:
        cells = [_short(row.name)]
        if with_device:
            device = row.device
            cells += [""] * 3 if device is None else [_us(device.mean_us), _us(device.max_us), _us(device.min_us)]
        if with_places:
            more = len(row.called_from) - 1
            cells += [_place(row.called_from[0].place), plain(more)] if row.called_from else ["", ""]
        rows.append(cells)
    return ["", *view.table(head, rows, least_width=6)]


def _operators_by_shape(report: TraceReport, view: View) -> list[str]:
    if not report.operators_by_shape:
        return []
    shown = _first_operators(report.operators_by_shape, view)
    with_device = any(row.device is not None for row in shown)
    head = ["by input shape", "sizes", "calls", "host self", "host total", "mean"]
    head += ["device self", "device total", "mean"] if with_device else []
    rows = []
    for row in shown:
        cells = [layout.shortened_inside(row.name, chars=_OPERATOR_CHARS)]
        cells.append(layout.shortened(row.inputs, chars=_SIZES_CHARS))
        cells += [plain(row.calls), _us(row.host_self.total_us), _us(row.host.total_us), _us(row.host.mean_us)]
        if row.device is not None and row.device_self is not None:
            cells += [_us(row.device_self.total_us), _us(row.device.total_us), _us(row.device.mean_us)]
        rows.append(cells)
    table = view.table(head, rows, least_width=6, left=(0, 1))
    return ["", *table, *_left_out(report.operators_by_shape, view)]


def _place(place: str | None) -> str:
    """The end of a file's path and its line."""
    if place is None:
        return NOT_AVAILABLE
    return place if len(place) <= _PLACE_CHARS else f"…{place[len(place) - _PLACE_CHARS + 1 :]}"


def _child(child: ChildRow, name: str, *, with_device: bool) -> list[str]:
    cells = [f"  {name}", plain(child.calls), "", percent(child.host.ratio) if child.host else ""]
    host = child.host
    cells += (
        ["", "", "", ""]
        if host is None
        else [_us(host.total_us), _us(host.mean_us), _us(host.max_us), _us(host.min_us)]
    )
    if with_device and child.device is not None:
        cells += ["", percent(child.device.ratio), _us(child.device.total_us)]
    return cells


def _memory_over_time(report: TraceReport, view: View) -> list[str]:
    """The peak of each device's memory and what held it then; the curve is in the JSON."""
    if not report.memory_curves:
        return []
    lines = view.section("Memory over time", "The most that was allocated at once, and what had allocated it.")
    for curve in report.memory_curves:
        where = "host" if curve.device_type == "host" else f"device {curve.device}"
        step = "" if curve.peak_step is None else f", in step {curve.peak_step}"
        when = f"{_us(curve.peak_us)} after the first event{step}"
        since = "" if curve.absolute else " more than when the trace began"
        lines += view.line(f"{where}: peak", f"{si(curve.peak_bytes, 'B')}{since}, {when}")
        if curve.held is None:
            lines += view.line(f"{where}: held by", f"{NOT_AVAILABLE} (the trace has no addresses)")
            continue
        with_modules = any(one.module is not None for one in curve.held)
        rows = [
            [
                *([_short(_module_of(one))] if with_modules else []),
                _short(_operator_of(one)),
                si(one.bytes, "B"),
                percent(one.bytes / curve.peak_bytes if curve.peak_bytes else None),
                plain(one.allocations),
            ]
            for one in view.sorted(
                curve.held,
                name=_operator_of,
                calls=lambda one: one.allocations,
                total=lambda one: one.bytes,
                bytes=lambda one: one.bytes,
            )[: view.rows]
        ]
        head = [*(["module"] if with_modules else []), f"{where}: held by", "bytes", "of peak", "allocations"]
        table = view.table(head, rows, left=(0, 1) if with_modules else (0,))
        lines += ["", *table, *_left_out(curve.held, view)]
    return lines


def _module_of(one: HeldMemory) -> str:
    return "" if one.module is None else one.module or "(root)"


def _operator_of(one: HeldMemory) -> str:
    if one.operator is not None:
        return one.operator
    return "(before the trace)" if one.allocations is None else "(outside operators)"


def _memory(report: TraceReport, view: View) -> list[str]:
    if report.memory is None:
        return []
    explanation = "Size increase: allocated less freed. Allocation: frees left out. Self: without operators it called."
    ordered = view.sorted(
        report.memory,
        name=lambda row: row.name or "",
        calls=lambda row: row.calls,
        total=lambda row: row.allocation_bytes,
        bytes=lambda row: row.allocation_bytes,
        self=lambda row: row.self_allocation_bytes,
    )
    table = operator_memory_table(ordered[: view.rows], view)
    return [*view.section("Memory (bytes)", explanation), *table, *_left_out(report.memory, view)]


def _module_memory(report: TraceReport, view: View) -> list[str]:
    if not report.module_memory:
        return []
    explanation = "As above, by the module whose forward or backward was running. Self: without the modules inside."
    ordered = view.sorted(
        report.module_memory,
        name=lambda row: row.name or "",
        total=lambda row: row.allocation_bytes,
        bytes=lambda row: row.allocation_bytes,
        self=lambda row: row.self_allocation_bytes,
    )
    table = module_memory_table(ordered[: view.rows], view)
    return [*view.section("Memory by module (bytes)", explanation), *table, *_left_out(report.module_memory, view)]


def _transfers(report: TraceReport, view: View) -> list[str]:
    if not report.transfers:
        return []
    shown = view.sorted(
        report.transfers,
        name=lambda row: row.name,
        calls=lambda row: row.calls,
        bytes=lambda row: row.bytes,
        total=lambda row: row.device.total_us,
        mean=lambda row: row.device.mean_us,
        max=lambda row: row.device.max_us,
        min=lambda row: row.device.min_us,
    )[: view.rows]
    host = [[_short(row.name), plain(row.calls), _bytes(row.bytes), *_statistics(row.host)] for row in shown]
    device = [[_short(row.name), plain(row.calls), _bytes(row.bytes), *_statistics(row.device)] for row in shown]
    lines = view.section(
        "Memory manipulation", "Copies and memsets: the calls that launched them, and they themselves."
    )
    lines += view.table(["host", "calls", "bytes", *_STATISTICS], host)
    lines += ["", *view.table(["device", "calls", "bytes", *_STATISTICS], device)]
    return [*lines, *_left_out(report.transfers, view)]


def _user_scopes(report: TraceReport, view: View) -> list[str]:
    if report.user_scopes is None:
        return []
    rows = []
    ordered = view.sorted(
        report.user_scopes,
        name=lambda row: row.name,
        calls=lambda row: row.calls,
        total=lambda row: row.host.total_us,
        mean=lambda row: row.host.mean_us,
        max=lambda row: row.host.max_us,
        min=lambda row: row.host.min_us,
    )
    for row in ordered[: view.rows]:
        launched = [] if row.device is None else [_us(row.device.total_us), percent(row.device.ratio)]
        rows.append([_short(row.name), plain(row.calls), *_statistics(row.host), *launched])
    head = ["scope", "calls", *_STATISTICS]
    if report.user_scopes[0].device is not None:
        head += ["device", "ratio"]
    lines = view.section("User-defined scopes", "record_function and the like; device: work launched in them.")
    return [*lines, *view.table(head, rows, least_width=6), *_left_out(report.user_scopes, view)]


def _idle(report: TraceReport, view: View) -> list[str]:
    if report.idle is None:
        return []
    explanation = (
        "Pauses between device events, over the whole trace. Host: what ended the pause was launched after it had "
        f"begun. Kernel gap: launched in time, under {KERNEL_GAP_LIMIT_US} us. Other: the rest."
    )
    rows = [
        [
            f"device {row.device}" if row.stream is None else f"device {row.device} stream {row.stream}",
            _us(row.busy_us),
            _us(row.host_wait_us),
            _us(row.kernel_gap_us),
            _us(row.other_us),
        ]
        for row in view.sorted(report.idle, total=lambda row: row.busy_us)[: view.rows]
    ]
    table = view.table(["", "busy", "host", "kernel gap", "other"], rows)
    return [*view.section("Idle", explanation), *table, *_left_out(report.idle, view)]


def _launches(report: TraceReport, view: View) -> list[str]:
    if not report.launches:
        return []
    explanation = "Delay: from the end of the call to the start on the device."
    rows = [
        [
            row.kind,
            plain(row.launches),
            plain(row.events),
            *(_us(value) for value in (row.host.mean_us, row.host.max_us, row.device.mean_us, row.device.max_us)),
            *(_us(value) for value in (row.delay.mean_us, row.delay.max_us)),
            plain(row.shorter_than_launch),
        ]
        for row in view.sorted(
            report.launches,
            name=lambda row: row.kind,
            calls=lambda row: row.launches,
            mean=lambda row: row.device.mean_us,
            max=lambda row: row.device.max_us,
        )
    ]
    head = [
        "",
        "calls",
        "launched",
        "call mean",
        "max",
        "device mean",
        "max",
        "delay mean",
        "max",
        "shorter than the call",
    ]
    return [*view.section("Launches", explanation), *view.table(head, rows, least_width=6)]


def _ranks(comparison: RankComparison, files: Sequence[str], view: View, *, straggles: bool) -> list[str]:
    names = [
        _short(file) if row.rank is None else str(row.rank) for row, file in zip(comparison.ranks, files, strict=True)
    ]
    explanation = (
        "Transfer: the shortest of the ranks for each call of a collective; wait: the rest, until the last rank came. "
        "A straggler is a rank that the others wait for: without communication that no computation hides, its step is "
        "longer than theirs by more than the advice's thresholds."
    )
    known = any(row.rank is not None for row in comparison.ranks)
    if not known:
        explanation = "Of separate runs, as none of these files says its rank; nobody waited here for another."
    lines = ["", *view.section("Ranks" if known else "Traces side by side", explanation)[1:]]
    what = "rank" if known else "trace"
    by_name = {} if known else {"name": lambda one: one[0]}  # ranks are in order
    listed = list(zip(names, comparison.ranks, strict=True))
    rows = [
        [
            name,
            plain(row.steps),
            _us(row.overlap.wall_us),
            _us(row.overlap.computation_us),
            _us(row.overlap.communication_us),
            _us(row.overlap.overlap_us),
            percent(row.overlap.overlap_ratio),
            _us(row.transfer_us),
            _us(row.wait_us),
            NOT_AVAILABLE if row.compute_over_median is None else f"{row.compute_over_median:.3f}",
        ]
        for name, row in view.sorted(listed, total=lambda one: one[1].overlap.wall_us, **by_name)
    ]
    head = [what, "steps", "wall", "compute", "comm", "overlap", "of comm", "transfer", "wait", "compute/median"]
    lines += view.table(head, rows, least_width=6)
    rows = [
        [name, row.name, plain(row.calls), plain(row.matched_calls), _bytes(row.bytes)]
        + [_us(value) for value in (row.latency_us, row.transfer_us, row.wait_us)]
        for name, row in view.sorted(
            [(name, row) for name, rank in listed for row in rank.collectives],
            name=lambda one: one[1].name,
            calls=lambda one: one[1].calls,
            bytes=lambda one: one[1].bytes,
            total=lambda one: one[1].latency_us,
        )
    ]
    if rows:
        head = [what, "collective", "calls", "matched", "bytes", "latency", "transfer", "wait"]
        lines += ["", *view.table(head, rows, least_width=6, left=(0, 1))]
    if are_compared(comparison):
        longest, straggler = "several alike", "none"
        if comparison.computes_longest is not None:
            longest = f"rank {comparison.computes_longest}"
        if straggles:
            straggler = f"rank {names[longest_own_time(comparison)]}"
    else:
        longest = straggler = NOT_AVAILABLE
    if known:
        lines += ["", *view.line("computes longest", longest), *view.line("straggler", straggler)]
    return [*lines, *(line for note in comparison.notes for line in view.paragraph(note))]


def _statistics(durations: Durations | None) -> list[str]:
    if durations is None:
        return [NOT_AVAILABLE] * len(_STATISTICS)
    times = (durations.total_us, durations.mean_us, durations.max_us, durations.min_us)
    return [*map(_us, times), percent(durations.ratio)]


def _left_out(rows: Sequence[object], view: View) -> Iterable[str]:
    return layout.and_more(0 if view.rows is None else len(rows) - view.rows)


def _us(time_us: float | None) -> str:
    return duration(None if time_us is None else time_us / 1e6)


def _bytes(count: int | None) -> str:
    return plain(count)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _short(name: str) -> str:
    return layout.shortened_inside(name, chars=_NAME_CHARS)
