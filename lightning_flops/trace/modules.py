"""What each module of a model took, forward and backward, in a trace whose modules and phases are marked.

Every moment of a thread belongs to the innermost *frame* then open: a module's mark, a phase's mark, or a node that
autograd runs. A node belongs to the module in whose frame its forward operator ran; both carry the same sequence
number. A reentrant checkpoint runs nodes inside another node: their time is taken out of the outer one's.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np

from lightning_flops.analysis.module_names import parent_name, with_those_above
from lightning_flops.records import marked_module, marked_phase
from lightning_flops.schema.tables import ModuleRow, ModuleTable
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.intervals import NS_PER_US, Ints, Lanes, distinct, occupied_by, sums_by, table
from lightning_flops.trace.names import Kind, phase_of
from lightning_flops.trace.structure import enclosing, in_nesting_order, nearest, nest, without_inner

_NODE = "autograd::engine::evaluate_function: "
_ACCUMULATES = "AccumulateGrad"

NO_MODULE, OPTIMIZER, ACCUMULATION = -1, -2, -3
"""Owners that are no module: of nothing known, of the optimizer, of adding gradients to parameters; in the backward."""
MODULE = "nn.Module: "
"""What the event of a module's call begins with; the class and a number follow: ``Linear_0``."""
_FRAME = re.compile(r"(.+?)\((\d+)\): ")
_OF_TORCH = re.compile(r"(^|/)torch/|/lib/python3\.\d+/(?!site-packages/|dist-packages/)|^<")


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
        return np.where(frame >= 0, self.owner[frame], NO_MODULE), np.where(frame >= 0, self.phase[frame], Phase.NONE)


def find_frames(trace: Trace) -> Frames | None:
    """The frames of *trace*; None if no module is marked in it and no module's call was recorded.

    Calls that torch recorded with ``with_stack`` stand in for marks where there are none of ours.
    """
    is_marked = trace.where(lambda name: marked_module(name) is not None, Kind.ANNOTATION)
    marked = {row: marked_module(trace.name_of(row)) or "" for row in np.flatnonzero(is_marked).tolist()}
    module_of = marked or called_modules(trace)
    # A container whose forward is never called, such as a list of blocks, has the time of what is in it.
    modules = tuple(
        dict.fromkeys(one for name in ("", *dict.fromkeys(module_of.values())) for one in with_those_above(name))
    )
    numbers = {name: index for index, name in enumerate(modules)}

    def part_of(name: str) -> str | None:  # torch's own scopes stand in a trace that is not of ours
        return marked_phase(name) or ("optimizer" if not marked and phase_of(name) == "optimizer" else None)

    is_part = trace.where(lambda name: marked_phase(name) is not None, Kind.ANNOTATION)
    if not module_of and not is_part.any():
        return None
    is_frame = trace.where(part_of, Kind.ANNOTATION)
    is_frame[[*module_of]] = True
    is_node = trace.where(lambda name: name.startswith(_NODE), Kind.OPERATOR)
    rows = in_nesting_order(trace, np.flatnonzero(is_frame | is_node))
    parent, _ = nest(trace, rows)
    maker = _maker_frames(trace, rows[is_node[rows]], Frames(modules, rows, parent, parent, parent))
    # The last of each is outside of every frame, where a module that is called runs forward.
    owner, phase = np.full(len(trace) + 1, NO_MODULE), np.append(np.zeros(len(trace), dtype=np.int64), Phase.FORWARD)
    parts: dict[int, str] = {}
    for row in rows[np.lexsort((-trace.duration_ns[rows], trace.start_ns[rows]))].tolist():
        name, around = trace.name_of(row), int(parent[row])
        if is_node[row]:
            phase[row] = Phase.BACKWARD
            # A node whose maker is not recorded may seem made in an optimizer's step: it is no module's.
            owner[row] = ACCUMULATION if name.endswith(_ACCUMULATES) else max(NO_MODULE, owner[maker[row]])
        elif row in module_of:
            owner[row] = numbers[module_of[row]]
            phase[row] = phase[around] or (Phase.FORWARD if parts.get(around) in _INSIDE_STEP else Phase.NONE)
        else:
            part = parts[row] = part_of(name) or ""
            phase[row] = _BOTH.get(part, Phase.NONE)
            owner[row] = {"forward": numbers[""], "optimizer": OPTIMIZER}.get(part, NO_MODULE)
    return Frames(modules, rows, parent, owner[:-1], phase[:-1])


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
    # What a wrapper calls, and what a backward repeats, is no call of its own.
    calls = frames.rows[(frames.owner[frames.rows] >= 0) & (frames.phase[frames.rows] == Phase.FORWARD)]
    around = frames.parent[calls]
    calls = calls[((around < 0) | (frames.owner[around] != frames.owner[calls])) & inside[calls]]
    names, parents = frames.modules, modules_above(frames.modules)
    if trace.has_device:
        launch, launcher = trace.links.launch[trace.device_rows], trace.links.operator_of_launch[trace.device_rows]
        # A device event whose launch is not in the trace still names the operator that launched it.
        source = np.where(launch >= 0, launch, launcher)
        rows, source = trace.device_rows[source >= 0], source[source >= 0]
        frame = frames.at(trace, trace.lane[source], trace.start_ns[source])
        known = (frame >= 0) & inside[frame]
        rows, frame = rows[known], frame[known]
        # Hooks of accumulation synchronize gradients, and so does the end of the backward: that is no module's time.
        of_nobody = trace.is_collective[rows] & (frames.phase[frame] == Phase.BACKWARD) & (frames.owner[frame] < 0)
        owner = np.where(of_nobody, NO_MODULE, frames.owner[frame])
    else:
        rows = frame = frames.rows[inside[frames.rows]]
        inner = frames.rows[frames.parent[frames.rows] >= 0]
        owner, own_ns = frames.owner[rows], without_inner(trace, inner, frames.parent)[rows]
    phase, is_kernel = frames.phase[frame], trace.kind[rows] == Kind.KERNEL

    def spent(owners: Ints, which: Ints, count: int) -> Ints:
        if trace.has_device:
            return occupied_by(owners, trace.start_ns[rows[which]], trace.end_ns[rows[which]], count)
        return sums_by(owners, own_ns[which], count)

    columns: dict[str, Any] = {}
    for name, one in _BOTH.items():
        mine = np.flatnonzero((phase == one) & (owner >= 0))
        above, which = _with_owners_above(owner[mine], parents)
        which = mine[which]
        columns[f"own_{name}_us"] = (spent(owner[mine], mine, len(names)) / NS_PER_US).tolist()
        columns[f"{name}_us"] = (spent(above, which, len(names)) / NS_PER_US).tolist()
        kernels = np.bincount(above[is_kernel[which]], minlength=len(names)).tolist()
        columns[f"{name}_kernels"] = kernels if trace.has_device else [None] * len(names)
    wholes = {
        "forward_us": phase == Phase.FORWARD,
        "backward_us": phase == Phase.BACKWARD,
        "optimizer_us": owner == OPTIMIZER,
        "gradient_accumulation_us": owner == ACCUMULATION,
        "unattributed_forward_us": (phase == Phase.FORWARD) & (owner == NO_MODULE),
        "unattributed_backward_us": (phase == Phase.BACKWARD) & (owner == NO_MODULE),
    }
    sums = {name: np.flatnonzero(wanted) for name, wanted in wholes.items()}
    return ModuleTable(
        clock="device" if trace.has_device else "host",
        steps=len(trace.steps) if step is None else 1,
        rows=table(
            ModuleRow,
            lambda row: row.name.split("."),
            name=names,
            calls=np.bincount(frames.owner[calls], minlength=len(names)).tolist(),
            **columns,
        ),
        **{name: int(spent(0 * which, which, 1)[0]) / NS_PER_US for name, which in sums.items()},
    )


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


