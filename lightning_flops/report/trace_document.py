"""Torch traces as a report: what they say at first sight, and every table of each, described once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightning_flops.analysis.devices import why_no_peak
from lightning_flops.analysis.peaks import why_no_mfu
from lightning_flops.analysis.rank_names import name_files
from lightning_flops.analysis.rates import ratio
from lightning_flops.report.document import (
    CALLS,
    Column,
    Figure,
    Item,
    Section,
    SortKey,
    Table,
    and_more,
    at,
    cells,
    field,
    figures,
    named,
    short,
    statistics,
    us,
)
from lightning_flops.report.layout import View, draw_all
from lightning_flops.report.profile_document import NO_ADVICE, advice_section, saving
from lightning_flops.report.ranks_document import rank_section
from lightning_flops.schema.ranks import Overlap
from lightning_flops.schema.tables import (
    KERNEL_GAP_LIMIT_US,
    SHORT_KERNEL_LIMIT_US,
    STEP_PARTS,
    KernelSummary,
    MemoryCurve,
    ModuleTable,
    StepTime,
    TraceFlops,
)
from lightning_flops.schema.trace import TraceReport, TracesReport
from lightning_flops.units import NOT_AVAILABLE, percent, plain, plural, si

MEMORY_TITLES = ("Memory over time", "Memory (bytes)")
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
    yield from _section("Memory (bytes)", note, report.memory, _SIZES)
    note = "Copies and memsets: the calls that launched them, and they themselves."
    calls = statistics("host", sort="", prefix="call ")
    yield from _section(
        "Memory manipulation", note, report.transfers, [named("kind"), CALLS, _BYTES, *calls, *statistics("device")]
    )
    columns = [named("scope"), CALLS, *statistics("host")]
    if any(row.device is not None for row in report.user_scopes or ()):
        columns += statistics("device", "total ratio", sort="", prefix="device ")
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


_BYTES = field("bytes", "bytes", sort="bytes")
_SIZES = [
    Column("operator", lambda row: "(outside operators)" if row.name is None else short(row.name), str, "name"),
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


def _rates(rows: Sequence[Any]) -> list[Column]:
    """Columns of the FLOPs that *rows* have, of their rate and share of the peak; none where no row has any."""
    columns = [
        field("FLOPs", "flops.hardware", si, "flops"),
        field("FLOP/s", "flops.flops_per_sec", si, "rate"),
        field("of peak", "flops.hfu", percent),
    ]
    return [] if all(row.flops is None for row in rows) else columns


def _steps(report: TraceReport) -> Section:
    times, labels = report.step_times, ["wall", *(label for label, _ in STEP_PARTS)]

    def parts(step: StepTime) -> list[float | None]:
        return [step.wall_us, *(getattr(step, part) for _, part in STEP_PARTS)]

    wall, *filled = parts(times.mean)
    shares = ["share", percent(1.0), *(percent(ratio(part=part, whole=wall)) for part in filled)]
    rows = [[_step_name(step.number), *map(us, parts(step))] for step in times.steps]
    mean = [["mean", *map(us, parts(times.mean))]] if len(rows) > 1 else []
    rows = [*mean, shares, *rows] if mean else [*rows, shares]
    return Section(
        "Step time",
        "Each moment of a step counts once: under the first name from the left that ran then. The parts add up to the "
        "wall time. A step lasts to the end of the last kernel that was launched in it.",
        [replace(cells(["", *labels], rows), whole=False)],
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
        yield Section("Devices", "", [f"{NOT_AVAILABLE}: GPU utilization, SM efficiency, occupancy: no device events."])


def _kernels(report: TraceReport, summary: KernelSummary) -> Section:
    """Each kernel: its time, the FLOPs of the operators that launched it, and how it fills the device."""
    rows = report.kernels or ()

    def tensor_cores(row: Any) -> str:
        return "/".join("yes" if one else "no" for one in (row.tensor_cores_eligible, row.tensor_cores))

    columns = [named("kernel"), CALLS, *statistics("device"), *_rates(rows)]
    columns += [] if summary.tensor_core_ratio is None else [Column("TC", tensor_cores, str)]
    columns += [field("blocks/SM", "blocks_per_sm"), field("occupancy, %", "occupancy_percent")]
    values = {
        "kernels": f"{plain(summary.calls)} in {us(summary.total_us)}",
        "time on tensor cores": percent(summary.tensor_core_ratio),
        "time in operators that can use them": percent(summary.tensor_core_eligible_ratio),
        f"shorter than {SHORT_KERNEL_LIMIT_US} us": f"{percent(summary.short_calls_ratio)} of the kernels, "
        f"{percent(summary.short_time_ratio)} of their time",
    }
    note = "TC: whether the operator can use tensor cores / whether the kernel's name says that it did; n/a where none "
    note += "computes, or the names are AMD's or Intel's. Above 100% of peak: algorithms such as Winograd's multiply "
    note += "less than the formula of a convolution says."
    return Section("Kernels", note, [*figures(values), Table(rows, columns)])


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


def _peaks(report: TraceReport, flops: TraceFlops) -> list[Item]:
    if flops.device is None and not flops.peaks:
        return [Figure("peak", f"n/a ({why_no_mfu([report])})")]
    count = f"{flops.devices} x " if flops.devices > 1 else ""
    values = {"device": f"{count}{flops.device or 'of no known name'}"}
    values |= {f"dense peak in {dtype}": si(peak, "FLOP/s") for dtype, peak in flops.peaks.items()}
    for dtype in sorted({row.dtype for row in flops.operators} - set(flops.peaks)):
        values[f"dense peak in {dtype}"] = f"n/a ({why_no_peak(flops.device or '', dtype)})"
    return figures({**values, "memory bandwidth": si(flops.memory_bytes_per_sec, "B/s")})


def _phases(report: TraceReport) -> Section:
    if report.phases is None:
        return Section("Phases", "", [f"{NOT_AVAILABLE}: nothing in the trace shows phases."])
    columns = [named("phase"), CALLS, *statistics("host")]
    columns += statistics("device", sort="", prefix="device ") if report.device_metrics is not None else []
    return Section(
        "Phases",
        "On the host's clock, and the device work launched in them, as scopes in the trace name them, or by operators: "
        "with gradients on before a backward, and in autograd. What is in no phase is in others, once for each step.",
        [Table(report.phases, columns, whole=True)],
    )


def _modules(modules: ModuleTable) -> Section:
    columns = [
        Column("module", lambda row: row.name or "(root)", short, "name"),
        CALLS,
        field("fwd self", "own_forward_us", us, "self"),
        field("fwd total", "forward_us", us, "total"),
    ]
    if any(row.backward_us for row in modules.rows):
        columns += [field("bwd self", "own_backward_us", us), field("bwd total", "backward_us", us)]
    rows = sorted(modules.rows, key=lambda row: -(row.own_forward_us + row.own_backward_us))
    wholes = {
        "forward": us(modules.forward_us),
        "  of it unattributed": us(modules.unattributed_forward_us),
        "backward": us(modules.backward_us),
        "  of it gradient accumulation": us(modules.gradient_accumulation_us),
        "  of it unattributed to a module": us(modules.unattributed_backward_us),
        "optimizer": us(modules.optimizer_us),
    }
    of_steps = "medians of one step" if modules.steps == 1 else "all steps together"
    return Section(
        "Modules",
        f"Time on the {modules.clock}, {of_steps}; self: without the modules inside. The backward includes "
        "what it repeats of the forward. Gradient accumulation is of the whole model and has its own line.",
        [*figures(wholes), Table(rows, columns)],
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
    values = {
        label: f"{us(time_us)} ({percent(ratio(part=time_us, whole=share.wall_us))} of the steps)"
        for label, time_us in parts.items()
    }
    values["overlap / communication"] = percent(share.overlap_ratio)
    table = Table(rows, [named("collective"), CALLS, _BYTES, *statistics(clock)])
    note = "Overlapping events are merged. Computation is every kernel that does not communicate."
    return Section("Communication", note, [*figures(values), table])


def _operators(report: TraceReport) -> Section:
    """Each operator: its times on the host and on the device, where it was called, and the same by input shape."""
    rows = report.operators or ()
    clocks = ("host", "device") if any(row.device is not None for row in rows) else ("host",)
    columns = [named("operator"), CALLS]
    for clock in clocks:  # rows are sorted by the last of them
        last = clock == clocks[-1]
        columns += statistics(f"{clock}_self", "total ratio", sort="self" if last else "", prefix=f"{clock} self ")
        columns += statistics(clock, "total mean max", sort=None if last else "", prefix=f"{clock} ")
    if any(row.called_from for row in rows):
        columns.append(field("called from", "called_from", short))
    note = "Self: without the operators that it called. Ratios are of the self times of all operators."
    tables: list[Item] = [Table(rows, columns)]
    if by_shape := report.operators_by_shape:
        sizes = Column("sizes", at("inputs"), lambda sizes: f"{sizes[:43]}…" if len(sizes) > 44 else sizes, left=True)
        columns = [named("by input shape"), sizes, CALLS]
        for clock in clocks:
            last = clock == clocks[-1]
            columns += statistics(clock, "total mean", sort=None if last else "", prefix=f"{clock} ")
        tables.append(Table(by_shape, [*columns, *_rates(by_shape)]))
    return Section("Operators", note, tables)


def _peak(curve: MemoryCurve) -> Figure:
    since = "" if curve.absolute else " more than when the trace began"
    peak = f"{si(curve.peak_bytes, 'B')}{since}, {us(curve.peak_us)} after the first event"
    return Figure(f"{_where(curve)}: peak", peak)


def names_of(report: TracesReport) -> list[str]:
    """What each trace is called: by its rank, if it says that, else by its file."""
    files = name_files([trace.source for trace in report.traces])
    return [
        short(file) if trace.rank is None else f"rank {trace.rank}"
        for trace, file in zip(report.traces, files, strict=True)
    ]


def common_sections(report: TracesReport) -> list[Section]:
    """The ranks side by side, if there are several, and the advice."""
    ranks = [] if report.ranks is None else [rank_section(report.ranks)]
    return [*ranks, advice_section(report.advice, rules=True)]


def render_traces(
    report: TracesReport, *, top_rows: int | None = 20, sort: SortKey | None = None, width: int | None = None
) -> str:
    """The answer, *top_rows* or all rows of every table of every trace, and the ranks side by side."""
    sections = [Section("The answer", "", [f"- {words}" for words in answer(report)])]
    for trace, name in zip(report.traces, names_of(report), strict=True):
        steps = len(trace.step_times.steps)
        of_steps = f"{steps} {plural('step', steps)}"
        taken = of_steps if trace.step_times.marked else "no profiler steps: the whole trace is taken as one step"
        about = f"{trace.source}: {plain(trace.events)} events, {taken}."
        sections += [Section(f"Trace of {name}", about, trace.notes), *trace_sections(trace)]
    return draw_all([*sections, *common_sections(report)], View(rows=top_rows, sort=sort, width=width))


# ---- the answer

_TRACES = 4
_PARTS = 4
_KERNELS = 3


def answer(report: TracesReport) -> list[str]:
    """What the traces say at first sight, and what to try first, in sentences."""
    if len(report.traces) == 1:
        (trace,) = report.traces
        said = [_time(trace), _mfu(trace), *([_top_kernels(trace)] if trace.kernels else [])]
    else:
        named = list(zip(report.traces, names_of(report), strict=True))[:_TRACES]
        said = [f"{name}: {_time(trace)} {_mfu(trace)}" for trace, name in named]
    said += and_more(len(report.traces) - _TRACES)
    for one, first in zip(report.advice, ("Try first", "Then", "Then"), strict=False):
        said.append(f"{first}: {one.fact} {one.remedy}{saving(one)}")
    return said if report.advice else [*said, NO_ADVICE]


def _mfu(trace: TraceReport) -> str:
    flops = trace.flops
    if flops is None or flops.mfu is None:
        return f"MFU is n/a: {why_no_mfu([trace]) or 'its FLOPs are not known'}."
    peaks = " and ".join(f"{si(peak, 'FLOP/s')} in {dtype}" for dtype, peak in flops.peaks.items())
    least = "at least " if any(step.lower_bound for step in flops.steps) else ""
    shares = f"MFU is {least}{percent(flops.mfu)}, HFU {least}{percent(flops.hfu)}"
    return f"{shares} of the device's dense peak, {peaks}."


def _top_kernels(trace: TraceReport) -> str:
    """The kernels that took most time, which are those to begin with."""
    from lightning_flops.trace.names import own_name  # which loads numpy

    top_kernels = []
    for row in (trace.kernels or ())[:_KERNELS]:
        hfu = at("flops.hfu")(row)
        of_peak = "" if hfu is None else f" (at {percent(hfu)} of the peak)"
        top_kernels.append(f"{short(own_name(row.name))} {percent(row.device.ratio)}{of_peak}")
    return f"Most kernel time: {', '.join(top_kernels)}."


def _time(trace: TraceReport) -> str:
    """How long a step takes, and what filled most of it."""
    times = trace.step_times
    wall, many = us(times.mean.wall_us), len(times.steps) > 1
    what = f"A step takes {wall}, the mean of {plain(len(times.steps))}" if many else f"The step takes {wall}"
    what = what if times.marked else f"The whole trace takes {wall}"
    known = [(name, getattr(times.mean, field) or 0.0) for name, field in STEP_PARTS]
    longest = sorted((part for part in known if part[1]), key=lambda part: -part[1])[:_PARTS]
    parts = [f"{name} {percent(ratio(part=time_us, whole=times.mean.wall_us))}" for name, time_us in longest]
    return f"{what}: {', '.join(parts)}." if parts else f"{what}."
