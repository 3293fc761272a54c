"""What each module of a model took, forward and backward, in a trace whose modules and phases are marked.

Every moment of a thread belongs to the innermost *frame* then open: a module's mark, a phase's mark, or a node that
autograd runs. A node belongs to the module in whose frame its forward operator ran; both carry the same sequence
number. A reentrant checkpoint runs nodes inside another node: their time is taken out of the outer one's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.module_names import parent_name, with_those_above
from lightning_flops.analysis.trace.columns import Trace
from lightning_flops.analysis.trace.durations import NS_PER_US
from lightning_flops.analysis.trace.event_names import Kind, is_optimizer
from lightning_flops.analysis.trace.intervals import Ints, distinct, intersect, merge, subtract
from lightning_flops.analysis.trace.python_calls import called_modules, forwards_of_modules
from lightning_flops.analysis.trace.structure import enclosing_operators, in_nesting_order, nest
from lightning_flops.analysis.trace_marks import marked_module, marked_phase
from lightning_flops.schema.trace_steps import ModuleRow, ModuleTable

_NODE = "autograd::engine::evaluate_function: "
_ACCUMULATES = "AccumulateGrad"

NOBODY = -1
"""Owner of what belongs to no module, optimizer or gradient accumulation."""
OPTIMIZER = -2
"""Owner of what the optimizer does."""
ACCUMULATION = -3
"""Owner of what adds gradients to parameters."""
_COMMUNICATION = -4
_OUTSIDE_NODES = -5


class Phase(IntEnum):
    """What a frame is part of, whoever owns it."""

    NONE = 0
    FORWARD = 1
    BACKWARD = 2


_OWN_PHASES = {"forward": Phase.FORWARD, "backward": Phase.BACKWARD}
_INSIDE_STEP = ("data_wait", "transfer", "optimizer", "bubble", "other")
"""A module called in one of these parts runs forward all the same; in others, such as validation, it does not count."""


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """The frames of a trace, and their owners."""

    modules: tuple[str, ...]
    """Qualified names; owners are indexes into these, or negative."""
    rows: Ints
    """Rows of the trace that are frames: thread by thread, by start, outer before inner."""
    parent: Ints
    """For each row of the trace that is a frame, the row of the frame around it; -1 elsewhere and for the outermost."""
    owner: Ints
    """For each row of the trace that is a frame, its owner."""
    phase: npt.NDArray[np.int8]
    """For each row of the trace that is a frame, forward (1), backward (2, with what it repeats) or neither (0)."""

    def at(self, trace: Trace, *, lanes: npt.NDArray[np.int32], moments_ns: Ints) -> Ints:
        """For each moment in a lane, the row of the innermost frame then open there; -1 where there is none."""
        return enclosing_operators(trace, self.rows, self.parent, lanes=lanes, moments_ns=moments_ns)


def find_frames(trace: Trace) -> Frames | None:
    """The frames of *trace*; None if no module is marked in it and no module's call was recorded.

    Calls that torch recorded with ``with_stack`` stand in for marks where there are none of ours.
    """
    marks = [marked_module(name) for name in trace.names]
    called = {} if any(name is not None for name in marks) else called_modules(trace)
    named = [*dict.fromkeys(called.values())] if called else [name for name in marks if name is not None]
    if not named:
        return None
    # A container whose forward nobody calls, such as a list of blocks, has the time of what is in it.
    modules = tuple(dict.fromkeys(one for name in ("", *named) for one in with_those_above(name)))
    numbers = {name: index for index, name in enumerate(modules)}
    parts = [marked_phase(name) or _part_of_torchs(name, called) for name in trace.names]
    is_mark = np.array([mark is not None or part is not None for mark, part in zip(marks, parts, strict=True)])
    is_node = np.array([name.startswith(_NODE) for name in trace.names])
    kind = trace.kind
    rows = np.flatnonzero(
        ((kind == Kind.ANNOTATION) & is_mark[trace.name]) | ((kind == Kind.OPERATOR) & is_node[trace.name])
    )
    rows = np.concatenate([rows, np.array(list(called), dtype=np.int64)])
    rows = in_nesting_order(trace, rows)
    parent = np.full(len(trace), -1, dtype=np.int64)
    nest(trace, rows, parent)
    maker = _maker_frames(trace, rows, parent, is_node)

    owner = np.full(len(trace), NOBODY, dtype=np.int64)
    phase = np.zeros(len(trace), dtype=np.int8)
    owners: dict[int, int] = {-1: NOBODY}
    phases: dict[int, int] = {-1: Phase.FORWARD}  # a module that is called outside of every mark runs forward
    in_time = rows[np.lexsort((-trace.duration_ns[rows], trace.start_ns[rows]))]
    for row, name, around, made_in in zip(
        in_time.tolist(),
        trace.name[in_time].tolist(),
        parent[in_time].tolist(),
        maker[in_time].tolist(),
        strict=True,
    ):
        module, part = called.get(row, marks[name]), parts[name]
        if module is not None:
            owners[row], phases[row] = numbers[module], phases[around]
            if phases[around] == Phase.NONE and _is_inside_step(parts, trace, around):
                phases[row] = Phase.FORWARD
        elif part is not None:
            phases[row] = _OWN_PHASES.get(part, Phase.NONE)
            owners[row] = {"forward": numbers[""], "optimizer": OPTIMIZER}.get(part, NOBODY)
        else:
            phases[row] = Phase.BACKWARD
            accumulates = trace.names[name].endswith(_ACCUMULATES)
            owners[row] = ACCUMULATION if accumulates else owners[made_in]
    owner[in_time] = [owners[row] for row in in_time.tolist()]
    phase[in_time] = [phases[row] for row in in_time.tolist()]
    return Frames(modules, rows, parent, owner, phase)


def _part_of_torchs(name: str, called: Mapping[int, str]) -> str | None:
    """The part of a step that torch's own scope is, in a trace that is not of ours."""
    return "optimizer" if called and is_optimizer(name) else None


