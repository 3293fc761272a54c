"""What a trace says of FLOPs, kernels and operators, each table described once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning_flops.analysis.devices import why_no_peak
from lightning_flops.analysis.peaks import why_no_mfu
from lightning_flops.report.document import (
    CALLS,
    NAME_CHARS,
    Column,
    Figure,
    Item,
    Section,
    Table,
    at,
    field,
    named,
    place,
    statistics,
    table,
    us,
)
from lightning_flops.report.layout import shortened
from lightning_flops.schema.tables import SHORT_KERNEL_LIMIT_US, TracedStepFlops, TraceFlops
from lightning_flops.schema.trace import TraceReport
from lightning_flops.units import percent, plain, si

_SIZES_CHARS = 44


def rates(rows: Sequence[Any] | None, of: str = "total") -> list[Column]:
    """Columns of the FLOPs that *rows* have, of their rate and share of the peak; none where no row has any."""

    def column(label: str, name: str, show: Callable[[Any], str], sort: str = "") -> Column:
        return Column(label, at(f"flops.{name}"), lambda known: "" if known is None else show(known), sort)

    columns = [
        column("FLOPs", of, si, "flops"),
        column("FLOP/s", "flops_per_sec", si, "rate"),
        column("of peak", "hfu", percent),
    ]
    return columns if any(row.flops is not None for row in rows or ()) else []


def flops_section(report: TraceReport, flops: TraceFlops) -> Section:
    """FLOPs by step and operator, and what was not counted."""
    items: list[Item] = [*_peaks(report, flops), _flops_by_step(flops.steps)]
    if flops.operators:
        columns = [
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
        items.append(table(flops.operators, columns, bytes=at("bytes"), least_width=6))
    if flops.uncounted:
        columns = [named(""), CALLS, Column("why", at("reason"), str, left=True)]
        note = "Not counted, so that FLOPs, MFU and HFU are at least these:"
        items.append(table(flops.uncounted, columns, note=note))
    return Section(
        "FLOPs",
        "From the shapes in the trace, by the counter's formulas: matrix products, convolutions, attention, "
        "recurrent layers; a multiply-add is two. MFU is forward + backward over what the device could do at its "
        "dense peak in the step's wall time, HFU what the kernels executed, recomputation included.",
        items,
    )


def _peaks(report: TraceReport, flops: TraceFlops) -> list[Figure]:
    if flops.device is None and not flops.peaks:
        return [Figure("peak", f"n/a ({why_no_mfu([report])})")]
    count = f"{flops.devices} x " if flops.devices > 1 else ""
    unknown = [dtype for dtype in sorted({row.dtype for row in flops.operators}) if dtype not in flops.peaks]
    bandwidth = flops.memory_bytes_per_sec
    return [
        Figure("device", f"{count}{flops.device or 'of no known name'}"),
        *(Figure(f"dense peak in {dtype}", si(peak, "FLOP/s")) for dtype, peak in flops.peaks.items()),
        *(Figure(f"dense peak in {dtype}", f"n/a ({why_no_peak(flops.device or '', dtype)})") for dtype in unknown),
        Figure("memory bandwidth", "n/a" if bandwidth is None else si(bandwidth, "B/s")),
    ]


def _flops_by_step(steps: Sequence[TracedStepFlops]) -> Table:
    columns = [
        Column("", lambda step: "whole trace" if step.step is None else f"step {step.step}", str),
        field("wall", "wall_us", us, "total"),
        *(field(phase, phase, si) for phase in ("forward", "backward", "recompute", "optimizer")),
        field("FLOP/s", "flops_per_sec", si, "rate"),
        field("MFU", "mfu", percent),
        field("HFU", "hfu", percent),
    ]
    return table(steps, columns, flops=at("hardware"))


def kernel_section(report: TraceReport) -> Section:
    """Each kernel: its time, the FLOPs of the operators that launched it, and how it fills the device."""
    summary, rows = report.kernel_summary, report.kernels or ()
    assert summary is not None  # there where kernels are
    names_show = summary.tensor_core_ratio is not None

    def tensor_cores(row: Any) -> str:
        return "/".join("yes" if one else "no" for one in (row.tensor_cores_eligible, row.tensor_cores))

    columns = [
        Column("kernel", at("name"), str, "name", chars=NAME_CHARS),
        CALLS,
        *statistics(at("device")),
    ]
    columns += rates(rows, "hardware")
    if names_show:
        columns.append(Column("TC", tensor_cores, str))
    columns += [field("blocks/SM", "blocks_per_sm"), field("occupancy, %", "occupancy_percent")]
    after = []
    if any(one.flops is not None and (one.flops.hfu or 0) > 1 for one in rows):
        after.append("Above 100%: algorithms such as Winograd's multiply less than the formula of a convolution says.")
    items: list[Item] = [Figure("kernels", f"{plain(summary.calls)} in {us(summary.total_us)}")]
    if names_show:
        items += [
            Figure("time on tensor cores", percent(summary.tensor_core_ratio)),
            Figure("time in operators that can use them", percent(summary.tensor_core_eligible_ratio)),
        ]
    of_all = f"{percent(summary.short_calls_ratio)} of the kernels, {percent(summary.short_time_ratio)} of their time"
    items.append(Figure(f"shorter than {SHORT_KERNEL_LIMIT_US} us", of_all))
    items.append(table(rows, columns, least_width=6, after=after, self=at("device.total_us")))
    return Section(
        "Kernels",
        "TC: whether the operator can use tensor cores / whether the kernel's name says that it did."
        if names_show
        else "Which ran on tensor cores is n/a: none computes, or the names are AMD's or Intel's, without that.",
        items,
    )


def operator_section(report: TraceReport) -> Section:
    """Each operator: its times on the host and on the device, where it was called, and the same by shapes."""
    rows = report.operators or ()
    clocks = ("host", "device") if any(row.device is not None for row in rows) else ("host",)

    def times(own: str, whole: str) -> Iterator[Column]:
        """Of each clock, without and with what an operator called; rows are sorted by the last of them."""
        for clock in clocks:
            yield from statistics(at(f"{clock}_self"), sorts=False, labels=own, prefix=f"{clock} self ")
            yield from statistics(at(clock), sorts=clock == clocks[-1], labels=whole, prefix=f"{clock} ")

    sorts: dict[str, Any] = {"self": at(f"{clocks[-1]}_self.total_us")}
    columns = [named("operator"), CALLS, *times("total ratio", "total mean max")]
    if any(row.called_from for row in rows):
        columns.append(Column("called from", at("called_from"), place))
    items = [table(rows, columns, least_width=6, **sorts)]
    if report.operators_by_shape:
        columns = [
            named("by input shape"),
            Column("sizes", at("inputs"), lambda sizes: shortened(sizes, chars=_SIZES_CHARS), left=True),
            CALLS,
            *times("total", "total mean"),
            *rates(report.operators_by_shape),
        ]
        items.append(table(report.operators_by_shape, columns, least_width=6, **sorts))
    note = "Self: without the operators that it called. Ratios are of the self times of all operators."
    return Section("Operators", note, items)
