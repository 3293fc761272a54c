"""Communication of one trace: how much of it computation hides, and every collective."""

from __future__ import annotations

import hashlib

import numpy as np

from lightning_flops.schema.communication import CollectiveCalls, Overlap
from lightning_flops.schema.trace_steps import Row
from lightning_flops.trace.columns import CollectiveArguments, Trace
from lightning_flops.trace.intervals import (
    NS_PER_US,
    Intervals,
    distinct,
    durations_of,
    inside,
    intersect,
    ratio,
    table,
    union,
)
from lightning_flops.trace.names import (
    Kind,
    collective_of_kernel,
    computes_on_host,
    host_collective,
    is_point_to_point,
)
from lightning_flops.trace.structure import launched_at

_LONGEST_GROUP_CHARS = 40
_NOTHING = CollectiveArguments()


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


def collective_table(trace: Trace) -> tuple[Row, ...] | None:
    """Collectives by name, the longest first; None when the trace has none."""
    found: dict[str, list[int]] = {}
    for row in trace.by_start(trace.is_collective).tolist():
        found.setdefault(collective_name(trace, row), []).append(row)
    whole_ns = int(trace.duration_ns[trace.is_collective].sum())
    found = dict(sorted(found.items(), key=lambda item: (-int(trace.duration_ns[item[1]].sum()), item[0])))
    lengths = [durations_of(trace.duration_ns[rows], whole_ns=whole_ns) for rows in found.values()]
    sizes = [collective_bytes(trace, rows) for rows in found.values()]
    columns = {"name": found, "calls": map(len, found.values()), "bytes": sizes}
    return table(Row, **columns, **{"device" if trace.has_device else "host": lengths}) or None


def collective_calls(trace: Trace) -> tuple[CollectiveCalls, ...]:
    """The collectives of *trace*, grouped by name, process group and the step in which they were started.

    What goes from one rank to another is of no known group.
    """
    found: dict[tuple[str, str | None, int | None], list[int]] = {}
    default_group = None if trace.only_group is None else str(list(trace.only_group))
    every, steps = trace.by_start(trace.is_collective), trace.steps
    for row, index in zip(every.tolist(), steps.of(launched_at(trace, every)).tolist(), strict=True):
        if steps.marked and index < 0:
            continue
        name = collective_name(trace, row)
        group = trace.collectives.get(row, _NOTHING).group or default_group
        if is_point_to_point(name, trace.name_of(row)):
            group = None
        found.setdefault((name, group, steps.numbers[index] if steps.marked else None), []).append(row)
    return tuple(
        CollectiveCalls(
            name=name,
            group=None if group is None else _short(group),
            group_size=trace.collectives.get(rows[0], _NOTHING).group_size,
            step=number,
            calls=len(rows),
            bytes=collective_bytes(trace, rows),
            total_ns=int(trace.duration_ns[rows].sum()),
            latency_ns=tuple(trace.duration_ns[rows].tolist()),
        )
        for (name, group, number), rows in found.items()
    )


def _short(group: str) -> str:
    """A group's name and members in few characters: a report of thousands of ranks has thousands of these."""
    if len(group) <= _LONGEST_GROUP_CHARS:
        return group
    return hashlib.blake2b(group.encode(errors="surrogatepass"), digest_size=8).hexdigest()