# ---- calls of Python, where the trace recorded them


@lru_cache(maxsize=65536)
def place_of(frame: str) -> str | None:
    """``net.py:7`` of ``net.py(7): forward``; None for code of torch and of Python itself, built-ins and modules."""
    match = _FRAME.match(frame)
    if match is None or _OF_TORCH.search(match[1]) is not None:
        return None
    if match[1].partition("/")[0].removesuffix(".py") in sys.stdlib_module_names:
        return None
    return f"{match[1]}:{match[2]}"


def called_from(trace: Trace) -> dict[int, str]:
    """By the index of an operator's name, the user's line that called it first, as Python's calls say it."""
    rows, (calls, around) = trace.by_start(trace.links.operators), python_calls(trace)
    is_users = trace.where(lambda name: place_of(name) is not None, Kind.PYTHON)
    inner = enclosing(trace, calls, around, lanes=trace.lane[rows], moments_ns=trace.start_ns[rows])
    rows, inner = rows[inner >= 0], inner[inner >= 0]
    users = np.where(is_users[inner], inner, nearest(inner, around, is_users))
    names, first = np.unique(trace.name[rows], return_index=True)
    places = [place_of(trace.name_of(call)) if call >= 0 else None for call in users[first].tolist()]
    return {name: place or "" for name, place in zip(names.tolist(), places, strict=True)}


def python_calls(trace: Trace) -> tuple[Ints, Ints]:
    """Rows of Python calls, thread by thread, callers first; for each row of the trace the call around it, or -1."""
    rows = in_nesting_order(trace, trace.of(Kind.PYTHON))
    return rows, nest(trace, rows)[0]


def called_modules(trace: Trace) -> dict[int, str]:
    """Names by row of a module's call: the classes and numbers of the modules around it and its own.

    ``ResNet_0.Bottleneck_3.Conv2d_5``: the numbers are those of the trace, which has no names of attributes. A module
    that is called in several places, such as again in a backward, has the name of its first call.
    """
    is_module = trace.where(lambda name: name.startswith(MODULE), Kind.PYTHON)
    if not is_module.any():
        return {}
    modules, around = np.flatnonzero(is_module), python_calls(trace)[1]
    modules = modules[np.lexsort((-trace.duration_ns[modules], trace.start_ns[modules]))]
    names: dict[int, str] = {}
    of_module: dict[str, str] = {}
    for row, outer in zip(modules.tolist(), nearest(modules, around, is_module).tolist(), strict=True):
        own = trace.name_of(row).removeprefix(MODULE).replace(".", "_")
        names[row] = of_module.setdefault(own, f"{names[outer]}.{own}" if outer in names else own)
    return names
