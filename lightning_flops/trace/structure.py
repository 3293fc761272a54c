"""Who called and launched whom: by nesting in time, by correlation ids, and by the ids of operators."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightning_flops.trace.intervals import Ints, Lanes, Mask, order_by, split_by
from lightning_flops.trace.names import Kind

if TYPE_CHECKING:
    from lightning_flops.trace.columns import Trace

_NODE = re.compile(r"autograd::engine::evaluate_function:|torch::autograd::AccumulateGrad|\w+Backward\d*$")
"""Nodes that autograd runs; the last are those of torch 1.8."""
_ROUNDING_NS = 1000  # a callee may seem to end so much later than its caller; what ends later was not called by it


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Rows that belong together; -1 where there is none."""

    operators: Ints  #: Rows of operators: thread by thread, by start, callers before what they call.
    parent: Ints  #: For each row of an operator, the operator that called it.
    levels: tuple[Ints, ...]  #: Rows by how many operators enclose them.
    launch: Ints  #: For each row of a device event, the runtime call that launched it.
    operator_of_launch: Ints  #: For each row of a device event, the innermost operator in which it was launched.
    is_node: Mask  #: Rows of operators that autograd runs for a backward.
    is_backward: Mask  #: These, and rows of operators that such a one called.


def link(trace: Trace) -> Links:
    """Callers, launches and launching operators."""
    # A device event without a known launch, such as one whose call lies outside the trace, falls back to the external
    # id that it shares with its operator. Of several calls of one number the outer one launched, which began first.
    operators, parent, depth = nest(trace, trace.of(Kind.OPERATOR))
    by_depth = operators[np.argsort(depth, kind="stable")]
    levels = tuple(np.split(by_depth, np.cumsum(np.bincount(depth))[:-1])) if len(operators) else ()
    launch, launcher = np.full((2, len(trace)), -1, dtype=np.int64)
    numbered = trace.correlation >= 0
    rows = np.flatnonzero(trace.on_device & numbered)
    launch[rows] = _matching(trace.by_start((trace.kind == Kind.RUNTIME) & numbered), trace.correlation, rows)
    launched = np.flatnonzero(launch >= 0)
    calls = launch[launched]
    launcher[launched] = enclosing(trace, operators, parent, trace.lane[calls], trace.start_ns[calls])
    rows = np.flatnonzero(trace.on_device & (launch < 0) & (trace.external_id > 0))
    launcher[rows] = _matching(operators, trace.external_id, rows)
    is_node = trace.where(_NODE.match, Kind.OPERATOR) | ((trace.kind == Kind.OPERATOR) & (trace.forward_thread > 0))
    return Links(operators, parent, levels, launch, launcher, is_node, nearest(parent, is_node) >= 0)


def enclosing(trace: Trace, rows: Ints, parent: Ints, lanes: Lanes, moments_ns: Ints) -> Ints:
    """For each moment in a lane, which of *rows*, in nesting order, is the innermost then running there; -1 if none."""
    found = np.full(len(moments_ns), -1, dtype=np.int64)
    for lane, wanted in split_by(lanes, np.arange(len(lanes))):
        here, moments = rows[trace.lane[rows] == lane], moments_ns[wanted]
        if not len(here):
            continue
        last = np.searchsorted(trace.start_ns[here], moments, side="right") - 1
        inner = np.where(last >= 0, here[last], -1)
        # What encloses the moment is what began last before it, or encloses that.
        while len(ended := np.flatnonzero((inner >= 0) & (trace.end_ns[inner] <= moments))):
            inner[ended] = parent[inner[ended]]
        found[wanted] = inner
    return found


def nest(trace: Trace, rows: Ints) -> tuple[Ints, Ints, Ints]:
    """*rows* in nesting order: thread by thread, by start, outer before inner, as files mostly have them.

    With them for each row of the trace which of these encloses it, or -1; and how many enclose each.
    """
    rows = rows[order_by(trace.lane[rows])]
    lanes, starts, lengths = trace.lane[rows], trace.start_ns[rows], trace.duration_ns[rows]
    later = np.diff(starts)
    sorted_already = (np.diff(lanes) > 0) | (later > 0) | ((later == 0) & (np.diff(lengths) <= 0))
    rows = rows if sorted_already.all() else rows[np.lexsort((-lengths, starts, lanes))]
    parent = np.full(len(trace), -1, dtype=np.int64)
    starts, ends = trace.start_ns[rows], trace.end_ns[rows]
    # Where not all before a row have ended, what encloses it is the one right before it or encloses that one. All rows
    # look at once: where the candidate does not, its own is next, and what that passed over does not enclose either.
    around = np.arange(-1, len(rows) - 1)
    around[1:][(np.diff(trace.lane[rows]) != 0) | (np.maximum.accumulate(ends)[:-1] <= starts[1:])] = -1
    looking = np.flatnonzero(around >= 0)
    while len(looking):
        outer = around[looking]
        passed = (ends[outer] <= starts[looking]) | (ends[outer] < ends[looking] - _ROUNDING_NS)
        looking = looking[passed]
        around[looking] = around[around[looking]]
        looking = looking[around[looking] >= 0]
    enclosed = around >= 0
    parent[rows[enclosed]] = rows[around[enclosed]]
    depth, above = enclosed.astype(np.int64), around.copy()
    while len(inside := np.flatnonzero(above >= 0)):  # each round looks twice as far up
        depth[inside], above[inside] = depth[inside] + depth[above[inside]], above[above[inside]]
    return rows, parent, depth


def without_inner(trace: Trace, around: Ints) -> Ints:
    """For each row its length without those of the rows that have it *around* them."""
    inner, own = np.flatnonzero(around >= 0), trace.duration_ns.copy()
    outer = around[inner]
    # What is inside may seem to end later, by rounding or across threads: it takes only what there is.
    np.subtract.at(own, outer, np.minimum(trace.end_ns[inner], trace.end_ns[outer]) - trace.start_ns[inner])
    return np.maximum(own, 0)


def nearest(around: Ints, wanted: Mask) -> Ints:
    """For each row itself or else the nearest one *around* it that is *wanted*; -1 without."""
    above = np.where(wanted, np.arange(len(wanted)), around)
    while len(passed := np.flatnonzero((above >= 0) & ~wanted[above])):
        above[passed] = above[above[passed]]  # each round looks twice as far up
    return above


def _matching(known: Ints, numbers: Ints, rows: Ints) -> Ints:
    """For each of *rows* the first of *known* that has the same of *numbers*; -1 without."""
    if not len(known):
        return np.full(len(rows), -1, dtype=np.int64)
    known = known[np.argsort(numbers[known], kind="stable")]
    index = np.minimum(np.searchsorted(numbers[known], numbers[rows], side="left"), len(known) - 1)
    return np.where(numbers[known[index]] == numbers[rows], known[index], -1)
