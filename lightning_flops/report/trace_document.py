"""Torch traces as a report: what they say at first sight, and every table of each, described once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from lightning_flops.analysis.counts import grouped
from lightning_flops.analysis.devices import why_no_peak
from lightning_flops.analysis.rates import ratio, why_no_mfu
from lightning_flops.report.compare_text import OVERLAP, rank_section
from lightning_flops.report.document import (
    CALLS,
    Column,
    Section,
    SortKey,
    Table,
    View,
    all_of,
    at,
    distinct_width,
    draw_all,
    filled,
    named,
    points,
    sentences,
    short,
    spread,
    us,
)
from lightning_flops.report.profile_document import NO_ADVICE, advice_section, saving
from lightning_flops.schema import tables
from lightning_flops.schema.trace import TraceReport, TracesReport
from lightning_flops.units import NOT_AVAILABLE, name_files, percent, plain, plural, si


def trace_sections(report: TraceReport, *, children: bool = False) -> Iterator[Section]:
    """All that one trace says, in the order of a report, *children* of operators if asked for; what it lacks is not."""
    for name, make in _SECTIONS.items():
        if (part := getattr(report, name)) and (children or name != "children"):
            yield make(report, part)
        elif name in _WITHOUT:
            yield _WITHOUT[name]


def _memory(report: TraceReport, curves: Sequence[tables.MemoryCurve]) -> Section:
    """What each operator allocated and freed, and the peaks of the *curves*, which a page draws."""
    peaks = {
        f"{_where(one)}: peak": f"{si(one.peak_bytes, 'B')}{'' if one.absolute else ' more than at the start'}, "
        f"{us(one.peak_us)} after the first event{f', in {one.peak_phase}' if one.peak_phase else ''}"
        for one in curves
    }
    return Section(
        "Memory",
        "Size increase: allocated less freed. Allocation: frees left out. Self: without operators it called.",
        [peaks, Table(report.memory or (), _SIZES)],
        "curves",
    )


# What is said of what a trace lacks, by the field of it.
_WITHOUT = {
    "device_metrics": Section(
        "Devices", "", [f"{NOT_AVAILABLE}: GPU utilization, SM efficiency, occupancy: no device events."]
    ),
    "phases": Section("Phases", "", [f"{NOT_AVAILABLE}: nothing in the trace shows phases."]),
}


def _where(row: Any) -> str:
    return "host" if row.device < 0 else f"device {row.device}"


_BYTES = Column("", at("bytes"), unit="B", sort="bytes")
_SIZES = [
    Column("operator", lambda row: "(outside operators)" if row.name is None else row.name, str, "name", is_name=True),
    Column("where", _where, str, left=True),
    CALLS,
    Column("size increase", at("size_increase_bytes"), unit="B"),
    Column("self", at("self_size_increase_bytes"), unit="B"),
    Column("allocation", at("allocation_bytes"), unit="B", sort="bytes"),
    Column("self", at("self_allocation_bytes"), unit="B", sort="self"),
]
_SIZES_CHARS = 44  # of a call of many tensors, more only where rows would look alike
_KINDS = [
    Column("each kind by itself, overlaps counted once", at("name"), str),
    CALLS,
    Column("time", at("time_us"), unit="us"),
    Column("of the steps", at("ratio"), percent),
]
# FLOPs of a row, their rate and share of the peak.
_RATES = [
    Column("", at("flops.total"), unit="FLOPs", sort="flops"),
    Column("", at("flops.flops_per_sec"), unit="FLOP/s", sort="rate"),
    Column("of peak", at("flops.of_peak"), percent),
]


def _steps(report: TraceReport, times: tables.StepTimes) -> Section:
    parts = {"wall": "wall_us", **dict(tables.STEP_PARTS)}
    shown = [("mean", times.mean)] if len(times.steps) > 1 else []
    shown += [(_step_name(step.number), step) for step in times.steps]
    rows: list[Sequence[Any]] = [(name, *attrgetter(*parts.values())(step)) for name, step in shown]
    rows.insert(1, ("share", *(percent(ratio(part=part, whole=rows[0][1])) for part in rows[0][1:])))
    columns = [Column(label, itemgetter(place), unit="us") for place, label in enumerate(parts, 1)]
    return Section(
        "Step time",
        "Each moment of a step counts once: under the first name from the left that ran then. The parts add up to the "
        "wall time. A step lasts to the end of the last kernel that was launched in it. Recording slows the host, so "
        "other steps take less.",
        [
            Table(rows, [Column("", itemgetter(0), str), *columns]),
            *([Table(report.kinds, _KINDS, whole=True)] if report.kinds else []),
        ],
    )


def _step_name(number: int | None) -> str:
    return "whole trace" if number is None else f"step {number}"


def _kernels(report: TraceReport, summary: tables.KernelSummary) -> Section:
    """Each kernel: its time, the FLOPs of the operators that launched it, and how it fills the device."""
    rows = report.kernels or ()

    def tensor_cores(row: tables.KernelRow) -> str | None:
        said = (row.tensor_cores_eligible, row.tensor_cores)
        return None if summary.tensor_core_ratio is None else "/".join("yes" if one else "no" for one in said)

    columns = [
        named("kernel"),
        *filled(rows, [Column("of", at("operator"), str, left=True, is_name=True)]),
        CALLS,
        *spread("device"),
        *filled(rows, [*_RATES, Column("TC", tensor_cores, str)]),
        *all_of({"blocks/SM": "blocks_per_sm", "occupancy, %": "occupancy_percent"}),
    ]
    values = {
        "kernels": f"{plain(summary.calls)} in {us(summary.total_us)}",
        "time on tensor cores": percent(summary.tensor_core_ratio),
        "time in operators that can use them": percent(summary.tensor_core_eligible_ratio),
        f"shorter than {tables.SHORT_KERNEL_LIMIT_US} us": f"{percent(summary.short_calls_ratio)} of the kernels, "
        f"{percent(summary.short_time_ratio)} of their time",
    }
    return Section(
        "Kernels",
        "TC: whether the operator can use tensor cores / whether the kernel's name says that it did; n/a for AMD's and "
        "Intel's names. Above 100% of peak: Winograd and the like multiply less than the formula says, or the clock "
        "was boosted above that of the vendor's figure.",
        [values, Table(rows, columns)],
    )


def _flops(report: TraceReport, flops: tables.TraceFlops) -> Section:
    """FLOPs by step and operator, and what was not counted."""
    skipped = ["skipped"] if any(step.skipped for step in flops.steps) else []
    steps = [
        Column("", lambda step: _step_name(step.step), str),
        Column("wall", at("wall_us"), unit="us", sort="total"),
        *all_of({phase: phase for phase in ("forward", "backward", "recompute", "optimizer", *skipped)}, unit="FLOPs"),
        Column("", at("flops_per_sec"), unit="FLOP/s", sort="rate"),
        *all_of({"MFU": "mfu", "HFU": "hfu"}, percent),
    ]
    operators = [
        named("operator"),
        Column("dtype", at("dtype"), str, left=True),
        CALLS,
        Column("", at("total"), unit="FLOPs", sort="flops"),
        Column("backward", lambda row: row.backward + row.recompute, unit="FLOPs"),
        Column("time", at("time_us"), unit="us", sort="total"),
        Column("", at("flops_per_sec"), unit="FLOP/s", sort="rate"),
        Column("of peak", at("of_peak"), percent),
        Column("FLOP/byte", at("flops_per_byte")),
        Column("attainable", at("attainable_flops_per_sec"), unit="FLOP/s", group="attainable"),
    ]
    uncounted = [named(""), CALLS, Column("why", at("reason"), str, left=True)]
    return Section(
        "FLOPs",
        "From shapes in the trace, by the counter's formulas; a multiply-add is two. MFU: forward + backward over what "
        "the dense peak allows in the step's wall time; HFU and FLOP/s: what the kernels executed, with recomputation, "
        "without what masked attention skips.",
        [
            _peaks(report, flops),
            Table(flops.steps, steps),
            *([Table(flops.operators, operators)] if flops.operators else []),
            "Not counted, so that FLOPs, MFU and HFU are at least these:" if flops.uncounted else "",
            *([Table(flops.uncounted, uncounted)] if flops.uncounted else []),
        ],
        "roofline",
    )


def _peaks(report: TraceReport, flops: tables.TraceFlops) -> dict[str, str]:
    if flops.device is None and not flops.peaks:
        return {"peak": f"n/a ({why_no_mfu([report])})"}
    count = f"{flops.devices} x " if flops.devices > 1 else ""
    unknown = sorted({row.dtype for row in flops.operators} - set(flops.peaks))
    return {
        "device": f"{count}{flops.device or 'of no known name'}",
        **{f"dense peak in {dtype}": si(peak, "FLOP/s") for dtype, peak in flops.peaks.items()},
        **{f"dense peak in {dtype}": f"n/a ({why_no_peak(flops.device or '', dtype)})" for dtype in unknown},
        "memory bandwidth": si(flops.memory_bytes_per_sec, "B/s"),
    }


def _modules(_: TraceReport, modules: tables.ModuleTable) -> Section:
    backward = {"bwd self": "own_backward_us", "bwd total": "backward_us"}
    rates = filled(modules.rows, _RATES)
    columns = [
        Column("module", lambda row: row.name or "(root)", str, "name", is_name=True),
        CALLS,
        Column("fwd self", at("own_forward_us"), unit="us", sort="self"),
        Column("fwd total", at("forward_us"), unit="us", sort="total"),
        *all_of(backward if any(row.backward_us for row in modules.rows) else {}, unit="us"),
        *rates,
    ]
    wholes = {
        "forward": us(modules.forward_us),
        "  of it unattributed": us(modules.unattributed_forward_us),
        "backward": us(modules.backward_us),
        "  of it gradient accumulation": us(modules.gradient_accumulation_us),
        "  of it unattributed to a module": us(modules.unattributed_backward_us),
        "optimizer": us(modules.optimizer_us),
    }
    of_steps = "medians of one step" if modules.steps == 1 else "all steps together"
    note = sentences(
        f"Time on the {modules.clock}, {of_steps}; self: without the modules inside. The backward includes what it "
        "repeats of the forward. Gradient accumulation is of the whole model and has its own line.",
        "FLOPs are with the modules inside; FLOP/s and of peak: over the total of forward and backward."
        if rates
        else "",
    )
    rows = sorted(modules.rows, key=lambda row: -(row.own_forward_us + row.own_backward_us))
    return Section("Modules", note, [wholes, Table(rows, columns)])


def _communication(report: TraceReport, _: object) -> Section:
    rows = report.collectives or ()
    clock = "device" if any(row.device is not None for row in rows) else "host"
    return Section(
        "Communication",
        "Overlapping events are merged. Compute: kernels that do not communicate. Exposed: not hidden by these.",
        [Table([report], filled([report], OVERLAP)), Table(rows, [named("collective"), CALLS, _BYTES, *spread(clock)])],
    )


def _operators(report: TraceReport, rows: Sequence[tables.OperatorRow]) -> Section:
    """Each operator: its times on the host and on the device, where it was called, and the same by input shape."""
    by_shape = report.operators_by_shape or ()
    width = distinct_width([row.inputs for row in by_shape], least=_SIZES_CHARS)
    sizes = Column("sizes", at("inputs"), partial(short, chars=width), left=True)
    columns, of_shape = [named("operator"), CALLS], [named("by input shape"), sizes, CALLS]
    for clock in ("host", "device"):
        columns += spread(f"{clock}_self", "total ratio", sort="self", prefix=f"{clock} self ")
        columns += spread(clock, "total mean max", prefix=f"{clock} ")
        of_shape += spread(clock, "total mean", prefix=f"{clock} ")
    columns.append(Column("called from", at("called_from"), str, left=True, is_name=True))
    shapes = [Table(by_shape, filled(by_shape, [*of_shape, *_RATES]))] if by_shape else []
    return Section(
        "Operators",
        "Self: without the operators that it called. Ratios are of the self times of all operators.",
        [Table(rows, filled(rows, columns)), *shapes],
    )


def _children(report: TraceReport, children: Sequence[tables.ChildRow]) -> Section:
    """Under each operator what its calls called and launched."""
    indented: list[Any] = [replace(child, name=f"  {child.name}") for child in children]
    of = grouped(indented, attrgetter("operator"))
    rows = [row for one in report.operators or () if one.name in of for row in (one, *of[one.name])]
    columns = [
        *(named("operator, and what it called and launched"), CALLS),
        *spread("host", "total ratio", prefix="host "),
        *spread("device", "total ratio", prefix="device "),
    ]
    return Section(
        "Operators and what they called",
        "What an operator called or launched itself stands under it, with the share of its time that this took.",
        [Table(rows, filled(rows, columns))],
    )


def _table(
    title: str,
    note: str,
    columns: Sequence[Column],
    _: TraceReport,
    rows: Sequence[Any],
    *,
    whole: bool = False,
    known: bool = False,
) -> Section:
    """The section of one table: all rows of a *whole* one, and of columns those of which something is *known*."""
    return Section(title, note, [Table(rows, filled(rows, columns) if known else columns, whole)])


_SECTIONS: dict[str, Callable[[TraceReport, Any], Section]] = {
    "step_times": _steps,
    "device_metrics": partial(
        _table,
        "Devices",
        "Within the steps. Utilization: a kernel ran. SM efficiency and occupancy are estimated from launches.",
        [
            Column("", _where, str),
            Column("", lambda row: row.name or "not described in the trace", str, left=True),
            Column("SMs", at("sm_count")),
            *all_of({"GPU utilization": "utilization", "SM efficiency": "sm_efficiency"}, percent),
            *all_of({"occupancy, %": "occupancy_percent", "blocks/SM": "blocks_per_sm"}),
        ],
        whole=True,
    ),
    "kernel_summary": _kernels,
    "flops": _flops,
    "phases": partial(
        _table,
        "Phases",
        "On the host's clock, and the device work launched in them, by scopes in the trace or by operators: with "
        "gradients on before a backward, and in autograd. What is in none is in others, once for each step.",
        [named("phase"), CALLS, *spread("host"), *spread("device", prefix="device ")],
        whole=True,
        known=True,
    ),
    "modules": _modules,
    "overlap": _communication,
    "operators": _operators,
    "children": _children,
    "memory_curves": _memory,
    "transfers": partial(
        _table,
        "Memory manipulation",
        "Copies and memsets: the calls that launched them, and they themselves.",
        [named("kind"), CALLS, _BYTES, *spread("host", prefix="call "), *spread("device")],
    ),
    "user_scopes": partial(
        _table,
        "User-defined scopes",
        "record_function and the like; device: work launched in them.",
        [named("scope"), CALLS, *spread("host"), *spread("device", "total ratio", prefix="device ")],
        known=True,
    ),
    "idle": partial(
        _table,
        "Idle",
        "Pauses between device events, over the whole trace. Host: what ended the pause was launched after it had "
        f"begun. Kernel gap: launched in time, under {tables.KERNEL_GAP_LIMIT_US} us. Other: the rest.",
        [
            Column("", _where, str),
            Column("busy", at("busy_us"), unit="us", sort="total"),
            *all_of({"host": "host_wait_us", "kernel gap": "kernel_gap_us", "other": "other_us"}, unit="us"),
        ],
    ),
}


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
    nothing = _NO_KERNELS if any(map(_lacks_kernels, report.traces)) else NO_ADVICE
    return [*ranks, advice_section(report.advice, nothing=nothing, of=_whole(report))]


def _whole(report: TracesReport) -> str:
    """What savings are shares of."""
    return "a step" if all(trace.step_times.marked for trace in report.traces) else "the trace"


def _lacks_kernels(trace: TraceReport) -> bool:
    """Whether calls of a device's runtime took time, and no kernel was recorded."""
    return bool(trace.step_times.mean.runtime_us) and trace.kernels is None


