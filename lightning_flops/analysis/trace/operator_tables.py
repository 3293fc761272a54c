"""What operators cost, on the host, on the device and in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from lightning_flops.analysis.trace.columns import Trace
from lightning_flops.analysis.trace.durations import NS_PER_US, Groups, group_by
from lightning_flops.analysis.trace.event_names import may_use_tensor_cores
from lightning_flops.analysis.trace.intervals import Ints
from lightning_flops.analysis.trace.python_calls import places, shapes_in_words
from lightning_flops.analysis.trace.structure import enclosing_operators
from lightning_flops.schema.trace_events import CalledFrom, ChildRow, MemoryRow, OperatorRow, OperatorShapeRow

_NO_TENSOR = ("Scalar", "TensorList", "GenericList", "Int", "Bool", "Double", "Float")
"""What begins the types of arguments that are no tensor, or a list of them."""


def operator_table(trace: Trace) -> tuple[OperatorRow, ...] | None:
    """Every operator by name, the longest self time first (the device's if there is one); None without operators.

    A call inside a call of the same operator is a part of that one, as in torch's own tables.
    """
    if not len(trace.links.operators):
        return None
    outermost = outermost_calls(trace)
    rows = np.flatnonzero(outermost == np.arange(len(trace)))
    host_self = _by_outermost(outermost, self_host_ns(trace))[rows]
    launched = device_ns_of_operators(trace)
    all_device = with_callees(trace, launched)
    own_device = _by_outermost(outermost, launched)[rows]
    host_all = _host_ns(trace, outermost)
    groups = group_by(trace.name[rows].astype(np.int64))
    host_whole, device_whole = int(host_self.sum()), int(own_device.sum())
    host = groups.durations(host_all[rows], whole_ns=host_whole)
    own_host = groups.durations(host_self, whole_ns=host_whole)
    device = groups.durations(all_device[rows], whole_ns=device_whole)
    device_self = groups.durations(own_device, whole_ns=device_whole)
    children = _children(
        trace,
        all_device=all_device,
        host_totals=dict(zip(groups.keys.tolist(), groups.sums(host_all[rows]).tolist(), strict=True)),
        device_totals=dict(zip(groups.keys.tolist(), groups.sums(all_device[rows]).tolist(), strict=True)),
    )
    called_from = _called_from(trace, rows, host_all, all_device)
    table = [
        OperatorRow(
            name=trace.names[name],
            calls=calls,
            called_from=called_from.get(name, ()),
            children=tuple(sorted(children.get(name, ()), key=_by_time)),
            host=host[index],
            host_self=own_host[index],
            device=device[index] if trace.has_device else None,
            device_self=device_self[index] if trace.has_device else None,
            tensor_cores_eligible=may_use_tensor_cores(trace.names[name]),
        )
        for index, (name, calls) in enumerate(zip(groups.keys.tolist(), groups.calls().tolist(), strict=True))
    ]
    return tuple(sorted(table, key=_by_self_time))


def operators_by_shape(trace: Trace) -> tuple[OperatorShapeRow, ...] | None:
    """Every operator by the sizes and dtypes of its inputs, as ``operator_table``; None where none were recorded."""
    if not (trace.inputs[trace.links.operators] >= 0).any():
        return None
    outermost = outermost_calls(trace)
    rows = np.flatnonzero((outermost == np.arange(len(trace))) & (trace.inputs >= 0))
    host_self = _by_outermost(outermost, self_host_ns(trace))
    launched = device_ns_of_operators(trace)
    own_device, all_device = _by_outermost(outermost, launched), with_callees(trace, launched)
    listed, groups = by_shapes(trace, rows)
    host_whole, device_whole = int(host_self[rows].sum()), int(own_device[rows].sum())
    host = groups.durations(_host_ns(trace, outermost)[rows], whole_ns=host_whole)
    own_host = groups.durations(host_self[rows], whole_ns=host_whole)
    device = groups.durations(all_device[rows], whole_ns=device_whole)
    device_self = groups.durations(own_device[rows], whole_ns=device_whole)
    table = []
    for index, (key, calls) in enumerate(zip(groups.keys.tolist(), groups.calls().tolist(), strict=True)):
        inputs, dtypes = listed[key % len(listed)]
        table.append(
            OperatorShapeRow(
                name=trace.names[key // len(listed)],
                inputs=inputs,
                dtypes=dtypes,
                calls=calls,
                host=host[index],
                host_self=own_host[index],
                device=device[index] if trace.has_device else None,
                device_self=device_self[index] if trace.has_device else None,
            )
        )
    return tuple(sorted(table, key=lambda row: (*_by_self_time(row), row.inputs, row.dtypes)))


def by_shapes(trace: Trace, rows: Ints) -> tuple[tuple[tuple[str, str], ...], Groups]:
    """*rows* of operators whose inputs were recorded, by name and by sizes and dtypes of inputs, in words.

    Calls whose other arguments differ are in one group. Its key is the number of the name times how many different
    sizes and dtypes there are, plus the number of these.
    """
    words = [(shapes_in_words(one.dims), _dtypes_in_words(one.types)) for one in trace.recorded_inputs]
    numbers = {one: index for index, one in enumerate(dict.fromkeys(words))}
    number = np.array([numbers[one] for one in words], dtype=np.int64)[trace.inputs[rows]]
    return tuple(numbers), group_by(trace.name[rows] * np.int64(len(numbers)) + number)


def _dtypes_in_words(types: Sequence[object]) -> str:
    return ", ".join(str(one) for one in types if one and not str(one).startswith(_NO_TENSOR))


def _called_from(trace: Trace, rows: Ints, all_host: Ints, all_device: Ints) -> dict[int, tuple[CalledFrom, ...]]:
    """Lines of the user's code that called the operators of each name, by the index of that name."""
    listed, of_row = places(trace)
    if not listed:
        return {}
    rows = rows[of_row[rows] >= 0]
    groups = group_by(trace.name[rows] * np.int64(len(listed)) + of_row[rows])
    columns = (groups.keys, groups.calls(), groups.sums(all_host[rows]), groups.sums(all_device[rows]))
    found: dict[int, list[CalledFrom]] = {}
    for key, calls, host_ns, device_ns in zip(*(column.tolist() for column in columns), strict=True):
        one = CalledFrom(
            place=listed[key % len(listed)],
            calls=calls,
            host_us=host_ns / NS_PER_US,
            device_us=device_ns / NS_PER_US if trace.has_device else None,
        )
        found.setdefault(key // len(listed), []).append(one)
    return {
        name: tuple(sorted(lines, key=lambda one: (-(one.device_us or 0.0), -one.host_us, one.place)))
        for name, lines in found.items()
    }


def outermost_calls(trace: Trace) -> Ints:
    """For each row of an operator the outermost call of the same operator around it, or itself; -1 for other rows."""
    links = trace.links
    rows = links.operators
    found = np.full(len(trace), -1, dtype=np.int64)
    found[rows] = rows
    above = links.parent[rows]
    while len(rows := rows[above >= 0]):
        above = above[above >= 0]
        same = trace.name[above] == trace.name[rows]
        found[rows[same]] = above[same]
        above = links.parent[above]
    return found


def _host_ns(trace: Trace, outermost: Ints) -> Ints:
    """For each outermost call its length: to the end of the last call in it, which may seem later, by rounding."""
    ends = trace.end_ns.copy()
    inside = _called_by_the_same(outermost)
    np.maximum.at(ends, outermost[inside], trace.end_ns[inside])
    return ends - trace.start_ns


def _by_outermost(outermost: Ints, values: Ints) -> Ints:
    """*values* of operators, added up at the outermost call of each."""
    inside = _called_by_the_same(outermost)
    sums = np.where(outermost == np.arange(len(outermost)), values, 0)
    np.add.at(sums, outermost[inside], values[inside])
    return sums


def _called_by_the_same(outermost: Ints) -> Ints:
    """Rows of calls inside a call of the same operator: few, if any."""
    return np.flatnonzero((outermost >= 0) & (outermost != np.arange(len(outermost))))


def _by_self_time(row: OperatorRow | OperatorShapeRow) -> tuple[float, float, str]:
    return (-row.device_self.total_us if row.device_self else 0.0, -row.host_self.total_us, row.name)


def memory_table(trace: Trace) -> tuple[MemoryRow, ...] | None:
    """Bytes by operator and device; None when the trace was taken without ``profile_memory``."""
    memory = trace.memory
    if memory is None:
        return None
    links = trace.links
    owner = enclosing_operators(trace, links.operators, links.parent, lanes=memory.lane, moments_ns=memory.time_ns)
    on_host = memory.device_type == 0
    device = np.where(on_host, -1, memory.device)
    table: list[MemoryRow] = []
    for kind, index in sorted(set(zip(on_host.tolist(), device.tolist(), strict=True)), reverse=True):
        here = (on_host == kind) & (device == index)
        table += _memory_rows(trace, owner[here], memory.bytes[here], "host" if kind else "device", index)
    return tuple(table)


def self_host_ns(trace: Trace) -> Ints:
    """For each row of an operator, its length without the operators it called."""
    links = trace.links
    own = trace.duration_ns.copy()
    called = links.operators[links.parent[links.operators] >= 0]
    callers = links.parent[called]
    # A callee may seem to end after its caller, by rounding or across threads: it takes only what the caller has.
    inside = np.minimum(trace.end_ns[called], trace.end_ns[callers]) - trace.start_ns[called]
    np.subtract.at(own, callers, inside)
    return np.maximum(own, 0)


def device_ns_of_operators(trace: Trace) -> Ints:
    """For each row of an operator, the lengths of the device events that it launched itself."""
    own = np.zeros(len(trace), dtype=np.int64)
    rows = trace.device_rows
    owners = trace.links.operator_of_launch[rows]
    np.add.at(own, owners[owners >= 0], trace.duration_ns[rows[owners >= 0]])
    return own


def with_callees(trace: Trace, own: Ints) -> Ints:
    """For each row of an operator, its *own* and that of all it called, directly or not."""
    links = trace.links
    total = own.copy()
    depth = links.depth[links.operators]
    for level in range(int(depth.max(initial=0)), 0, -1):
        rows = links.operators[depth == level]
        np.add.at(total, links.parent[rows], total[rows])
    return total


def _children(
    trace: Trace, *, all_device: Ints, host_totals: Mapping[int, int], device_totals: Mapping[int, int]
) -> dict[int, list[ChildRow]]:
    """Children of the operators of each name, by the index of that name."""
    links, count = trace.links, len(trace.names)
    found: dict[int, list[ChildRow]] = {}
    called = links.operators[links.parent[links.operators] >= 0]
    name, callers = trace.name[called], trace.name[links.parent[called]]
    if (same := name == callers).any():  # those are the same call
        called, name, callers = called[~same], name[~same], callers[~same]
    groups = group_by(callers * np.int64(count) + name)
    parents, names = (groups.keys // count).tolist(), (groups.keys % count).tolist()
    host = groups.durations(trace.duration_ns[called], whole_ns=[host_totals[parent] for parent in parents])
    device = groups.durations(all_device[called], whole_ns=[device_totals[parent] for parent in parents])
    for index, (parent, name, calls) in enumerate(zip(parents, names, groups.calls().tolist(), strict=True)):
        on_device = device[index] if trace.has_device else None
        row = ChildRow(name=trace.names[name], kind="operator", calls=calls, host=host[index], device=on_device)
        found.setdefault(parent, []).append(row)
    events = trace.device_rows[links.operator_of_launch[trace.device_rows] >= 0]
    owners = links.operator_of_launch[events]
    groups = group_by(trace.name[owners] * np.int64(count) + trace.name[events])
    parents, names = (groups.keys // count).tolist(), (groups.keys % count).tolist()
    device = groups.durations(trace.duration_ns[events], whole_ns=[device_totals[parent] for parent in parents])
    for index, (parent, name, calls) in enumerate(zip(parents, names, groups.calls().tolist(), strict=True)):
        row = ChildRow(name=trace.names[name], kind="device", calls=calls, host=None, device=device[index])
        found.setdefault(parent, []).append(row)
    return found


def _by_time(row: ChildRow) -> tuple[float, float, str]:
    return (-row.device.total_us if row.device else 0.0, -row.host.total_us if row.host else 0.0, row.name)


def _memory_rows(
    trace: Trace, owner: Ints, size: Ints, device_type: Literal["host", "device"], device: int
) -> list[MemoryRow]:
    inside = owner >= 0
    own = np.zeros((4, len(trace)), dtype=np.int64)
    np.add.at(own[0], owner[inside], size[inside])
    np.add.at(own[1], owner[inside], np.maximum(size[inside], 0))
    np.add.at(own[2], owner[inside], 1)
    np.add.at(own[3], owner[inside], size[inside] > 0)
    increase, allocation, events, allocations = (with_callees(trace, part) for part in own)
    outermost = outermost_calls(trace)
    own = np.stack([_by_outermost(outermost, part) for part in own])
    rows = trace.links.operators[events[trace.links.operators] > 0]
    rows = rows[outermost[rows] == rows]
    groups = group_by(trace.name[rows].astype(np.int64))
    sums = [groups.sums(part[rows]).tolist() for part in (increase, own[0], allocation, own[1], allocations)]
    table = [
        MemoryRow(
            name=trace.names[name],
            device_type=device_type,
            device=device,
            calls=calls,
            size_increase_bytes=sums[0][index],
            self_size_increase_bytes=sums[1][index],
            allocation_bytes=sums[2][index],
            self_allocation_bytes=sums[3][index],
            allocations=sums[4][index],
        )
        for index, (name, calls) in enumerate(zip(groups.keys.tolist(), groups.calls().tolist(), strict=True))
    ]
    if not inside.all():
        outside = size[~inside]
        change, allocated = int(outside.sum()), int(np.maximum(outside, 0).sum())
        table.append(
            MemoryRow(
                name=None,
                device_type=device_type,
                device=device,
                calls=len(outside),
                size_increase_bytes=change,
                self_size_increase_bytes=change,
                allocation_bytes=allocated,
                self_allocation_bytes=allocated,
                allocations=int((outside > 0).sum()),
            )
        )
    return sorted(table, key=lambda row: (-row.self_allocation_bytes, row.name or ""))
