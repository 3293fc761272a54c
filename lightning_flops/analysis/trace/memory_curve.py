"""Memory over time: how much of a device's memory was allocated when, and what held it at the peak."""

from __future__ import annotations

import numpy as np

from lightning_flops.analysis.trace.columns import MemoryEvents, Trace
from lightning_flops.analysis.trace.durations import NS_PER_US
from lightning_flops.analysis.trace.intervals import Ints
from lightning_flops.analysis.trace.structure import enclosing_operators
from lightning_flops.schema.trace_events import HeldMemory, MemoryCurve, MemoryPoint, StepSpan

MOST_POINTS = 500
"""Of one curve; the rises between two of them are in the second."""

MOST_SPANS = 1000


def memory_curves(trace: Trace) -> tuple[MemoryCurve, ...] | None:
    """The curve of each device whose allocations were recorded; None where none were."""
    memory = trace.memory
    if memory is None:
        return None
    on_host = memory.device_type == 0
    device = np.where(on_host, -1, memory.device)
    found = []
    spans = _spans(trace)
    for kind, index in sorted(set(zip(on_host.tolist(), device.tolist(), strict=True))):
        rows = np.flatnonzero((on_host == kind) & (device == index))
        found.append(_curve(trace, memory, rows[np.argsort(memory.time_ns[rows], kind="stable")], index, spans))
    return tuple(found)


def _spans(trace: Trace) -> tuple[StepSpan, ...]:
    """The marked steps and their phases, as ``MemoryCurve.spans`` says."""
    begin, steps, phases = int(trace.start_ns.min()), trace.steps, trace.phases
    named = {
        "data loader": phases.data_loader,
        "forward": phases.forward,
        "backward": phases.backward,
        "optimizer": phases.optimizer,
    }
    of_steps = (
        [
            (start, end, f"step {number}")
            for start, end, number in zip(
                steps.host_start_ns.tolist(), steps.host_end_ns.tolist(), steps.numbers, strict=True
            )
        ]
        if steps.marked
        else []
    )
    of_phases = [
        (start, end, name)
        for name, found in named.items()
        if found is not None
        for start, end in found.merged().pairs()
    ]
    kept = next((one for one in ([*of_steps, *of_phases], of_steps) if len(one) <= MOST_SPANS), [])
    return tuple(
        StepSpan(name=name, start_us=(start - begin) / NS_PER_US, end_us=(end - begin) / NS_PER_US)
        for start, end, name in sorted(kept, key=lambda span: (span[0], -span[1]))
    )


def _curve(trace: Trace, memory: MemoryEvents, rows: Ints, device: int, spans: tuple[StepSpan, ...]) -> MemoryCurve:
    times = memory.time_ns[rows]
    known = memory.total_allocated[rows]
    absolute = bool((known >= 0).all())
    allocated = known if absolute else np.cumsum(memory.bytes[rows])
    peak = int(allocated.argmax())
    begin = int(trace.start_ns.min())
    step = int(np.searchsorted(trace.steps.host_start_ns, times[peak], side="right")) - 1
    inside = step >= 0 and int(times[peak]) < int(trace.steps.host_end_ns[step])
    return MemoryCurve(
        device_type="host" if device < 0 else "device",
        device=device,
        absolute=absolute,
        peak_bytes=int(allocated[peak]),
        peak_us=(int(times[peak]) - begin) / NS_PER_US,
        peak_step=trace.steps.numbers[step] if inside else None,
        held=_held(trace, memory, rows[: peak + 1], int(allocated[peak]) if absolute else None),
        points=_points(times - begin, allocated),
        spans=spans,
    )


def _points(times: Ints, allocated: Ints) -> tuple[MemoryPoint, ...]:
    """At most ``MOST_POINTS`` of the curve: of each stretch its highest point."""
    firsts = np.unique(np.linspace(0, len(times), MOST_POINTS, endpoint=False, dtype=np.int64))
    ends = np.append(firsts[1:], len(times)).tolist()
    highest = [first + int(allocated[first:end].argmax()) for first, end in zip(firsts.tolist(), ends, strict=True)]
    return tuple(MemoryPoint(us=int(times[place]) / NS_PER_US, bytes=int(allocated[place])) for place in highest)


def _held(trace: Trace, memory: MemoryEvents, rows: Ints, total: int | None) -> tuple[HeldMemory, ...] | None:
    """What was allocated in *rows*, which end at the peak, and not yet freed; None where no addresses were written."""
    if (memory.address[rows] < 0).any():
        return None
    alive: dict[int, int] = {}
    for row, address, size in zip(
        rows.tolist(), memory.address[rows].tolist(), memory.bytes[rows].tolist(), strict=True
    ):
        if size > 0:
            alive[address] = row
        else:
            alive.pop(address, None)
    living = np.array(sorted(alive.values()), dtype=np.int64)
    links = trace.links
    lanes, moments_ns = memory.lane[living], memory.time_ns[living]
    owner = enclosing_operators(trace, links.operators, links.parent, lanes=lanes, moments_ns=moments_ns)
    while (inside := (owner >= 0) & (links.parent[np.maximum(owner, 0)] >= 0)).any():
        owner = np.where(inside, links.parent[np.maximum(owner, 0)], owner)
    modules = _modules(trace, memory, living)
    found: dict[tuple[str | None, str | None], list[int]] = {}
    for row, operator, module in zip(living.tolist(), owner.tolist(), modules, strict=True):
        name = trace.names[trace.name[operator]] if operator >= 0 else None
        found.setdefault((module, name), []).append(int(memory.bytes[row]))
    held = [
        HeldMemory(module=module, operator=operator, bytes=sum(sizes), allocations=len(sizes))
        for (module, operator), sizes in found.items()
    ]
    earlier = 0 if total is None else total - sum(one.bytes for one in held)
    if earlier > 0:
        held.append(HeldMemory(module=None, operator=None, bytes=earlier, allocations=None))
    return tuple(sorted(held, key=lambda one: (-one.bytes, one.module or "", one.operator or "")))


def _modules(trace: Trace, memory: MemoryEvents, rows: Ints) -> list[str | None]:
    """The module in which each of *rows* allocated; None where none is known."""
    frames = trace.frames
    if frames is None:
        return [None] * len(rows)
    frame = frames.at(trace, lanes=memory.lane[rows], moments_ns=memory.time_ns[rows])
    owner = np.where(frame >= 0, frames.owner[np.maximum(frame, 0)], -1).tolist()
    return [frames.modules[one] if one >= 0 else None for one in owner]
