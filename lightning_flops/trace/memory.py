"""Memory: how much was allocated when, and who allocated and freed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lightning_flops.schema.tables import MemoryCurve, MemoryRow
from lightning_flops.trace.columns import MemoryEvents, Trace
from lightning_flops.trace.intervals import NS_PER_US, Ints, distinct, sums_by, table
from lightning_flops.trace.modules import NO_MODULE, Phase, modules_above, with_below
from lightning_flops.trace.structure import enclosing
from lightning_flops.trace.tables import with_callees

MOST_POINTS = 500
"""Of one curve."""
MOST_SPANS = 1000


def by_device(memory: MemoryEvents) -> Iterator[tuple[int, Ints]]:
    """Each device, then the host, which is -1, with the places of its events in order of time."""
    in_time = np.argsort(memory.time_ns, kind="stable")
    for device in sorted(distinct(memory.device).tolist(), key=lambda one: (one < 0, one)):
        yield device, in_time[memory.device[in_time] == device]


def allocated_after(memory: MemoryEvents, rows: Ints) -> tuple[Ints, bool]:
    """Bytes after each of *rows*, all of one device; and whether these are all there is, or the change alone."""
    total = memory.total_allocated[rows]
    absolute = bool((total >= 0).all())
    return total if absolute else np.cumsum(memory.bytes[rows]), absolute


def memory_curves(trace: Trace) -> tuple[MemoryCurve, ...] | None:
    """The curve of each device whose allocations were recorded; None where none were."""
    if (memory := trace.memory) is None:
        return None
    begin, curves = int(trace.start_ns.min()), []
    spans = _spans(trace, begin)
    for device, rows in by_device(memory):
        times_us, (allocated, absolute) = (memory.time_ns[rows] - begin) / NS_PER_US, allocated_after(memory, rows)
        # Of each of at most so many stretches its highest point.
        firsts = np.unique(np.linspace(0, len(rows), MOST_POINTS, endpoint=False, dtype=np.int64))
        stretches = zip(firsts.tolist(), np.split(allocated, firsts[1:]), strict=True)
        highest, peak = [first + int(one.argmax()) for first, one in stretches], int(allocated.argmax())
        curve = MemoryCurve(
            device=device,
            absolute=absolute,
            peak_bytes=int(allocated[peak]),
            peak_us=float(times_us[peak]),
            points=tuple(zip(times_us[highest].tolist(), allocated[highest].tolist(), strict=True)),
            spans=spans,
        )
        curves.append(curve)
    return tuple(curves)


def _spans(trace: Trace, begin: int) -> tuple[tuple[str, float, float], ...]:
    """The marked steps and their phases, as ``MemoryCurve.spans`` says."""
    steps = trace.steps
    columns = (steps.host_start_ns.tolist(), steps.host_end_ns.tolist(), steps.numbers)
    spans = [(start, end, f"step {number}") for start, end, number in zip(*columns, strict=True) if steps.marked]
    spans += [(*pair, name) for name, found in trace.phases.items() for pair in found.own.pairs()]
    in_time = sorted(spans if len(spans) <= MOST_SPANS else [], key=lambda span: (span[0], -span[1]))
    return tuple((name, (start - begin) / NS_PER_US, (end - begin) / NS_PER_US) for start, end, name in in_time)


def memory_table(trace: Trace) -> tuple[MemoryRow, ...] | None:
    """Bytes by operator and device; None when the trace was taken without ``profile_memory``."""
    memory, links, rows = trace.memory, trace.links, trace.operator_times.rows
    if memory is None:
        return None
    owner = enclosing(trace, links.operators, links.parent, lanes=memory.lane, moments_ns=memory.time_ns)
    count, found = len(trace.names), list[MemoryRow]()
    for device, here in by_device(memory):
        of, sizes = owner[here], memory.bytes[here]
        own = _amounts(np.where(of >= 0, trace.name[of], NO_MODULE), sizes, count)
        calls = [with_callees(trace, values)[rows] for values in _amounts(of, sizes, len(trace))]
        calls[2] = np.minimum(calls[2], 1)
        total = [sums_by(trace.name[rows].astype(np.int64), values, count) for values in calls]
        rest = _amounts(np.minimum(-1 - of, 0), sizes, 1)
        found += [*_rows(device, trace.names, own, total), *_rows(device, [None], rest, rest)]
    return tuple(sorted(found, key=_most_first))


def module_memory_table(trace: Trace) -> tuple[MemoryRow, ...] | None:
    """Bytes by module and device; None when no module is marked, or memory was not recorded.

    An allocation or a free belongs to the innermost module whose forward ran in its thread then.
    """
    memory, frames = trace.memory, trace.frames
    if memory is None or frames is None:
        return None
    owner, phase = frames.owner_at(trace, memory.lane, memory.time_ns)
    above, found = modules_above(frames.modules), list[MemoryRow]()
    for device, here in by_device(memory):
        of = np.where(phase[here] == Phase.FORWARD, owner[here], NO_MODULE)
        own = _amounts(of, memory.bytes[here], len(above))
        found += _rows(device, frames.modules, own, [with_below(values, above) for values in own])
    return tuple(sorted(found, key=_most_first))


def _amounts(owner: Ints, size: Ints, count: int) -> list[Ints]:
    """For each of *count* owners the change, what was allocated, and how many events there were; below 0 is none."""
    known, sizes = owner >= 0, (size, np.maximum(size, 0), np.ones(len(size), dtype=np.int64))
    return [sums_by(owner[known], values[known], count) for values in sizes]


def _rows(device: int, names: Sequence[str | None], own: list[Ints], total: list[Ints]) -> tuple[MemoryRow, ...]:
    """A row for each name that has any calls in *total*."""
    places = np.flatnonzero(total[2])
    return table(
        MemoryRow,
        name=[names[place] for place in places.tolist()],
        device=[device] * len(places),
        calls=total[2][places].tolist(),
        size_increase_bytes=total[0][places].tolist(),
        self_size_increase_bytes=own[0][places].tolist(),
        allocation_bytes=total[1][places].tolist(),
        self_allocation_bytes=own[1][places].tolist(),
    )


def _most_first(row: MemoryRow) -> tuple[bool, int, int, str]:
    """By device, what allocated most itself first."""
    return row.device < 0, row.device, -row.self_allocation_bytes, row.name or ""
