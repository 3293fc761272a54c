"""Tables of a trace: devices, kernels, copies, idle times, operators and scopes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_flops.schema.trace_events import (
    KERNEL_GAP_LIMIT_US,
    SHORT_KERNEL_LIMIT_US,
    IdleTime,
    KernelRow,
    KernelSummary,
    OperatorRow,
)
from lightning_flops.schema.trace_steps import DeviceMetrics, Row
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.communication import collective_name
from lightning_flops.trace.intervals import (
    NS_PER_US,
    Groups,
    Ints,
    Lanes,
    Mask,
    distinct,
    durations_of,
    group_by,
    load_within,
    ratio,
    shared_ns,
    sums_by,
    table,
)
from lightning_flops.trace.modules import called_from
from lightning_flops.trace.names import (
    Kind,
    is_users_scope,
    may_use_tensor_cores,
    uses_tensor_cores,
)
from lightning_flops.trace.steps import launched_ns
from lightning_flops.trace.structure import launched_at, without_inner

if TYPE_CHECKING:
    from lightning_flops.schema.trace_comparison import TableName

_NO_TENSOR = ("Scalar", "TensorList", "GenericList", "Int", "Bool", "Double", "Float")
"""What begins the types of arguments that are no tensor, or a list of them."""


def _longest_first(row: Row) -> tuple[float, str]:
    longest = row.host if row.device is None else row.device
    return -longest.total_us if longest else 0.0, row.name


# ---- the device


def device_metrics(trace: Trace) -> tuple[DeviceMetrics, ...] | None:
    """Utilization, SM efficiency, occupancy and blocks per SM of each device; None without a device."""
    return tuple(_metrics(trace, device) for device in _devices(trace)) if trace.has_device else None


def _devices(trace: Trace) -> list[int]:
    return distinct(trace.device[trace.on_device]).tolist()  # type: ignore[no-any-return]


def _metrics(trace: Trace, device: int) -> DeviceMetrics:
    total_ns, spans, entry = trace.steps.total_ns, trace.steps.spans, trace.described(device)
    rows = np.flatnonzero((trace.kind == Kind.KERNEL) & (trace.device == device))
    efficiency, blocks, busy = None, trace.blocks_per_sm[rows], trace.merged(rows)
    if len(rows) and not np.isnan(blocks).any():
        efficiency = ratio(load_within(trace.start_ns[rows], trace.end_ns[rows], blocks, spans), total_ns)
    within = rows[(trace.end_ns[rows] > trace.steps.start_ns[0]) & (trace.start_ns[rows] < trace.steps.end_ns[-1])]
    together, weights = group_by(np.zeros(len(within), dtype=np.int64)), trace.duration_ns[within]
    return DeviceMetrics(
        device=device,
        name=entry.name if entry else None,
        sm_count=entry.sm_count if entry else None,
        utilization=ratio(shared_ns(busy, spans), total_ns) or 0.0,
        sm_efficiency=efficiency,
        occupancy_percent=next(iter(together.means(trace.occupancy_percent[within], weights)), None),
        blocks_per_sm=next(iter(together.means(trace.blocks_per_sm[within], weights)), None),
        busy_us=busy.total / NS_PER_US,
    )


def kernel_table(trace: Trace) -> tuple[KernelRow, ...] | None:
    """Every kernel of the trace by name, the longest together first; None without a device."""
    if not trace.has_device:
        return None
    rows = trace.of(Kind.KERNEL)
    lengths, groups = trace.duration_ns[rows], group_by(trace.name[rows])
    names = trace.texts(groups.keys)
    return table(
        KernelRow,
        _longest_first,
        name=names,
        calls=groups.calls,
        device=groups.durations(lengths, whole_ns=int(lengths.sum())),
        tensor_cores=map(uses_tensor_cores, names),
        tensor_cores_eligible=map(bool, groups.sums(_eligible(trace, rows))),
        collective=map(bool, groups.sums(trace.is_collective[rows])),
        blocks_per_sm=groups.means(trace.blocks_per_sm[rows], lengths),
        occupancy_percent=groups.means(trace.occupancy_percent[rows], lengths),
    )


def kernel_summary(trace: Trace) -> KernelSummary | None:
    """All kernels together: tensor cores and short kernels; None without a device."""
    if not trace.has_device:
        return None
    rows = trace.of(Kind.KERNEL)
    lengths, computes = trace.duration_ns[rows], ~trace.is_collective[rows]
    short = lengths < SHORT_KERNEL_LIMIT_US * NS_PER_US

    def share(chosen: Mask) -> float | None:
        time_ns = (int(lengths[chosen & computes].sum()), int(lengths[computes].sum()))
        return ratio(*time_ns) if trace.names_tell_tensor_cores else None

    return KernelSummary(
        calls=len(rows),
        total_us=int(lengths.sum()) / NS_PER_US,
        tensor_core_ratio=share(trace.where(uses_tensor_cores, Kind.KERNEL)[rows]),
        tensor_core_eligible_ratio=share(_eligible(trace, rows)),
        short_calls_ratio=ratio(int(short.sum()), len(rows)),
        short_time_ratio=ratio(int(lengths[short].sum()), int(lengths.sum())),
    )


def _eligible(trace: Trace, rows: Ints) -> Mask:
    operators = trace.links.operator_of_launch[rows]
    return (operators >= 0) & trace.where(may_use_tensor_cores, Kind.OPERATOR)[np.maximum(operators, 0)]


def transfer_table(trace: Trace) -> tuple[Row, ...] | None:
    """Copies and memsets by kind, the longest first; None without a device."""
    if not trace.has_device:
        return None
    rows = np.flatnonzero((trace.kind == Kind.MEMCPY) | (trace.kind == Kind.MEMSET))
    sizes, groups = trace.bytes[rows], group_by(trace.name[rows])
    calls = [distinct(trace.links.launch[here]) for here in groups.parts(rows)]
    unknown = groups.sums(sizes < 0)
    return table(
        Row,
        _longest_first,
        name=trace.texts(groups.keys),
        calls=groups.calls,
        bytes=[None if lacks else total for total, lacks in zip(groups.sums(sizes), unknown, strict=True)],
        host=[durations_of(trace.duration_ns[here[here >= 0]], whole_ns=trace.steps.host_ns) for here in calls],
        device=groups.durations(trace.duration_ns[rows], whole_ns=trace.device_work_ns),
    )


def idle_times(trace: Trace) -> tuple[IdleTime, ...] | None:
    """Idle time of each device, over the whole trace; None without a device."""
    found = []
    for device in _devices(trace):
        rows = trace.device_rows[trace.device[trace.device_rows] == device]
        reached = np.maximum.accumulate(trace.end_ns[rows])[:-1]
        gaps, calls = np.maximum(trace.start_ns[rows[1:]] - reached, 0), trace.links.launch[rows[1:]]
        after = (calls >= 0) & (trace.start_ns[np.maximum(calls, 0)] > reached)
        short = (calls >= 0) & ~after & (gaps < KERNEL_GAP_LIMIT_US * NS_PER_US)
        one = IdleTime(
            device=device,
            busy_us=trace.merged(rows).total / NS_PER_US,
            host_wait_us=int(gaps[after].sum()) / NS_PER_US,
            kernel_gap_us=int(gaps[short].sum()) / NS_PER_US,
            other_us=int(gaps[~after & ~short].sum()) / NS_PER_US,
        )
        found.append(one)
    return tuple(found) or None


# ---- the host


def user_scope_table(trace: Trace) -> tuple[Row, ...] | None:
    """The user's own scopes by name, the longest first; None when there are none."""
    rows = np.flatnonzero(trace.where(is_users_scope, Kind.ANNOTATION))
    groups = group_by(trace.name[rows])
    launched = launched_ns(trace, trace.start_ns[rows], trace.end_ns[rows])
    device: list[Any] = groups.durations(launched, whole_ns=trace.device_work_ns)
    found = table(
        Row,
        lambda row: (-(row.host.total_us if row.host else 0.0), row.name),
        name=trace.texts(groups.keys),
        calls=groups.calls,
        host=groups.durations(trace.duration_ns[rows], whole_ns=trace.steps.host_ns),
        device=device if trace.has_device else [None] * len(device),
    )
    return found or None


