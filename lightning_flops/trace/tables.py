"""Tables of a trace: devices, kernels, copies, idle times, operators and scopes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_flops.schema.comparison import TableName
from lightning_flops.schema.tables import (
    KERNEL_GAP_LIMIT_US,
    SHORT_KERNEL_LIMIT_US,
    DeviceMetrics,
    IdleTime,
    KernelRow,
    KernelSummary,
    OperatorRow,
    Row,
)
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.communication import collectives_by_name
from lightning_flops.trace.intervals import (
    NS_PER_US,
    Groups,
    Ints,
    Lanes,
    Mask,
    distinct,
    durations_of,
    group_by,
    intersect,
    load_within,
    longest_first,
    ratio,
    sums_by,
    table,
    weighted_mean,
)
from lightning_flops.trace.modules import called_from
from lightning_flops.trace.names import Kind, is_users_scope, may_use_tensor_cores, uses_tensor_cores
from lightning_flops.trace.steps import launched_ns
from lightning_flops.trace.structure import launched_at, nearest, without_inner

_NO_TENSOR = ("Scalar", "TensorList", "GenericList", "Int", "Bool", "Double", "Float")
"""What begins the types of arguments that are no tensor, or a list of them."""


# ---- the device


def device_metrics(trace: Trace) -> tuple[DeviceMetrics, ...] | None:
    """Utilization, SM efficiency, occupancy and blocks per SM of each device; None without a device."""
    steps, spans, found = trace.steps, trace.steps.spans, list[DeviceMetrics]()
    for device in distinct(trace.device[trace.on_device]).tolist():
        rows = np.flatnonzero((trace.kind == Kind.KERNEL) & (trace.device == device))
        blocks, busy, entry = trace.blocks_per_sm[rows], trace.merged(rows), trace.described(device)
        known = len(rows) > 0 and not np.isnan(blocks).any()
        load = load_within(trace.start_ns[rows], trace.end_ns[rows], blocks, spans) if known else None
        within = rows[(trace.end_ns[rows] > steps.start_ns[0]) & (trace.start_ns[rows] < steps.end_ns[-1])]
        occupancy, blocks_per_sm = (
            weighted_mean(values[within], trace.duration_ns[within])
            for values in (trace.occupancy_percent, trace.blocks_per_sm)
        )
        found += [
            DeviceMetrics(
                device=device,
                name=entry.name if entry else None,
                sm_count=entry.sm_count if entry else None,
                utilization=ratio(intersect(busy, spans).total, steps.total_ns) or 0.0,
                sm_efficiency=None if load is None else ratio(load, steps.total_ns),
                occupancy_percent=occupancy,
                blocks_per_sm=blocks_per_sm,
                busy_us=busy.total / NS_PER_US,
            )
        ]
    return tuple(found) or None


def kernel_table(trace: Trace) -> tuple[KernelRow, ...] | None:
    """Every kernel of the trace by name, the longest together first; None without a device."""
    if not trace.has_device:
        return None
    rows = trace.of(Kind.KERNEL)
    lengths, groups = trace.duration_ns[rows], group_by(trace.name[rows])
    names = trace.texts(groups.keys)
    return table(
        KernelRow,
        longest_first,
        name=names,
        calls=groups.calls,
        device=groups.durations(lengths, whole_ns=int(lengths.sum())),
        tensor_cores=map(uses_tensor_cores, names),
        tensor_cores_eligible=groups.reduced(np.logical_or, _eligible(trace, rows)),
        collective=groups.reduced(np.logical_or, trace.is_collective[rows]),
        blocks_per_sm=groups.means(trace.blocks_per_sm[rows], lengths),
        occupancy_percent=groups.means(trace.occupancy_percent[rows], lengths),
    )


def kernel_summary(trace: Trace) -> KernelSummary | None:
    """All kernels together: tensor cores and short kernels; None without a device."""
    if not trace.has_device:
        return None
    rows = trace.of(Kind.KERNEL)
    lengths, computes = trace.duration_ns[rows], ~trace.is_collective[rows]
    short, whole_ns = lengths < SHORT_KERNEL_LIMIT_US * NS_PER_US, int(lengths.sum())
    cores, eligible = (
        ratio(int(lengths[chosen & computes].sum()), int(lengths[computes].sum()))
        if trace.names_tell_tensor_cores
        else None
        for chosen in (trace.where(uses_tensor_cores, Kind.KERNEL)[rows], _eligible(trace, rows))
    )
    return KernelSummary(
        calls=len(rows),
        total_us=whole_ns / NS_PER_US,
        tensor_core_ratio=cores,
        tensor_core_eligible_ratio=eligible,
        short_calls_ratio=ratio(int(short.sum()), len(rows)),
        short_time_ratio=ratio(int(lengths[short].sum()), whole_ns),
    )


def _eligible(trace: Trace, rows: Ints) -> Mask:
    operators = trace.links.operator_of_launch[rows]
    return (operators >= 0) & trace.where(may_use_tensor_cores, Kind.OPERATOR)[operators]


def transfer_table(trace: Trace) -> tuple[Row, ...] | None:
    """Copies and memsets by kind, the longest first; None without a device."""
    if not trace.has_device:
        return None
    rows = np.flatnonzero((trace.kind == Kind.MEMCPY) | (trace.kind == Kind.MEMSET))
    sizes, groups = trace.bytes[rows], group_by(trace.name[rows])
    calls = [distinct(trace.links.launch[here]) for here in groups.parts(rows)]
    return table(
        Row,
        longest_first,
        name=trace.texts(groups.keys),
        calls=groups.calls,
        bytes=groups.sums_known(sizes, sizes >= 0),
        host=[durations_of(trace.duration_ns[here[here >= 0]], whole_ns=trace.steps.host_ns) for here in calls],
        device=groups.durations(trace.duration_ns[rows], whole_ns=trace.device_work_ns),
    )


def idle_times(trace: Trace) -> tuple[IdleTime, ...] | None:
    """Idle time of each device, over the whole trace; None without a device."""
    found = list[IdleTime]()
    for device in distinct(trace.device[trace.on_device]).tolist():
        rows = trace.device_rows[trace.device[trace.device_rows] == device]
        reached = np.maximum.accumulate(trace.end_ns[rows])[:-1]
        gaps, launched = np.maximum(trace.start_ns[rows[1:]] - reached, 0), trace.links.launch[rows[1:]] >= 0
        late = launched & (launched_at(trace, rows[1:]) > reached)
        short = launched & ~late & (gaps < KERNEL_GAP_LIMIT_US * NS_PER_US)
        causes = {"host_wait_us": late, "kernel_gap_us": short, "other_us": ~late & ~short}
        times = {name: int(gaps[chosen].sum()) / NS_PER_US for name, chosen in causes.items()}
        found += [IdleTime(device=device, busy_us=trace.merged(rows).total / NS_PER_US, **times)]
    return tuple(found) or None


# ---- the host


def user_scope_table(trace: Trace) -> tuple[Row, ...] | None:
    """The user's own scopes by name, the longest first; None when there are none."""
    rows = np.flatnonzero(trace.where(is_users_scope, Kind.ANNOTATION))
    groups = group_by(trace.name[rows])
    launched = launched_ns(trace, trace.start_ns[rows], trace.end_ns[rows])
    on_device = groups.durations(launched, whole_ns=trace.device_work_ns)
    found = table(
        Row,
        lambda row: (-(row.host.total_us if row.host else 0.0), row.name),
        name=trace.texts(groups.keys),
        calls=groups.calls,
        host=groups.durations(trace.duration_ns[rows], whole_ns=trace.steps.host_ns),
        device=on_device if trace.has_device else [None] * len(on_device),
    )
    return found or None


