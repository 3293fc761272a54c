"""What ran in a trace: operators, kernels, copies, scopes, collectives, pauses and launches, grouped by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np

from lightning_flops.analysis.trace_marks import METADATA_KEY
from lightning_flops.schema.communication import CollectiveRow, Overlap
from lightning_flops.schema.trace_events import (
    KERNEL_GAP_LIMIT_US,
    LONG_DELAY_US,
    SHORT_KERNEL_LIMIT_US,
    CalledFrom,
    ChildRow,
    IdleTime,
    KernelLaunch,
    KernelRow,
    KernelSummary,
    LaunchRow,
    OperatorRow,
    OperatorShapeRow,
    TransferRow,
    UserScopeRow,
)
from lightning_flops.schema.trace_steps import DeviceMetrics, DeviceSummary, DeviceUse, OverviewRow
from lightning_flops.trace.columns import CollectiveArguments, LaunchShape, Trace
from lightning_flops.trace.intervals import (
    NS_PER_US,
    Floats,
    Groups,
    Intervals,
    Ints,
    Mask,
    covered_within,
    distinct,
    durations_of,
    group_by,
    inside,
    intersect,
    load_within,
    ratio,
    sums_between,
    union,
)
from lightning_flops.trace.names import (
    Kind,
    collective_of_kernel,
    computes_on_host,
    host_collective,
    is_data_loader,
    is_users_scope,
    may_use_tensor_cores,
    step_number,
    uses_tensor_cores,
)
from lightning_flops.trace.python_calls import places

_NOTHING = CollectiveArguments()
_NO_TENSOR = ("Scalar", "TensorList", "GenericList", "Int", "Bool", "Double", "Float")
"""What begins the types of arguments that are no tensor, or a list of them."""

_Row = TypeVar("_Row", KernelRow, TransferRow)


# Operators


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
        self.host_self, self.device_self = (at_outermost(outermost, own) for own in (self_host_ns(trace), launched))

    def of(self, groups: Groups, rows: Ints) -> list[dict[str, object]]:
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
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


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
            **row,  # type: ignore[arg-type]
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
        table.append(OperatorShapeRow(name=name, inputs=inputs, dtypes=dtypes, calls=calls, **row))  # type: ignore[arg-type]
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


# The device


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
                utilization=_shared_ns(trace.merged(rows), spans) / total_ns if total_ns else 0.0,
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
    columns = (
        groups.keys.tolist(),
        groups.calls().tolist(),
        groups.durations(lengths, whole_ns=int(lengths.sum())),
        groups.sums(_eligible(trace, rows).astype(np.int64)).tolist(),
        groups.sums(trace.is_collective[rows].astype(np.int64)).tolist(),
        _weighted_means(groups, trace.blocks_per_sm[rows], lengths),
        _weighted_means(groups, trace.occupancy_percent[rows], lengths),
    )
    launched = _launch_shapes(trace, rows)
    table = [
        KernelRow(
            name=trace.names[name],
            calls=calls,
            device=device,
            tensor_cores=uses_tensor_cores(trace.names[name]),
            tensor_cores_eligible=eligible > 0,
            collective=collective > 0,
            blocks_per_sm=blocks,
            occupancy_percent=occupancy,
            launch_shapes=launched.get(name, ()),
        )
        for name, calls, device, eligible, collective, blocks, occupancy in zip(*columns, strict=True)
    ]
    return _longest_first(table)


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
        device = durations_of(trace.duration_ns[here], whole_ns=_device_work_ns(trace))
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


# Scopes, and every kind of event as a whole


def user_scope_table(trace: Trace) -> tuple[UserScopeRow, ...] | None:
    """The user's own scopes by name, the longest first; None when there are none."""
    rows = np.flatnonzero(trace.where(is_users_scope, Kind.ANNOTATION))
    if not len(rows):
        return None
    groups = group_by(trace.name[rows].astype(np.int64))
    host = groups.durations(trace.duration_ns[rows], whole_ns=trace.steps.host_ns)
    device = groups.durations(_launched_in(trace, rows), whole_ns=_device_work_ns(trace))
    table = [
        UserScopeRow(
            name=trace.names[name], calls=calls, host=host[index], device=device[index] if trace.has_device else None
        )
        for index, (name, calls) in enumerate(zip(groups.keys.tolist(), groups.calls().tolist(), strict=True))
    ]
    return tuple(sorted(table, key=lambda row: (-row.host.total_us, row.name)))


def _launched_in(trace: Trace, rows: Ints) -> Ints:
    """For each scope the device work launched in it: by its own thread, or by autograd's while it was open."""
    launched = trace.device_rows[trace.links.launch[trace.device_rows] >= 0]
    launched = launched[np.argsort(trace.start_ns[trace.links.launch[launched]], kind="stable")]
    calls = trace.links.launch[launched]
    total = np.zeros(len(rows), dtype=np.int64)
    for lane in distinct(trace.lane[calls]).tolist():
        here = trace.lane[calls] == lane
        to = np.flatnonzero((trace.lane[rows] == lane) | bool(trace.links.backward_lanes[lane]))
        moments, lengths = trace.start_ns[calls[here]], trace.duration_ns[launched[here]]
        total[to] += sums_between(moments, lengths, trace.start_ns[rows[to]], trace.end_ns[rows[to]])
    return total


