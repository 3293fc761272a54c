"""Tables of events: kinds, kernels, copies, scopes, launches, how well the device was used, and communication."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_flops.schema.communication import CollectiveRow, Overlap
from lightning_flops.schema.trace_events import (
    KERNEL_GAP_LIMIT_US,
    SHORT_KERNEL_LIMIT_US,
    IdleTime,
    KernelRow,
    KernelSummary,
    LaunchRow,
)
from lightning_flops.schema.trace_steps import DeviceMetrics, Row
from lightning_flops.trace.columns import CollectiveArguments, Trace
from lightning_flops.trace.intervals import (
    NS_PER_US,
    Intervals,
    Ints,
    Mask,
    distinct,
    durations_of,
    group_by,
    inside,
    intersect,
    load_within,
    ratio,
    shared_ns,
    sums_between,
    table,
    union,
)
from lightning_flops.trace.names import (
    Kind,
    collective_of_kernel,
    computes_on_host,
    host_collective,
    is_users_scope,
    may_use_tensor_cores,
    uses_tensor_cores,
)

_NOTHING = CollectiveArguments()


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
        efficiency = ratio(load_within(trace.start_ns[rows], trace.end_ns[rows], blocks, spans, limit=1.0), total_ns)
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
    """Idle time of each device as a whole and of each of its streams, over the whole trace; None without a device."""
    return tuple(_idle(trace)) if trace.has_device else None


def _idle(trace: Trace) -> Iterator[IdleTime]:
    for device in _devices(trace):
        of_device = trace.device_rows[trace.device[trace.device_rows] == device]
        for stream in (None, *distinct(trace.stream[of_device]).tolist()):
            rows = of_device if stream is None else of_device[trace.stream[of_device] == stream]
            reached = np.maximum.accumulate(trace.end_ns[rows])[:-1]
            gaps, calls = np.maximum(trace.start_ns[rows[1:]] - reached, 0), trace.links.launch[rows[1:]]
            after = (calls >= 0) & (trace.start_ns[np.maximum(calls, 0)] > reached)
            short = (calls >= 0) & ~after & (gaps < KERNEL_GAP_LIMIT_US * NS_PER_US)
            yield IdleTime(
                device=device,
                stream=stream,
                busy_us=trace.merged(rows).total / NS_PER_US,
                host_wait_us=int(gaps[after].sum()) / NS_PER_US,
                kernel_gap_us=int(gaps[short].sum()) / NS_PER_US,
                other_us=int(gaps[~after & ~short].sum()) / NS_PER_US,
            )


def launch_statistics(trace: Trace) -> tuple[LaunchRow, ...] | None:
    """Launches of kernels, copies and memsets; None without a device, a kind without launches is left out."""
    if not trace.has_device:
        return None
    whole_ns = trace.steps.total_ns
    rows = np.flatnonzero(trace.on_device & (trace.links.launch >= 0))
    groups, calls = group_by(trace.kind[rows]), trace.links.launch[rows]
    lengths, delays = trace.duration_ns[rows], np.maximum(trace.start_ns[rows] - trace.end_ns[calls], 0)
    of_kind = [distinct(here) for here in groups.parts(calls)]
    return table(
        LaunchRow,
        name=[Kind(kind).name.lower() for kind in groups.keys.tolist()],
        calls=map(len, of_kind),
        events=groups.calls,
        host=[durations_of(trace.duration_ns[here], whole_ns=whole_ns) for here in of_kind],
        device=groups.durations(lengths, whole_ns=whole_ns),
        delay=groups.durations(delays, whole_ns=0),
        shorter_than_launch=groups.sums(lengths < trace.duration_ns[calls]),
    )


# ---- the host


def user_scope_table(trace: Trace) -> tuple[Row, ...] | None:
    """The user's own scopes by name, the longest first; None when there are none."""
    rows = np.flatnonzero(trace.where(is_users_scope, Kind.ANNOTATION))
    groups = group_by(trace.name[rows])
    device: list[Any] = groups.durations(_launched_in(trace, rows), whole_ns=trace.device_work_ns)
    found = table(
        Row,
        lambda row: (-(row.host.total_us if row.host else 0.0), row.name),
        name=trace.texts(groups.keys),
        calls=groups.calls,
        host=groups.durations(trace.duration_ns[rows], whole_ns=trace.steps.host_ns),
        device=device if trace.has_device else [None] * len(device),
    )
    return found or None


