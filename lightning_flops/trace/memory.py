"""Memory: how much was allocated when and what held it at the peak, and who allocated and freed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from lightning_flops.schema.trace_events import (
    HeldMemory,
    MemoryCurve,
    MemoryPart,
    MemoryPoint,
    MemoryRow,
    ModuleMemoryRow,
    StepSpan,
)
from lightning_flops.trace.columns import MemoryEvents, Trace
from lightning_flops.trace.intervals import NS_PER_US, Ints, group_by
from lightning_flops.trace.modules import ACCUMULATION, OPTIMIZER, Frames, Phase, modules_above, with_below
from lightning_flops.trace.operators import at_outermost, outermost_calls, with_callees
from lightning_flops.trace.structure import enclosing

MOST_POINTS = 500
"""Of one curve."""
MOST_SPANS = 1000


def _devices(memory: MemoryEvents) -> Iterator[tuple[Literal["host", "device"], int, Ints]]:
    """The host, and each device, with the places of its events."""
    for index in np.unique(memory.device).tolist():
        yield "host" if index < 0 else "device", index, np.flatnonzero(memory.device == index)


def memory_curves(trace: Trace) -> tuple[MemoryCurve, ...] | None:
    """The curve of each device whose allocations were recorded, the devices first; None where none were."""
    memory = trace.memory
    if memory is None:
        return None
    curves = [
        _curve(trace, memory, rows[np.argsort(memory.time_ns[rows], kind="stable")], index)
        for _, index, rows in _devices(memory)
    ]
    return tuple(sorted(curves, key=lambda one: (one.device < 0, one.device)))


def _curve(trace: Trace, memory: MemoryEvents, rows: Ints, device: int) -> MemoryCurve:
    times, begin = memory.time_ns[rows], int(trace.start_ns.min())
    known = memory.total_allocated[rows]
    absolute = bool((known >= 0).all())
    allocated = known if absolute else np.cumsum(memory.bytes[rows])
    peak = int(allocated.argmax())
    step = int(trace.steps.of(times[peak : peak + 1])[0])
    return MemoryCurve(
        device_type="host" if device < 0 else "device",
        device=device,
        absolute=absolute,
        peak_bytes=int(allocated[peak]),
        peak_us=(int(times[peak]) - begin) / NS_PER_US,
        peak_step=trace.steps.numbers[step] if step >= 0 else None,
        held=_held(trace, memory, rows[: peak + 1], int(allocated[peak]) if absolute else None),
        points=_points(times - begin, allocated),
        spans=_spans(trace, begin),
    )


def _points(times: Ints, allocated: Ints) -> tuple[MemoryPoint, ...]:
    """At most ``MOST_POINTS`` of the curve: of each stretch its highest point."""
    firsts = np.unique(np.linspace(0, len(times), MOST_POINTS, endpoint=False, dtype=np.int64))
    ends = np.append(firsts[1:], len(times)).tolist()
    highest = [first + int(allocated[first:end].argmax()) for first, end in zip(firsts.tolist(), ends, strict=True)]
    return tuple(MemoryPoint(us=int(times[place]) / NS_PER_US, bytes=int(allocated[place])) for place in highest)


def _spans(trace: Trace, begin: int) -> tuple[StepSpan, ...]:
    """The marked steps and their phases, as ``MemoryCurve.spans`` says."""
    steps = trace.steps
    columns = (steps.host_start_ns.tolist(), steps.host_end_ns.tolist(), steps.numbers)
    of_steps = [(start, end, f"step {number}") for start, end, number in zip(*columns, strict=True) if steps.marked]
    of_phases = [(*pair, name) for name, found in trace.phases.known().items() for pair in found.merged().pairs()]
    kept = next((one for one in ([*of_steps, *of_phases], of_steps) if len(one) <= MOST_SPANS), [])
    return tuple(
        StepSpan(name=name, start_us=(start - begin) / NS_PER_US, end_us=(end - begin) / NS_PER_US)
        for start, end, name in sorted(kept, key=lambda span: (span[0], -span[1]))
    )


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
        name = trace.names[trace.name[operator]] if operator >= 0 else None
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
    memory, links = trace.memory, trace.links
    if memory is None:
        return None
    owner = enclosing(trace, links.operators, links.parent, lanes=memory.lane, moments_ns=memory.time_ns)
    table: list[MemoryRow] = []
    for device_type, device, here in _devices(memory):
        size, of = memory.bytes[here], owner[here]
        known, outside = of >= 0, size[of < 0]
        own = np.zeros((4, len(trace)), dtype=np.int64)
        for sums, values in zip(own, _sizes(size), strict=True):
            np.add.at(sums, of[known], values[known])
        total = [with_callees(trace, part) for part in own]
        outermost = outermost_calls(trace)
        rows = links.operators[total[2][links.operators] > 0]
        rows = rows[outermost[rows] == rows]
        groups = group_by(trace.name[rows].astype(np.int64))
        selfs = [at_outermost(outermost, part) for part in own]
        shown = (total[0], selfs[0], total[1], selfs[1], total[3])
        columns = [groups.keys.tolist(), groups.calls().tolist()]
        columns += [groups.sums(part[rows]).tolist() for part in shown]
        named = [(trace.names[name], *row) for name, *row in zip(*columns, strict=True)]
        if len(outside):
            increase, allocation, _, allocations = (int(values.sum()) for values in _sizes(outside))
            named.append((None, len(outside), increase, increase, allocation, allocation, allocations))
        fields = ("name", "calls", *_FIELDS, "allocations")
        found = [
            MemoryRow(device_type=device_type, device=device, **dict(zip(fields, row, strict=True))) for row in named
        ]
        table += sorted(found, key=lambda row: (-row.self_allocation_bytes, row.name or ""))
    return tuple(table)


_FIELDS = ("size_increase_bytes", "self_size_increase_bytes", "allocation_bytes", "self_allocation_bytes")


def _sizes(size: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Of allocations and frees: the change, what was allocated, how many events, how many allocations."""
    return size, np.maximum(size, 0), np.ones(len(size), dtype=np.int64), (size > 0).astype(np.int64)


