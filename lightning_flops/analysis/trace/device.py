"""How well the device was used: utilization, SM efficiency, occupancy, kernels, idle time, launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace.columns import LaunchShape, Trace
from lightning_flops.analysis.trace.durations import NS_PER_US, Groups, durations_of, group_by, ratio
from lightning_flops.analysis.trace.event_names import Kind, may_use_tensor_cores, uses_tensor_cores
from lightning_flops.analysis.trace.intervals import Floats, Ints, distinct, load_within, shared_ns
from lightning_flops.schema.trace_events import (
    KERNEL_GAP_LIMIT_US,
    LONG_DELAY_US,
    SHORT_KERNEL_LIMIT_US,
    IdleTime,
    KernelLaunch,
    KernelRow,
    KernelSummary,
    LaunchRow,
)
from lightning_flops.schema.trace_steps import DeviceMetrics

_UNKNOWN_SHAPE = LaunchShape()


def device_metrics(trace: Trace) -> tuple[DeviceMetrics, ...] | None:
    """Utilization, SM efficiency, occupancy and blocks per SM of each device; None without a device."""
    if not trace.has_device:
        return None
    properties = {entry.index: entry for entry in trace.devices}
    total_ns, spans = trace.steps.total_ns, trace.steps.spans
    found = []
    for device in distinct(trace.device[trace.on_device]).tolist():
        rows = np.flatnonzero((trace.kind == Kind.KERNEL) & (trace.device == device))
        entry = properties.get(device)
        blocks = trace.blocks_per_sm[rows]
        efficiency = None
        if not np.isnan(blocks).any() and len(rows):
            loaded = load_within(trace.start_ns[rows], trace.end_ns[rows], blocks, spans, limit=1.0)
            efficiency = ratio(loaded, total_ns)
        inside = rows[(trace.end_ns[rows] > trace.steps.start_ns[0]) & (trace.start_ns[rows] < trace.steps.end_ns[-1])]
        found.append(
            DeviceMetrics(
                device=device,
                name=entry.name if entry else None,
                sm_count=entry.sm_count if entry else None,
                utilization=shared_ns(trace.merged(rows), spans) / total_ns if total_ns else 0.0,
                sm_efficiency=efficiency,
                occupancy_percent=_weighted_mean(trace.occupancy_percent[inside], trace.duration_ns[inside]),
                blocks_per_sm=_weighted_mean(trace.blocks_per_sm[inside], trace.duration_ns[inside]),
            )
        )
    return tuple(found)


def kernel_table(trace: Trace) -> tuple[KernelRow, ...] | None:
    """Every kernel of the trace by name, the longest together first; None without a device."""
    if not trace.has_device:
        return None
    rows = np.flatnonzero(trace.kind == Kind.KERNEL)
    groups = group_by(trace.name[rows].astype(np.int64))
    lengths = groups.durations(trace.duration_ns[rows], whole_ns=int(trace.duration_ns[rows].sum()))
    eligible = groups.sums(_eligible(trace, rows).astype(np.int64)).tolist()
    blocks = _weighted_means(groups, trace.blocks_per_sm[rows], trace.duration_ns[rows])
    occupancy = _weighted_means(groups, trace.occupancy_percent[rows], trace.duration_ns[rows])
    collective = groups.sums(trace.is_collective[rows].astype(np.int64)).tolist()
    launched = _launch_shapes(trace, rows)
    table = [
        KernelRow(
            name=trace.names[name],
            calls=calls,
            device=lengths[index],
            tensor_cores=uses_tensor_cores(trace.names[name]),
            tensor_cores_eligible=eligible[index] > 0,
            collective=collective[index] > 0,
            blocks_per_sm=blocks[index],
            occupancy_percent=occupancy[index],
            launch_shapes=launched[name],
        )
        for index, (name, calls) in enumerate(zip(groups.keys.tolist(), groups.calls().tolist(), strict=True))
    ]
    return tuple(sorted(table, key=lambda row: (-row.device.total_us, row.name)))


def _launch_shapes(trace: Trace, rows: Ints) -> dict[int, tuple[KernelLaunch, ...]]:
    """How the kernels of each name, by its index, were launched."""
    found: dict[int, list[KernelLaunch]] = {name: [] for name in distinct(trace.name[rows]).tolist()}
    count = np.int64(len(trace.launch_shapes) + 1)
    groups = group_by(trace.name[rows].astype(np.int64) * count + trace.launch_shape[rows] + 1)
    times = groups.sums(trace.duration_ns[rows]).tolist()
    for key, calls, time_ns in zip(groups.keys.tolist(), groups.calls().tolist(), times, strict=True):
        shape = trace.launch_shapes[key % count - 1] if key % count else None
        if shape is None or shape == _UNKNOWN_SHAPE:
            continue
        found[key // count].append(
            KernelLaunch(
                grid=shape.grid,
                block=shape.block,
                registers=shape.registers,
                shared_memory=shape.shared_memory,
                calls=calls,
                device_us=time_ns / NS_PER_US,
            )
        )
    return {name: tuple(sorted(shapes, key=lambda one: (-one.device_us, -one.calls))) for name, shapes in found.items()}


def kernel_summary(trace: Trace) -> KernelSummary | None:
    """All kernels together: tensor cores and short kernels; None without a device."""
    if not trace.has_device:
        return None
    rows = np.flatnonzero(trace.kind == Kind.KERNEL)
    lengths = trace.duration_ns[rows]
    computes = ~trace.is_collective[rows]
    computing_ns = int(lengths[computes].sum())
    on_tensor_cores = trace.names_where(uses_tensor_cores)[rows] & computes
    eligible = _eligible(trace, rows) & computes
    short = lengths < SHORT_KERNEL_LIMIT_US * NS_PER_US
    told = trace.names_tell_tensor_cores
    return KernelSummary(
        calls=len(rows),
        total_us=int(lengths.sum()) / NS_PER_US,
        tensor_core_ratio=ratio(int(lengths[on_tensor_cores].sum()), computing_ns) if told else None,
        tensor_core_eligible_ratio=ratio(int(lengths[eligible].sum()), computing_ns) if told else None,
        short_calls_ratio=ratio(int(short.sum()), len(rows)),
        short_time_ratio=ratio(int(lengths[short].sum()), int(lengths.sum())),
    )


def idle_times(trace: Trace) -> tuple[IdleTime, ...] | None:
    """Idle time of each device as a whole and of each of its streams; None without a device.

    The whole trace counts, as in HTA. Where streams take turns, only the row of the device says when nothing ran.
    """
    if not trace.has_device:
        return None
    rows = trace.device_rows
    found = []
    for device in distinct(trace.device[rows]).tolist():
        of_device = rows[trace.device[rows] == device]
        whole = _idle(trace, of_device, device=device, stream=None)
        streams = distinct(trace.stream[of_device]).tolist()
        found.append(whole)
        if len(streams) == 1:
            found.append(replace(whole, stream=streams[0]))
            continue
        for stream in streams:
            found.append(_idle(trace, of_device[trace.stream[of_device] == stream], device=device, stream=stream))
    return tuple(found)


def launch_statistics(trace: Trace) -> tuple[LaunchRow, ...] | None:
    """Launches of kernels, copies and memsets; None without a device, a kind without launches is left out."""
    if not trace.has_device:
        return None
    found = []
    kinds: tuple[tuple[Kind, Literal["kernel", "memcpy", "memset"]], ...] = (
        (Kind.KERNEL, "kernel"),
        (Kind.MEMCPY, "memcpy"),
        (Kind.MEMSET, "memset"),
    )
    for kind, name in kinds:
        rows = np.flatnonzero((trace.kind == kind) & (trace.links.launch >= 0))
        calls = trace.links.launch[rows]
        called = distinct(calls)
        host_ns, device_ns = trace.duration_ns[calls], trace.duration_ns[rows]
        delay_ns = np.maximum(trace.start_ns[rows] - trace.end_ns[calls], 0)
        host = durations_of(trace.duration_ns[called], whole_ns=trace.steps.total_ns)
        device = durations_of(device_ns, whole_ns=trace.steps.total_ns)
        delay = durations_of(delay_ns, whole_ns=0)
        if host is None or device is None or delay is None:
            continue
        found.append(
            LaunchRow(
                kind=name,
                launches=len(called),
                events=len(rows),
                host=host,
                device=device,
                delay=delay,
                shorter_than_launch=int((device_ns < host_ns).sum()),
                long_delays=int((delay_ns > LONG_DELAY_US * NS_PER_US).sum()),
            )
        )
    return tuple(found)


def _idle(trace: Trace, rows: Ints, *, device: int, stream: int | None) -> IdleTime:
    starts, ends = trace.start_ns[rows], trace.end_ns[rows]
    reached = np.maximum.accumulate(ends)
    gaps = starts[1:] - reached[:-1]
    calls = trace.links.launch[rows[1:]]
    known = calls >= 0
    after = known & (trace.start_ns[np.maximum(calls, 0)] > reached[:-1])
    paused = gaps > 0
    short = gaps < KERNEL_GAP_LIMIT_US * NS_PER_US
    return IdleTime(
        device=device,
        stream=stream,
        busy_us=trace.merged(rows).total / NS_PER_US,
        host_wait_us=int(gaps[paused & after].sum()) / NS_PER_US,
        kernel_gap_us=int(gaps[paused & known & ~after & short].sum()) / NS_PER_US,
        other_us=int(gaps[paused & ~after & ~(known & short)].sum()) / NS_PER_US,
    )


def _eligible(trace: Trace, rows: Ints) -> npt.NDArray[np.bool_]:
    operators = trace.links.operator_of_launch[rows]
    eligible = trace.names_where(may_use_tensor_cores)
    return (operators >= 0) & eligible[np.maximum(operators, 0)]


def _weighted_mean(values: Floats, weights: Ints) -> float | None:
    known = ~np.isnan(values)
    total = int(weights[known].sum())
    if not total:
        return None
    return float((values[known] * weights[known]).sum()) / total


def _weighted_means(groups: Groups, values: Floats, weights: Ints) -> list[float | None]:
    known = ~np.isnan(values)
    weight = groups.sums(np.where(known, weights, 0)).tolist()
    if not weight:
        return []
    total = np.add.reduceat(np.where(known, values * weights, 0.0)[groups.order], groups.firsts).tolist()
    return [part / whole if whole else None for part, whole in zip(total, weight, strict=True)]
