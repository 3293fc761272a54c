"""Kernels, copies and the scopes that launched them, as text."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_flops.report import layout
from lightning_flops.report.trace_cells import NAME_CHARS, STATISTICS, short, statistics, us, yes
from lightning_flops.report.trace_view import View
from lightning_flops.schema.trace import TraceReport
from lightning_flops.schema.trace_events import SHORT_KERNEL_LIMIT_US, KernelRow
from lightning_flops.units import NOT_AVAILABLE, percent, plain


def kernel_lines(report: TraceReport, view: View) -> list[str]:
    """Each kernel, and how it was launched."""
    if report.kernels is None or report.kernel_summary is None:
        return []
    summary = report.kernel_summary
    told = summary.tensor_core_ratio is not None
    lines = view.section(
        "Kernels",
        "TC: whether the operator can use tensor cores / whether the kernel's name says that it did."
        if told
        else "Which ran on tensor cores is n/a: none computes, or the names are AMD's or Intel's, which do not tell.",
    )
    lines += view.line("kernels", f"{plain(summary.calls)} in {us(summary.total_us)}")
    if told:
        lines += view.line("time on tensor cores", percent(summary.tensor_core_ratio))
        lines += view.line("time in operators that can use them", percent(summary.tensor_core_eligible_ratio))
    of_all = f"{percent(summary.short_calls_ratio)} of the kernels, {percent(summary.short_time_ratio)} of their time"
    lines += view.line(f"shorter than {SHORT_KERNEL_LIMIT_US} us", of_all)
    shown = view.first(
        report.kernels,
        name=lambda row: row.name,
        calls=lambda row: row.calls,
        self=lambda row: row.device.total_us,
        durations=lambda row: row.device,
    )
    names = layout.shortened_apart([row.name for row in shown], chars=NAME_CHARS)
    rows = [
        [
            name,
            plain(row.calls),
            *statistics(row.device),
            *([f"{yes(row.tensor_cores_eligible)}/{yes(row.tensor_cores)}"] if told else []),
            plain(row.blocks_per_sm),
            percent(None if row.occupancy_percent is None else row.occupancy_percent / 100),
        ]
        for name, row in zip(names, shown, strict=True)
    ]
    head = ["kernel", "calls", *STATISTICS, *(["TC"] if told else []), "blocks/SM", "occupancy"]
    lines += ["", *view.table(head, rows, least_width=6), *view.more(report.kernels)]
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
            us(row.launch_shapes[0].device_us),
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


def transfer_lines(report: TraceReport, view: View) -> list[str]:
    """Copies and memsets."""
    if not report.transfers:
        return []
    shown = view.first(
        report.transfers,
        name=lambda row: row.name,
        calls=lambda row: row.calls,
        bytes=lambda row: row.bytes,
        durations=lambda row: row.device,
    )
    host = [[short(row.name), plain(row.calls), plain(row.bytes), *statistics(row.host)] for row in shown]
    device = [[short(row.name), plain(row.calls), plain(row.bytes), *statistics(row.device)] for row in shown]
    lines = view.section(
        "Memory manipulation", "Copies and memsets: the calls that launched them, and they themselves."
    )
    lines += view.table(["host", "calls", "bytes", *STATISTICS], host)
    lines += ["", *view.table(["device", "calls", "bytes", *STATISTICS], device)]
    return [*lines, *view.more(report.transfers)]


def scope_lines(report: TraceReport, view: View) -> list[str]:
    """The user's scopes."""
    if report.user_scopes is None:
        return []
    rows = []
    shown = view.first(
        report.user_scopes,
        name=lambda row: row.name,
        calls=lambda row: row.calls,
        durations=lambda row: row.host,
    )
    for row in shown:
        launched = [] if row.device is None else [us(row.device.total_us), percent(row.device.ratio)]
        rows.append([short(row.name), plain(row.calls), *statistics(row.host), *launched])
    head = ["scope", "calls", *STATISTICS]
    if report.user_scopes[0].device is not None:
        head += ["device", "ratio"]
    lines = view.section("User-defined scopes", "record_function and the like; device: work launched in them.")
    return [*lines, *view.table(head, rows, least_width=6), *view.more(report.user_scopes)]
