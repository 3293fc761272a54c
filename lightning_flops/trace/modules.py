"""What each module of a model took, forward and backward, in a trace whose modules and phases are marked.

Every moment of a thread belongs to the innermost *frame* then open: a module's mark, a phase's mark, or a node that
autograd runs. A node belongs to the module in whose frame its forward operator ran; both carry the same sequence
number. A reentrant checkpoint runs nodes inside another node: their time is taken out of the outer one's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from lightning_flops.analysis.module_names import parent_name, with_those_above
from lightning_flops.analysis.trace_marks import marked_module, marked_phase
from lightning_flops.schema.trace_steps import ModuleRow, ModuleTable
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.intervals import (
    NS_PER_US,
    Ints,
    Lanes,
    Mask,
    distinct,
    intersect,
    merge,
    occupied_by,
    subtract,
    sums_by,
    table,
)
from lightning_flops.trace.names import Kind, is_optimizer
from lightning_flops.trace.operators import without_inner
from lightning_flops.trace.python_calls import called_modules, forwards_of_modules
from lightning_flops.trace.structure import enclosing, in_nesting_order, nest

_NODE = "autograd::engine::evaluate_function: "
_ACCUMULATES = "AccumulateGrad"

NOBODY, OPTIMIZER, ACCUMULATION, _COMMUNICATION, _OUTSIDE_NODES = -1, -2, -3, -4, -5
"""Owners that are no module: of nothing known, of the optimizer, of adding gradients to parameters; in the backward."""


class Phase(IntEnum):
    """What a frame is part of, whoever owns it."""

    NONE = 0
    FORWARD = 1
    BACKWARD = 2


_BOTH = {"forward": Phase.FORWARD, "backward": Phase.BACKWARD}
_INSIDE_STEP = ("data_wait", "transfer", "optimizer", "bubble", "other")
"""A module called in one of these parts runs forward all the same; in others, such as validation, it does not count."""


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """The frames of a trace, and their owners; the last three are columns over all rows of the trace."""

    modules: tuple[str, ...]
    """Qualified names; owners are indexes into these, or negative."""
    rows: Ints
    """Rows of the trace that are frames: thread by thread, by start, outer before inner."""
    parent: Ints
    """The row of the frame around a frame; -1 for the outermost."""
    owner: Ints
    phase: Ints

    def at(self, trace: Trace, lanes: Lanes, moments_ns: Ints) -> Ints:
        """For each moment in a lane, the row of the innermost frame then open there; -1 where there is none."""
        return enclosing(trace, self.rows, self.parent, lanes=lanes, moments_ns=moments_ns)

    def owner_at(self, trace: Trace, lanes: Lanes, moments_ns: Ints) -> tuple[Ints, Ints]:
        """For each moment in a lane, the owner and the phase of that frame."""
        frame = self.at(trace, lanes, moments_ns)
        return np.where(frame >= 0, self.owner[frame], NOBODY), np.where(frame >= 0, self.phase[frame], Phase.NONE)

    def calls(self) -> Ints:
        """Rows of modules' marks that are a call of their own: forward, and no wrapper's call of what it wraps."""
        rows = self.rows[(self.owner[self.rows] >= 0) & (self.phase[self.rows] == Phase.FORWARD)]
        around = self.parent[rows]
        calls: Ints = rows[(around < 0) | (self.owner[around] != self.owner[rows])]
        return calls


def find_frames(trace: Trace) -> Frames | None:
    """The frames of *trace*; None if no module is marked in it and no module's call was recorded.

    Calls that torch recorded with ``with_stack`` stand in for marks where there are none of ours.
    """
    is_module = trace.where(lambda name: marked_module(name) is not None, Kind.ANNOTATION)
    called = {} if is_module.any() else called_modules(trace)
    of_name = {name: marked_module(trace.names[name]) for name in distinct(trace.name[is_module]).tolist()}
    named = [*called.values(), *(module for module in of_name.values() if module is not None)]
    # A container whose forward nobody calls, such as a list of blocks, has the time of what is in it.
    modules = tuple(dict.fromkeys(one for name in ("", *dict.fromkeys(named)) for one in with_those_above(name)))
    numbers = {name: index for index, name in enumerate(modules)}

    def part_of(name: str) -> str | None:  # torch's own scopes stand in a trace that is not of ours
        return marked_phase(name) or ("optimizer" if called and is_optimizer(name) else None)

    is_part = trace.where(lambda name: part_of(name) is not None, Kind.ANNOTATION)
    if not named and not is_part.any():
        return None
    is_node = trace.where(lambda name: name.startswith(_NODE), Kind.OPERATOR)
    rows = np.flatnonzero(is_module | is_part | is_node)
    rows = in_nesting_order(trace, np.concatenate([rows, np.array(list(called), dtype=np.int64)]))
    parent, _ = nest(trace, rows)
    maker = _maker_frames(trace, rows[is_node[rows]], Frames(modules, rows, parent, parent, parent))

    owners: dict[int, int] = {-1: NOBODY}
    phases: dict[int, int] = {-1: Phase.FORWARD}  # a module that is called outside of every mark runs forward
    parts: dict[int, str | None] = {}
    in_time = rows[np.lexsort((-trace.duration_ns[rows], trace.start_ns[rows]))]
    columns = (in_time.tolist(), trace.name[in_time].tolist(), parent[in_time].tolist(), is_node[in_time].tolist())
    for row, name, around, runs_node in zip(*columns, strict=True):
        module = called.get(row, of_name.get(name))
        if runs_node:
            phases[row] = Phase.BACKWARD
            accumulates = trace.names[name].endswith(_ACCUMULATES)
            owners[row] = ACCUMULATION if accumulates else owners[int(maker[row])]
        elif module is not None:
            owners[row], phases[row] = numbers[module], phases[around]
            if phases[around] == Phase.NONE and parts.get(around) in _INSIDE_STEP:
                phases[row] = Phase.FORWARD
        else:
            part = parts[row] = part_of(trace.names[name])
            phases[row] = _BOTH.get(part or "", Phase.NONE)
            owners[row] = {"forward": numbers[""], "optimizer": OPTIMIZER}.get(part or "", NOBODY)
    owner, phase = np.full(len(trace), NOBODY, dtype=np.int64), np.zeros(len(trace), dtype=np.int64)
    owner[in_time] = [owners[row] for row in in_time.tolist()]
    phase[in_time] = [phases[row] for row in in_time.tolist()]
    return Frames(modules, rows, parent, owner, phase)


def _maker_frames(trace: Trace, nodes: Ints, frames: Frames) -> Ints:
    """For each row of a node, the frame in which the operator ran that made the node; -1 where it is not known.

    An operator carries the number that the next node of its thread will get. So the last operator with a node's number
    made the node. If no operator has that number, because none was recorded then, it is the one with the highest number
    below it.
    """
    made_in = np.full(len(trace), -1, dtype=np.int64)
    nodes = nodes[trace.sequence[nodes] >= 0]
    makers = np.flatnonzero((trace.kind == Kind.OPERATOR) & (trace.sequence >= 0) & (trace.forward_thread <= 0))
    if not len(nodes) or not len(makers):
        return made_in
    makers = makers[np.lexsort((trace.start_ns[makers], trace.lane[makers]))]
    lanes = [makers[trace.lane[makers] == lane] for lane in distinct(trace.lane[makers]).tolist()]
    for thread in distinct(trace.forward_thread[nodes]).tolist():
        here = nodes[trace.forward_thread[nodes] == thread]
        wanted = trace.sequence[here]
        # A trace numbers threads in two ways: the one that made the nodes has most of their numbers.
        matches = [int(np.isin(wanted, trace.sequence[one]).sum()) for one in lanes]
        made_by = lanes[matches.index(max(matches))]
        # Numbers only rise on a thread; an operator that starts inside another may be recorded a moment late.
        numbers = np.maximum.accumulate(trace.sequence[made_by])
        last = np.searchsorted(numbers, wanted, side="right") - 1
        operators = made_by[last[last >= 0]]
        made_in[here[last >= 0]] = frames.at(trace, trace.lane[operators], trace.start_ns[operators])
    return made_in


def module_table(trace: Trace, step: int | None = None) -> ModuleTable | None:
    """Forward and backward time of each module, over all steps or in one; None if the trace does not show modules.

    If a device took part, this is the time in which kernels, copies and memsets that were launched in the module ran on
    it; a moment in which several of them ran counts once. Otherwise it is the host's time.
    """
    frames = trace.frames
    if frames is None:
        return None
    inside = np.full(len(trace), True) if step is None else trace.steps.of(trace.start_ns) == step
    times = _device_times if trace.has_device else _host_times
    columns, owner, phase, spent = times(trace, frames, inside)
    calls = frames.calls()
    sources = forwards_of_modules(trace, called_modules(trace))
    found = {
        "forward": phase == Phase.FORWARD,
        "backward": phase == Phase.BACKWARD,
        "optimizer": owner == OPTIMIZER,
        "gradient_accumulation": owner == ACCUMULATION,
        "backward_communication": owner == _COMMUNICATION,
        "backward_outside_nodes": owner == _OUTSIDE_NODES,
        "unattributed_forward": (phase == Phase.FORWARD) & (owner == NOBODY),
        "unattributed_backward": (phase == Phase.BACKWARD) & (owner == NOBODY),
    }
    wholes = {name: spent(wanted) for name, wanted in found.items()}
    if not trace.has_device:
        between = _between_nodes(trace, frames, inside)
        wholes["backward_communication"], wholes["backward_outside_nodes"] = between
        wholes["unattributed_backward"] -= sum(between)
    return ModuleTable(
        clock="device" if trace.has_device else "host",
        steps=len(trace.steps) if step is None else 1,
        rows=table(
            ModuleRow,
            lambda row: row.name.split("."),
            name=frames.modules,
            calls=np.bincount(frames.owner[calls[inside[calls]]], minlength=len(frames.modules)).tolist(),
            source=map(sources.get, frames.modules),
            **columns,
        ),
        **{f"{name}_us": time_ns / NS_PER_US for name, time_ns in wholes.items()},
    )


_Times = tuple[dict[str, Any], Ints, Ints, Callable[[Mask], int]]
"""The columns of the table; owner and phase of whatever took time, and the nanoseconds that some of it took."""


def own_host_ns(trace: Trace, frames: Frames) -> Ints:
    """For each of the frames' rows, its length on the host without the frames inside it."""
    return without_inner(trace, frames.rows[frames.parent[frames.rows] >= 0], frames.parent)[frames.rows]


