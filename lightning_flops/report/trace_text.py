"""The tables of torch traces as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_flops.analysis.rank_names import name_files
from lightning_flops.analysis.stragglers import are_compared, longest_own_time
from lightning_flops.report import layout
from lightning_flops.report.advice_text import advice_lines
from lightning_flops.report.memory_text import module_memory_table, operator_memory_table
from lightning_flops.report.trace_flops_text import flops_lines
from lightning_flops.report.traced_text import STEP_PARTS
from lightning_flops.schema.communication import RankComparison
from lightning_flops.schema.trace import TraceReport, TracesReport
from lightning_flops.schema.trace_events import KERNEL_GAP_LIMIT_US, SHORT_KERNEL_LIMIT_US, ChildRow
from lightning_flops.schema.trace_steps import Durations, PhaseRow, StepTime
from lightning_flops.text.printable import page
from lightning_flops.units import NOT_AVAILABLE, duration, percent, plain

TOP_ROWS = 20
"""How many rows of a long table are shown unless more are asked for."""

_NAME_CHARS = 56
_STATISTICS = ("total", "mean", "max", "min", "ratio")


def render_traces(report: TracesReport, *, top_rows: int | None = TOP_ROWS, children: bool = False) -> str:
    """Every table of every trace, and the ranks side by side; ends with a line break.

    Args:
        report: what ``analyze_traces`` returned.
        top_rows: rows shown of each table of kernels, operators, memory, scopes and copies; None for all.
        children: show below each operator what it called and launched itself.
    """
    files = name_files([trace.source for trace in report.traces])
    lines = [
        line
        for trace, file in zip(report.traces, files, strict=True)
        for line in _trace(trace, top_rows, children, file=file)
    ]
    if report.ranks is not None:
        straggles = any(advice.rule == "straggler" for advice in report.advice)
        lines += _ranks(report.ranks, files, straggles=straggles)
    lines += ["", *advice_lines(report.advice)]
    return page([*lines, layout.rule()])


def _trace(report: TraceReport, top_rows: int | None, children: bool, *, file: str) -> list[str]:
    of = _short(file) if report.rank is None else f"rank {report.rank}"
    lines = [layout.title(f"Trace of {of}")]
    lines += layout.paragraph(f"{report.source}: {plain(report.events)} events, {_steps(report)}.")
    lines += [line for note in report.notes for line in layout.paragraph(note)]
    lines += _step_times(report)
    lines += _device(report)
    lines += flops_lines(report.flops, top_rows=top_rows)
    lines += _overview(report)
    lines += _model_summary(report)
    lines += _modules(report, top_rows)
    lines += _communication(report)
    lines += _kernels(report, top_rows)
    lines += _operators(report, top_rows, children)
    lines += _memory(report, top_rows)
    lines += _module_memory(report, top_rows)
    lines += _transfers(report, top_rows)
    lines += _user_scopes(report, top_rows)
    lines += _idle(report)
    lines += _launches(report)
    return lines


def _steps(report: TraceReport) -> str:
    times = report.step_times
    if not times.marked:
        return "no profiler steps: the whole trace is taken as one step"
    return f"{len(times.steps)} step{'s' if len(times.steps) > 1 else ''}"


def _section(title: str, explanation: str) -> list[str]:
    return ["", layout.title(title), *layout.paragraph(explanation)]


def _step_times(report: TraceReport) -> list[str]:
    times = report.step_times
    head = ["", "wall", *(label for label, _ in STEP_PARTS)]
    rows = [_step_row(_step_name(step), step) for step in times.steps] if len(times.steps) > 1 else []
    rows.append(_step_row("mean" if len(times.steps) > 1 else _step_name(times.steps[0]), times.mean))
    shares = [_share(times.mean, attribute) for _, attribute in STEP_PARTS]
    rows.append(["ratio", percent(1.0) if times.mean.wall_us else NOT_AVAILABLE, *shares])
    explanation = (
        "Each moment of a step counts once: under the first name from the left that ran then. The parts add up to the "
        "wall time. A step lasts to the end of the last kernel that was launched in it."
    )
    return [*_section("Step time", explanation), *layout.table(head, rows, least_width=8)]


def _step_name(step: StepTime) -> str:
    return "whole trace" if step.number is None else f"step {step.number}"


def _step_row(name: str, step: StepTime) -> list[str]:
    return [name, _us(step.wall_us), *(_us(getattr(step, attribute)) for _, attribute in STEP_PARTS)]


def _share(step: StepTime, attribute: str) -> str:
    value: float | None = getattr(step, attribute)
    return percent(value / step.wall_us) if value is not None and step.wall_us else NOT_AVAILABLE


def _device(report: TraceReport) -> list[str]:
    lines = _section("Devices", 'Within the steps; from "elapsed" on, over the whole trace.')
    metrics = report.device_metrics
    for device in metrics or ():
        name = f"device {device.device}"
        described = device.name or "not described in the trace"
        lines.append(layout.line(name, described + (f", {device.sm_count} SMs" if device.sm_count else "")))
        lines.append(layout.line(f"{name}: GPU utilization (a kernel ran)", percent(device.utilization)))
        lines.append(layout.line(f"{name}: SM efficiency (estimated)", percent(device.sm_efficiency)))
        occupancy = None if device.occupancy_percent is None else device.occupancy_percent / 100
        lines.append(layout.line(f"{name}: achieved occupancy (estimated)", percent(occupancy)))
        lines.append(layout.line(f"{name}: mean blocks per SM", plain(device.blocks_per_sm)))
    if metrics is None:
        lines.append(layout.line("GPU utilization, SM efficiency, occupancy", f"{NOT_AVAILABLE} (no device events)"))
    summary = report.device_summary
    lines.append(layout.line("elapsed, first event to last", _us(summary.elapsed_us)))
    lines.append(layout.line("CPU (process) = CPU time / elapsed", percent(summary.cpu_process_ratio)))
    lines.append(layout.line("CPU (system) = busy / (busy + idle)", percent(summary.cpu_system_ratio)))
    for use in summary.devices or ():
        lines.append(layout.line(f"GPU {use.device} = kernels / elapsed", percent(use.utilization)))
    return lines


def _overview(report: TraceReport) -> list[str]:
    rows = [[row.kind, row.side, plain(row.calls), _us(row.time_us), percent(row.ratio)] for row in report.overview]
    explanation = "Events of one kind are merged: a moment that they share counts once. Kinds overlap."
    table = layout.table(["kind", "side", "calls", "time", "of steps"], rows, left=(0, 1))
    return [*_section("Overview", explanation), *table]


def _model_summary(report: TraceReport) -> list[str]:
    summary = report.model_summary
    named: tuple[tuple[str, PhaseRow | None], ...] = (
        ("step", summary.step),
        ("data loader", summary.data_loader),
        ("forward", summary.forward),
        ("backward", summary.backward),
        ("optimizer", summary.optimizer),
    )
    host, device = [], []
    for name, row in named:
        label = f"{name} *" if row and row is not summary.step and row.source == "operators" else name
        calls = plain(row.calls) if row else NOT_AVAILABLE
        host.append([label, calls, *_statistics(row.host if row else None)])
        device.append([label, calls, *_statistics(row.device if row else None)])
    others = summary.others
    host.append(["others", "", _us(others.host_us), "", "", "", percent(others.host_ratio)])
    device.append(["others", "", _us(others.device_us), "", "", "", percent(others.device_ratio)])
    explanation = (
        "Phases on the host's clock, and the device work launched in them. A phase with * has no scope in the trace "
        "and is found by its operators. A phase that is n/a cannot be found; its time is in others."
    )
    lines = _section("Model summary", explanation)
    lines += layout.table(["host", "calls", *_STATISTICS], host)
    if summary.step.device is not None:
        lines += ["", *layout.table(["device", "calls", *_STATISTICS], device)]
    return lines


def _modules(report: TraceReport, top_rows: int | None) -> list[str]:
    modules = report.modules
    if modules is None:
        return []
    where = "on the device" if modules.clock == "device" else "on the host"
    lines = _section(
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
        lines.append(layout.line(label, _us(time_us)))
    longest = sorted(modules.rows, key=lambda row: -(row.own_forward_us + row.own_backward_us))
    rows = [
        [
            _short(row.name or "(root)"),
            plain(row.calls),
            *map(_us, (row.own_forward_us, row.forward_us, row.own_backward_us, row.backward_us)),
            *([] if row.forward_kernels is None else [plain(row.forward_kernels), plain(row.backward_kernels)]),
        ]
        for row in longest[:top_rows]
    ]
    head = ["module", "calls", "fwd self", "fwd total", "bwd self", "bwd total"]
    head += ["fwd kernels", "bwd kernels"] if modules.clock == "device" else []
    return [*lines, "", *layout.table(head, rows), *_left_out(modules.rows, top_rows)]


def _communication(report: TraceReport) -> list[str]:
    share = report.overlap
    if share is None:
        return []
    explanation = "Overlapping events are merged. Computation is every kernel that does not communicate."
    lines = _section("Communication", explanation)
    for label, time_us in (
        ("computation without communication", share.computation_us - share.overlap_us),
        ("both at once", share.overlap_us),
        ("communication without computation", share.communication_us - share.overlap_us),
        ("neither", share.other_us),
    ):
        part = percent(time_us / share.wall_us) if share.wall_us else NOT_AVAILABLE
        lines.append(layout.line(label, f"{_us(time_us)} ({part} of the steps)"))
    lines.append(layout.line("overlap / communication", percent(share.overlap_ratio)))
    rows = [
        [row.name, plain(row.calls), _bytes(row.bytes), *_statistics(row.latency)] for row in report.collectives or ()
    ]
    return [*lines, "", *layout.table(["collective", "calls", "bytes", *_STATISTICS], rows)]


def _kernels(report: TraceReport, top_rows: int | None) -> list[str]:
    if report.kernels is None or report.kernel_summary is None:
        return []
    summary = report.kernel_summary
    lines = _section(
        "Kernels", "TC: whether the operator can use tensor cores / whether the kernel's name says that it did."
    )
    lines.append(layout.line("kernels", f"{plain(summary.calls)} in {_us(summary.total_us)}"))
    lines.append(layout.line("time on tensor cores", percent(summary.tensor_core_ratio)))
    lines.append(layout.line("time in operators that can use them", percent(summary.tensor_core_eligible_ratio)))
    short = f"{percent(summary.short_calls_ratio)} of the kernels, {percent(summary.short_time_ratio)} of their time"
    lines.append(layout.line(f"shorter than {SHORT_KERNEL_LIMIT_US} us", short))
    shown = report.kernels[:top_rows]
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
    return [*lines, "", *layout.table(head, rows, least_width=6), *_left_out(report.kernels, top_rows)]


def _operators(report: TraceReport, top_rows: int | None, children: bool) -> list[str]:
    if report.operators is None:
        return []
    explanation = "Self: without the operators that it called. Ratios are of the self times of all operators."
    if children:
        explanation += " Indented: what it called and launched itself, with its part of the parent's total."
    with_device = any(row.device is not None for row in report.operators)
    head = ["operator", "calls", "host self", "ratio", "host total", "mean", "max", "min"]
    rows = []
    for row in report.operators[:top_rows]:
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
    table = layout.table(head, rows, least_width=6)
    return [*_section("Operators", explanation), *table, *_left_out(report.operators, top_rows)]


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


def _memory(report: TraceReport, top_rows: int | None) -> list[str]:
    if report.memory is None:
        return []
    explanation = "Size increase: allocated less freed. Allocation: frees left out. Self: without operators it called."
    table = operator_memory_table(report.memory[:top_rows])
    return [*_section("Memory (bytes)", explanation), *table, *_left_out(report.memory, top_rows)]


def _module_memory(report: TraceReport, top_rows: int | None) -> list[str]:
    if not report.module_memory:
        return []
    explanation = "As above, by the module whose forward or backward was running. Self: without the modules inside."
    table = module_memory_table(report.module_memory[:top_rows])
    return [*_section("Memory by module (bytes)", explanation), *table, *_left_out(report.module_memory, top_rows)]


def _transfers(report: TraceReport, top_rows: int | None) -> list[str]:
    if not report.transfers:
        return []
    host = [
        [_short(row.name), plain(row.calls), _bytes(row.bytes), *_statistics(row.host)]
        for row in report.transfers[:top_rows]
    ]
    device = [
        [_short(row.name), plain(row.calls), _bytes(row.bytes), *_statistics(row.device)]
        for row in report.transfers[:top_rows]
    ]
    lines = _section("Memory manipulation", "Copies and memsets: the calls that launched them, and they themselves.")
    lines += layout.table(["host", "calls", "bytes", *_STATISTICS], host)
    lines += ["", *layout.table(["device", "calls", "bytes", *_STATISTICS], device)]
    return [*lines, *_left_out(report.transfers, top_rows)]


def _user_scopes(report: TraceReport, top_rows: int | None) -> list[str]:
    if report.user_scopes is None:
        return []
    rows = []
    for row in report.user_scopes[:top_rows]:
        launched = [] if row.device is None else [_us(row.device.total_us), percent(row.device.ratio)]
        rows.append([_short(row.name), plain(row.calls), *_statistics(row.host), *launched])
    head = ["scope", "calls", *_STATISTICS]
    if report.user_scopes[0].device is not None:
        head += ["device", "ratio"]
    lines = _section("User-defined scopes", "record_function and the like; device: work launched in them.")
    return [*lines, *layout.table(head, rows, least_width=6), *_left_out(report.user_scopes, top_rows)]


def _idle(report: TraceReport) -> list[str]:
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
        for row in report.idle
    ]
    return [*_section("Idle", explanation), *layout.table(["", "busy", "host", "kernel gap", "other"], rows)]


def _launches(report: TraceReport) -> list[str]:
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
        for row in report.launches
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
    return [*_section("Launches", explanation), *layout.table(head, rows, least_width=6)]


def _ranks(comparison: RankComparison, files: Sequence[str], *, straggles: bool) -> list[str]:
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
    lines = ["", *_section("Ranks" if known else "Traces side by side", explanation)[1:]]
    what = "rank" if known else "trace"
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
        for name, row in zip(names, comparison.ranks, strict=True)
    ]
    head = [what, "steps", "wall", "compute", "comm", "overlap", "of comm", "transfer", "wait", "compute/median"]
    lines += layout.table(head, rows, least_width=6)
    rows = [
        [name, row.name, plain(row.calls), plain(row.matched_calls), _bytes(row.bytes)]
        + [_us(value) for value in (row.latency_us, row.transfer_us, row.wait_us)]
        for name, rank in zip(names, comparison.ranks, strict=True)
        for row in rank.collectives
    ]
    if rows:
        head = [what, "collective", "calls", "matched", "bytes", "latency", "transfer", "wait"]
        lines += ["", *layout.table(head, rows, least_width=6, left=(0, 1))]
    if are_compared(comparison):
        longest, straggler = "several alike", "none"
        if comparison.computes_longest is not None:
            longest = f"rank {comparison.computes_longest}"
        if straggles:
            straggler = f"rank {names[longest_own_time(comparison)]}"
    else:
        longest = straggler = NOT_AVAILABLE
    if known:
        lines += ["", layout.line("computes longest", longest), layout.line("straggler", straggler)]
    return [*lines, *(line for note in comparison.notes for line in layout.paragraph(note))]


def _statistics(durations: Durations | None) -> list[str]:
    if durations is None:
        return [NOT_AVAILABLE] * len(_STATISTICS)
    times = (durations.total_us, durations.mean_us, durations.max_us, durations.min_us)
    return [*map(_us, times), percent(durations.ratio)]


def _left_out(rows: Sequence[object], top_rows: int | None) -> Iterable[str]:
    hidden = 0 if top_rows is None else max(len(rows) - top_rows, 0)
    return [f"(and {plain(hidden)} more)"] if hidden else []


def _us(time_us: float | None) -> str:
    return duration(None if time_us is None else time_us / 1e6)


def _bytes(count: int | None) -> str:
    return plain(count)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _short(name: str) -> str:
    return layout.shortened_inside(name, chars=_NAME_CHARS)
