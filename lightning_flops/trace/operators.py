"""What operators cost, on the host and on the device."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from lightning_flops.schema.trace_events import (
    CalledFrom,
    ChildRow,
    OperatorRow,
    OperatorShapeRow,
)
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.intervals import (
    NS_PER_US,
    Groups,
    Ints,
    group_by,
    records,
)
from lightning_flops.trace.names import (
    may_use_tensor_cores,
)
from lightning_flops.trace.python_calls import places

_NO_TENSOR = ("Scalar", "TensorList", "GenericList", "Int", "Bool", "Double", "Float")
"""What begins the types of arguments that are no tensor, or a list of them."""


def outermost_calls(trace: Trace) -> Ints:
    """For each row of an operator the outermost call of the same operator around it, or itself; -1 for other rows.

    A call inside a call of the same operator is a part of that one, as in torch's own tables.
    """
    rows = trace.links.operators
    found = np.full(len(trace), -1, dtype=np.int64)
    if not len(rows):
        return found
    rows = rows[group_by(trace.lane[rows] * np.int64(len(trace.names)) + trace.name[rows]).order]
    new = np.append(True, (np.diff(trace.lane[rows]) != 0) | (np.diff(trace.name[rows]) != 0))
    # All of one operator in one thread lie in a stretch of time of their own; in it, one that begins after all before
    # it have ended is an outermost one.
    first, last = int(trace.start_ns[rows].min()), int(trace.end_ns[rows].max())
    shift = np.cumsum(new) * (last - first + 1)
    reached = np.maximum.accumulate(trace.end_ns[rows] - first + shift)
    new[1:] |= trace.start_ns[rows[1:]] - first + shift[1:] >= reached[:-1]
    found[rows] = rows[np.flatnonzero(new)[np.cumsum(new) - 1]]
    return found


def at_outermost(outermost: Ints, values: Ints) -> Ints:
    """*values* of operators, added up at the outermost call of each."""
    inner = np.flatnonzero((outermost >= 0) & (outermost != np.arange(len(outermost))))
    sums = np.where(outermost == np.arange(len(outermost)), values, 0)
    np.add.at(sums, outermost[inner], values[inner])
    return sums


def self_host_ns(trace: Trace) -> Ints:
    """For each row of an operator, its length without the operators it called."""
    parent, own = trace.links.parent, trace.duration_ns.copy()
    called = trace.links.operators[parent[trace.links.operators] >= 0]
    callers = parent[called]
    # A callee may seem to end after its caller, by rounding or across threads: it takes only what the caller has.
    np.subtract.at(own, callers, np.minimum(trace.end_ns[called], trace.end_ns[callers]) - trace.start_ns[called])
    return np.maximum(own, 0)


def device_ns_of_operators(trace: Trace) -> Ints:
    """For each row of an operator, the lengths of the device events that it launched itself."""
    own = np.zeros(len(trace), dtype=np.int64)
    owners = trace.links.operator_of_launch[trace.device_rows]
    np.add.at(own, owners[owners >= 0], trace.duration_ns[trace.device_rows[owners >= 0]])
    return own


def with_callees(trace: Trace, own: Ints) -> Ints:
    """For each row of an operator, its *own* and that of all it called, directly or not."""
    total = own.copy()
    for rows in reversed(trace.links.levels[1:]):
        np.add.at(total, trace.links.parent[rows], total[rows])
    return total


class _OperatorTimes:
    """The times of every operator, with and without what it called; a column over all rows of the trace for each."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        outermost = outermost_calls(trace)
        self.rows = np.flatnonzero(outermost == np.arange(len(trace)))
        launched = device_ns_of_operators(trace)
        ends = trace.end_ns.copy()
        inner = np.flatnonzero(outermost >= 0)
        np.maximum.at(ends, outermost[inner], trace.end_ns[inner])  # the last call in it may seem to end later
        self.host, self.device = ends - trace.start_ns, with_callees(trace, launched)
        self.device_self = at_outermost(outermost, launched)
        # Callees that overlap by rounding would make up more than there is.
        self.host_self = np.minimum(at_outermost(outermost, self_host_ns(trace)), self.host)

    def of(self, groups: Groups, rows: Ints) -> list[dict[str, Any]]:
        """The four statistics of each group of *rows*, ratios of all self times."""
        host_whole, device_whole = int(self.host_self[rows].sum()), int(self.device_self[rows].sum())
        columns = {
            "host": groups.durations(self.host[rows], whole_ns=host_whole),
            "host_self": groups.durations(self.host_self[rows], whole_ns=host_whole),
            "device": groups.durations(self.device[rows], whole_ns=device_whole),
            "device_self": groups.durations(self.device_self[rows], whole_ns=device_whole),
        }
        if not self.trace.has_device:
            columns |= dict.fromkeys(("device", "device_self"), [None] * len(groups.keys))  # type: ignore[list-item]
        return records(**columns)


def operator_table(trace: Trace) -> tuple[OperatorRow, ...] | None:
    """Every operator by name, the longest self time first (the device's if there is one); None without operators."""
    if not len(trace.links.operators):
        return None
    times = _OperatorTimes(trace)
    rows = times.rows
    groups = group_by(trace.name[rows].astype(np.int64))
    children, called_from = _children(times, groups), _called_from(times)
    table = [
        OperatorRow(
            name=trace.names[name],
            calls=calls,
            called_from=called_from.get(name, ()),
            children=children.get(name, ()),
            tensor_cores_eligible=may_use_tensor_cores(trace.names[name]),
            **row,
        )
        for name, calls, row in zip(groups.keys.tolist(), groups.calls().tolist(), times.of(groups, rows), strict=True)
    ]
    return tuple(sorted(table, key=_by_self_time))