def _host_times(trace: Trace, frames: Frames, inside: Mask) -> _Times:
    rows = frames.rows[inside[frames.rows]]
    times, owner, phase = own_host_ns(trace, frames)[inside[frames.rows]], frames.owner[rows], frames.phase[rows]
    parents = modules_above(frames.modules)
    columns: dict[str, Any] = {}
    for name, one in _BOTH.items():
        mine = (phase == one) & (owner >= 0)
        own = sums_by(owner[mine], times[mine], len(parents))
        columns[f"own_{name}_us"] = (own / NS_PER_US).tolist()
        columns[f"{name}_us"] = (with_below(own, parents) / NS_PER_US).tolist()
        columns[f"{name}_kernels"] = [None] * len(parents)
    return columns, owner, phase, lambda wanted: int(times[wanted].sum())


def _between_nodes(trace: Trace, frames: Frames, inside: Mask) -> tuple[int, int]:
    """Nanoseconds of the backward in which its thread runs no node: with a collective under way, with an operator.

    A wrapper that synchronizes gradients waits there, and does there what it postponed to the backward's end.
    """
    marks = np.flatnonzero(inside & trace.where(_is_backward_mark, Kind.ANNOTATION))
    communication_ns = operators_ns = 0
    collectives = trace.merged(trace.is_collective)
    for lane in distinct(trace.lane[marks]).tolist():
        mine, inner = marks[trace.lane[marks] == lane], frames.rows[trace.lane[frames.rows] == lane]
        inner = inner[np.isin(frames.parent[inner], mine)]
        free = subtract(trace.merged(mine), trace.merged(inner))
        communicating = intersect(free, collectives)
        operators = trace.merged((trace.kind == Kind.OPERATOR) & (trace.lane == lane))
        communication_ns += communicating.total
        operators_ns += intersect(subtract(free, communicating), operators).total
    return communication_ns, operators_ns


