"""What each module of a model took, forward and backward, in a trace that shows the modules' calls.

Every moment of a thread belongs to the innermost *frame* then open: a module's mark, a phase's mark, or a node that
autograd runs. Where no module is marked, calls that torch recorded with ``with_stack`` stand for the marks. A node
belongs to the module in whose frame its forward operator ran; both carry the same sequence number. A reentrant
checkpoint runs nodes inside another node: their time is taken out of the outer one's.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from lightning_flops.analysis.counts import with_those_above
from lightning_flops.records import marked_module, marked_phase
from lightning_flops.schema.tables import ModuleRow, ModuleTable
from lightning_flops.trace.columns import Kind, Trace, once, phase_of
from lightning_flops.trace.intervals import NS_PER_US, Ints, counted_once, split_by, sums_by, table
from lightning_flops.trace.steps import steps_of
from lightning_flops.trace.structure import enclosing, links_of, nearest, nest, without_inner

_NODE = "autograd::engine::evaluate_function: "
_CALL = "nn.Module: "  # what the event of a module's call begins with; the class and a number follow: ``Linear_0``
# The root's number, and owners that are no module: of nothing known, of the optimizer, of adding gradients to
# parameters; in the backward.
_ROOT, _NO_MODULE, _OPTIMIZER, _ACCUMULATION = 0, -1, -2, -3
_FRAME = re.compile(r"(.+?)\((\d+)\): ")
_OF_TORCH = re.compile(r"(^|/)torch/|/lib/python3\.\d+/(?!site-packages/|dist-packages/)|^<")
# A module called in one of these parts runs forward all the same; in others, such as validation, it does not count.
_INSIDE_STEP = ("data_wait", "transfer", "optimizer", "bubble", "other")
_NO_PHASE, _FORWARD, _BACKWARD = range(3)  # what a frame is part of, whoever owns it
_BOTH = {"forward": _FORWARD, "backward": _BACKWARD}


@dataclass(frozen=True, slots=True, eq=False)
class Frames:
    """The frames of a trace, and their owners; the last three are columns over all rows of the trace."""

    modules: tuple[str, ...]  #: Qualified names; owners are indexes into these, or negative.
    rows: Ints  #: Rows of the trace that are frames: thread by thread, by start, outer before inner.
    parent: Ints  #: The row of the frame around a frame; -1 for the outermost.
    owner: Ints
    phase: Ints


@once
def frames_of(trace: Trace) -> Frames | None:
    """The frames of *trace*; None if nothing is marked in it, and torch recorded no call of a module either."""
    is_module = trace.where(lambda name: marked_module(name) is not None, Kind.ANNOTATION)
    marked = {row: marked_module(trace.name_of(row)) or "" for row in np.flatnonzero(is_module).tolist()}
    module_of = marked or _called_modules(trace)

    def part_of(name: str) -> str | None:  # of torch's own scopes, only where calls stand for marks
        return marked_phase(name) or ("optimizer" if not marked and phase_of(name) == "optimizer" else None)

    if not module_of and not trace.where(marked_phase, Kind.ANNOTATION).any():
        return None
    is_frame = trace.where(part_of, Kind.ANNOTATION)
    is_frame[[*module_of]] = True
    # A container whose forward is never called, such as a list of blocks, has the time of what is in it.
    modules = tuple(dict.fromkeys(one for name in ("", *module_of.values()) for one in with_those_above(name)))
    numbers = {name: index for index, name in enumerate(modules)}
    is_node = trace.where(lambda name: name.startswith(_NODE), Kind.OPERATOR)
    rows, parent, _ = nest(trace, np.flatnonzero(is_frame | is_node))
    maker = _maker_frames(trace, rows[is_node[rows]], rows, parent)
    owner, phase = _owners(trace, rows, parent, maker, {row: numbers[name] for row, name in module_of.items()}, part_of)
    return Frames(modules, rows, parent, owner[:-1], phase[:-1])


def _owners(
    trace: Trace,
    rows: Ints,
    parent: Ints,
    maker: Ints,
    module_of: Mapping[int, int],
    part_of: Callable[[str], str | None],
) -> tuple[Ints, Ints]:
    """Owner and phase of each frame; the last of each is outside of every frame, where a called module runs forward."""
    owner, phase = np.full(len(trace) + 1, _NO_MODULE), np.append(np.zeros(len(trace), dtype=np.int64), _FORWARD)
    parts: dict[int, str] = {}
    for row in rows[np.lexsort((-trace.duration_ns[rows], trace.start_ns[rows]))].tolist():
        name, around = trace.name_of(row), int(parent[row])
        if row in module_of:
            owner[row] = module_of[row]
            phase[row] = phase[around] or (_FORWARD if parts.get(around) in _INSIDE_STEP else _NO_PHASE)
        elif name.startswith(_NODE):
            phase[row] = _BACKWARD
            # A node whose maker is not recorded may seem made in an optimizer's step: it is no module's.
            owner[row] = _ACCUMULATION if name.endswith("AccumulateGrad") else max(_NO_MODULE, owner[maker[row]])
        else:
            part = parts[row] = part_of(name) or ""
            phase[row] = _BOTH.get(part, _NO_PHASE)
            owner[row] = {"forward": _ROOT, "optimizer": _OPTIMIZER}.get(part, _NO_MODULE)
    return owner, phase


def _called_modules(trace: Trace) -> dict[int, str]:
    """Names by row of a module's call, as ``ResNet_0.Bottleneck_3.Conv2d_5``: the classes and numbers that torch wrote.

    A module that is called in several places, such as again in a backward, has the name of its first call.
    """
    rows, around, _ = nest(trace, np.flatnonzero(trace.where(lambda name: name.startswith(_CALL), Kind.PYTHON)))
    names, first = dict[int, str](), dict[str, str]()
    for row in trace.by_start(rows).tolist():
        own, outer = trace.name_of(row).removeprefix(_CALL).replace(".", "_"), names.get(int(around[row]))
        names[row] = first.setdefault(own, f"{outer}.{own}" if outer else own)
    return names


def _maker_frames(trace: Trace, nodes: Ints, frames: Ints, parent: Ints) -> Ints:
    """For each row of a node, the frame in which the operator ran that made the node; -1 where it is not known."""
    # An operator has the number that the next node of its thread will get. So the last operator with a node's number
    # made the node, or, if none was recorded then, the one with the highest number below it.
    made_in = np.full(len(trace), -1, dtype=np.int64)
    nodes = nodes[trace.sequence[nodes] >= 0]
    makers = np.flatnonzero((trace.kind == Kind.OPERATOR) & (trace.sequence >= 0) & (trace.forward_thread <= 0))
    lanes = [one for _, one in split_by(trace.lane, trace.by_start(makers))]
    for _, here in split_by(trace.forward_thread, nodes) if lanes else ():
        wanted = trace.sequence[here]
        # A trace numbers threads in two ways: the one that made the nodes has most of their numbers.
        made_by = max(lanes, key=lambda one: int(np.isin(wanted, trace.sequence[one]).sum()))
        # Numbers only rise on a thread; an operator that starts inside another may be recorded a moment late.
        numbers = np.maximum.accumulate(trace.sequence[made_by])
        last = np.searchsorted(numbers, wanted, side="right") - 1
        operators = made_by[last[last >= 0]]
        made_in[here[last >= 0]] = enclosing(trace, frames, parent, trace.lane[operators], trace.start_ns[operators])
    return made_in


def module_table(trace: Trace, step: int | None = None) -> ModuleTable | None:
    """Forward and backward time of each module, over all steps or in one; None if the trace does not show modules.

    On a device, the time in which anything ran that was launched in the module, overlaps counted once; else the host's.
    """
    frames = frames_of(trace)
    if frames is None:
        return None
    inside = np.full(len(trace), True) if step is None else steps_of(trace).of(trace.start_ns) == step
    # What a wrapper calls, and what a backward repeats, is no call of its own.
    calls = frames.rows[(frames.owner[frames.rows] >= 0) & (frames.phase[frames.rows] == _FORWARD)]
    around = frames.parent[calls]
    calls = calls[((around < 0) | (frames.owner[around] != frames.owner[calls])) & inside[calls]]
    if trace.has_device:
        source = links_of(trace).launch[trace.device_rows]
        rows, source = trace.device_rows[source >= 0], source[source >= 0]
        frame = enclosing(trace, frames.rows, frames.parent, trace.lane[source], trace.start_ns[source])
        known = (frame >= 0) & inside[frame]
        rows, frame = rows[known], frame[known]
        # Hooks of accumulation synchronize gradients, and so does the end of the backward: that is no module's time.
        of_none = trace.is_collective[rows] & (frames.phase[frame] == _BACKWARD) & (frames.owner[frame] < 0)
        owner = np.where(of_none, _NO_MODULE, frames.owner[frame])
    else:
        rows = frame = frames.rows[inside[frames.rows]]
        owner, own_ns = frames.owner[rows], without_inner(trace, frames.parent)[rows]
    phase, names = frames.phase[frame], frames.modules

    def spent_us(owners: Ints, which: Ints, count: int) -> list[float]:
        starts, ends = trace.start_ns[rows[which]], trace.end_ns[rows[which]]
        spent = ends - counted_once(owners, starts, ends) if trace.has_device else own_ns[which]
        return (sums_by(owners, spent, count) / NS_PER_US).tolist()  # type: ignore[no-any-return]

    columns: dict[str, Any] = {}
    wholes = {"optimizer_us": owner == _OPTIMIZER, "gradient_accumulation_us": owner == _ACCUMULATION}
    for name, one in _BOTH.items():
        mine = np.flatnonzero((phase == one) & (owner >= 0))
        columns[f"own_{name}_us"] = spent_us(owner[mine], mine, len(names))
        columns[f"{name}_us"] = spent_us(*with_modules_above(owner[mine], mine, names), len(names))
        wholes[f"{name}_us"], wholes[f"unattributed_{name}_us"] = phase == one, (phase == one) & (owner == _NO_MODULE)
    sums = {name: np.flatnonzero(wanted) for name, wanted in wholes.items()}
    of_calls = np.bincount(frames.owner[calls], minlength=len(names)).tolist()
    return ModuleTable(
        clock="device" if trace.has_device else "host",
        steps=len(steps_of(trace)) if step is None else 1,
        rows=table(ModuleRow, lambda row: row.name.split("."), name=names, calls=of_calls, **columns),
        **{name: spent_us(0 * which, which, 1)[0] for name, which in sums.items()},
    )


def with_modules_above(owner: Ints, which: Ints, modules: tuple[str, ...]) -> tuple[Ints, Ints]:
    """Each of the owners, and all modules above it; and of *which* it is."""
    numbers = {name: index for index, name in enumerate(modules)}
    above = [[numbers[one] for one in with_those_above(name)] for name in modules]
    owners = [above[one] for one in owner.tolist()]
    return np.array([*chain(*owners)], dtype=np.int64), np.repeat(which, [*map(len, owners)])


@lru_cache(maxsize=65536)
def place_of(frame: str) -> str | None:
    """``net.py:7`` of ``net.py(7): forward``; None for code of torch and of Python itself, built-ins and modules."""
    match = _FRAME.match(frame)
    if match is None or _OF_TORCH.search(match[1]) is not None:
        return None
    is_pythons = match[1].partition("/")[0].removesuffix(".py") in sys.stdlib_module_names
    return None if is_pythons else f"{match[1]}:{match[2]}"


def called_from(trace: Trace) -> dict[int, str]:
    """By the index of an operator's name, the user's line that called it first, as Python's calls say it."""
    calls, around, _ = nest(trace, np.flatnonzero(trace.kind == Kind.PYTHON))
    is_users = trace.where(lambda name: place_of(name) is not None, Kind.PYTHON)
    rows = trace.by_start(links_of(trace).operators)
    inner = enclosing(trace, calls, around, trace.lane[rows], trace.start_ns[rows])
    rows, users = rows[inner >= 0], nearest(around, is_users)[inner[inner >= 0]]
    names, first = np.unique(trace.name[rows], return_index=True)
    places = [place_of(trace.name_of(call)) if call >= 0 else None for call in users[first].tolist()]
    return {name: place or "" for name, place in zip(names.tolist(), places, strict=True)}
