"""Every table of a trace, described once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightning_flops.analysis.devices import why_no_peak
from lightning_flops.analysis.peaks import why_no_mfu
from lightning_flops.report.document import (
    CALLS,
    Column,
    Figure,
    Item,
    Section,
    Table,
    at,
    cells,
    field,
    named,
    short,
    statistics,
    us,
)
from lightning_flops.schema.communication import Overlap
from lightning_flops.schema.trace import TraceReport
from lightning_flops.schema.trace_events import KERNEL_GAP_LIMIT_US, SHORT_KERNEL_LIMIT_US, KernelSummary, MemoryCurve
from lightning_flops.schema.trace_flops import TraceFlops
from lightning_flops.schema.trace_steps import STEP_PARTS, ModuleTable, StepTime
from lightning_flops.units import NOT_AVAILABLE, percent, plain, si

MEMORY_TITLES = ("Memory over time", "Memory (bytes)", "Memory by module (bytes)")
"""Sections of which a trace has what it needs with ``profile_memory`` alone."""


def trace_sections(report: TraceReport) -> Iterator[Section]:
    """All that one trace says, in the order of a report; what it has nothing for is left out."""
    yield _steps(report)
    yield from _devices(report)
    if report.kernel_summary is not None:
        yield _kernels(report, report.kernel_summary)
    if report.flops is not None:
        yield _flops(report, report.flops)
    yield _phases(report)
    if report.modules is not None:
        yield _modules(report.modules)
    if report.overlap is not None:
        yield _communication(report, report.overlap)
    if report.operators is not None:
        yield _operators(report)
    if report.memory_curves:
        peaks = [*map(_peak, report.memory_curves)]
        yield Section("Memory over time", "The most that was allocated at once.", peaks, "curves")
    note = "Size increase: allocated less freed. Allocation: frees left out. Self: without operators it called."
    yield from _section("Memory (bytes)", note, report.memory, [_place("operator"), *_SIZES])
    note = "As above, by the module whose forward was running. Self: without the modules inside."
    yield from _section("Memory by module (bytes)", note, report.module_memory, [_place("module"), *_SIZES])
    note = "Copies and memsets: the calls that launched them, and they themselves."
    calls = statistics("host", sorts=False, prefix="call ")
    yield from _section(
        "Memory manipulation", note, report.transfers, [named("kind"), CALLS, _BYTES, *calls, *statistics("device")]
    )
    columns = [named("scope"), CALLS, *statistics("host")]
    if any(row.device is not None for row in report.user_scopes or ()):
        columns += statistics("device", "total ratio", sorts=False, prefix="device ")
    note = "record_function and the like; device: work launched in them."
    yield from _section("User-defined scopes", note, report.user_scopes, columns)
    note = (
        "Pauses between device events, over the whole trace. Host: what ended the pause was launched after it had "
        f"begun. Kernel gap: launched in time, under {KERNEL_GAP_LIMIT_US} us. Other: the rest."
    )
    yield from _section("Idle", note, report.idle, _IDLE)


def _section(title: str, note: str, rows: Sequence[Any] | None, columns: Sequence[Column]) -> Iterator[Section]:
    """The section of one table; none without rows."""
    if rows:
        yield Section(title, note, [Table(rows, columns)])


def _where(row: Any) -> str:
    return "host" if row.device < 0 else f"device {row.device}"


def _place(of: str) -> Column:
    """The column of what allocated: an *operator* or a *module*."""

    def name(row: Any) -> str:
        return short("(outside operators)" if row.name is None else row.name or "(root)")

    return Column(of, name, str, "name")


_BYTES = field("bytes", "bytes", sort="bytes")
_SIZES = [
    Column("where", _where, str, left=True),
    CALLS,
    field("size increase", "size_increase_bytes"),
    field("self", "self_size_increase_bytes"),
    field("allocation", "allocation_bytes", sort="bytes"),
    field("self", "self_allocation_bytes", sort="self"),
]
_IDLE = [
    Column("", _where, str),
    field("busy", "busy_us", us, "total"),
    field("host", "host_wait_us", us),
    field("kernel gap", "kernel_gap_us", us),
    field("other", "other_us", us),
]


def _rates(rows: Sequence[Any], of: str = "total") -> list[Column]:
    """Columns of the FLOPs that *rows* have, of their rate and share of the peak; none where no row has any."""

    def column(label: str, name: str, show: Callable[[Any], str], sort: str = "") -> Column:
        return field(label, f"flops.{name}", lambda known: "" if known is None else show(known), sort)

    if all(row.flops is None for row in rows):
        return []
    return [
        column("FLOPs", of, si, "flops"),
        column("FLOP/s", "flops_per_sec", si, "rate"),
        column("of peak", "hfu", percent),
    ]


def _steps(report: TraceReport) -> Section:
    times = report.step_times
    wall, many = times.mean.wall_us, len(times.steps) > 1

    def parts(step: StepTime) -> list[float | None]:
        return [step.wall_us, *(getattr(step, part) for _, part in STEP_PARTS)]

    shares = [percent(None if part is None or not wall else part / wall) for part in parts(times.mean)]
    rows = [[_step_name(step.number), *map(us, parts(step))] for step in times.steps]
    mean = [["mean", *map(us, parts(times.mean))]] if many else rows
    table = cells(["", "wall", *(label for label, _ in STEP_PARTS)], [*mean, ["share", *shares]])
    return Section(
        "Step time",
        "Each moment of a step counts once: under the first name from the left that ran then. The parts add up to the "
        "wall time. A step lasts to the end of the last kernel that was launched in it.",
        [table, *([Table(rows, table.columns)] if many else [])],
    )


def _step_name(number: int | None) -> str:
    return "whole trace" if number is None else f"step {number}"


def _devices(report: TraceReport) -> Iterator[Section]:
    columns = [
        Column("", _where, str),
        Column("", lambda row: row.name or "not described in the trace", str, left=True),
        field("SMs", "sm_count"),
        field("GPU utilization", "utilization", percent),
        field("SM efficiency", "sm_efficiency", percent),
        field("occupancy, %", "occupancy_percent"),
        field("blocks/SM", "blocks_per_sm"),
    ]
    note = "Within the steps. Utilization: a kernel ran. SM efficiency and occupancy are estimated from launches."
    yield from _section("Devices", note, report.device_metrics, columns)
    if report.device_metrics is None:
        yield Section(
            "Devices", "", [f"GPU utilization, SM efficiency, occupancy: {NOT_AVAILABLE} (no device events)."]
        )


def _kernels(report: TraceReport, summary: KernelSummary) -> Section:
    """Each kernel: its time, the FLOPs of the operators that launched it, and how it fills the device."""
    rows, names_show = report.kernels or (), summary.tensor_core_ratio is not None

    def tensor_cores(row: Any) -> str:
        return "/".join("yes" if one else "no" for one in (row.tensor_cores_eligible, row.tensor_cores))

    columns = [named("kernel"), CALLS, *statistics("device"), *_rates(rows, "hardware")]
    columns += [Column("TC", tensor_cores, str)] if names_show else []
    columns += [field("blocks/SM", "blocks_per_sm"), field("occupancy, %", "occupancy_percent")]
    figures = {"kernels": f"{plain(summary.calls)} in {us(summary.total_us)}"}
    if names_show:
        figures["time on tensor cores"] = percent(summary.tensor_core_ratio)
        figures["time in operators that can use them"] = percent(summary.tensor_core_eligible_ratio)
    of_all = f"{percent(summary.short_calls_ratio)} of the kernels, {percent(summary.short_time_ratio)} of their time"
    figures[f"shorter than {SHORT_KERNEL_LIMIT_US} us"] = of_all
    items: list[Item] = [Figure(label, value) for label, value in figures.items()]
    items.append(Table(rows, columns))
    if any(one.flops is not None and (one.flops.hfu or 0) > 1 for one in rows):
        items.append("Above 100%: algorithms such as Winograd's multiply less than the formula of a convolution says.")
    return Section(
        "Kernels",
        "TC: whether the operator can use tensor cores / whether the kernel's name says that it did."
        if names_show
        else "Which ran on tensor cores is n/a: none computes, or the names are AMD's or Intel's, without that.",
        items,
    )


def _flops(report: TraceReport, flops: TraceFlops) -> Section:
    """FLOPs by step and operator, and what was not counted."""
    steps = [
        Column("", lambda step: _step_name(step.step), str),
        field("wall", "wall_us", us, "total"),
        *(field(phase, phase, si) for phase in ("forward", "backward", "recompute", "optimizer")),
        field("FLOP/s", "flops_per_sec", si, "rate"),
        field("MFU", "mfu", percent),
        field("HFU", "hfu", percent),
    ]
    operators = [
        named("operator"),
        Column("dtype", at("dtype"), str, left=True),
        CALLS,
        field("FLOPs", "total", si, "flops"),
        Column("backward", lambda row: row.backward + row.recompute, si),
        field("time", "time_us", us, "total"),
        field("FLOP/s", "flops_per_sec", si, "rate"),
        field("of peak", "hfu", percent),
        field("FLOP/byte", "flops_per_byte"),
        field("attainable", "attainable_flops_per_sec", si),
    ]
    items: list[Item] = [*_peaks(report, flops), Table(flops.steps, steps)]
    items += [Table(flops.operators, operators)] if flops.operators else []
    if flops.uncounted:
        items.append("Not counted, so that FLOPs, MFU and HFU are at least these:")
        items.append(Table(flops.uncounted, [named(""), CALLS, Column("why", at("reason"), str, left=True)]))
    return Section(
        "FLOPs",
        "From the shapes in the trace, by the counter's formulas: matrix products, convolutions, attention, "
        "recurrent layers; a multiply-add is two. MFU is forward + backward over what the device could do at its "
        "dense peak in the step's wall time, HFU what the kernels executed, recomputation included.",
        items,
        "roofline",
    )


def _peaks(report: TraceReport, flops: TraceFlops) -> list[Figure]:
    if flops.device is None and not flops.peaks:
        return [Figure("peak", f"n/a ({why_no_mfu([report])})")]
    count = f"{flops.devices} x " if flops.devices > 1 else ""
    peaks = {dtype: si(peak, "FLOP/s") for dtype, peak in flops.peaks.items()}
    for dtype in sorted({row.dtype for row in flops.operators} - set(peaks)):
        peaks[dtype] = f"n/a ({why_no_peak(flops.device or '', dtype)})"
    return [
        Figure("device", f"{count}{flops.device or 'of no known name'}"),
        *(Figure(f"dense peak in {dtype}", peak) for dtype, peak in peaks.items()),
        Figure("memory bandwidth", si(flops.memory_bytes_per_sec, "B/s")),
    ]


def _phases(report: TraceReport) -> Section:
    if report.phases is None:
        return Section("Phases", "", [f"{NOT_AVAILABLE}: nothing in the trace shows phases."])
    clocks = ("host", "device") if report.device_metrics is not None else ("host",)
    return Section(
        "Phases",
        "On the host's clock, and the device work launched in them, as scopes in the trace name them, or by operators: "
        "with gradients on before a backward, and in autograd. What is in no phase is in others, once for each step.",
        [Table(report.phases, [named(clock), CALLS, *statistics(clock)], whole=True) for clock in clocks],
    )


def _modules(modules: ModuleTable) -> Section:
    on_device, has_backward = modules.clock == "device", any(row.backward_us for row in modules.rows)
    columns = [
        Column("module", lambda row: row.name or "(root)", short, "name"),
        CALLS,
        field("fwd self", "own_forward_us", us, "self"),
        field("fwd total", "forward_us", us, "total"),
    ]
    columns += [field("bwd self", "own_backward_us", us), field("bwd total", "backward_us", us)] if has_backward else []
    columns += [field("fwd kernels", "forward_kernels")] if on_device else []
    columns += [field("bwd kernels", "backward_kernels")] if on_device and has_backward else []
    rows = sorted(modules.rows, key=lambda row: -(row.own_forward_us + row.own_backward_us))
    wholes = {
        "forward": modules.forward_us,
        "  of it unattributed": modules.unattributed_forward_us,
        "backward": modules.backward_us,
        "  of it gradient accumulation": modules.gradient_accumulation_us,
        "  of it unattributed to a module": modules.unattributed_backward_us,
        "optimizer": modules.optimizer_us,
    }
    of_steps = "medians of one step" if modules.steps == 1 else "all steps together"
    return Section(
        "Modules",
        f"Time on the {modules.clock}, {of_steps}; self: without the modules inside. The backward includes "
        "what it repeats of the forward. Gradient accumulation is of the whole model and has its own line.",
        [
            *(Figure(label, us(time_us)) for label, time_us in wholes.items()),
            Table(rows, [*columns, *_rates(modules.rows)]),
        ],
    )


def _communication(report: TraceReport, share: Overlap) -> Section:
    rows = report.collectives or ()
    clock = "device" if any(row.device is not None for row in rows) else "host"
    parts = {
        "computation without communication": share.computation_us - share.overlap_us,
        "both at once": share.overlap_us,
        "communication without computation": share.exposed_us,
        "neither": share.other_us,
    }
    figures = [
        Figure(label, f"{us(time_us)} ({percent(time_us / share.wall_us if share.wall_us else None)} of the steps)")
        for label, time_us in parts.items()
    ]
    return Section(
        "Communication",
        "Overlapping events are merged. Computation is every kernel that does not communicate.",
        [
            *figures,
            Figure("overlap / communication", percent(share.overlap_ratio)),
            Table(rows, [named("collective"), CALLS, _BYTES, *statistics(clock)]),
        ],
    )


def _operators(report: TraceReport) -> Section:
    """Each operator: its times on the host and on the device, where it was called, and the same by shapes."""
    rows, shapes = report.operators or (), report.operators_by_shape or ()
    clocks = ("host", "device") if any(row.device is not None for row in rows) else ("host",)

    def times(own: str, whole: str) -> Iterator[Column]:
        """Of each clock, without and with what an operator called; rows are sorted by the last of them."""
        for clock in clocks:
            last = clock == clocks[-1]
            first, *others = statistics(f"{clock}_self", own, sorts=False, prefix=f"{clock} self ")
            yield from [replace(first, sort="self" if last else ""), *others]
            yield from statistics(clock, whole, sorts=last, prefix=f"{clock} ")

    columns = [named("operator"), CALLS, *times("total ratio", "total mean max")]
    if any(row.called_from for row in rows):
        columns.append(field("called from", "called_from", short))
    items = [Table(rows, columns)]
    if shapes:
        sizes = field("sizes", "inputs", short)
        columns = [named("by input shape"), replace(sizes, left=True), CALLS, *times("total", "total mean")]
        items.append(Table(shapes, [*columns, *_rates(shapes)]))
    note = "Self: without the operators that it called. Ratios are of the self times of all operators."
    return Section("Operators", note, items)


def _peak(curve: MemoryCurve) -> Figure:
    since = "" if curve.absolute else " more than when the trace began"
    peak = f"{si(curve.peak_bytes, 'B')}{since}, {us(curve.peak_us)} after the first event"
    return Figure(f"{_where(curve)}: peak", peak)
