"""FLOPs of each operator of a trace, by the shapes in it.

The outermost operator that a formula is known for counts, and what it called does not, as in the counter: operators
that are only made of others (``aten::linear``) leave it to these. An operator for which the file does not say enough
leaves it to those it called, too (``aten::_convolution`` of an old file to ``aten::cudnn_convolution``); if none of
them counts, it is listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np

from lightning_flops.trace.columns import Trace
from lightning_flops.trace.intervals import Intervals, Ints, Mask, inside
from lightning_flops.trace.names import Kind
from lightning_flops.trace.recorded import RecordedCall, RecordedInputs, RecordedWork
from lightning_flops.trace.structure import NODE

Formulas = Callable[[RecordedCall], RecordedWork]
"""FLOPs of one recorded call. ``instrument.counting.recorded_calls`` has the one there is; it needs torch."""
_ACCUMULATES = "AccumulateGrad"
_CAPTURE = (re.compile(r"(cuda|hip)StreamBeginCapture"), re.compile(r"(cuda|hip)StreamEndCapture"))
_NO_INPUTS = RecordedInputs(dims=(), types=())
_HALF = re.compile(r"aten::\w+_convolution_backward_(input|weights?)$")
"""Halves of a convolution's backward up to torch 1.10, each of which has the FLOPs of the forward."""
_PLAIN = (*[""] * 6, "False", "", "")
"""Of the arguments of a convolution all that decides where the sizes of its result are known: not transposed."""
_NO_SHAPES = "its shapes were not recorded"
_TOO_MANY = "its shapes give more FLOPs or bytes than a trace can have"
_LARGEST_SUM = 2**61
"""No sum over a trace is larger, so that three of them together are still an integer of a column."""


class FlopPart(IntEnum):
    """The bucket that an operator's FLOPs belong to."""

    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2
    OPTIMIZER = 3


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """FLOPs of each operator of a trace; columns over all rows of the trace."""

    works: tuple[RecordedWork, ...]
    """Every different answer once."""
    work: Ints
    """Index into ``works``; -1 for rows that are no operators."""
    rows: Ints
    """Rows of the calls that count, by start; no one of them encloses another."""
    owner: Ints
    """For each row of an operator, the row of the call that counts for it: itself or one around it; -1 without."""
    part: Ints
    """For each row of an operator, a ``FlopPart``."""
    uncounted: Ints
    """Rows of operators that may have FLOPs and are not counted."""
    reasons: Mapping[int, str]
    """Why, by the index of the work, where the work does not say it."""

    def of(self, field: str) -> Ints:
        """One number of the work of each call that counts."""
        values = np.array([getattr(work, field) or 0 for work in self.works], dtype=np.int64)
        return values[self.work[self.rows]]

    def without(self, reasons: Mapping[int, str]) -> Counted:
        """These FLOPs with the calls of the works that have *reasons* listed instead of counted."""
        dropped = np.isin(self.work[self.rows], list(reasons))
        return replace(
            self,
            rows=self.rows[~dropped],
            owner=np.where(np.isin(self.owner, self.rows[dropped]), -1, self.owner),
            uncounted=np.union1d(self.uncounted, self.rows[dropped]),
            reasons=reasons,
        )


def count_trace(trace: Trace, formulas: Formulas) -> Counted:
    """FLOPs of each operator of *trace*; *formulas* is called once for each different call."""
    works, work = _answers(trace, formulas)
    links, levels, parent = trace.links, trace.links.levels, trace.links.parent

    def where(holds: Callable[[RecordedWork], bool]) -> Mask:
        return np.array([*map(holds, works), False])[work]

    is_counting, is_free = where(lambda one: one.role == "counts"), where(lambda one: one.role == "free")
    can_count = where(lambda one: one.role == "composite" and one.flops > 0)
    is_heavy = where(lambda one: one.heavy and one.role in ("unread", "unknown"))
    owner, listed = np.full(len(trace), -1, dtype=np.int64), np.zeros(len(trace), dtype=bool)
    settled = _captured(trace)
    """Rows that a call around them, or they themselves, answer for."""
    for rows in levels:
        inner = rows[parent[rows] >= 0]
        owner[inner] = owner[parent[inner]]
        settled[inner] |= settled[parent[inner]]
        fresh = rows[~settled[rows]]
        owner[fresh[is_counting[fresh]]] = fresh[is_counting[fresh]]
        settled[fresh[is_counting[fresh] | is_free[fresh]]] = True
    # From below: who encloses a call that counts, or one that is listed, is answered for by it.
    answered = owner >= 0
    for rows in reversed(levels):
        here = rows[~settled[rows] & ~answered[rows]]
        whole = here[can_count[here]]
        owner[whole] = whole
        listed[here[is_heavy[here]]] = True
        answered[here[can_count[here] | is_heavy[here]]] = True
        answered[parent[rows[answered[rows] & (parent[rows] >= 0)]]] = True
    # A composite call without any below it has taken these over.
    for rows in levels:
        below = rows[(parent[rows] >= 0) & (owner[rows] < 0)]
        owner[below] = owner[parent[below]]
    counted, parts = links.operators[owner[links.operators] == links.operators], _parts(trace)
    broken = _broken_off(trace, counted, parts)
    owner[counted[broken]] = -1
    return Counted(works, work, trace.by_start(counted[~broken]), owner, parts, np.flatnonzero(listed), {})


