"""Operators of a trace as text: all calls, those of one shape, and where they were called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lightning_flops.report import layout
from lightning_flops.report.trace_cells import NAME_CHARS, OPERATOR_CHARS, place, short, us
from lightning_flops.report.trace_view import View
from lightning_flops.schema.trace import TraceReport
from lightning_flops.schema.trace_events import ChildRow, OperatorRow, OperatorShapeRow
from lightning_flops.schema.trace_flops import ShapeFlops
from lightning_flops.schema.trace_steps import Durations
from lightning_flops.units import percent, plain, si

Row = TypeVar("Row", OperatorRow, OperatorShapeRow)

_SIZES_CHARS = 44


def operator_lines(report: TraceReport, view: View, children: bool) -> list[str]:
    """Each operator: its times, on the device, by shapes, and where it was called."""
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
        cells = [short(row.name), plain(row.calls), us(row.host_self.total_us), percent(row.host_self.ratio)]
        cells += [us(row.host.total_us), us(row.host.mean_us), us(row.host.max_us), us(row.host.min_us)]
        if with_device and row.device is not None and row.device_self is not None:
            cells += [us(row.device_self.total_us), percent(row.device_self.ratio), us(row.device.total_us)]
        rows.append(cells)
        if children:
            inside = layout.shortened_apart([child.name for child in row.children], chars=NAME_CHARS - 2)
            rows += [
                _child(child, name, with_device=with_device) for child, name in zip(row.children, inside, strict=True)
            ]
    if with_device:
        head += ["device self", "ratio", "device total"]
    table = view.table(head, rows, least_width=6)
    return [
        *view.section("Operators", explanation),
        *table,
        *view.more(report.operators),
        *_operators_on_device(shown, view),
        *_operators_by_shape(report, view),
    ]


def _first_operators(rows: Sequence[Row], view: View, **keys: Callable[[Row], float | None]) -> Sequence[Row]:
    """The rows that are shown, in the order that was asked for."""
    return view.first(
        rows,
        name=lambda row: row.name,
        calls=lambda row: row.calls,
        self=lambda row: (row.device_self or row.host_self).total_us,
        durations=_lead,
        **keys,
    )


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
        cells = [short(row.name)]
        if with_device:
            device = row.device
            cells += [""] * 3 if device is None else [us(device.mean_us), us(device.max_us), us(device.min_us)]
        if with_places:
            more = len(row.called_from) - 1
            cells += [place(row.called_from[0].place), plain(more)] if row.called_from else ["", ""]
        rows.append(cells)
    return ["", *view.table(head, rows, least_width=6)]


def _operators_by_shape(report: TraceReport, view: View) -> list[str]:
    if not report.operators_by_shape:
        return []
    flops = {} if report.flops is None else {(one.name, one.inputs, one.dtypes): one for one in report.flops.shapes}

    def counted(row: OperatorShapeRow) -> ShapeFlops | None:
        return flops.get((row.name, row.inputs, row.dtypes))

    shown = _first_operators(
        report.operators_by_shape,
        view,
        flops=lambda row: None if (one := counted(row)) is None else one.counted,
        rate=lambda row: None if (one := counted(row)) is None else one.flops_per_sec,
    )
    with_device = any(row.device is not None for row in shown)
    head = ["by input shape", "sizes", "calls", "host self", "host total", "mean"]
    head += ["device self", "device total", "mean"] if with_device else []
    head += ["FLOPs", "FLOP/s", "of peak"] if flops else []
    rows = []
    for row in shown:
        cells = [layout.shortened_inside(row.name, chars=OPERATOR_CHARS)]
        cells.append(layout.shortened(row.inputs, chars=_SIZES_CHARS))
        cells += [plain(row.calls), us(row.host_self.total_us), us(row.host.total_us), us(row.host.mean_us)]
        if row.device is not None and row.device_self is not None:
            cells += [us(row.device_self.total_us), us(row.device.total_us), us(row.device.mean_us)]
        if flops:
            one = counted(row)
            cells += ["", "", ""] if one is None else [si(one.counted), si(one.flops_per_sec), percent(one.peak_share)]
        rows.append(cells)
    table = view.table(head, rows, least_width=6, left=(0, 1))
    return ["", *table, *view.more(report.operators_by_shape)]


def _child(child: ChildRow, name: str, *, with_device: bool) -> list[str]:
    cells = [f"  {name}", plain(child.calls), "", percent(child.host.ratio) if child.host else ""]
    host = child.host
    cells += (
        ["", "", "", ""] if host is None else [us(host.total_us), us(host.mean_us), us(host.max_us), us(host.min_us)]
    )
    if with_device and child.device is not None:
        cells += ["", percent(child.device.ratio), us(child.device.total_us)]
    return cells