def module_table(trace: Trace) -> ModuleTable | None:
    """Forward and backward time of each module, over all steps; None if the trace does not show modules.

    If a device took part, this is the time in which kernels, copies and memsets that were launched in the module ran on
    it; a moment in which several of them ran counts once. Otherwise it is the host's time.
    """
    frames = trace.frames
    if frames is None:
        return None
    parents = modules_above(frames.modules)
    sources = forwards_of_modules(trace, called_modules(trace))
    count = len(frames.modules)
    spent = _device_times(trace, frames, parents) if trace.has_device else _host_times(trace, frames, parents)
    calls = np.bincount(frames.owner[calls_of_modules(frames)], minlength=count)
    kernels = [[None] * count] * 2 if spent.kernels is None else [part.tolist() for part in spent.kernels]
    columns = (part.tolist() for part in (calls, *spent.total, *spent.own))
    rows = [
        ModuleRow(
            name=name,
            calls=called,
            forward_us=forward / NS_PER_US,
            own_forward_us=own_forward / NS_PER_US,
            backward_us=backward / NS_PER_US,
            own_backward_us=own_backward / NS_PER_US,
            forward_kernels=forward_kernels,
            backward_kernels=backward_kernels,
            source=sources.get(name),
        )
        for name, called, forward, backward, own_forward, own_backward, forward_kernels, backward_kernels in zip(
            frames.modules, *columns, *kernels, strict=True
        )
    ]
    return ModuleTable(
        clock="device" if trace.has_device else "host",
        steps=len(trace.steps),
        rows=tuple(sorted(rows, key=lambda row: row.name.split("."))),
        forward_us=spent.whole_forward_ns / NS_PER_US,
        backward_us=spent.whole_backward_ns / NS_PER_US,
        optimizer_us=spent.optimizer_ns / NS_PER_US,
        gradient_accumulation_us=spent.accumulation_ns / NS_PER_US,
        backward_communication_us=spent.communication_ns / NS_PER_US,
        backward_outside_nodes_us=spent.outside_nodes_ns / NS_PER_US,
        unattributed_forward_us=spent.lost_forward_ns / NS_PER_US,
        unattributed_backward_us=spent.lost_backward_ns / NS_PER_US,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Times:
    """Nanoseconds by module, forward and then backward, and those of the phases that no module owns."""

    own: tuple[Ints, Ints]
    total: tuple[Ints, Ints]
    kernels: tuple[Ints, Ints] | None
    whole_forward_ns: int
    whole_backward_ns: int
    optimizer_ns: int
    accumulation_ns: int
    communication_ns: int
    outside_nodes_ns: int
    lost_forward_ns: int
    lost_backward_ns: int


def own_host_ns(trace: Trace, frames: Frames) -> Ints:
    """For each of the frames' rows, its length on the host without the frames inside it."""
    rows = frames.rows
    own_ns = trace.duration_ns.copy()
    inner = rows[frames.parent[rows] >= 0]
    around = frames.parent[inner]
    np.subtract.at(own_ns, around, np.minimum(trace.end_ns[inner], trace.end_ns[around]) - trace.start_ns[inner])
    return np.maximum(own_ns[rows], 0)


def _host_times(trace: Trace, frames: Frames, parents: Ints) -> _Times:
    rows = frames.rows
    times = own_host_ns(trace, frames)
    owner, phase = frames.owner[rows], frames.phase[rows]

    def spent(wanted: npt.NDArray[np.bool_]) -> int:
        return int(times[wanted].sum())

    own = tuple(_sums(owner, times, (phase == one) & (owner >= 0), len(parents)) for one in _BOTH)
    communication_ns, outside_nodes_ns = _between_nodes(trace, frames)
    return _Times(
        own=(own[0], own[1]),
        total=(with_below(own[0], parents), with_below(own[1], parents)),
        kernels=None,
        communication_ns=communication_ns,
        outside_nodes_ns=outside_nodes_ns,
        whole_forward_ns=spent(phase == Phase.FORWARD),
        whole_backward_ns=spent(phase == Phase.BACKWARD),
        optimizer_ns=spent(owner == OPTIMIZER),
        accumulation_ns=spent(owner == ACCUMULATION),
        lost_forward_ns=spent((phase == Phase.FORWARD) & (owner == NOBODY)),
        lost_backward_ns=spent((phase == Phase.BACKWARD) & (owner == NOBODY)) - communication_ns - outside_nodes_ns,
    )


def _between_nodes(trace: Trace, frames: Frames) -> tuple[int, int]:
    """Nanoseconds of the backward in which its thread runs no node: with a collective under way, with an operator.

    A wrapper that synchronizes gradients waits there, and does there what it postponed to the backward's end.
    """
    rows = frames.rows
    marks = rows[trace.names_where(lambda name: marked_phase(name) == "backward")[rows]]
    communication_ns = operators_ns = 0
    collectives = trace.merged(trace.is_collective)
    for lane in distinct(trace.lane[marks]).tolist():
        mine, others = marks[trace.lane[marks] == lane], rows[trace.lane[rows] == lane]
        inner = others[frames.parent[others] >= 0]
        inner = inner[np.isin(frames.parent[inner], mine)]
        free = subtract(trace.merged(mine), trace.merged(inner))
        communicating = intersect(free, collectives)
        operators = (trace.kind == Kind.OPERATOR) & (trace.lane == lane)
        communication_ns += communicating.total
        operators_ns += intersect(subtract(free, communicating), trace.merged(operators)).total
    return communication_ns, operators_ns


def owned_device_events(trace: Trace, frames: Frames) -> tuple[Ints, Ints, npt.NDArray[np.int8]]:
    """Rows of the device events that were launched in a frame, and for each its owner and its phase."""
    events, frame = _launched_in(trace, frames)
    return events, frames.owner[frame], frames.phase[frame]


def _launched_in(trace: Trace, frames: Frames) -> tuple[Ints, Ints]:
    """Rows of the device events that were launched in a frame, and the row of each one's frame."""
    events = trace.device_rows
    launch = trace.links.launch[events]
    # A device event whose launch is not in the trace still names the operator that launched it.
    source = np.where(launch >= 0, launch, trace.links.operator_of_launch[events])
    events, source = events[source >= 0], source[source >= 0]
    frame = frames.at(trace, lanes=trace.lane[source], moments_ns=trace.start_ns[source])
    return events[frame >= 0], frame[frame >= 0]


def _device_times(trace: Trace, frames: Frames, parents: Ints) -> _Times:
    events, frame = _launched_in(trace, frames)
    owner, phase = frames.owner[frame], frames.phase[frame]
    # Hooks of accumulation synchronize gradients, and so does the end of the backward: that is no module's time.
    synchronizes = trace.is_collective[events] & (phase == Phase.BACKWARD) & (owner < 0)
    owner = np.where(synchronizes, _COMMUNICATION, owner)
    is_mark = trace.names_where(lambda name: marked_phase(name) == "backward")[frame]
    owner = np.where(is_mark & (owner == NOBODY), _OUTSIDE_NODES, owner)
    starts, ends = trace.start_ns[events], trace.end_ns[events]
    is_kernel = trace.kind[events] == Kind.KERNEL

    def occupied(wanted: npt.NDArray[np.bool_]) -> int:
        return merge(starts[wanted], ends[wanted]).total

    own, total, kernels = [], [], []
    for one in _BOTH:
        mine = np.flatnonzero((phase == one) & (owner >= 0))
        own.append(occupied_by(owner[mine], starts[mine], ends[mine], len(parents)))
        above, which = _with_owners_above(owner[mine], parents)
        total.append(occupied_by(above, starts[mine][which], ends[mine][which], len(parents)))
        kernels.append(_sums(above, is_kernel[mine][which].astype(np.int64), above >= 0, len(parents)))
    return _Times(
        own=(own[0], own[1]),
        total=(total[0], total[1]),
        kernels=(kernels[0], kernels[1]),
        whole_forward_ns=occupied(phase == Phase.FORWARD),
        whole_backward_ns=occupied(phase == Phase.BACKWARD),
        optimizer_ns=occupied(owner == OPTIMIZER),
        accumulation_ns=occupied(owner == ACCUMULATION),
        communication_ns=occupied(owner == _COMMUNICATION),
        outside_nodes_ns=occupied(owner == _OUTSIDE_NODES),
        lost_forward_ns=occupied((phase == Phase.FORWARD) & (owner == NOBODY)),
        lost_backward_ns=occupied((phase == Phase.BACKWARD) & (owner == NOBODY)),
    )


_BOTH = (Phase.FORWARD, Phase.BACKWARD)


def _is_inside_step(parts: list[str | None], trace: Trace, around: int) -> bool:
    """Whether the frame in row *around* is the mark of a part of the step in which a module's call counts."""
    return around >= 0 and parts[trace.name[around]] in _INSIDE_STEP


def _maker_frames(trace: Trace, rows: Ints, parent: Ints, is_node: npt.NDArray[np.bool_]) -> Ints:
    """For each row of a node, the frame in which the operator ran that made the node; -1 where it is not known.

    An operator carries the number that the next node of its thread will get. So the last operator with a node's number
    made the node. If no operator has that number, because none was recorded then, it is the one with the highest number
    below it.
    """
    made_in = np.full(len(trace), -1, dtype=np.int64)
    nodes = rows[is_node[trace.name[rows]] & (trace.sequence[rows] >= 0)]
    makers = np.flatnonzero((trace.kind == Kind.OPERATOR) & (trace.sequence >= 0) & (trace.forward_thread <= 0))
    if not len(nodes) or not len(makers):
        return made_in
    makers = makers[np.lexsort((trace.start_ns[makers], trace.lane[makers]))]
    lanes = distinct(trace.lane[makers])
    of_lane = {int(lane): makers[trace.lane[makers] == lane] for lane in lanes}
    for thread in distinct(trace.forward_thread[nodes]).tolist():
        here = nodes[trace.forward_thread[nodes] == thread]
        made_by = _thread_of(trace, trace.sequence[here], of_lane)
        # Numbers only rise on a thread; an operator that starts inside another may be recorded a moment late.
        numbers = np.maximum.accumulate(trace.sequence[made_by])
        last = np.searchsorted(numbers, trace.sequence[here], side="right") - 1
        known = last >= 0
        operators = made_by[last[known]]
        made_in[here[known]] = enclosing_operators(
            trace, rows, parent, lanes=trace.lane[operators], moments_ns=trace.start_ns[operators]
        )
    return made_in


def _thread_of(trace: Trace, numbers: Ints, of_lane: dict[int, Ints]) -> Ints:
    """Operators of the thread that made nodes of these *numbers*: a trace numbers threads in two ways."""
    if len(of_lane) == 1:
        return next(iter(of_lane.values()))
    matches = {lane: int(np.isin(numbers, trace.sequence[operators]).sum()) for lane, operators in of_lane.items()}
    return of_lane[max(matches, key=matches.__getitem__)]


def calls_of_modules(frames: Frames) -> Ints:
    """Rows of modules' marks that are a call of their own: forward, and no wrapper's call of what it wraps."""
    rows = frames.rows[(frames.owner[frames.rows] >= 0) & (frames.phase[frames.rows] == Phase.FORWARD)]
    around = frames.parent[rows]
    wrapped = (around >= 0) & (frames.owner[around] == frames.owner[rows])
    calls: Ints = rows[~wrapped]
    return calls


def modules_above(modules: tuple[str, ...]) -> Ints:
    """For each module the one above it; -1 for the root."""
    numbers = {name: index for index, name in enumerate(modules)}
    return np.array([numbers[parent_name(name)] if name else -1 for name in modules], dtype=np.int64)


def _sums(owner: Ints, values: Ints, wanted: npt.NDArray[np.bool_], count: int) -> Ints:
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, owner[wanted], values[wanted])
    return sums