def overview(trace: Trace) -> tuple[OverviewRow, ...]:
    """Each kind of event inside the steps: how many there are, and the time they cover together."""
    kind, parent, collective = trace.kind, trace.links.parent, trace.is_collective
    operator, found = kind == Kind.OPERATOR, []

    def add(name: str, rows: Mask) -> None:
        spans, here = trace.steps.spans, np.flatnonzero(rows)
        if not len(spans.starts):
            return
        here = here[(trace.start_ns[here] < spans.ends[-1]) & (trace.end_ns[here] > spans.starts[0])]
        if len(here):
            on_device = bool(trace.on_device[here].any())
            found.append(_overview_row(trace, name, on_device, len(here), trace.merged(here)))

    add("profiler step", trace.where(lambda name: step_number(name) is not None, Kind.ANNOTATION))
    add("data loader", trace.where(is_data_loader, Kind.ANNOTATION))
    for name, phase in trace.phases.known().items():
        if name != "data loader":
            found.append(_overview_row(trace, name, False, len(phase.starts), phase.merged()))
    add("user scope", trace.where(is_users_scope, Kind.ANNOTATION))
    add("operator", operator & (parent < 0))
    add("inner operator", operator & (parent >= 0))
    add("runtime call", kind == Kind.RUNTIME)
    add("host communication", collective & ~trace.on_device)
    add("kernel", kind == Kind.KERNEL)
    add("memcpy", kind == Kind.MEMCPY)
    add("memset", kind == Kind.MEMSET)
    add("communication", collective & trace.on_device)
    return tuple(found)


def _overview_row(trace: Trace, name: str, on_device: bool, calls: int, covered: Intervals) -> OverviewRow:
    time_ns = _shared_ns(covered, trace.steps.spans)
    return OverviewRow(
        kind=name,
        side="device" if on_device else "host",
        calls=calls,
        time_us=time_ns / NS_PER_US,
        ratio=ratio(time_ns, trace.steps.total_ns),
    )


def device_summary(trace: Trace) -> DeviceSummary:
    """How busy the host's and the device's processors were; CPU times are what this package wrote into the file."""
    rows = trace.kind > Kind.PYTHON
    elapsed_ns = int(trace.end_ns[rows].max()) - int(trace.start_ns[rows].min())
    written = trace.metadata.get(METADATA_KEY)
    seconds = {
        key: float(value)
        for key, value in (written if isinstance(written, dict) else {}).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    busy, idle = seconds.get("system_busy_sec"), seconds.get("system_idle_sec")
    process, elapsed = seconds.get("process_cpu_sec"), seconds.get("elapsed_sec")
    kernels = trace.kind == Kind.KERNEL
    return DeviceSummary(
        elapsed_us=elapsed_ns / NS_PER_US,
        cpu_process_ratio=None if process is None or not elapsed else process / elapsed,
        cpu_system_ratio=None if busy is None or idle is None or not busy + idle else busy / (busy + idle),
        devices=tuple(
            DeviceUse(device=device, utilization=trace.merged(kernels & (trace.device == device)).total / elapsed_ns)
            for device in distinct(trace.device[kernels]).tolist()
        )
        if trace.has_device and elapsed_ns
        else None,
    )


def _device_work_ns(trace: Trace) -> int:
    return int(trace.duration_ns[trace.device_rows].sum())


def _shared_ns(covered: Intervals, spans: Intervals) -> int:
    return int(covered_within(covered, spans.starts, spans.ends).sum())


# Communication


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


def collective_rows_by_start(trace: Trace) -> Ints:
    """Rows of the collectives of *trace*, by start."""
    rows = np.flatnonzero(trace.is_collective)
    return rows[np.argsort(trace.start_ns[rows], kind="stable")]


def collective_name(trace: Trace, row: int) -> str:
    """What the collective in *row* is called: by its own arguments, else by the event's name."""
    name = trace.names[trace.name[row]]
    return trace.collectives.get(row, _NOTHING).name or host_collective(name) or collective_of_kernel(name)


def collective_bytes(trace: Trace, row: int) -> int | None:
    """Bytes of the larger side of the collective in *row*; None if the trace does not say.

    A host scope says what it sends: what it gathers from all ranks is as many times that.
    """
    sent = trace.collectives.get(row, _NOTHING).bytes
    gathers = host_collective(trace.names[trace.name[row]]) in ("all_gather", "gather")
    if sent is None or trace.on_device[row] or not gathers:
        return sent
    return None if trace.only_group is None else sent * len(trace.only_group)


def collective_table(trace: Trace) -> tuple[CollectiveRow, ...] | None:
    """Collectives by name, the longest first; None when the trace has none."""
    found: dict[str, list[int]] = {}
    for row in collective_rows_by_start(trace).tolist():
        found.setdefault(collective_name(trace, row), []).append(row)
    whole = int(trace.duration_ns[trace.is_collective].sum())
    table = []
    for name, rows in found.items():
        latency = durations_of(trace.duration_ns[rows], whole_ns=whole)
        sizes = [collective_bytes(trace, row) for row in rows]
        known = [size for size in sizes if size is not None]
        assert latency is not None  # a name that is there has a row
        table.append(
            CollectiveRow(
                name=name, calls=len(rows), bytes=sum(known) if len(known) == len(sizes) else None, latency=latency
            )
        )
    return tuple(sorted(table, key=lambda row: (-row.latency.total_us, row.name))) or None
