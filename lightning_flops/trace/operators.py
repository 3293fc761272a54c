"""What operators cost, on the host and on the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_flops.schema.trace_events import CalledFrom, OperatorRow, OperatorShapeRow
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.intervals import NS_PER_US, Groups, Ints, group_by, sums_by, table
from lightning_flops.trace.names import may_use_tensor_cores
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


def self_host_ns(trace: Trace) -> Ints:
    """For each row of an operator, its length without the operators it called."""
    return without_inner(trace, trace.links.called, trace.links.parent)


def without_inner(trace: Trace, inner: Ints, around: Ints) -> Ints:
    """For each row its length without those of the rows *inner* that have it *around* them."""
    outer, own = around[inner], trace.duration_ns.copy()
    # What is inside may seem to end later, by rounding or across threads: it takes only what there is.
    np.subtract.at(own, outer, np.minimum(trace.end_ns[inner], trace.end_ns[outer]) - trace.start_ns[inner])
    return np.maximum(own, 0)


def device_ns_of_operators(trace: Trace) -> Ints:
    """For each row of an operator, the lengths of the device events that it launched itself."""
    rows = np.flatnonzero(trace.links.operator_of_launch >= 0)
    return sums_by(trace.links.operator_of_launch[rows], trace.duration_ns[rows], len(trace))


def with_callees(trace: Trace, own: Ints) -> Ints:
    """For each row of an operator, its *own* and that of all it called, directly or not."""
    total = own.copy()
    for rows in reversed(trace.links.levels[1:]):
        np.add.at(total, trace.links.parent[rows], total[rows])
    return total


class OperatorTimes:
    """The times of every operator, with and without what it called; a column over all rows of the trace for each."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.outermost = trace, outermost_calls(trace)
        self.rows = np.flatnonzero(self.outermost == np.arange(len(trace)))
        launched, ends = device_ns_of_operators(trace), trace.end_ns.copy()
        inner = trace.links.operators
        np.maximum.at(ends, self.outermost[inner], trace.end_ns[inner])  # the last call in it may seem to end later
        self.host, self.device = ends - trace.start_ns, with_callees(trace, launched)
        self.device_self = self.at_outermost(launched)
        # Callees that overlap by rounding would make up more than there is.
        self.host_self = np.minimum(self.at_outermost(self_host_ns(trace)), self.host)

    def at_outermost(self, values: Ints) -> Ints:
        """*values* of operators, added up at the outermost call of each."""
        operators = self.trace.links.operators
        return sums_by(self.outermost[operators], values[operators], len(values))

    def of(self, groups: Groups, rows: Ints) -> dict[str, Any]:
        """Calls and the four statistics of each group of *rows*, ratios of all self times."""
        host_whole, device_whole = int(self.host_self[rows].sum()), int(self.device_self[rows].sum())
        nothing = None if self.trace.has_device else [None] * len(groups.keys)
        return {
            "calls": groups.calls,
            "host": groups.durations(self.host[rows], whole_ns=host_whole),
            "host_self": groups.durations(self.host_self[rows], whole_ns=host_whole),
            "device": nothing or groups.durations(self.device[rows], whole_ns=device_whole),
            "device_self": nothing or groups.durations(self.device_self[rows], whole_ns=device_whole),
        }


def operator_table(trace: Trace) -> tuple[OperatorRow, ...] | None:
    """Every operator by name, the longest self time first (the device's if there is one); None without operators."""
    times = trace.operator_times
    groups = group_by(trace.name[times.rows])
    numbers = groups.keys.tolist()
    names = [trace.names[name] for name in numbers]
    called_from = _called_from(times)
    found = table(
        OperatorRow,
        _by_self_time,
        name=names,
        called_from=[called_from.get(name, ()) for name in numbers],
        tensor_cores_eligible=map(may_use_tensor_cores, names),
        **times.of(groups, times.rows),
    )
    return found or None