# ---- operators


def outermost_calls(trace: Trace) -> Ints:
    """For each row of an operator the call that it is a part of: itself, or one of its name that calls nothing else.

    So do torch's own tables have it: ``aten::sum`` that only passes other arguments on to ``aten::sum`` is one call. It
    is -1 for other rows.
    """
    links, found = trace.links, np.full(len(trace), -1, dtype=np.int64)
    found[links.operators] = links.operators
    inner, outer = links.called, links.parent[links.called]
    inner = inner[(trace.name[inner] == trace.name[outer]) & (np.bincount(outer, minlength=1)[outer] == 1)]
    is_outer = np.full(len(trace), True)
    is_outer[inner] = False
    found[inner] = nearest(inner, links.parent, is_outer)
    return found


def with_callees(trace: Trace, own: Ints) -> Ints:
    """For each row of an operator, its *own* and that of all it called, directly or not."""
    total = own.copy()
    for rows in reversed(trace.links.levels[1:]):
        np.add.at(total, trace.links.parent[rows], total[rows])
    return total


class OperatorTimes:
    """The times of every operator, with and without what it called; a column over all rows of the trace for each."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.outermost, links = trace, outermost_calls(trace), trace.links
        self.rows = np.flatnonzero(self.outermost == np.arange(len(trace)))
        rows = np.flatnonzero(links.operator_of_launch >= 0)
        launched = sums_by(links.operator_of_launch[rows], trace.duration_ns[rows], len(trace))
        self.host, self.device = trace.duration_ns, with_callees(trace, launched)
        owner, own = self.outermost[links.operators], without_inner(trace, links.called, links.parent)
        self.device_self = sums_by(owner, launched[links.operators], len(trace))
        # Callees that overlap by rounding would make up more than there is.
        self.host_self = np.minimum(sums_by(owner, own[links.operators], len(trace)), self.host)

    def of(self, groups: Groups, rows: Ints) -> dict[str, Any]:
        """Name, calls and the four statistics of each group of *rows*, ratios of all self times."""
        names = self.trace.texts(self.trace.name[rows[groups.order[groups.firsts]]])
        columns = {"name": names, "calls": groups.calls, "tensor_cores_eligible": map(may_use_tensor_cores, names)}
        for clock, whole, own in (("host", self.host, self.host_self), ("device", self.device, self.device_self)):
            nothing = None if clock == "host" or self.trace.has_device else [None] * len(names)
            for name, values in ((clock, whole), (f"{clock}_self", own)):
                columns[name] = nothing or groups.durations(values[rows], whole_ns=int(own[rows].sum()))
        return columns


def operator_table(trace: Trace) -> tuple[OperatorRow, ...] | None:
    """Every operator by name, the longest self time first (the device's if there is one); None without operators."""
    times = trace.operator_times
    groups = group_by(trace.name[times.rows])
    places = called_from(trace)
    called = [places.get(name, "") for name in groups.keys.tolist()]
    return table(OperatorRow, _by_self_time, called_from=called, **times.of(groups, times.rows)) or None


def operators_by_shape(trace: Trace) -> tuple[OperatorRow, ...] | None:
    """Every operator by the sizes and dtypes of its inputs, as ``operator_table``; None where none were recorded."""
    times = trace.operator_times
    rows = times.rows[trace.inputs[times.rows] >= 0]
    words, groups = by_shapes(trace, rows)
    return table(OperatorRow, _by_self_time, **words, **times.of(groups, rows)) or None


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
    found = [listed[key % len(listed)] for key in groups.keys.tolist()]
    return {"inputs": [inputs for inputs, _ in found], "dtypes": [dtypes for _, dtypes in found]}, groups


def _by_self_time(row: OperatorRow) -> tuple[float, float, str, str, str]:
    on_device = -row.device_self.total_us if row.device_self else 0.0
    return on_device, -row.host_self.total_us, row.name, row.inputs, row.dtypes


# ---- steps one by one


def _each_step(trace: Trace, keys: Lanes, moments_ns: Ints, *columns: Ints) -> tuple[list[int], list[Ints]]:
    """The keys of what began in a step, and the sums of each of *columns*: a row for each step, a column for each key.

    An event belongs to the step in whose mark on the host its moment lies; what lies outside of every step is left out.
    """
    step = trace.steps.of(moments_ns)
    inside, count = np.flatnonzero(step >= 0), len(trace.steps)
    used, which = np.unique(keys[inside], return_inverse=True)
    place, shape = step[inside] * len(used) + which, (count, len(used))
    return used.tolist(), [sums_by(place, one[inside], count * len(used)).reshape(shape) for one in columns]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSums:
    """What things of one kind took in each step: a row for each step, a column for each name."""

    names: tuple[str, ...]
    ns: Ints
    calls: Ints


def step_sums(trace: Trace) -> dict[TableName, StepSums]:
    """What each kernel, operator and collective took in each step in which it was launched, or began if nothing did.

    Operators on the host, without what they called.
    """
    times, (collectives, number, names) = trace.operator_times, collectives_by_name(trace)

    def sums(of: Sequence[str], name: Lanes, rows: Ints, spent_ns: Ints) -> StepSums:
        ones = np.ones(len(rows), dtype=np.int64)
        used, (ns, calls) = _each_step(trace, name, launched_at(trace, rows), spent_ns[rows], ones)
        return StepSums(names=tuple(of[one] for one in used), ns=ns, calls=calls)

    return {
        "kernels": sums(trace.names, trace.name[trace.device_rows], trace.device_rows, trace.duration_ns),
        "operators": sums(trace.names, trace.name[times.rows], times.rows, times.host_self),
        "collectives": sums(names, number, collectives, trace.duration_ns),
    }