def render_traces(
    report: TracesReport,
    *,
    top_rows: int | None = 20,
    sort: SortKey | None = None,
    width: int | None = None,
    children: bool = False,
) -> str:
    """The summary, *top_rows* or all rows of every table of every trace, and the ranks side by side."""
    sections = [Section("Summary", "", points(summary(report)))]
    for trace, name in zip(report.traces, names_of(report), strict=True):
        number, marked = len(trace.step_times.steps), trace.step_times.marked
        steps = f"{number} {plural('step', number)}" if marked else "no profiler steps: the whole trace is one step"
        about = f"{trace.source}: {plain(trace.events)} events, {steps}."
        sections += [Section(f"Trace of {name}", about, trace.notes), *trace_sections(trace, children=children)]
    return draw_all([*sections, *common_sections(report)], View(rows=top_rows, sort=sort, width=width))


# ---- the summary

_NO_KERNELS = (
    "The host called a device's runtime, and no kernel, copy or memset was recorded: its time is in no figure. "
    "Record with ProfilerActivity.CUDA (XPU), and where that was so, give the process access to CUPTI or roctracer."
)
_TRACES, _PARTS, _KERNELS = 4, 4, 3  # the most of each that it names


def summary(report: TracesReport) -> list[str]:
    """What the traces say at first sight, and what to try first, in sentences."""
    missing = [_NO_KERNELS] if any(map(_lacks_kernels, report.traces)) else []
    of_each = zip(report.traces, names_of(report), strict=True)
    said = points(
        [f"{name}: {_time(trace)} {_mfu(trace)}" for trace, name in of_each], _TRACES, mark="", others="traces"
    )
    if len(report.traces) == 1:
        (trace,) = report.traces
        said = [_time(trace), _mfu(trace), *([_top_kernels(trace)] if trace.kernels else [])]
    first = zip(report.advice, ("Try first", "Then", "Then"), strict=False)
    advice = [f"{which}: {one.fact} {one.remedy}{saving(one, _whole(report))}" for one, which in first]
    return [*missing, *said, *(advice or ([] if missing else [NO_ADVICE]))]