def _captured(trace: Trace) -> Mask:
    """Operators that only recorded a graph, in a thread between the begin and the end of a stream capture: none ran."""
    found = np.zeros(len(trace), dtype=bool)
    begins, ends = (
        trace.by_start(trace.where(lambda name: _CAPTURE[which].match(name) is not None, Kind.RUNTIME))  # noqa: B023
        for which in (0, 1)
    )
    for lane in np.unique(trace.lane[begins]).tolist():
        starts, stops = (trace.start_ns[rows[trace.lane[rows] == lane]] for rows in (begins, ends))
        until = np.append(stops, np.iinfo(np.int64).max)
        spans = Intervals(starts, np.minimum(until[np.searchsorted(until, starts)], np.append(starts[1:], until[-1])))
        rows = trace.links.operators[trace.lane[trace.links.operators] == lane]
        found[rows[inside(spans, trace.start_ns[rows])]] = True
    return found


def _broken_off(trace: Trace, rows: Ints, parts: Ints) -> Mask:
    """Calls among *rows* that were made and never ran.

    Checkpointing without reentry ends its repetition once it has what it needs, by an exception within the call of an
    operator. That call stands in the trace with nothing inside but what keeps its inputs for the backward, where the
    same call of the forward has something.
    """
    links, holds = trace.links, np.zeros(len(trace) + 1, dtype=bool)
    keeps = trace.where(lambda name: name in ("aten::detach", "detach"), Kind.OPERATOR)
    holds[links.parent[links.operators[~keeps[links.operators]]]] = True
    holds[links.operator_of_launch[trace.device_rows]] = True
    calls = trace.name[rows] * np.int64(len(trace.recorded_inputs) + 1) + trace.inputs[rows] + 1
    repeats = parts[rows] == FlopPart.RECOMPUTE
    found: Mask = repeats & ~holds[rows] & np.isin(calls, calls[~repeats & holds[rows]])
    return found


def _answers(trace: Trace, formulas: Formulas) -> tuple[tuple[RecordedWork, ...], Ints]:
    """The different answers, and for each row of the trace the index of its own."""
    rows, known_sizes = trace.links.operators, _results(trace)
    sizes_of = tuple(dict.fromkeys(known_sizes.values()))
    result = np.full(len(trace), -1, dtype=np.int64)
    result[list(known_sizes)] = [sizes_of.index(sizes) for sizes in known_sizes.values()]
    # One number for name, inputs and result; the last two may be -1.
    many, more = len(trace.recorded_inputs) + 1, len(sizes_of) + 1
    calls = (trace.name[rows] * np.int64(many) + trace.inputs[rows] + 1) * more + result[rows] + 1
    different, index = np.unique(calls, return_inverse=True)
    works = []
    for call in different.tolist():
        name, inputs, sizes = call // more // many, call // more % many - 1, call % more - 1
        recorded = _NO_INPUTS if inputs < 0 else trace.recorded_inputs[inputs]
        known = None if sizes < 0 else sizes_of[sizes]
        work = formulas(RecordedCall(operator=trace.names[name], inputs=recorded, result=known))
        if inputs < 0 and work.role in ("unread", "unknown"):
            work = replace(work, reason=_NO_SHAPES)
        works.append(work)
    largest = [max(work.flops, work.recompute, work.skipped, work.bytes or 0) for work in works]
    uses = np.bincount(index.reshape(-1)).tolist()
    if sum(one * used for one, used in zip(largest, uses, strict=False)) > _LARGEST_SUM:
        too_many = RecordedWork(role="unread", heavy=True, reason=_TOO_MANY)
        for place, one in enumerate(largest):
            if one > _LARGEST_SUM // sum(uses):
                works[place] = replace(too_many, operator=works[place].operator)
    numbers = np.full(len(trace), -1, dtype=np.int64)
    numbers[rows] = index.reshape(-1)
    known_halves: dict[tuple[str, int], int] = {}
    for row in np.flatnonzero(trace.where(lambda name: _HALF.match(name) is not None, Kind.OPERATOR)).tolist():
        name, around = trace.name_of(row), int(trace.inputs[trace.links.parent[row]])
        if (name, around) not in known_halves:
            known_halves[name, around] = len(works)
            works.append(_half(name, trace.recorded_inputs[around] if around >= 0 else _NO_INPUTS, formulas))
        numbers[row] = known_halves[name, around]
    return tuple(works), numbers


def _half(name: str, whole: RecordedInputs, formulas: Formulas) -> RecordedWork:
    """A half of the backward whose values, gradient of the result and weight are *whole*."""
    if len(whole.dims) < 3 or len(whole.types) < 3:
        return RecordedWork(role="unread", operator=name.replace("::", "."), heavy=True, reason=_NO_SHAPES)
    forward = RecordedInputs(
        dims=(whole.dims[0], whole.dims[2], *[[]] * 7),
        types=(whole.types[0], whole.types[2], *[""] * 7),
        concrete=_PLAIN,
    )
    work = formulas(RecordedCall(operator="aten::convolution", inputs=forward, result=_sizes(whole, 1)))
    return replace(work, operator=name.replace("::", "."))