def _launched_in(trace: Trace, rows: Ints) -> Ints:
    """For each scope the device work launched in it: by its own thread, or by autograd's while it was open."""
    moments, launched = trace.launches
    lanes = trace.lane[trace.links.launch[launched]]
    total = np.zeros(len(rows), dtype=np.int64)
    for lane in distinct(lanes).tolist():
        here = lanes == lane
        to = np.flatnonzero((trace.lane[rows] == lane) | bool(trace.links.backward_lanes[lane]))
        lengths = trace.duration_ns[launched[here]]
        total[to] += sums_between(moments[here], lengths, trace.start_ns[rows[to]], trace.end_ns[rows[to]])
    return total


# ---- communication


def overlap(trace: Trace) -> Overlap:
    """Computation, communication and their overlap over all steps."""
    communication, computation = communication_and_computation(trace)
    shared, wall = intersect(computation, communication).total, trace.steps.total_ns
    return Overlap(
        wall_us=wall / NS_PER_US,
        computation_us=computation.total / NS_PER_US,
        communication_us=communication.total / NS_PER_US,
        overlap_us=shared / NS_PER_US,
        other_us=(wall - union(computation, communication).total) / NS_PER_US,
        overlap_ratio=ratio(shared, communication.total),
    )


def communication_and_computation(trace: Trace) -> tuple[Intervals, Intervals]:
    """The moments of the steps in which the rank communicated, and those in which it computed."""
    spans, collective = trace.steps.spans, trace.is_collective
    if trace.has_device:
        computes = trace.kind == Kind.KERNEL
    else:
        computes = trace.where(computes_on_host, Kind.OPERATOR)
        # Operators inside a host collective are the copies that it consists of.
        for lane in distinct(trace.lane[collective]).tolist():
            rows = np.flatnonzero(computes & (trace.lane == lane))
            computes[rows[inside(trace.merged(collective & (trace.lane == lane)), trace.start_ns[rows])]] = False
    communication = intersect(trace.merged(collective), spans)
    return communication, intersect(trace.merged(computes & ~collective), spans)


def collective_name(trace: Trace, row: int) -> str:
    """What the collective in *row* is called: by its own arguments, else by the event's name."""
    name = trace.name_of(row)
    return trace.collectives.get(row, _NOTHING).name or host_collective(name) or collective_of_kernel(name)


def collective_bytes(trace: Trace, rows: list[int]) -> int | None:
    """Bytes of the larger side of the collectives in *rows*; None if the trace does not say that of one.

    A host scope says what it sends: what it gathers from all ranks is as many times that.
    """
    total = 0
    for row in rows:
        sent, times = trace.collectives.get(row, _NOTHING).bytes, 1
        if not trace.on_device[row] and host_collective(trace.name_of(row)) in ("all_gather", "gather"):
            times = 0 if trace.only_group is None else len(trace.only_group)
        if sent is None or not times:
            return None
        total += sent * times
    return total


def collective_table(trace: Trace) -> tuple[CollectiveRow, ...] | None:
    """Collectives by name, the longest first; None when the trace has none."""
    found: dict[str, list[int]] = {}
    for row in trace.by_start(trace.is_collective).tolist():
        found.setdefault(collective_name(trace, row), []).append(row)
    whole_ns = int(trace.duration_ns[trace.is_collective].sum())
    rows = table(
        CollectiveRow,
        lambda row: (-row.latency.total_us, row.name),
        name=found,
        calls=map(len, found.values()),
        bytes=[collective_bytes(trace, rows) for rows in found.values()],
        latency=[durations_of(trace.duration_ns[rows], whole_ns=whole_ns) for rows in found.values()],
    )
    return rows or None