def with_below(own: Ints, parents: Ints) -> Ints:
    """For each module its *own* and that of all modules below it; *parents* as ``modules_above`` returns it."""
    total = own.copy()
    above = parents.copy()
    while (inside := above >= 0).any():
        np.add.at(total, above[inside], own[inside])
        above = np.where(inside, parents[np.maximum(above, 0)], -1)
    return total


def _with_owners_above(owner: Ints, parents: Ints) -> tuple[Ints, Ints]:
    """Each owner and all modules above it, and the entry of *owner* that each of these is for."""
    which = np.arange(len(owner))
    owners, places = [owner], [which]
    above = parents[owner]
    while (inside := above >= 0).any():
        which, above = which[inside], above[inside]
        owners.append(above)
        places.append(which)
        above = parents[above]
    return np.concatenate(owners), np.concatenate(places)


def occupied_by(owner: Ints, starts: Ints, ends: Ints, count: int) -> Ints:
    """For each owner, how long at least one of its events ran."""
    occupied = np.zeros(count, dtype=np.int64)
    if not len(owner):
        return occupied
    first = int(starts.min())
    span = int(ends.max()) - first + 1
    shift = owner * span - first  # every owner gets a stretch of time for itself
    spans = merge(starts + shift, ends + shift)
    np.add.at(occupied, spans.starts // span, spans.ends - spans.starts)
    return occupied
