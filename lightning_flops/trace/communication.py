"""Communication of one trace: how much of it computation hides, and every collective."""

from __future__ import annotations

import hashlib
import math
from array import array

import numpy as np

from lightning_flops.schema.ranks import CollectiveCalls, Overlap
from lightning_flops.schema.tables import Row
from lightning_flops.trace.columns import CollectiveArguments, Trace
from lightning_flops.trace.events import are_integers
from lightning_flops.trace.intervals import (
    NS_PER_US,
    Intervals,
    Ints,
    distinct,
    group_by,
    inside,
    intersect,
    longest_first,
    ratio,
    subtract,
    table,
    union,
)
from lightning_flops.trace.names import (
    ELEMENT_BYTES,
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
    shared = intersect(computation, communication).total
    other = subtract(trace.steps.spans, union(computation, communication)).total
    return Overlap(
        wall_us=trace.steps.total_ns / NS_PER_US,
        computation_us=computation.total / NS_PER_US,
        communication_us=communication.total / NS_PER_US,
        overlap_us=shared / NS_PER_US,
        other_us=other / NS_PER_US,
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
        known, times = trace.collectives.get(row), 1
        if not trace.on_device[row] and host_collective(trace.name_of(row)) in ("all_gather", "gather"):
            times = len(trace.only_group or ())
        size = known.bytes if known else _bytes_of_inputs(trace, row)
        if size is None or not times:
            return None
        total += size * times
    return total


def _bytes_of_inputs(trace: Trace, row: int) -> int | None:
    """Bytes of all inputs of a call; None if one of them is not known."""
    if trace.inputs[row] < 0:
        return None
    inputs = trace.recorded_inputs[trace.inputs[row]]
    sizes = [
        math.prod(shape) * ELEMENT_BYTES.get(str(dtype).lower(), 0) if are_integers(shape) else 0
        for shape, dtype in zip(inputs.dims, inputs.types, strict=False)
    ]
    return sum(sizes) if sizes and all(sizes) else None


def collectives_by_name(trace: Trace) -> tuple[Ints, Ints, tuple[str, ...]]:
    """Rows of all collectives, by start; for each of them the index of its name; and the names."""
    rows, names = trace.by_start(trace.is_collective), dict[str, int]()
    number = [names.setdefault(collective_name(trace, row), len(names)) for row in rows.tolist()]
    return rows, np.array(number, dtype=np.int64), tuple(names)


def collective_table(trace: Trace) -> tuple[Row, ...] | None:
    """Collectives by name, the longest first; None when the trace has none."""
    rows, number, names = collectives_by_name(trace)
    groups, lengths = group_by(number), trace.duration_ns[rows]
    found = table(
        Row,
        longest_first,
        name=names,
        calls=groups.calls,
        bytes=[collective_bytes(trace, one.tolist()) for one in groups.parts(rows)],
        **{"device" if trace.has_device else "host": groups.durations(lengths, whole_ns=int(lengths.sum()))},
    )
    return found or None


def collective_calls(trace: Trace) -> tuple[CollectiveCalls, ...]:
    """The collectives of *trace*, grouped by name, process group and the step in which they were started.

    What goes from one rank to another is of no known group.
    """
    found: dict[tuple[str, str | None, int | None], list[int]] = {}
    default_group = None if trace.only_group is None else str(list(trace.only_group))
    rows, number, names = collectives_by_name(trace)
    columns = (rows.tolist(), number.tolist(), trace.steps.of(launched_at(trace, rows)).tolist())
    for row, one, index in zip(*columns, strict=True):
        if trace.steps.marked and index < 0:
            continue
        group = trace.collectives.get(row, _NOTHING).group or default_group
        if is_point_to_point(names[one], trace.name_of(row)):
            group = None
        key = (names[one], group, trace.steps.numbers[index] if trace.steps.marked else None)
        found.setdefault(key, []).append(row)
    return tuple(
        CollectiveCalls(
            name=name,
            group=None if group is None else _short(group),
            group_size=trace.collectives.get(rows[0], _NOTHING).group_size,
            step=step,
            calls=len(rows),
            bytes=collective_bytes(trace, rows),
            total_ns=int(trace.duration_ns[rows].sum()),
            latency_ns=array("q", trace.duration_ns[rows].tolist()),
        )
        for (name, group, step), rows in found.items()
    )


def _short(group: str) -> str:
    """A group's name and members in few characters: a report of thousands of ranks has thousands of these."""
    if len(group) <= _LONGEST_GROUP_CHARS:
        return group
    return hashlib.blake2b(group.encode(errors="surrogatepass"), digest_size=8).hexdigest()
