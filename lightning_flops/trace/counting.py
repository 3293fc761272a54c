"""FLOPs of each operator of a trace, by the shapes in it.

The outermost operator that a formula is known for counts, and what it called does not, as in the counter: operators
that are only made of others (``aten::linear``) leave it to these. An operator for which the file does not say enough
leaves it to those it called, too; if none of them counts, it is listed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from lightning_flops.trace.columns import Trace
from lightning_flops.trace.events import are_integers
from lightning_flops.trace.intervals import Ints, Mask, distinct, inside
from lightning_flops.trace.names import ELEMENT_BYTES, Kind
from lightning_flops.trace.recorded import RecordedInputs, RecordedWork
from lightning_flops.trace.structure import NODE, nearest
from lightning_flops.trace.tables import with_callees

Formulas = Callable[[str, RecordedInputs], RecordedWork]
"""FLOPs of one recorded call. ``measure.counting.recorded_calls`` has the one there is; it needs torch."""
_CAPTURE = re.compile(r"(cuda|hip)Stream(Begin|End)Capture")
_CAPTURE_BEGINS = re.compile(r"(cuda|hip)StreamBeginCapture")
_NO_INPUTS = RecordedInputs(dims=(), types=())
_OLD_CONVOLUTION = re.compile(r"aten::\w+_convolution(_backward_(input|weights?))?$")
"""A library's convolution, and the halves of its backward up to torch 1.10."""
Sizes = tuple[int, ...]
_NO_SHAPES = "its shapes were not recorded"
_TOO_MANY = "its shapes give more FLOPs or bytes than a trace can have"
_MOST = 2**58
"""No call has more: these are five minutes of an H100."""


class FlopPart(IntEnum):
    """The bucket that an operator's FLOPs belong to."""

    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2
    OPTIMIZER = 3


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """FLOPs of each operator of a trace; columns over all rows of the trace."""

    works: Sequence[RecordedWork]
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

    def of(self, field: str) -> Ints:
        """One number of the work of each call that counts."""
        values = np.array([getattr(work, field) or 0 for work in self.works], dtype=np.int64)
        return values[self.work[self.rows]]


def count_trace(trace: Trace, works: Sequence[RecordedWork], work: Ints) -> Counted:
    """FLOPs of each operator of *trace*, from what ``works_of`` returns."""
    rows = trace.links.operators
    places = np.arange(len(rows))
    end = places + with_callees(trace, np.ones(len(trace), dtype=np.int64))[rows]
    """Where the calls end that one encloses: they follow it."""

    def where(holds: Callable[[RecordedWork], bool]) -> Mask:
        return np.array([*map(holds, works), False])[work[rows]]

    def around(chosen: Mask) -> Ints:
        """For each call the outermost *chosen* one that it is or that encloses it; -1 without."""
        reached = np.maximum.accumulate(np.where(chosen, end, 0))
        outermost = chosen & (np.append(0, reached)[:-1] <= places)
        last = np.maximum.accumulate(np.where(outermost, places, -1))
        return np.where((last >= 0) & (end[last] > places), last, -1)

    counts, captured = where(lambda one: one.role == "counts"), _captured(trace)[rows]
    settled = around(counts | where(lambda one: one.role == "free") | captured)
    counting = counts & ~captured & (settled == places)
    # Of calls that nothing around them answers for, the innermost do, if nothing counts in them.
    composite = where(lambda one: one.role == "composite" and one.flops > 0)
    open_ = (settled < 0) & (composite | where(lambda one: one.heavy and one.role in ("unread", "unknown")))
    before = np.append(0, np.cumsum(counting | open_))
    innermost = open_ & (before[end] == before[places + 1])
    counting |= innermost & composite
    parts = _parts(trace)
    owner = around(counting)
    broken = _broken_off(trace, rows[counting], parts)
    owners = np.full(len(trace), -1, dtype=np.int64)
    owners[rows] = np.where(owner >= 0, rows[owner], -1)
    owners[rows[counting][broken]] = -1
    by_start = trace.by_start(rows[counting][~broken])
    return Counted(works, work, by_start, owners, parts, np.sort(rows[innermost & ~composite]))


def _captured(trace: Trace) -> Mask:
    """Operators that only recorded a graph, in a thread between the begin and the end of a stream capture: none ran."""
    found = np.zeros(len(trace), dtype=bool)
    edges, begins = (trace.where(pattern.match, Kind.RUNTIME) for pattern in (_CAPTURE, _CAPTURE_BEGINS))
    for lane in distinct(trace.lane[edges]).tolist():
        rows = np.flatnonzero(trace.lane == lane)
        here = trace.by_start(rows[edges[rows]])
        last = np.searchsorted(trace.start_ns[here], trace.start_ns[rows]) - 1
        found[rows] = (last >= 0) & begins[here[last]]
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