def _is_backward_mark(name: str) -> bool:
    return marked_phase(name) == "backward"


def launched_in_frames(trace: Trace, frames: Frames) -> tuple[Ints, Ints]:
    """Rows of the device events that were launched in a frame, and the row of each one's frame."""
    events = trace.device_rows
    launch = trace.links.launch[events]
    # A device event whose launch is not in the trace still names the operator that launched it.
    source = np.where(launch >= 0, launch, trace.links.operator_of_launch[events])
    events, source = events[source >= 0], source[source >= 0]
    frame = frames.at(trace, trace.lane[source], trace.start_ns[source])
    return events[frame >= 0], frame[frame >= 0]


def _device_times(trace: Trace, frames: Frames, inside: Mask) -> _Times:
    events, frame = launched_in_frames(trace, frames)
    events, frame = events[inside[frame]], frame[inside[frame]]
    owner, phase = frames.owner[frame], frames.phase[frame]
    # Hooks of accumulation synchronize gradients, and so does the end of the backward: that is no module's time.
    owner = np.where(trace.is_collective[events] & (phase == Phase.BACKWARD) & (owner < 0), _COMMUNICATION, owner)
    in_mark = trace.where(_is_backward_mark, Kind.ANNOTATION)[frame]
    owner = np.where(in_mark & (owner == NOBODY), _OUTSIDE_NODES, owner)
    starts, ends, is_kernel = trace.start_ns[events], trace.end_ns[events], trace.kind[events] == Kind.KERNEL
    parents = modules_above(frames.modules)
    columns: dict[str, Any] = {}
    for name, one in _BOTH.items():
        mine = np.flatnonzero((phase == one) & (owner >= 0))
        above, which = _with_owners_above(owner[mine], parents)
        which = mine[which]
        own = occupied_by(owner[mine], starts[mine], ends[mine], len(parents))
        columns[f"own_{name}_us"] = (own / NS_PER_US).tolist()
        columns[f"{name}_us"] = (occupied_by(above, starts[which], ends[which], len(parents)) / NS_PER_US).tolist()
        columns[f"{name}_kernels"] = np.bincount(above[is_kernel[which]], minlength=len(parents)).tolist()
    return columns, owner, phase, lambda wanted: merge(starts[wanted], ends[wanted]).total


def modules_above(modules: tuple[str, ...]) -> Ints:
    """For each module the one above it; -1 for the root."""
    numbers = {name: index for index, name in enumerate(modules)}
    return np.array([numbers[parent_name(name)] if name else -1 for name in modules], dtype=np.int64)


def with_below(own: Ints, parents: Ints) -> Ints:
    """For each module its *own* and that of all modules below it; *parents* as ``modules_above`` returns it."""
    above, which = _with_owners_above(np.arange(len(own)), parents)
    return sums_by(above, own[which], len(own))


def _with_owners_above(owner: Ints, parents: Ints) -> tuple[Ints, Ints]:
    """Each owner and all modules above it, and the entry of *owner* that each of these is for."""
    above, which = owner, np.arange(len(owner))
    owners, places = [above], [which]
    while len(which := which[parents[above] >= 0]):
        above = parents[above][parents[above] >= 0]
        owners.append(above)
        places.append(which)
    return np.concatenate(owners), np.concatenate(places)