# ---- operators


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
        """Name, calls and the four statistics of each group of *rows*, ratios of all self times."""
        host_whole, device_whole = int(self.host_self[rows].sum()), int(self.device_self[rows].sum())
        nothing = None if self.trace.has_device else [None] * len(groups.keys)
        names = self.trace.texts(self.trace.name[rows[groups.order[groups.firsts]]])
        return {
            "name": names,
            "calls": groups.calls,
            "host": groups.durations(self.host[rows], whole_ns=host_whole),
            "host_self": groups.durations(self.host_self[rows], whole_ns=host_whole),
            "device": nothing or groups.durations(self.device[rows], whole_ns=device_whole),
            "device_self": nothing or groups.durations(self.device_self[rows], whole_ns=device_whole),
            "tensor_cores_eligible": map(may_use_tensor_cores, names),
        }


def operator_table(trace: Trace) -> tuple[OperatorRow, ...] | None:
    """Every operator by name, the longest self time first (the device's if there is one); None without operators."""
    times = trace.operator_times
    groups = group_by(trace.name[times.rows])
    lines = called_from(trace)
    places = [lines.get(name, "") for name in groups.keys.tolist()]
    return table(OperatorRow, _by_self_time, called_from=places, **times.of(groups, times.rows)) or None


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSums:
    """What things of one kind took in each step: a row for each step, a column for each name."""

    names: tuple[str, ...]
    ns: Ints
    calls: Ints


def step_sums(trace: Trace) -> dict[TableName, StepSums]:
    """What each kernel, operator and collective took in each step; operators on the host, without what they called.

    An event belongs to the step in whose mark on the host it was launched, or began if nothing launched it; what lies
    outside of every step is left out.
    """

    def sums(names: Sequence[str], name: Lanes, rows: Ints, spent_ns: Ints, calls: Ints) -> StepSums:
        step = trace.steps.of(launched_at(trace, rows))
        inside = np.flatnonzero(step >= 0)
        used, which = np.unique(name[inside], return_inverse=True)
        shape, place = (len(trace.steps), len(used)), step[inside] * len(used) + which
        ns, count = (sums_by(place, values[inside], shape[0] * shape[1]).reshape(shape) for values in (spent_ns, calls))
        return StepSums(names=tuple(names[one] for one in used.tolist()), ns=ns, calls=count)

    on_device, operators, collectives = trace.device_rows, trace.links.operators, trace.by_start(trace.is_collective)
    # A call inside a call of the same operator is a part of it.
    outermost, names = (trace.operator_times.outermost[operators] == operators).astype(np.int64), dict[str, int]()
    number = [names.setdefault(collective_name(trace, row), len(names)) for row in collectives.tolist()]

    def events(of: Sequence[str], name: Lanes, rows: Ints) -> StepSums:
        return sums(of, name, rows, trace.duration_ns[rows], np.ones(len(rows), dtype=np.int64))

    return {
        "kernels": events(trace.names, trace.name[on_device], on_device),
        "operators": sums(trace.names, trace.name[operators], operators, self_host_ns(trace)[operators], outermost),
        "collectives": events(tuple(names), np.array(number, dtype=np.int64), collectives),
    }