def works_of(trace: Trace, formulas: Formulas) -> tuple[list[RecordedWork], Ints]:
    """What *formulas* say of each different call, and for each row of the trace the index of its own."""
    rows, parent, inputs_of = trace.links.operators, trace.links.parent, trace.inputs.copy()
    # The halves of an old convolution's backward do not say all sizes; the call around them does.
    halves = np.flatnonzero(trace.where(lambda name: "_convolution_backward_" in name, Kind.OPERATOR))
    inputs_of[halves] = np.where(parent[halves] >= 0, inputs_of[parent[halves]], -1)
    many, gradients = len(trace.recorded_inputs) + 1, _gradients(trace)
    different, index = np.unique(trace.name[rows] * np.int64(many) + inputs_of[rows] + 1, return_inverse=True)
    works = []
    for call in different.tolist():
        name, number = trace.names[call // many], call % many - 1
        inputs = trace.recorded_inputs[number] if number >= 0 else _NO_INPUTS
        work = formulas(name, inputs)
        if number < 0 and work.role in ("unread", "unknown"):
            work = replace(work, reason=_NO_SHAPES)
        if _OLD_CONVOLUTION.match(name) is not None and inputs.concrete is None:
            work = _old_convolution(work.operator, inputs, gradients) or work
        if max(work.flops, work.recompute, work.skipped, work.bytes or 0) > _MOST:
            work = RecordedWork(role="unread", operator=work.operator, heavy=True, reason=_TOO_MANY)
        works.append(work)
    numbers = np.full(len(trace), -1, dtype=np.int64)
    numbers[rows] = index.reshape(-1)
    return works, numbers


def _sizes(inputs: RecordedInputs) -> list[Sizes]:
    """Of the first three arguments; empty for one that is no tensor."""
    return [tuple(one) if are_integers(one) else () for one in (*inputs.dims[:3], *[()] * 3)][:3]


def _gradients(trace: Trace) -> dict[tuple[Sizes, Sizes], Sizes]:
    """The size of a convolution's result by those of its values and weight, in files from before torch 2.0.

    It is as large as its gradient in the backward; nothing where two backwards differ in it.
    """
    found: dict[tuple[Sizes, Sizes], Sizes] = {}
    rows = np.flatnonzero(trace.where(lambda name: name.endswith("convolution_backward"), Kind.OPERATOR))
    for name, number in {(trace.name_of(row), int(trace.inputs[row])) for row in rows.tolist()}:
        if number >= 0 and trace.recorded_inputs[number].concrete is None:
            values, gradient, weight = _sizes(trace.recorded_inputs[number])
            if name == "aten::convolution_backward":
                values, gradient = gradient, values
            known = found.setdefault((values, weight), gradient)
            found[values, weight] = gradient if known == gradient else ()
    return found


def _old_convolution(
    operator: str, inputs: RecordedInputs, gradients: Mapping[tuple[Sizes, Sizes], Sizes]
) -> RecordedWork | None:
    """A convolution of a file without strides, or a half of its backward: each has the FLOPs of the forward."""
    values, gradient, weight = _sizes(inputs)
    if "backward" not in operator:
        weight = gradient
        gradient = gradients.get((values, weight), ())
    if min((0, *values, *gradient, *weight)) < 0 or not values or gradient[:2] != (values[0], *weight[:1]):
        return None
    written = str(inputs.types[0]).lower()
    numbers = sum(map(math.prod, (values, gradient, weight)))
    return RecordedWork(
        role="counts",
        operator=operator,
        dtype={"c10::half": "float16", "double": "float64"}.get(written, "float32"),
        flops=2 * math.prod(gradient) * math.prod(weight[1:]),
        bytes=numbers * ELEMENT_BYTES.get(written, 4),
    )


def _parts(trace: Trace) -> Ints:
    """The bucket of each operator.

    Autograd runs its own operators with gradients off, unless a graph is kept for another backward: there every
    operator that a node calls has them on. One with a sequence number elsewhere repeats a part of the forward.
    """
    links, rows, parent = trace.links, trace.links.operators, trace.links.parent
    is_node = trace.where(NODE.match, Kind.OPERATOR) | (trace.forward_thread > 0)
    is_node &= links.is_backward
    with_gradients = links.is_backward & (trace.sequence >= 0) & ~is_node
    called = links.called[~is_node[links.called] & ~with_gradients[links.called]]
    off = np.zeros(len(trace) + 1, dtype=bool)  # the last is that of no node
    off[parent[called]] = True
    repeats = with_gradients.copy()
    repeats[rows] &= off[nearest(rows, parent, is_node)]
    parts = np.where(links.is_backward, int(FlopPart.BACKWARD), int(FlopPart.FORWARD))

    def innermost(wanted: Mask) -> Ints:
        return np.where(wanted[rows], rows, nearest(rows, parent, wanted))

    parts[rows[repeats[innermost(is_node | repeats)]]] = FlopPart.RECOMPUTE
    accumulates = is_node & trace.where(lambda name: name.endswith("AccumulateGrad"), Kind.OPERATOR)
    parts[rows[innermost(accumulates) >= 0]] = FlopPart.OPTIMIZER
    if (optimizer := trace.phases.get("optimizer")) is not None:
        parts[rows[inside(optimizer.own, trace.start_ns[rows])]] = FlopPart.OPTIMIZER
    return parts
