"""Memory of a trace as text: over time, by operator and by module."""

from __future__ import annotations

from lightning_flops.report.memory_text import module_memory_table, operator_memory_table
from lightning_flops.report.trace_cells import short, us
from lightning_flops.report.trace_view import View
from lightning_flops.schema.trace import TraceReport
from lightning_flops.schema.trace_events import HeldMemory
from lightning_flops.units import NOT_AVAILABLE, percent, plain, si


def memory_curve_lines(report: TraceReport, view: View) -> list[str]:
    """The peak of each device's memory and what held it then; the curve is in the JSON."""
    if not report.memory_curves:
        return []
    lines = view.section("Memory over time", "The most that was allocated at once, and what had allocated it.")
    for curve in report.memory_curves:
        where = "host" if curve.device_type == "host" else f"device {curve.device}"
        step = "" if curve.peak_step is None else f", in step {curve.peak_step}"
        when = f"{us(curve.peak_us)} after the first event{step}"
        since = "" if curve.absolute else " more than when the trace began"
        lines += view.line(f"{where}: peak", f"{si(curve.peak_bytes, 'B')}{since}, {when}")
        if curve.held is None:
            lines += view.line(f"{where}: held by", f"{NOT_AVAILABLE} (the trace has no addresses)")
            continue
        with_modules = any(one.module is not None for one in curve.held)
        rows = [
            [
                *([short(_module_of(one))] if with_modules else []),
                short(_operator_of(one)),
                si(one.bytes, "B"),
                percent(one.bytes / curve.peak_bytes if curve.peak_bytes else None),
                plain(one.allocations),
            ]
            for one in view.first(
                curve.held,
                name=_operator_of,
                calls=lambda one: one.allocations,
                total=lambda one: one.bytes,
                bytes=lambda one: one.bytes,
            )
        ]
        head = [*(["module"] if with_modules else []), f"{where}: held by", "bytes", "of peak", "allocations"]
        table = view.table(head, rows, left=(0, 1) if with_modules else (0,))
        lines += ["", *table, *view.more(curve.held)]
    return lines


def _module_of(one: HeldMemory) -> str:
    return "" if one.module is None else one.module or "(root)"


def _operator_of(one: HeldMemory) -> str:
    if one.operator is not None:
        return one.operator
    return "(before the trace)" if one.allocations is None else "(outside operators)"


def operator_memory_lines(report: TraceReport, view: View) -> list[str]:
    """What operators allocated."""
    if report.memory is None:
        return []
    explanation = "Size increase: allocated less freed. Allocation: frees left out. Self: without operators it called."
    shown = view.first(
        report.memory,
        name=lambda row: row.name or "",
        calls=lambda row: row.calls,
        total=lambda row: row.allocation_bytes,
        bytes=lambda row: row.allocation_bytes,
        self=lambda row: row.self_allocation_bytes,
    )
    table = operator_memory_table(shown, view)
    return [*view.section("Memory (bytes)", explanation), *table, *view.more(report.memory)]


def module_memory_lines(report: TraceReport, view: View) -> list[str]:
    """What modules allocated."""
    if not report.module_memory:
        return []
    explanation = "As above, by the module whose forward or backward was running. Self: without the modules inside."
    shown = view.first(
        report.module_memory,
        name=lambda row: row.name or "",
        total=lambda row: row.allocation_bytes,
        bytes=lambda row: row.allocation_bytes,
        self=lambda row: row.self_allocation_bytes,
    )
    table = module_memory_table(shown, view)
    return [*view.section("Memory by module (bytes)", explanation), *table, *view.more(report.module_memory)]
