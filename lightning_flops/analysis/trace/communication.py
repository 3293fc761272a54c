"""Collectives, and how far computation hides them."""

from __future__ import annotations

import numpy as np

from lightning_flops.analysis.trace.columns import CollectiveArguments, Trace
from lightning_flops.analysis.trace.durations import NS_PER_US, group_by, ratio
from lightning_flops.analysis.trace.event_names import Kind, collective_of_kernel, computes_on_host, host_collective
from lightning_flops.analysis.trace.intervals import Intervals, Ints, distinct, intersect, union
from lightning_flops.schema.communication import CollectiveRow, Overlap

_NOTHING = CollectiveArguments()
_GATHERING = ("all_gather", "gather")


def overlap(trace: Trace) -> Overlap:
    """Computation, communication and their overlap over all steps."""
    communication, computation = communication_and_computation(trace)
    shared = intersect(computation, communication).total
    wall = trace.steps.total_ns
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
    spans = trace.steps.spans
    if trace.has_device:
        computes = trace.kind == Kind.KERNEL
    else:
        computes = (trace.kind == Kind.OPERATOR) & trace.names_where(computes_on_host)
        # Operators inside a host collective are the copies that it consists of.
        computes[_inside_host_collectives(trace)] = False
    communication = intersect(trace.merged(trace.is_collective), spans)
    computation = intersect(trace.merged(computes & ~trace.is_collective), spans)
    return communication, computation


def collective_rows_by_start(trace: Trace) -> Ints:
    """Rows of the collectives of *trace*, by start."""
    rows = np.flatnonzero(trace.is_collective)
    return rows[np.argsort(trace.start_ns[rows], kind="stable")]


def collective_name(trace: Trace, row: int) -> str:
    """What the collective in *row* is called: by its own arguments, else by the event's name."""
    written = trace.collectives.get(row, _NOTHING).name
    name = trace.names[trace.name[row]]
    return written or host_collective(name) or collective_of_kernel(name)


def collective_bytes(trace: Trace, row: int) -> int | None:
    """Bytes of the larger side of the collective in *row*; None if the trace does not say.

    A host scope says what it sends: what it gathers from all ranks is as many times that.
    """
    sent = trace.collectives.get(row, _NOTHING).bytes
    if sent is None or trace.on_device[row] or host_collective(trace.names[trace.name[row]]) not in _GATHERING:
        return sent
    return None if trace.only_group is None else sent * len(trace.only_group)


def collective_table(trace: Trace) -> tuple[CollectiveRow, ...] | None:
    """Collectives by name, the longest first; None when the trace has none."""
    rows = collective_rows_by_start(trace)
    if not len(rows):
        return None
    names: dict[str, int] = {}
    keys = [names.setdefault(collective_name(trace, row), len(names)) for row in rows.tolist()]
    texts = list(names)
    groups = group_by(np.array(keys, dtype=np.int64))
    latency = groups.durations(trace.duration_ns[rows], whole_ns=int(trace.duration_ns[rows].sum()))
    sizes: list[int | None] = [0] * len(texts)
    for row, key in zip(rows.tolist(), keys, strict=True):
        size, so_far = collective_bytes(trace, row), sizes[key]
        sizes[key] = None if size is None or so_far is None else so_far + size
    table = [
        CollectiveRow(name=texts[key], calls=calls, bytes=sizes[key], latency=latency[index])
        for index, (key, calls) in enumerate(zip(groups.keys.tolist(), groups.calls().tolist(), strict=True))
    ]
    return tuple(sorted(table, key=lambda row: (-row.latency.total_us, row.name)))


def _inside_host_collectives(trace: Trace) -> Ints:
    collectives = np.flatnonzero(trace.is_collective & ~trace.on_device)
    operators = np.flatnonzero(trace.kind == Kind.OPERATOR)
    inside = np.zeros(len(operators), dtype=bool)
    for lane in distinct(trace.lane[collectives]).tolist():
        here = collectives[trace.lane[collectives] == lane]
        covered = trace.merged(here)
        if not len(covered.starts):
            continue
        start = trace.start_ns[operators]
        index = np.searchsorted(covered.starts, start, side="right") - 1
        inside |= (trace.lane[operators] == lane) & (index >= 0) & (start < covered.ends[np.maximum(index, 0)])
    return operators[inside]