_PHASES: tuple[tuple[Phase, MemoryPart], ...] = ((Phase.FORWARD, "forward"), (Phase.BACKWARD, "backward"))


def module_memory_table(trace: Trace) -> tuple[ModuleMemoryRow, ...] | None:
    """Bytes by module, part of the step and device; None when no module is marked, or memory was not recorded.

    An allocation or a free belongs to the innermost module whose forward ran in its thread then, or to the module of
    the node that autograd ran.
    """
    memory, frames = trace.memory, None if trace.memory is None else trace.frames
    if memory is None or frames is None:
        return None
    owner, phase = frames.owner_at(trace, memory.lane, memory.time_ns)
    table: list[ModuleMemoryRow] = []
    for device_type, device, here in _devices(memory):
        rows = [
            ModuleMemoryRow(
                name=name, part=part, device_type=device_type, device=device, **dict(zip(_FIELDS, sizes, strict=True))
            )
            for name, part, *sizes in _of_modules(frames, owner[here], phase[here], memory.bytes[here])
        ]
        table += sorted(rows, key=lambda row: (-row.self_allocation_bytes, row.name or "", row.part))
    return tuple(table)


def _of_modules(
    frames: Frames, owner: Ints, phase: Ints, size: Ints
) -> Iterator[tuple[str | None, MemoryPart, int, int, int, int]]:
    above = modules_above(frames.modules)
    rest = np.ones(len(owner), dtype=np.bool_)
    for number, part in _PHASES:
        mine = (phase == number) & (owner >= 0)
        rest &= ~mine
        own = np.zeros((3, len(frames.modules)), dtype=np.int64)
        for sums, values in zip(own, _sizes(size), strict=False):
            np.add.at(sums, owner[mine], values[mine])
        increase, allocated, events = (with_below(one, above) for one in own)
        for place in np.flatnonzero(events).tolist():
            found = (increase[place], own[0][place], allocated[place], own[1][place])
            yield (frames.modules[place], part, *map(int, found))  # type: ignore[misc]
    others = (owner != ACCUMULATION) & (owner != OPTIMIZER)
    parts: tuple[tuple[MemoryPart, np.ndarray[tuple[int, ...], np.dtype[np.bool_]]], ...] = (
        ("gradient accumulation", owner == ACCUMULATION),
        ("optimizer", owner == OPTIMIZER),
        ("elsewhere", others),
    )
    for part, wanted in parts:
        if (mine := rest & wanted).any():
            change, allocation = int(size[mine].sum()), int(np.maximum(size[mine], 0).sum())
            yield None, part, change, change, allocation, allocation