def _results(trace: Trace) -> dict[int, tuple[int, ...]]:
    """Sizes of what convolutions returned, if the file does not have their strides, as files from before torch 2.0.

    The result of a forward is as large as the gradient that its node was given in the backward; both carry the same
    sequence number, or, in torch 1.8, sizes of values and weight that belong together.
    """
    if all(one.concrete is not None for one in trace.recorded_inputs):
        return {}  # what torch writes since 2.0

    @cache
    def sizes_at(inputs: int, place: int) -> tuple[int, ...] | None:
        return _sizes(trace.recorded_inputs[inputs], place) if inputs >= 0 else None

    here = np.flatnonzero(trace.where(lambda name: "convolution" in name.lower(), Kind.OPERATOR) & (trace.inputs >= 0))
    nodes = here[(trace.forward_thread[here] > 0) & (trace.sequence[here] >= 0)]
    columns = (trace.sequence[nodes].tolist(), trace.inputs[nodes].tolist())
    gradients = {number: sizes_at(inputs, 0) for number, inputs in zip(*columns, strict=True)}
    by_sizes: dict[Any, Any] = {}
    for row in here[trace.where(lambda name: name.endswith("convolution_backward"), Kind.OPERATOR)[here]].tolist():
        values, gradient, weight = (sizes_at(int(trace.inputs[row]), place) for place in range(3))
        by_sizes[values, weight] = gradient if by_sizes.get((values, weight), gradient) == gradient else None
    known_sizes = {}
    for row in here[(trace.forward_thread[here] <= 0)].tolist():
        if "backward" in trace.name_of(row):
            continue
        inputs, number = int(trace.inputs[row]), int(trace.sequence[row])
        values, weight = sizes_at(inputs, 0), sizes_at(inputs, 1)
        sizes = gradients.get(number) if number >= 0 else by_sizes.get((values, weight))
        # The number may be another node's, where this call made none.
        if values is not None and weight is not None and sizes and sizes[:2] == (*values[:1], *weight[:1]):
            known_sizes[row] = sizes
    return known_sizes


def _sizes(inputs: RecordedInputs, place: int) -> tuple[int, ...] | None:
    """The sizes of one tensor among the arguments; None where they are none."""
    sizes = inputs.dims[place] if len(inputs.dims) > place else None
    return tuple(sizes) if isinstance(sizes, list) and sizes and all(type(size) is int for size in sizes) else None


def _parts(trace: Trace) -> Ints:
    """The bucket of each operator.

    Autograd runs its own operators with gradients off, unless a graph is kept for another backward. An operator that
    has a sequence number there has gradients on: it repeats a part of the forward.
    """
    links = trace.links
    parts = np.full(len(trace), int(FlopPart.FORWARD), dtype=np.int64)
    accumulates = trace.where(lambda name: name.endswith(_ACCUMULATES), Kind.OPERATOR)
    is_node = trace.where(lambda name: NODE.match(name) is not None, Kind.OPERATOR) | (trace.forward_thread > 0)
    is_node &= links.is_backward
    with_gradients = (trace.sequence >= 0) & ~is_node
    keeps_graph = _keeps_graph(trace, is_node, with_gradients)
    for rows in links.levels:
        rows = rows[links.is_backward[rows]]
        parts[rows] = FlopPart.BACKWARD
        inner = rows[links.parent[rows] >= 0]
        around = links.parent[inner]
        handed_down = (parts[around] == FlopPart.OPTIMIZER) | ((parts[around] == FlopPart.RECOMPUTE) & ~is_node[inner])
        parts[inner[handed_down]] = parts[around[handed_down]]
        repeats = with_gradients[inner] & ~keeps_graph[inner] & (parts[inner] == FlopPart.BACKWARD)
        parts[inner[repeats]] = FlopPart.RECOMPUTE
        parts[rows[accumulates[rows] & is_node[rows]]] = FlopPart.OPTIMIZER
    if (optimizer := trace.phases.get("optimizer")) is not None:
        parts[links.operators[inside(optimizer.merged(), trace.start_ns[links.operators])]] = FlopPart.OPTIMIZER
    return parts


def _keeps_graph(trace: Trace, is_node: Mask, with_gradients: Mask) -> Mask:
    """Rows inside nodes of a backward that keeps a graph: there every operator that a node calls has gradients on."""
    parent, called = trace.links.parent, trace.links.called
    called = called[~is_node[called] & is_node[parent[called]]]
    off, on = np.zeros((2, len(trace)), dtype=bool)
    off[parent[called[~with_gradients[called]]]] = True
    on[parent[called[with_gradients[called]]]] = True
    keeps = is_node & on & ~off
    for rows in trace.links.levels[1:]:
        inner = rows[~is_node[rows]]
        keeps[inner] |= keeps[parent[inner]]
    return keeps