def typical_operators(trace: Trace) -> list[tuple[str, Ints, Ints, Ints]]:
    """Each operator by name: calls, self and total nanoseconds of a step, medians over the steps.

    Each of the three is a row: neither forward nor backward, forward, backward; as ``modules.Phase`` numbers them. The
    nanoseconds are the device's if there is one.
    """
    times, count = trace.operator_times, len(trace.steps)
    step = trace.steps.of(trace.start_ns[times.rows])
    rows, step = times.rows[step >= 0], step[step >= 0]
    phase = np.zeros(len(rows), dtype=np.int64)
    if trace.frames is not None:
        phase = trace.frames.owner_at(trace, trace.lane[rows], trace.start_ns[rows])[1]
    names, which = np.unique(trace.name[rows], return_inverse=True)
    own, whole = (times.device_self, times.device) if trace.has_device else (times.host_self, times.host)
    columns = [
        np.median(sums_by((which * 3 + phase) * count + step, values, len(names) * 3 * count).reshape(-1, 3, count), 2)
        for values in (np.ones(len(rows), dtype=np.int64), own[rows], whole[rows])
    ]
    return [(trace.names[name], *row) for name, *row in zip(names.tolist(), *columns, strict=True)]


def operators_by_shape(trace: Trace) -> tuple[OperatorShapeRow, ...] | None:
    """Every operator by the sizes and dtypes of its inputs, as ``operator_table``; None where none were recorded."""
    times = trace.operator_times
    rows = times.rows[trace.inputs[times.rows] >= 0]
    names, groups = by_shapes(trace, rows)
    found = table(
        OperatorShapeRow, lambda row: (*_by_self_time(row), row.inputs, row.dtypes), **names, **times.of(groups, rows)
    )
    return found or None


def by_shapes(trace: Trace, rows: Ints) -> tuple[dict[str, list[str]], Groups]:
    """*rows* of operators whose inputs were recorded, by name and by sizes and dtypes of inputs; and these in words."""
    words = [
        (
            ", ".join(str(one) for one in recorded.dims if one),
            ", ".join(str(one) for one in recorded.types if one and not str(one).startswith(_NO_TENSOR)),
        )
        for recorded in trace.recorded_inputs
    ]
    numbers = {one: index for index, one in enumerate(dict.fromkeys(words))}
    number = np.array([numbers[one] for one in words], dtype=np.int64)[trace.inputs[rows]]
    groups, listed = group_by(trace.name[rows] * np.int64(len(numbers)) + number), tuple(numbers)
    keys = groups.keys.tolist()
    inputs, dtypes = ([listed[key % len(listed)][which] for key in keys] for which in (0, 1))
    return {"name": [trace.names[key // len(listed)] for key in keys], "inputs": inputs, "dtypes": dtypes}, groups


def _by_self_time(row: OperatorRow | OperatorShapeRow) -> tuple[float, float, str]:
    return (-row.device_self.total_us if row.device_self else 0.0, -row.host_self.total_us, row.name)


def _called_from(times: OperatorTimes) -> dict[int, tuple[CalledFrom, ...]]:
    """Lines of the user's code that called the operators of each name, by the index of that name, the longest first."""
    trace = times.trace
    listed, of_row = places(trace)
    rows = times.rows[of_row[times.rows] >= 0]
    groups = group_by(trace.name[rows] * np.int64(len(listed)) + of_row[rows])
    found: dict[int, list[CalledFrom]] = {}
    columns = (groups.keys.tolist(), groups.calls, *(groups.sums(one[rows]) for one in (times.host, times.device)))
    for key, calls, host_ns, device_ns in zip(*columns, strict=True):
        device_us = device_ns / NS_PER_US if trace.has_device else None
        place = listed[key % len(listed)]
        one = CalledFrom(place=place, calls=calls, host_us=host_ns / NS_PER_US, device_us=device_us)
        found.setdefault(key // len(listed), []).append(one)
    return {
        name: tuple(sorted(lines, key=lambda one: (-(one.device_us or 0.0), -one.host_us, one.place)))
        for name, lines in found.items()
    }