def _mfu(trace: TraceReport) -> str:
    flops = trace.flops
    if flops is None or flops.mfu is None:
        return f"MFU is n/a: {why_no_mfu([trace]) or 'its FLOPs are not known'}."
    peaks = " and ".join(f"{si(peak, 'FLOP/s')} in {dtype}" for dtype, peak in flops.peaks.items())
    least = "at least " if any(step.lower_bound for step in flops.steps) else ""
    return f"MFU is {least}{percent(flops.mfu)}, HFU {least}{percent(flops.hfu)} of the device's dense peak, {peaks}."


def _top_kernels(trace: TraceReport) -> str:
    """The kernels that took most time, which are those to begin with."""
    from lightning_flops.trace.columns import own_name  # which loads numpy

    top_kernels = []
    for row in (trace.kernels or ())[:_KERNELS]:
        of_peak = "" if (part := at("flops.of_peak")(row)) is None else f" (at {percent(part)} of the peak)"
        launched = f" of {short(row.operator)}" if row.operator else ""
        top_kernels.append(f"{short(own_name(row.name))}{launched} {percent(row.device.ratio)}{of_peak}")
    return f"Most kernel time: {', '.join(top_kernels)}."


def _time(trace: TraceReport) -> str:
    """How long a step takes, and what filled most of it."""
    times, mean = trace.step_times, trace.step_times.mean
    several, wall = len(times.steps) > 1, us(mean.wall_us)
    what = f"The step takes {wall}" if times.marked else f"The whole trace takes {wall}"
    what = f"A step takes {wall}, the mean of {plain(len(times.steps))}" if several else what
    known = {name: getattr(mean, field) or 0.0 for name, field in tables.STEP_PARTS}
    longest = sorted(filter(known.get, known), key=lambda name: -known[name])[:_PARTS]
    parts = ", ".join(f"{name} {percent(ratio(part=known[name], whole=mean.wall_us))}" for name in longest)
    return f"{what}{f': {parts}' if parts else ''}."
