"""What each operator of a trace spent, by the shapes in it.

The outermost operator that a formula is known for counts, and what it called does not, as in the counter: operators
that are only made of others (``aten::linear``) leave it to these. An operator for which the file does not say enough
leaves it to those it called, too (``aten::_convolution`` of an old file to ``aten::cudnn_convolution``); if none of
them counts, it is listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache, partial
from typing import Any

import numpy as np

from lightning_flops.trace.columns import Trace
from lightning_flops.trace.intervals import Intervals, Ints, Mask, inside
from lightning_flops.trace.names import Kind
from lightning_flops.trace.recorded import RecordedCall, RecordedInputs, RecordedWork
from lightning_flops.trace.structure import NODE

Formulas = Callable[[RecordedCall], RecordedWork]
"""What one recorded call spent. ``instrument.counting.recorded_calls`` has the one there is; it needs torch."""
_ACCUMULATES = "AccumulateGrad"
_BEGINS_CAPTURE = re.compile(r"(cuda|hip)StreamBeginCapture")
_ENDS_CAPTURE = re.compile(r"(cuda|hip)StreamEndCapture")
_NO_INPUTS = RecordedInputs(dims=(), types=())
_GRADIENT_OF = {"input": 0, "weight": 2, "weights": 2}
"""A part of a convolution's backward makes the gradient of one argument. This is where that argument stands in the
backward as a whole."""
_NO_SHAPES = "its shapes were not recorded"
_TOO_MANY = "its shapes give more FLOPs or bytes than a trace can have"
_LARGEST_SUM = 2**61
"""No sum over a trace is larger, so that three of them together are still an integer of a column."""


class FlopPart(IntEnum):
    """The bucket that an operator's FLOPs belong to, by the field of the reports that has them."""

    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2
    OPTIMIZER = 3

    @property
    def field(self) -> str:
        """As reports call it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """What each operator of a trace spent; columns over all rows of the trace."""

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
    """Rows of operators that may have spent FLOPs and are not counted."""
    reasons: Mapping[int, str]
    """Why, by the index of the work, where the work does not say it."""

    def of(self, field: str) -> Ints:
        """One number of the work of each call that counts."""
        values = np.array([getattr(work, field) or 0 for work in self.works], dtype=np.int64)
        return values[self.work[self.rows]]

    def without(self, works: Sequence[int], reasons: Mapping[int, str]) -> Counted:
        """The same with the calls of these *works* listed instead of counted."""
        dropped = self.rows[np.isin(self.work[self.rows], works)]
        return replace(
            self,
            rows=self.rows[~np.isin(self.rows, dropped)],
            owner=np.where(np.isin(self.owner, dropped), -1, self.owner),
            uncounted=np.union1d(self.uncounted, dropped),
            reasons=reasons,
        )


def count_trace(trace: Trace, formulas: Formulas) -> Counted:
    """What each operator of *trace* spent; *formulas* is asked once for each different call."""
    works, work = _ask(trace, formulas)
    links, levels = trace.links, trace.links.levels

    def where(holds: Callable[[RecordedWork], bool]) -> Mask:
        return np.array([*map(holds, works), False])[work]

    is_counting, is_free = where(lambda one: one.role == "counts"), where(lambda one: one.role == "free")
    can_count = where(lambda one: one.role == "composite" and one.flops > 0)
    is_heavy = where(lambda one: one.heavy and one.role in ("unread", "unknown"))
    owner, listed = np.full(len(trace), -1, dtype=np.int64), np.zeros(len(trace), dtype=bool)
    settled = _captured(trace)
    """Rows that a call around them, or they themselves, answer for."""
    for rows in levels:
        around = links.parent[rows]
        inner = around >= 0
        owner[rows[inner]] = owner[around[inner]]
        settled[rows[inner]] |= settled[around[inner]]
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
        answered[links.parent[rows[answered[rows] & (links.parent[rows] >= 0)]]] = True
    # A composite call without any below it has taken these over.
    for rows in levels:
        below = rows[(links.parent[rows] >= 0) & (owner[rows] < 0)]
        owner[below] = owner[links.parent[below]]
    counted = links.operators[owner[links.operators] == links.operators]
    parts = _parts(trace)
    broken = _broken_off(trace, counted, parts)
    owner[broken] = -1
    counted = counted[~np.isin(counted, broken)]
    by_start = counted[np.argsort(trace.start_ns[counted], kind="stable")]
    return Counted(works, work, by_start, owner, parts, np.flatnonzero(listed), {})


def _captured(trace: Trace) -> Mask:
    """Operators that only recorded a graph, in a thread between the begin and the end of a stream capture: none ran."""
    found = np.zeros(len(trace), dtype=bool)
    begins = np.flatnonzero(trace.where(lambda name: _BEGINS_CAPTURE.match(name) is not None, Kind.RUNTIME))
    ends = np.flatnonzero(trace.where(lambda name: _ENDS_CAPTURE.match(name) is not None, Kind.RUNTIME))
    for lane in np.unique(trace.lane[begins]).tolist():
        starts = np.sort(trace.start_ns[begins[trace.lane[begins] == lane]])
        until = np.append(np.sort(trace.start_ns[ends[trace.lane[ends] == lane]]), np.iinfo(np.int64).max)
        spans = Intervals(starts, np.minimum(until[np.searchsorted(until, starts)], np.append(starts[1:], until[-1])))
        rows = trace.links.operators[trace.lane[trace.links.operators] == lane]
        found[rows[inside(spans, trace.start_ns[rows])]] = True
    return found


def _broken_off(trace: Trace, rows: Ints, parts: Ints) -> Ints:
    """Those of *rows* that were called and never ran.

    Checkpointing without reentry ends its repetition once it has what it needs, by an exception within the call of an
    operator. That call stands in the trace with nothing inside but what keeps its inputs for the backward, where the
    same call of the forward has something.
    """
    links = trace.links
    holds = np.zeros(len(trace), dtype=bool)
    keeps = trace.where(lambda name: name in ("aten::detach", "detach"), Kind.OPERATOR)
    holds[links.parent[links.operators[(links.parent[links.operators] >= 0) & ~keeps[links.operators]]]] = True
    launched = links.operator_of_launch[trace.device_rows]
    holds[launched[launched >= 0]] = True
    calls = trace.name[rows] * np.int64(len(trace.recorded_inputs) + 1) + trace.inputs[rows] + 1
    repeats = parts[rows] == FlopPart.RECOMPUTE
    found: Ints = rows[repeats & ~holds[rows] & np.isin(calls, calls[~repeats & holds[rows]])]
    return found


def _ask(trace: Trace, formulas: Formulas) -> tuple[tuple[RecordedWork, ...], Ints]:
    """The answers, and for each row of the trace the index of its own."""
    rows, told = trace.links.operators, _results_told(trace)
    results = {sizes: index for index, sizes in enumerate(dict.fromkeys(told.values()))}
    result = np.full(len(trace), -1, dtype=np.int64)
    result[list(told)] = [results[sizes] for sizes in told.values()]
    # One number for name, inputs and result; the last two may be -1.
    many, more = len(trace.recorded_inputs) + 1, len(results) + 1
    calls = (trace.name[rows] * np.int64(many) + trace.inputs[rows] + 1) * more + result[rows] + 1
    different, index = np.unique(calls, return_inverse=True)
    sizes_of, works = tuple(results), []
    for call in different.tolist():
        name, inputs, sizes = call // more // many, call // more % many - 1, call % more - 1
        recorded = _NO_INPUTS if inputs < 0 else trace.recorded_inputs[inputs]
        known = None if sizes < 0 else sizes_of[sizes]
        work = formulas(RecordedCall(operator=trace.names[name], inputs=recorded, result=known))
        if inputs < 0 and work.role in ("unread", "unknown"):
            work = replace(work, reason=_NO_SHAPES)
        works.append(work)
    numbers = np.full(len(trace), -1, dtype=np.int64)
    numbers[rows] = index.reshape(-1)
    return _summable(works, np.bincount(index.reshape(-1)).tolist()), numbers


def _summable(works: Sequence[RecordedWork], uses: Sequence[int]) -> tuple[RecordedWork, ...]:
    """*works*, each used so often; if their sums would not fit a column, without those that are to blame."""
    largest = [max(work.flops, work.recompute, work.skipped, work.bytes or 0) for work in works]
    if sum(one * used for one, used in zip(largest, uses, strict=True)) <= _LARGEST_SUM:
        return tuple(works)
    most = _LARGEST_SUM // sum(uses)
    return tuple(
        work if one <= most else RecordedWork(role="unread", operator=work.operator, heavy=True, reason=_TOO_MANY)
        for work, one in zip(works, largest, strict=True)
    )


def _results_told(trace: Trace) -> dict[int, tuple[int, ...]]:
    """Sizes of what convolutions returned, if the file does not have their strides, as files from before torch 2.0.

    The result of a forward is as large as the gradient that its node was given in the backward; both carry the same
    sequence number. The gradient of an input or a weight is as large as that input or weight, which is an argument of
    the call around it.
    """
    if all(one.concrete is not None for one in trace.recorded_inputs):
        return {}  # what torch writes since 2.0
    told: dict[int, tuple[int, ...]] = {}
    sizes_at = lru_cache(maxsize=None)(partial(_sizes_at, trace))
    here = np.flatnonzero(trace.where(lambda name: "convolution" in name.lower(), Kind.OPERATOR) & (trace.inputs >= 0))
    nodes = here[(trace.forward_thread[here] > 0) & (trace.sequence[here] >= 0)]
    columns = (trace.sequence[nodes].tolist(), trace.inputs[nodes].tolist())
    gradients = {number: sizes_at(inputs, 0) for number, inputs in zip(*columns, strict=True)}
    # Files of torch 1.8 have no such numbers: there the sizes of what went in tell which backward belongs to it.
    by_sizes: dict[Any, Any] = {}
    for row in here[trace.where(lambda name: name.endswith("convolution_backward"), Kind.OPERATOR)[here]].tolist():
        values, gradient, weight = (sizes_at(int(trace.inputs[row]), place) for place in range(3))
        by_sizes[values, weight] = gradient if by_sizes.get((values, weight), gradient) == gradient else None
    for row in here.tolist():
        name, above = trace.names[trace.name[row]], int(trace.links.parent[row])
        sizes = None
        if (place := _GRADIENT_OF.get(name.rpartition("_backward_")[2])) is not None:
            sizes = sizes_at(int(trace.inputs[above]), place) if above >= 0 else None
        elif trace.forward_thread[row] <= 0 and "backward" not in name:
            values, weight = (sizes_at(int(trace.inputs[row]), place) for place in (0, 1))
            numbered = trace.sequence[row] >= 0
            sizes = gradients.get(int(trace.sequence[row])) if numbered else by_sizes.get((values, weight))
            # The number may be another node's, where this call made none.
            if sizes is not None and (values is None or weight is None or sizes[:2] != (*values[:1], *weight[:1])):
                sizes = None
        if sizes is not None:
            told[row] = sizes
    return told


def _sizes_at(trace: Trace, inputs: int, place: int) -> tuple[int, ...] | None:
    dims = trace.recorded_inputs[inputs].dims if inputs >= 0 else ()
    sizes = dims[place] if len(dims) > place else None
    if not isinstance(sizes, Sequence) or not sizes or not all(type(size) is int for size in sizes):
        return None
    return tuple(sizes)


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
    if trace.phases.optimizer is not None:
        in_optimizer = inside(trace.phases.optimizer.merged(), trace.start_ns[links.operators])
        parts[links.operators[in_optimizer]] = FlopPart.OPTIMIZER
    return parts


def _keeps_graph(trace: Trace, is_node: Mask, with_gradients: Mask) -> Mask:
    """Rows inside nodes of a backward that keeps a graph: there every operator that a node calls has gradients on."""
    parent, called = trace.links.parent, trace.links.operators
    called = called[(parent[called] >= 0) & ~is_node[called]]
    called = called[is_node[parent[called]]]
    off, on = np.zeros(len(trace), dtype=bool), np.zeros(len(trace), dtype=bool)
    off[parent[called[~with_gradients[called]]]] = True
    on[parent[called[with_gradients[called]]]] = True
    keeps = is_node & on & ~off
    for rows in trace.links.levels[1:]:
        inner = rows[~is_node[rows]]
        keeps[inner] |= keeps[parent[inner]]
    return keeps
