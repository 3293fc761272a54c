"""What a trace says of FLOPs, kernels and operators, each table described once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_flops.analysis.devices import why_no_peak
from lightning_flops.report import layout
from lightning_flops.report.document import (
    CALLS,
    NAME_CHARS,
    Column,
    Figure,
    Section,
    Table,
    field,
    named,
    place,
    statistics,
    table,
    us,
)
from lightning_flops.schema.trace import TraceReport
from lightning_flops.schema.trace_events import SHORT_KERNEL_LIMIT_US
from lightning_flops.schema.trace_flops import JobFlops, JobStepFlops, TracedStepFlops, TraceFlops
from lightning_flops.units import NOT_AVAILABLE, percent, plain, si

_OPERATOR_CHARS = 40
_SIZES_CHARS = 44
_AT_LEAST = ">="


def _operator(name: str) -> str:
    return layout.shortened_inside(name, chars=_OPERATOR_CHARS)


def flops_section(flops: TraceFlops) -> Section:
    """By step, operator and kernel, and what was not counted."""
    items: list[Figure | Table | str] = [*_peaks(flops), _flops_by_step(flops.steps)]
    if flops.operators:
        columns = [
            Column("operator", lambda row: row.operator, _operator, "name"),
            Column("dtype", lambda row: row.dtype, str, left=True),
            CALLS,
            Column("FLOPs", lambda row: row.forward + row.backward + row.recompute + row.optimizer, si, "flops"),
            Column("backward", lambda row: row.backward + row.recompute, si),
            field("time", "time_us", us, "total"),
            field("FLOP/s", "flops_per_sec", si, "rate"),
            field("of peak", "peak_share", percent),
            field("FLOP/byte", "flops_per_byte"),
            field("attainable", "attainable_flops_per_sec", si),
        ]
        items.append(table(flops.operators, columns, bytes=lambda row: row.bytes, least_width=6))
    if flops.kernels:
        items.append(_flops_by_kernel(flops))
    if flops.uncounted:
        columns = [
            Column("", lambda row: row.name, _operator, "name"),
            CALLS,
            Column("why", lambda row: row.reason, str, left=True),
        ]
        note = f"Not counted, so that figures with {_AT_LEAST} are lower bounds:"
        items.append(table(flops.uncounted, columns, note=note))
    return Section(
        "FLOPs",
        "From the shapes in the trace, by the counter's formulas: matrix products, convolutions, attention, "
        "recurrent layers; a multiply-add is two. MFU is forward + backward over what the device could do at its "
        "dense peak in the step's wall time, HFU what the kernels executed, recomputation included.",
        items,
    )


def _peaks(flops: TraceFlops) -> list[Figure]:
    if not flops.devices:
        return [Figure("peak", "n/a (no device is in the trace)")]
    if flops.device is None and not flops.peaks:
        return [Figure("peak", "n/a (no device of one known name ran the kernels)")]
    count = f"{flops.devices} x " if flops.devices > 1 else ""
    unknown = [dtype for dtype in sorted({row.dtype for row in flops.operators}) if dtype not in flops.peaks]
    bandwidth = flops.memory_bytes_per_sec
    return [
        Figure("device", f"{count}{flops.device or 'of no known name'}"),
        *(Figure(f"dense peak in {dtype}", si(peak, "FLOP/s")) for dtype, peak in flops.peaks.items()),
        *(Figure(f"dense peak in {dtype}", f"n/a ({why_no_peak(flops.device or '', dtype)})") for dtype in unknown),
        Figure("memory bandwidth", "n/a" if bandwidth is None else si(bandwidth, "B/s")),
    ]


def _flops_by_step(steps: Sequence[TracedStepFlops | JobStepFlops]) -> Table:
    def marked(label: str, of: Callable[[Any], Any], show: Callable[[Any], str], sort: str = "") -> Column:
        def text(step: Any) -> str:
            shown = show(of(step))
            at_least = step.lower_bound and (shown != "n/a" or show is si)
            return f"{_AT_LEAST} {shown}" if at_least else shown

        return Column(label, lambda step: step, text)

    def rate(step: Any) -> float | None:
        return step.hardware / step.wall_us * 1e6 if step.wall_us else None

    columns = [
        Column("", lambda step: "whole trace" if step.step is None else f"step {step.step}", str),
        field("wall", "wall_us", us, "total"),
        marked("forward", lambda step: step.forward, si),
        marked("backward", lambda step: step.backward, si),
        marked("recompute", lambda step: step.recompute, si),
        marked("optimizer", lambda step: step.optimizer, si),
        marked("FLOP/s", rate, si),
        marked("MFU", lambda step: step.mfu, percent),
        marked("HFU", lambda step: step.hfu, percent),
    ]
    return table(steps, columns, flops=lambda step: step.hardware, rate=rate)


def _flops_by_kernel(flops: TraceFlops) -> Table:
    def about(of: Callable[[Any], Any], show: Callable[[Any], str]) -> Callable[[Any], str]:
        return lambda row: f"{'~' if row.shared_flops and of(row) is not None else ''}{show(of(row))}"

    def itself(row: Any) -> Any:
        return row

    def spent(row: Any) -> int:
        return int(row.flops + row.shared_flops)

    columns = [
        Column("kernel", lambda row: row.name, str, "name", chars=NAME_CHARS),
        CALLS,
        field("time", "time_us", us, "total"),
        Column("FLOPs", itself, about(spent, si)),
        Column("FLOP/s", itself, about(lambda row: row.flops_per_sec, si)),
        Column("of peak", itself, about(lambda row: row.peak_share, percent)),
    ]
    after = []
    if any(row.shared_flops for row in flops.kernels or ()):
        after.append("~: an operator's FLOPs, divided by time among the kernels in it that multiply, is an estimate.")
    shares = [row.peak_share for row in flops.kernels or ()] + [row.peak_share for row in flops.operators]
    if any(share is not None and share > 1 for share in shares):
        after.append("Above 100%: algorithms such as Winograd's multiply less than the formula of a convolution says.")
    return table(flops.kernels, columns, flops=spent, rate=lambda row: row.flops_per_sec, after=after)


def kernel_section(report: TraceReport) -> Section:
    """Each kernel, and how it was launched."""
    summary = report.kernel_summary
    assert summary is not None  # there where kernels are
    told = summary.tensor_core_ratio is not None

    def yes(value: bool) -> str:
        return "yes" if value else "no"

    name = Column("kernel", lambda row: row.name, str, "name", chars=NAME_CHARS)
    columns = [name, CALLS, *statistics(lambda row: row.device)]
    if told:
        columns.append(Column("TC", lambda row: f"{yes(row.tensor_cores_eligible)}/{yes(row.tensor_cores)}", str))
    columns += [
        field("blocks/SM", "blocks_per_sm"),
        Column(
            "occupancy", lambda row: None if row.occupancy_percent is None else row.occupancy_percent / 100, percent
        ),
    ]

    def first(label: str, field: str, show: Callable[[Any], str] = plain) -> Column:
        return Column(label, lambda row: getattr(row.launch_shapes[0], field), show)

    def axes(value: tuple[int, int, int] | None) -> str:
        return NOT_AVAILABLE if value is None else " x ".join(map(str, value))

    launched = [
        Column("launched most of the time with", name.of, str, "name", chars=NAME_CHARS),
        Column("shapes", lambda row: len(row.launch_shapes)),
        first("grid", "grid", axes),
        first("block", "block", axes),
        first("registers", "registers"),
        first("shared B", "shared_memory"),
        first("calls", "calls"),
        first("time", "device_us", us),
    ]
    sorts: dict[str, Any] = {
        "self": lambda row: row.device.total_us,
        "calls": lambda row: row.calls,
        **{one.sort: one.of for one in statistics(lambda row: row.device) if one.sort},
    }
    items: list[Figure | Table | str] = [Figure("kernels", f"{plain(summary.calls)} in {us(summary.total_us)}")]
    if told:
        items += [
            Figure("time on tensor cores", percent(summary.tensor_core_ratio)),
            Figure("time in operators that can use them", percent(summary.tensor_core_eligible_ratio)),
        ]
    of_all = f"{percent(summary.short_calls_ratio)} of the kernels, {percent(summary.short_time_ratio)} of their time"
    items += [
        Figure(f"shorter than {SHORT_KERNEL_LIMIT_US} us", of_all),
        table(report.kernels, columns, least_width=6, **sorts),
    ]
    if any(row.launch_shapes for row in report.kernels or ()):
        items.append(
            table(report.kernels, launched, only=lambda row: row.launch_shapes, more=False, least_width=6, **sorts)
        )
    return Section(
        "Kernels",
        "TC: whether the operator can use tensor cores / whether the kernel's name says that it did."
        if told
        else "Which ran on tensor cores is n/a: none computes, or the names are AMD's or Intel's, which do not tell.",
        items,
    )


def operator_section(report: TraceReport) -> Section:
    """Each operator: its times, on the device, by shapes, and where it was called."""
    with_device = any(row.device is not None for row in report.operators or ())
    with_places = any(row.called_from for row in report.operators or ())
    note = "Self: without the operators that it called. Ratios are of the self times of all operators."

    def times(of: str, labels: str, prefix: str = "") -> list[Column]:
        found = statistics(lambda row: getattr(row, of), sorts=False, labels=labels)
        return [Column(prefix + found[0].label, found[0].of, found[0].show), *found[1:]]

    def lead(field: str) -> Callable[[Any], Any]:
        return lambda row: getattr(row.host if row.device is None else row.device, field)

    sorts: dict[str, Any] = {
        "name": lambda row: row.name,
        "calls": lambda row: row.calls,
        "self": lambda row: (row.device_self or row.host_self).total_us,
        **{key: lead(f"{key}_us") for key in ("total", "mean", "max", "min")},
    }

    columns = [
        named("operator"),
        CALLS,
        *times("host_self", "total ratio"),
        *times("host", "total mean max min", "host "),
    ]
    columns[2] = Column("host self", columns[2].of, us)
    if with_device:
        own = times("device_self", "total ratio")
        columns += [Column("device self", own[0].of, us), own[1], *times("device", "total", "device ")]
    items = [table(report.operators, columns, least_width=6, **sorts)]
    if with_device or with_places:
        of_a_call = [named("of a call")]
        of_a_call += times("device", "mean max min", "device ") if with_device else []
        if with_places:
            of_a_call += [
                Column(
                    "called from", lambda row: row.called_from, lambda found: place(found[0].place) if found else ""
                ),
                Column(
                    "other lines", lambda row: row.called_from, lambda found: plain(len(found) - 1) if found else ""
                ),
            ]
        items.append(table(report.operators, of_a_call, more=False, least_width=6, **sorts))
    if report.operators_by_shape:
        items.append(_operators_by_shape(report, times, sorts))
    return Section("Operators", note, items)


def _operators_by_shape(report: TraceReport, times: Callable[..., list[Column]], sorts: dict[str, Any]) -> Table:
    flops = {(one.name, one.inputs, one.dtypes): one for one in (report.flops.shapes if report.flops else ())}

    def counted(row: Any) -> Any:
        return flops.get((row.name, row.inputs, row.dtypes))

    def of_flops(label: str, field: str, show: Callable[[Any], str]) -> Column:
        return Column(label, counted, lambda one: "" if one is None else show(getattr(one, field)))

    columns = [
        Column(
            "by input shape", lambda row: row.name, lambda name: layout.shortened_inside(name, chars=_OPERATOR_CHARS)
        ),
        Column("sizes", lambda row: row.inputs, lambda sizes: layout.shortened(sizes, chars=_SIZES_CHARS), left=True),
        CALLS,
        Column("host self", lambda row: row.host_self.total_us, us),
        *times("host", "total mean", "host "),
    ]
    if any(row.device is not None for row in report.operators_by_shape or ()):
        own = Column("device self", lambda row: row.device_self.total_us, us)
        columns += [own, *times("device", "total mean", "device ")]
    if flops:
        columns += [
            of_flops("FLOPs", "counted", si),
            of_flops("FLOP/s", "flops_per_sec", si),
            of_flops("of peak", "peak_share", percent),
        ]
    more: dict[str, Any] = {
        "flops": lambda row: getattr(counted(row), "counted", None),
        "rate": lambda row: getattr(counted(row), "flops_per_sec", None),
    }
    return table(report.operators_by_shape, columns, least_width=6, **sorts, **more)


def job_section(flops: JobFlops) -> Section:
    """FLOPs of all ranks together."""
    note = "Of all ranks together. The wall time is the mean of theirs; MFU and HFU are over what all devices could do."
    return Section("FLOPs of the job", note, [_flops_by_step(flops.steps)])
