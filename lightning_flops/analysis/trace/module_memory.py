"""What each module of a model allocated and freed, in a trace whose modules are marked."""

from __future__ import annotations

from typing import Literal

import numpy as np

from lightning_flops.analysis.trace.columns import Trace
from lightning_flops.analysis.trace.intervals import Ints
from lightning_flops.analysis.trace.modules import (
    ACCUMULATION,
    OPTIMIZER,
    Frames,
    Phase,
    modules_above,
    with_below,
)
from lightning_flops.schema.trace_events import MemoryPart, ModuleMemoryRow

_PHASES: tuple[tuple[Phase, MemoryPart], ...] = ((Phase.FORWARD, "forward"), (Phase.BACKWARD, "backward"))


def module_memory_table(trace: Trace) -> tuple[ModuleMemoryRow, ...] | None:
    """Bytes by module, part of the step and device; modules that allocated most themselves come first.

    An allocation or a free belongs to the innermost module whose forward ran in its thread then, or to the module of
    the node that autograd ran.

    Returns:
        None when no module is marked, or the trace was taken without ``profile_memory``.
    """
    memory = trace.memory
    frames = None if memory is None else trace.frames
    if memory is None or frames is None:
        return None
    frame = frames.at(trace, lanes=memory.lane, moments_ns=memory.time_ns)
    known = frame >= 0
    owner = np.where(known, frames.owner[frame], -1)
    phase = np.where(known, frames.phase[frame], 0)
    on_host = memory.device_type == 0
    device = np.where(on_host, -1, memory.device)
    table: list[ModuleMemoryRow] = []
    for kind, index in sorted(set(zip(on_host.tolist(), device.tolist(), strict=True)), reverse=True):
        here = (on_host == kind) & (device == index)
        rows = _rows(frames, owner[here], phase[here], memory.bytes[here], "host" if kind else "device", index)
        table += sorted(rows, key=lambda row: (-row.self_allocation_bytes, row.name or "", row.part))
    return tuple(table)


def _rows(
    frames: Frames, owner: Ints, phase: Ints, size: Ints, device_type: Literal["host", "device"], device: int
) -> list[ModuleMemoryRow]:
    above = modules_above(frames.modules)
    rows = []
    rest = np.ones(len(owner), dtype=np.bool_)
    for number, part in _PHASES:
        mine = (phase == number) & (owner >= 0)
        rest &= ~mine
        own = np.zeros((3, len(frames.modules)), dtype=np.int64)
        np.add.at(own[0], owner[mine], size[mine])
        np.add.at(own[1], owner[mine], np.maximum(size[mine], 0))
        np.add.at(own[2], owner[mine], 1)
        increase, allocated, events = (with_below(one, above) for one in own)
        for place in np.flatnonzero(events).tolist():
            rows.append(
                ModuleMemoryRow(
                    name=frames.modules[place],
                    part=part,
                    device_type=device_type,
                    device=device,
                    size_increase_bytes=int(increase[place]),
                    self_size_increase_bytes=int(own[0][place]),
                    allocation_bytes=int(allocated[place]),
                    self_allocation_bytes=int(own[1][place]),
                )
            )
    nobodys: tuple[tuple[MemoryPart, Ints], ...] = (
        ("gradient accumulation", owner == ACCUMULATION),
        ("optimizer", owner == OPTIMIZER),
        ("elsewhere", (owner != ACCUMULATION) & (owner != OPTIMIZER)),
    )
    for part, wanted in nobodys:
        mine = rest & wanted
        if not mine.any():
            continue
        change, allocation = int(size[mine].sum()), int(np.maximum(size[mine], 0).sum())
        rows.append(
            ModuleMemoryRow(
                name=None,
                part=part,
                device_type=device_type,
                device=device,
                size_increase_bytes=change,
                self_size_increase_bytes=change,
                allocation_bytes=allocation,
                self_allocation_bytes=allocation,
            )
        )
    return rows
