"""Memory: how much was allocated when and what held it at the peak, and who allocated and freed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from lightning_flops.schema.trace_events import (
    HeldMemory,
    MemoryCurve,
    MemoryRow,
)
from lightning_flops.trace.columns import MemoryEvents, Trace
from lightning_flops.trace.intervals import NS_PER_US, Ints, group_by, sums_by
from lightning_flops.trace.modules import ACCUMULATION, NO_MODULE, OPTIMIZER, Phase, modules_above, with_below
from lightning_flops.trace.structure import enclosing
from lightning_flops.trace.tables import with_callees

MOST_POINTS = 500
"""Of one curve."""
MOST_SPANS = 1000
_Listed = tuple[str | None, Any, int, Sequence[int]]
"""Name, part, calls and the four sizes of a row."""
_FIELDS = ("size_increase_bytes", "self_size_increase_bytes", "allocation_bytes", "self_allocation_bytes")


def _devices(memory: MemoryEvents) -> Iterator[tuple[int, Ints]]:
    """The host, which is -1, and each device, with the places of its events."""
    for index in np.unique(memory.device).tolist():
        yield index, np.flatnonzero(memory.device == index)


def memory_curves(trace: Trace) -> tuple[MemoryCurve, ...] | None:
    """The curve of each device whose allocations were recorded, the devices first; None where none were."""
    memory = trace.memory
    if memory is None:
        return None
    begin = int(trace.start_ns.min())
    spans = _spans(trace, begin)
    curves = []
    for device, rows in _devices(memory):
        rows = rows[np.argsort(memory.time_ns[rows], kind="stable")]
        times, known = memory.time_ns[rows], memory.total_allocated[rows]
        absolute = bool((known >= 0).all())
        allocated = known if absolute else np.cumsum(memory.bytes[rows])
        peak = int(allocated.argmax())
        step = int(trace.steps.of(times[peak : peak + 1])[0])
        curve = MemoryCurve(
            absolute=absolute,
            peak_bytes=int(allocated[peak]),
            peak_us=(int(times[peak]) - begin) / NS_PER_US,
            peak_step=trace.steps.numbers[step] if step >= 0 else None,
            held=_held(trace, memory, rows[: peak + 1], int(allocated[peak]) if absolute else None),
            points=_points(times - begin, allocated),
            spans=spans,
            device_type="host" if device < 0 else "device",
            device=device,
        )
        curves.append(curve)
    return tuple(sorted(curves, key=lambda one: (one.device < 0, one.device)))


def _points(times: Ints, allocated: Ints) -> tuple[tuple[float, int], ...]:
    """At most ``MOST_POINTS`` of the curve: of each stretch its highest point."""
    firsts = np.unique(np.linspace(0, len(times), MOST_POINTS, endpoint=False, dtype=np.int64))
    ends = np.append(firsts[1:], len(times)).tolist()
    highest = [first + int(allocated[first:end].argmax()) for first, end in zip(firsts.tolist(), ends, strict=True)]
    return tuple(zip((times[highest] / NS_PER_US).tolist(), allocated[highest].tolist(), strict=True))


def _spans(trace: Trace, begin: int) -> tuple[tuple[str, float, float], ...]:
    """The marked steps and their phases, as ``MemoryCurve.spans`` says."""
    steps = trace.steps
    columns = (steps.host_start_ns.tolist(), steps.host_end_ns.tolist(), steps.numbers)
    of_steps = [(start, end, f"step {number}") for start, end, number in zip(*columns, strict=True) if steps.marked]
    of_phases = [(*pair, name) for name, found in trace.phases.items() for pair in found.merged().pairs()]
    kept = next((one for one in ([*of_steps, *of_phases], of_steps) if len(one) <= MOST_SPANS), [])
    in_time = sorted(kept, key=lambda span: (span[0], -span[1]))
    return tuple((name, (start - begin) / NS_PER_US, (end - begin) / NS_PER_US) for start, end, name in in_time)


def _held(trace: Trace, memory: MemoryEvents, rows: Ints, total: int | None) -> tuple[HeldMemory, ...] | None:
    """What was allocated in *rows*, which end at the peak, and not yet freed; None where no addresses were written."""
    if (memory.address[rows] < 0).any():
        return None
    alive: dict[int, int] = {}
    columns = (rows.tolist(), memory.address[rows].tolist(), memory.bytes[rows].tolist())
    for row, address, size in zip(*columns, strict=True):
        if size > 0:
            alive[address] = row
        else:
            alive.pop(address, None)
    living, parent = np.array(sorted(alive.values()), dtype=np.int64), trace.links.parent
    lanes, moments = memory.lane[living], memory.time_ns[living]
    owner = enclosing(trace, trace.links.operators, parent, lanes=lanes, moments_ns=moments)
    while len(inner := np.flatnonzero((owner >= 0) & (parent[owner] >= 0))):
        owner[inner] = parent[owner[inner]]
    modules = np.full(len(living), -1) if trace.frames is None else trace.frames.owner_at(trace, lanes, moments)[0]
    found: dict[tuple[str | None, str | None], list[int]] = {}
    for size, operator, module in zip(memory.bytes[living].tolist(), owner.tolist(), modules.tolist(), strict=True):
        name = trace.name_of(operator) if operator >= 0 else None
        where = trace.frames.modules[module] if trace.frames is not None and module >= 0 else None
        found.setdefault((where, name), []).append(size)
    held = [
        HeldMemory(module=module, operator=operator, bytes=sum(sizes), allocations=len(sizes))
        for (module, operator), sizes in found.items()
    ]
    earlier = 0 if total is None else total - sum(one.bytes for one in held)
    if earlier > 0:
        held.append(HeldMemory(module=None, operator=None, bytes=earlier, allocations=None))
    return tuple(sorted(held, key=lambda one: (-one.bytes, one.module or "", one.operator or "")))


def memory_table(trace: Trace) -> tuple[MemoryRow, ...] | None:
    """Bytes by operator and device; None when the trace was taken without ``profile_memory``."""
    memory, links, times = trace.memory, trace.links, trace.operator_times
    if memory is None:
        return None
    owner = enclosing(trace, links.operators, links.parent, lanes=memory.lane, moments_ns=memory.time_ns)
    found: list[MemoryRow] = []
    for device, here in _devices(memory):
        of, sizes = owner[here], _sizes(memory.bytes[here])
        own = [sums_by(of[of >= 0], values[of >= 0], len(trace)) for values in sizes]
        events = with_callees(trace, own[2])
        rows = times.rows[events[times.rows] > 0]
        groups = group_by(trace.name[rows])
        columns = [one for values in own[:2] for one in (with_callees(trace, values), times.at_outermost(values))]
        sums = zip(*(groups.sums(one[rows]) for one in columns), strict=True)
        listed: list[_Listed] = [
            (name, "", calls, row)
            for name, calls, row in zip(trace.texts(groups.keys), groups.calls, sums, strict=True)
        ]
        outside = [int(values[of < 0].sum()) for values in sizes]
        if outside[2]:
            listed.append((None, "", outside[2], (outside[0],) * 2 + (outside[1],) * 2))
        found += _rows(device, listed)
    return tuple(found)


def module_memory_table(trace: Trace) -> tuple[MemoryRow, ...] | None:
    """Bytes by module, part of the step and device; None when no module is marked, or memory was not recorded.

    An allocation or a free belongs to the innermost module whose forward ran in its thread then, or to the module of
    the node that autograd ran.
    """
    memory, frames = trace.memory, trace.frames
    if memory is None or frames is None:
        return None
    owner, phase = frames.owner_at(trace, memory.lane, memory.time_ns)
    above, found = modules_above(frames.modules), []
    for device, here in _devices(memory):
        of, sizes = owner[here], _sizes(memory.bytes[here])
        rest, listed = np.ones(len(here), dtype=bool), list[_Listed]()
        for part, one in (("forward", Phase.FORWARD), ("backward", Phase.BACKWARD)):
            mine = (phase[here] == one) & (of >= 0)
            rest &= ~mine
            own = [sums_by(of[mine], values[mine], len(above)) for values in sizes]
            change, size, events = (with_below(values, above) for values in own)
            columns = np.stack([change, own[0], size, own[1]], axis=1).tolist()
            for place in np.flatnonzero(events).tolist():
                listed.append((frames.modules[place], part, int(events[place]), columns[place]))
        parts = {ACCUMULATION: "gradient accumulation", OPTIMIZER: "optimizer"}
        for owned in (*parts, NO_MODULE):
            mine = rest & ((of == owned) if owned in parts else ~np.isin(of, list(parts)))
            if mine.any():
                sums = [int(values[mine].sum()) for values in sizes]
                listed.append((None, parts.get(owned, "elsewhere"), sums[2], (sums[0],) * 2 + (sums[1],) * 2))
        found += _rows(device, listed)
    return tuple(found)


def _sizes(size: Ints) -> tuple[Ints, Ints, Ints]:
    """Sizes of allocations and frees: the change, what was allocated, how many events."""
    return size, np.maximum(size, 0), np.ones(len(size), dtype=np.int64)


def _rows(device: int, listed: Iterable[_Listed]) -> list[MemoryRow]:
    """Rows of one device; what allocated most itself first."""
    rows = [
        MemoryRow(name=name, part=part, device=device, calls=calls, **dict(zip(_FIELDS, sizes, strict=True)))
        for name, part, calls, sizes in listed
    ]
    return sorted(rows, key=lambda row: (-row.self_allocation_bytes, row.name or "", row.part))
