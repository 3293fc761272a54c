"""How well the device was used: utilization, SM efficiency, occupancy, kernels, copies, idle time, launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np

from lightning_flops.schema.trace_events import (
    KERNEL_GAP_LIMIT_US,
    LONG_DELAY_US,
    SHORT_KERNEL_LIMIT_US,
    IdleTime,
    KernelLaunch,
    KernelRow,
    KernelSummary,
    LaunchRow,
    TransferRow,
)
from lightning_flops.schema.trace_steps import DeviceMetrics
from lightning_flops.trace.columns import LaunchShape, Trace
from lightning_flops.trace.intervals import (
    NS_PER_US,
    Floats,
    Groups,
    Ints,
    Mask,
    distinct,
    durations_of,
    group_by,
    load_within,
    ratio,
    records,
    shared_ns,
)
from lightning_flops.trace.names import (
    Kind,
    may_use_tensor_cores,
    uses_tensor_cores,
)

_Row = TypeVar("_Row", KernelRow, TransferRow)


def device_metrics(trace: Trace) -> tuple[DeviceMetrics, ...] | None:
    """Utilization, SM efficiency, occupancy and blocks per SM of each device; None without a device."""
    if not trace.has_device:
        return None
    total_ns, spans = trace.steps.total_ns, trace.steps.spans
    found = []
    for device in distinct(trace.device[trace.on_device]).tolist():
        rows = np.flatnonzero((trace.kind == Kind.KERNEL) & (trace.device == device))
        entry, blocks = trace.described(device), trace.blocks_per_sm[rows]
        efficiency = None
        if not np.isnan(blocks).any() and len(rows):
            loaded = load_within(trace.start_ns[rows], trace.end_ns[rows], blocks, spans, limit=1.0)
            efficiency = ratio(loaded, total_ns)
        within = rows[(trace.end_ns[rows] > trace.steps.start_ns[0]) & (trace.start_ns[rows] < trace.steps.end_ns[-1])]
        together = group_by(np.zeros(len(within), dtype=np.int64))
        means = [
            (_weighted_means(together, column[within], trace.duration_ns[within]) or [None])[0]
            for column in (trace.occupancy_percent, trace.blocks_per_sm)
        ]
        found.append(
            DeviceMetrics(
                device=device,
                name=entry.name if entry else None,
                sm_count=entry.sm_count if entry else None,
                utilization=shared_ns(trace.merged(rows), spans) / total_ns if total_ns else 0.0,
                sm_efficiency=efficiency,
                occupancy_percent=means[0],
                blocks_per_sm=means[1],
            )
        )
    return tuple(found)


def kernel_table(trace: Trace) -> tuple[KernelRow, ...] | None:
    """Every kernel of the trace by name, the longest together first; None without a device."""
    if not trace.has_device:
        return None
    rows = np.flatnonzero(trace.kind == Kind.KERNEL)
    lengths = trace.duration_ns[rows]
    groups = group_by(trace.name[rows].astype(np.int64))
    launched = _launch_shapes(trace, rows)
    names = [trace.names[name] for name in groups.keys.tolist()]
    columns = records(
        name=names,
        calls=groups.calls().tolist(),
        device=groups.durations(lengths, whole_ns=int(lengths.sum())),
        tensor_cores=map(uses_tensor_cores, names),
        tensor_cores_eligible=(groups.sums(_eligible(trace, rows).astype(np.int64)) > 0).tolist(),
        collective=(groups.sums(trace.is_collective[rows].astype(np.int64)) > 0).tolist(),
        blocks_per_sm=_weighted_means(groups, trace.blocks_per_sm[rows], lengths),
        occupancy_percent=_weighted_means(groups, trace.occupancy_percent[rows], lengths),
        launch_shapes=[launched.get(name, ()) for name in groups.keys.tolist()],
    )
    return _longest_first([KernelRow(**one) for one in columns])


def _longest_first(table: Sequence[_Row]) -> tuple[_Row, ...]:
    return tuple(sorted(table, key=lambda row: (-row.device.total_us, row.name)))


def _launch_shapes(trace: Trace, rows: Ints) -> dict[int, tuple[KernelLaunch, ...]]:
    """How the kernels of each name, by its index, were launched."""
    found: dict[int, list[KernelLaunch]] = {}
    count = np.int64(len(trace.launch_shapes) + 1)
    groups = group_by(trace.name[rows].astype(np.int64) * count + trace.launch_shape[rows] + 1)
    times = groups.sums(trace.duration_ns[rows]).tolist()
    for key, calls, time_ns in zip(groups.keys.tolist(), groups.calls().tolist(), times, strict=True):
        shape = trace.launch_shapes[key % count - 1] if key % count else LaunchShape()
        if shape != LaunchShape():
            one = KernelLaunch(
                grid=shape.grid,
                block=shape.block,
                registers=shape.registers,
                shared_memory=shape.shared_memory,
                calls=calls,
                device_us=time_ns / NS_PER_US,
            )
            found.setdefault(int(key // count), []).append(one)
    return {name: tuple(sorted(shapes, key=lambda one: (-one.device_us, -one.calls))) for name, shapes in found.items()}


def kernel_summary(trace: Trace) -> KernelSummary | None:
    """All kernels together: tensor cores and short kernels; None without a device."""
    if not trace.has_device:
        return None
    rows = np.flatnonzero(trace.kind == Kind.KERNEL)
    lengths, computes = trace.duration_ns[rows], ~trace.is_collective[rows]
    whole, computing = int(lengths.sum()), int(lengths[computes].sum())
    short = lengths < SHORT_KERNEL_LIMIT_US * NS_PER_US

    def share(chosen: Mask) -> float | None:
        return ratio(int(lengths[chosen & computes].sum()), computing) if trace.names_tell_tensor_cores else None

    return KernelSummary(
        calls=len(rows),
        total_us=whole / NS_PER_US,
        tensor_core_ratio=share(trace.where(uses_tensor_cores, Kind.KERNEL)[rows]),
        tensor_core_eligible_ratio=share(_eligible(trace, rows)),
        short_calls_ratio=ratio(int(short.sum()), len(rows)),
        short_time_ratio=ratio(int(lengths[short].sum()), whole),
    )


def _eligible(trace: Trace, rows: Ints) -> Mask:
    operators = trace.links.operator_of_launch[rows]
    return (operators >= 0) & trace.where(may_use_tensor_cores, Kind.OPERATOR)[np.maximum(operators, 0)]


def _weighted_means(groups: Groups, values: Floats, weights: Ints) -> list[float | None]:
    """The mean of the known *values* of each group; None where none is known, or has a weight."""
    known = ~np.isnan(values)
    weight = groups.sums(np.where(known, weights, 0)).tolist()
    total = np.where(known, values * weights, 0.0)[groups.order]
    totals = np.add.reduceat(total, groups.firsts).tolist() if weight else []
    return [part / whole if whole else None for part, whole in zip(totals, weight, strict=True)]


def transfer_table(trace: Trace) -> tuple[TransferRow, ...] | None:
    """Copies and memsets by kind, the longest first; None without a device."""
    if not trace.has_device:
        return None
    rows = np.flatnonzero((trace.kind == Kind.MEMCPY) | (trace.kind == Kind.MEMSET))
    table = []
    for name in distinct(trace.name[rows]).tolist():
        here = rows[trace.name[rows] == name]
        calls, sizes = trace.links.launch[here], trace.bytes[here]
        device = durations_of(trace.duration_ns[here], whole_ns=trace.device_work_ns)
        assert device is not None  # a name that is there has a row
        table.append(
            TransferRow(
                name=trace.names[name],
                calls=len(here),
                bytes=int(sizes.sum()) if (sizes >= 0).all() else None,
                host=durations_of(trace.duration_ns[distinct(calls[calls >= 0])], whole_ns=trace.steps.host_ns),
                device=device,
            )
        )
    return _longest_first(table)


def idle_times(trace: Trace) -> tuple[IdleTime, ...] | None:
    """Idle time of each device as a whole and of each of its streams, over the whole trace; None without a device."""
    if not trace.has_device:
        return None
    found = []
    for device in distinct(trace.device[trace.device_rows]).tolist():
        rows = trace.device_rows[trace.device[trace.device_rows] == device]
        found.append(_idle(trace, rows, device=device, stream=None))
        for stream in distinct(trace.stream[rows]).tolist():
            found.append(_idle(trace, rows[trace.stream[rows] == stream], device=device, stream=stream))
    return tuple(found)


def _idle(trace: Trace, rows: Ints, *, device: int, stream: int | None) -> IdleTime:
    reached = np.maximum.accumulate(trace.end_ns[rows])[:-1]
    gaps = trace.start_ns[rows[1:]] - reached
    calls = trace.links.launch[rows[1:]]
    known = calls >= 0
    after = known & (trace.start_ns[np.maximum(calls, 0)] > reached)
    short = known & ~after & (gaps < KERNEL_GAP_LIMIT_US * NS_PER_US)
    return IdleTime(
        device=device,
        stream=stream,
        busy_us=trace.merged(rows).total / NS_PER_US,
        host_wait_us=int(gaps[(gaps > 0) & after].sum()) / NS_PER_US,
        kernel_gap_us=int(gaps[(gaps > 0) & short].sum()) / NS_PER_US,
        other_us=int(gaps[(gaps > 0) & ~after & ~short].sum()) / NS_PER_US,
    )


def launch_statistics(trace: Trace) -> tuple[LaunchRow, ...] | None:
    """Launches of kernels, copies and memsets; None without a device, a kind without launches is left out."""
    if not trace.has_device:
        return None
    found = []
    kinds: dict[Kind, Literal["kernel", "memcpy", "memset"]] = {
        Kind.KERNEL: "kernel",
        Kind.MEMCPY: "memcpy",
        Kind.MEMSET: "memset",
    }
    for kind, name in kinds.items():
        rows = np.flatnonzero((trace.kind == kind) & (trace.links.launch >= 0))
        calls = trace.links.launch[rows]
        host_ns, device_ns = trace.duration_ns[calls], trace.duration_ns[rows]
        delay_ns = np.maximum(trace.start_ns[rows] - trace.end_ns[calls], 0)
        host = durations_of(trace.duration_ns[distinct(calls)], whole_ns=trace.steps.total_ns)
        device = durations_of(device_ns, whole_ns=trace.steps.total_ns)
        delay = durations_of(delay_ns, whole_ns=0)
        if host is not None and device is not None and delay is not None:
            row = LaunchRow(
                kind=name,
                launches=len(distinct(calls)),
                events=len(rows),
                host=host,
                device=device,
                delay=delay,
                shorter_than_launch=int((device_ns < host_ns).sum()),
                long_delays=int((delay_ns > LONG_DELAY_US * NS_PER_US).sum()),
            )
            found.append(row)
    return tuple(found)
