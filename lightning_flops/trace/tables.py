"""Named scopes, each kind of event as a whole, how busy processors were, and communication."""

from __future__ import annotations

import numpy as np

from lightning_flops.analysis.trace_marks import METADATA_KEY
from lightning_flops.schema.communication import CollectiveRow, Overlap
from lightning_flops.schema.trace_events import (
    UserScopeRow,
)
from lightning_flops.schema.trace_steps import DeviceSummary, DeviceUse, OverviewRow
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
    ratio,
    records,
    shared_ns,
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
    step_number,
)

_NOTHING = CollectiveArguments()


def user_scope_table(trace: Trace) -> tuple[UserScopeRow, ...] | None:
    """The user's own scopes by name, the longest first; None when there are none."""
    rows = np.flatnonzero(trace.where(is_users_scope, Kind.ANNOTATION))
    if not len(rows):
        return None
    groups = group_by(trace.name[rows].astype(np.int64))
    device = groups.durations(_launched_in(trace, rows), whole_ns=trace.device_work_ns)
    columns = records(
        name=[trace.names[name] for name in groups.keys.tolist()],
        calls=groups.calls().tolist(),
        host=groups.durations(trace.duration_ns[rows], whole_ns=trace.steps.host_ns),
        device=device if trace.has_device else [None] * len(device),
    )
    return tuple(sorted((UserScopeRow(**one) for one in columns), key=lambda row: (-row.host.total_us, row.name)))


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
    time_ns = shared_ns(covered, trace.steps.spans)
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