def operators_by_shape(trace: Trace) -> tuple[OperatorShapeRow, ...] | None:
    """Every operator by the sizes and dtypes of its inputs, as ``operator_table``; None where none were recorded."""
    if not (trace.inputs[trace.links.operators] >= 0).any():
        return None
    times = _OperatorTimes(trace)
    rows = times.rows[trace.inputs[times.rows] >= 0]
    listed, groups = by_shapes(trace, rows)
    table = []
    for key, calls, row in zip(groups.keys.tolist(), groups.calls().tolist(), times.of(groups, rows), strict=True):
        inputs, dtypes = listed[key % len(listed)]
        name = trace.names[key // len(listed)]
        table.append(OperatorShapeRow(name=name, inputs=inputs, dtypes=dtypes, calls=calls, **row))
    return tuple(sorted(table, key=lambda row: (*_by_self_time(row), row.inputs, row.dtypes)))


def by_shapes(trace: Trace, rows: Ints) -> tuple[tuple[tuple[str, str], ...], Groups]:
    """*rows* of operators whose inputs were recorded, by name and by sizes and dtypes of inputs, in words.

    A group's key is the number of the name times how many different sizes and dtypes there are, plus the number of
    these.
    """
    words = [
        (
            ", ".join(str(one) for one in recorded.dims if one),
            ", ".join(str(one) for one in recorded.types if one and not str(one).startswith(_NO_TENSOR)),
        )
        for recorded in trace.recorded_inputs
    ]
    numbers = {one: index for index, one in enumerate(dict.fromkeys(words))}
    number = np.array([numbers[one] for one in words], dtype=np.int64)[trace.inputs[rows]]
    return tuple(numbers), group_by(trace.name[rows] * np.int64(len(numbers)) + number)


def _by_self_time(row: OperatorRow | OperatorShapeRow) -> tuple[float, float, str]:
    return (-row.device_self.total_us if row.device_self else 0.0, -row.host_self.total_us, row.name)


def _called_from(times: _OperatorTimes) -> dict[int, tuple[CalledFrom, ...]]:
    """Lines of the user's code that called the operators of each name, by the index of that name, the longest first."""
    trace = times.trace
    listed, of_row = places(trace)
    rows = times.rows[of_row[times.rows] >= 0]
    groups = group_by(trace.name[rows] * np.int64(len(listed)) + of_row[rows])
    columns = (groups.keys, groups.calls(), groups.sums(times.host[rows]), groups.sums(times.device[rows]))
    found: dict[int, list[CalledFrom]] = {}
    for key, calls, host_ns, device_ns in zip(*(column.tolist() for column in columns), strict=True):
        device_us = device_ns / NS_PER_US if trace.has_device else None
        place = listed[key % len(listed)]
        one = CalledFrom(place=place, calls=calls, host_us=host_ns / NS_PER_US, device_us=device_us)
        found.setdefault(key // len(listed), []).append(one)
    return {
        name: tuple(sorted(lines, key=lambda one: (-(one.device_us or 0.0), -one.host_us, one.place)))
        for name, lines in found.items()
    }


def _children(times: _OperatorTimes, parents: Groups) -> dict[int, tuple[ChildRow, ...]]:
    """What the operators of each name, by its index, called and launched themselves, the longest first."""
    trace, links, count = times.trace, times.trace.links, len(times.trace.names)
    wholes = [
        dict(zip(parents.keys.tolist(), parents.sums(column[times.rows]).tolist(), strict=True))
        for column in (times.host, times.device)
    ]
    called = links.operators[links.parent[links.operators] >= 0]
    called = called[trace.name[called] != trace.name[links.parent[called]]]  # those are the same call
    events = trace.device_rows[links.operator_of_launch[trace.device_rows] >= 0]
    found: dict[int, list[ChildRow]] = {}
    kinds: tuple[tuple[Literal["operator", "device"], Ints, Ints, Ints], ...] = (
        ("operator", called, links.parent[called], times.device[called]),
        ("device", events, links.operator_of_launch[events], trace.duration_ns[events]),
    )
    for kind, rows, callers, device_ns in kinds:
        groups = group_by(trace.name[callers] * np.int64(count) + trace.name[rows])
        names = (groups.keys // count).tolist()
        host, device = (
            groups.durations(column, whole_ns=[whole[name] for name in names])
            for column, whole in zip((trace.duration_ns[rows], device_ns), wholes, strict=True)
        )
        for index, (key, calls) in enumerate(zip(groups.keys.tolist(), groups.calls().tolist(), strict=True)):
            row = ChildRow(
                name=trace.names[key % count],
                kind=kind,
                calls=calls,
                host=host[index] if kind == "operator" else None,
                device=device[index] if trace.has_device else None,
            )
            found.setdefault(key // count, []).append(row)

    def longest_first(row: ChildRow) -> tuple[float, float, str]:
        return (-row.device.total_us if row.device else 0.0, -row.host.total_us if row.host else 0.0, row.name)

    return {name: tuple(sorted(rows, key=longest_first)) for name, rows in found.items()}
