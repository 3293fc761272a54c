"""Who called and launched whom: an operator encloses what it calls and launches, in time and on its thread.

Ids join a device event to the call that launched it, and to nothing else: what numbers operators in one writer's files
counts launches in another's. Where several calls have the number of an event, as in files whose ids begin again or are
all zero, time decides; where that does not either, the launch is not known, and the trace's notes say of how many.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from lightning_flops.trace.columns import Kind, Trace, once
from lightning_flops.trace.intervals import Ints, Lanes, Mask, numbered, order_by, split_by

# Nodes that autograd runs; the last are those of torch 1.8.
_NODE = re.compile(r"autograd::engine::evaluate_function:|torch::autograd::AccumulateGrad|\w+Backward\d*$")
_LAUNCHES = re.compile("launch|memcpy|memset", re.I)
_ROUNDING_NS = 1000  # what begins so shortly before another one's end, and ends that much later, was not called by it


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Rows that belong together; -1 where there is none."""

    operators: Ints  #: Rows of operators: thread by thread, by start, callers before what they call.
    parent: Ints  #: For each row of an operator, the operator that called it.
    levels: tuple[Ints, ...]  #: Rows by how many operators enclose them.
    launch: Ints  #: For each row of a device event, the runtime call that launched it.
    operator_of_launch: Ints  #: For each row of a device event, the innermost operator in which it was launched.
    ambiguous: int  #: Device events whose number several launches have, at times that fit each.
    is_node: Mask  #: Rows of operators that autograd runs for a backward.
    is_backward: Mask  #: These, and rows of operators that such a one called.


@once
def links_of(trace: Trace) -> Links:
    """Callers, launches and launching operators."""
    operators, parent, depth = nest(trace, np.flatnonzero(trace.kind == Kind.OPERATOR))
    by_depth = operators[np.argsort(depth, kind="stable")]
    levels = tuple(np.split(by_depth, np.cumsum(np.bincount(depth))[:-1])) if len(operators) else ()
    launch, ambiguous = _launches(trace)
    launched, launcher = np.flatnonzero(launch >= 0), np.full(len(trace), -1, dtype=np.int64)
    calls = launch[launched]
    launcher[launched] = enclosing(trace, operators, parent, trace.lane[calls], trace.start_ns[calls])
    is_node = trace.where(_NODE.match, Kind.OPERATOR) | ((trace.kind == Kind.OPERATOR) & (trace.forward_thread > 0))
    is_backward = nearest(parent, is_node) >= 0
    return Links(operators, parent, levels, launch, launcher, ambiguous, is_node, is_backward)


@once
def launch_ns_of(trace: Trace) -> Ints:
    """When each event was launched, or began if no launch of it is known."""
    launch = links_of(trace).launch
    return np.where(launch >= 0, trace.start_ns[launch], trace.start_ns)


@once
def launches_of(trace: Trace) -> tuple[Ints, Ints]:
    """When each device event whose launch is known was launched, rising, and its row."""
    rows = trace.device_rows[links_of(trace).launch[trace.device_rows] >= 0]
    moments = launch_ns_of(trace)[rows]
    order = np.argsort(moments, kind="stable")
    return moments[order], rows[order]


def _launches(trace: Trace) -> tuple[Ints, int]:
    """For each row of a device event the call that launched it, or -1; and how many may be of several calls."""
    # A launch and what it launched have a number in common. AMD's roctracer writes no correlation: there it is the
    # External id.
    number, rest = 2 * trace.correlation, np.flatnonzero(trace.correlation < 0)
    number[rest] = np.where(trace.external_id[rest] > 0, 2 * trace.external_id[rest] + 1, -1)
    calls = trace.by_start((trace.kind == Kind.RUNTIME) & (number >= 0))
    calls = calls[np.argsort(number[calls], kind="stable")]
    # A call of the driver within the runtime's has its number: the outer one launched.
    again = (np.diff(number[calls]) == 0) & (np.diff(trace.lane[calls]) == 0)
    again &= trace.start_ns[calls[1:]] < trace.end_ns[calls[:-1]]
    calls = calls[np.append(True, ~again)[: len(calls)]]
    events = trace.device_rows[number[trace.device_rows] >= 0]
    firsts, ends = (np.searchsorted(number[calls], number[events], side=side) for side in ("left", "right"))
    found, of_one, of_several = np.full(len(trace), -1, dtype=np.int64), ends - firsts == 1, ends - firsts > 1
    found[events[of_one]] = calls[firsts[of_one]]
    several = events[of_several]
    calls = calls[trace.where(_LAUNCHES.search, Kind.RUNTIME)[calls] & np.isin(number[calls], number[several])]
    able = dict(split_by(number, calls))
    for one, launched in split_by(number, several):
        found[launched] = _in_time(trace, able.get(one, calls[:0]), launched)
    return found, int((found[several] < 0).sum())


def _in_time(trace: Trace, calls: Ints, events: Ints) -> Ints:
    """For each of *events*, which are by start, the one of *calls* with its number that launched it; -1 if unclear."""
    called_ns, began_ns = trace.start_ns[calls], trace.start_ns[events]
    # Either as many calls as events, and one stream, which runs in the order of the launches.
    if len(calls) == len(events) and (called_ns <= began_ns).all() and (np.diff(trace.lane[events]) == 0).all():
        return calls
    # Or each launch is done before the next one of its number: then the last call before an event launched it.
    last = np.searchsorted(called_ns, began_ns, side="right") - 1
    is_clear = np.array_equal(np.unique(last), np.arange(len(calls)))  # each launched something, and before no event
    return calls[last] if is_clear else np.full(len(events), -1)


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
        left = ends[outer] - starts[looking]
        passed = (left <= 0) | ((left <= _ROUNDING_NS) & (ends[outer] < ends[looking] - _ROUNDING_NS))
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


def by_process(trace: Trace) -> list[Trace]:
    """Each process of *trace* that called operators, with the device events that it launched; mostly the one it has.

    Where the traces of several processes were merged, their numbers begin again in each, so that nothing but a process
    joins them. A tool that merges writes the rank in front of each process, ``[TP00] 1234``, also of those that stand
    for a device; without that nothing says who launched a kernel, and it is in none.
    """
    names, process = numbered(trace.processes)
    of_row = process[trace.lane]
    hosts = np.unique(of_row[trace.kind == Kind.OPERATOR]).tolist()
    if len(hosts) < 2:
        return [trace]
    labels = [name[: name.find("]") + 1] for name in names]
    alike = [[host for host in hosts if label and labels[host] == label] for label in labels]
    ranks = np.array([found[0] if len(found) == 1 else -1 for found in alike], dtype=np.int64)
    mine = np.where(trace.on_device, ranks[of_row], of_row)
    lost, in_memory = int((mine < 0).sum()), process[trace.memory["lane"]] if trace.memory else None
    left_out = f"Left out: {lost:,} kernels, copies and memsets of which the process that launched them is unclear."
    notes = [f"The file has {len(hosts):,} processes that called operators: each stands by itself."]
    notes += [left_out] if lost else []
    return [
        trace.only(
            mine == host,
            source=f"{trace.source} (process {names[host]})",
            rank=None,
            memory={name: column[in_memory == host] for name, column in trace.memory.items()},
            notes=(*trace.notes, *notes),
        )
        for host in hosts
    ]
