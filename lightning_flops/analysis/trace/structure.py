"""Who called and launched whom, and where steps begin and end: several tables of a trace need it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace.event_names import Kind, host_collective, is_collective_kernel, step_number
from lightning_flops.analysis.trace.intervals import Intervals, Ints, distinct, merge, order_by
from lightning_flops.analysis.trace.whole_steps import OddMark, whole_steps

if TYPE_CHECKING:
    from lightning_flops.analysis.trace.columns import Trace

_BACKWARD_PREFIXES = ("autograd::engine::evaluate_function:", "torch::autograd::AccumulateGrad")


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Rows that belong together; -1 where there is none."""

    operators: Ints
    """Rows of operators: thread by thread, by start, callers before what they call."""
    parent: Ints
    """For each row of an operator, the operator that called it."""
    depth: npt.NDArray[np.int32]
    """For each row of an operator, how many operators enclose it."""
    launch: Ints
    """For each row of a device event, the runtime call that launched it."""
    operator_of_launch: Ints
    """For each row of a device event, the innermost operator in which it was launched."""
    is_backward: npt.NDArray[np.bool_]
    """Rows of operators that autograd runs for a backward, or that such an operator called."""
    backward_lanes: npt.NDArray[np.bool_]
    """For each lane, whether operators of a backward run in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Steps in order of time; they do not overlap."""

    marked: bool
    """False when the trace has no profiler steps; the whole trace is then one step."""
    numbers: tuple[int | None, ...]
    """The profiler's number of each step."""
    host_start_ns: Ints
    host_end_ns: Ints
    """The step's own mark on the host."""
    start_ns: Ints
    end_ns: Ints
    """With the device: up to the last event launched in the step, from where the step before it ended."""

    odd: tuple[OddMark, ...] = ()
    """Marks that are no whole steps, and are left out, and those of which one may doubt it."""

    def __len__(self) -> int:
        """Steps."""
        return len(self.start_ns)

    @property
    def total_ns(self) -> int:
        """All steps together."""
        return int((self.end_ns - self.start_ns).sum())

    @property
    def spans(self) -> Intervals:
        """The moments inside any step."""
        return merge(self.start_ns, self.end_ns)


def collective_rows(trace: Trace) -> npt.NDArray[np.bool_]:
    """Rows that communicate with other ranks: collectives' kernels, and host scopes that communicate themselves."""
    kernels: npt.NDArray[np.bool_] = (trace.kind == Kind.KERNEL) & trace.names_where(is_collective_kernel)
    for row in trace.collectives:
        # A kernel that says which collective it is needs no known name.
        kernels[row] |= trace.kind[row] == Kind.KERNEL
    host = (trace.kind == Kind.ANNOTATION) | (trace.kind == Kind.OPERATOR)
    kernels |= host & trace.names_where(lambda name: host_collective(name) is not None)
    return kernels


def link(trace: Trace) -> Links:
    """Find callers by nesting in time, launches by correlation id, and the operators that launched by both.

    A device event without a known launch, such as one whose call lies outside the trace, falls back to the external id
    that it shares with its operator.
    """
    count = len(trace)
    parent = np.full(count, -1, dtype=np.int64)
    depth = np.zeros(count, dtype=np.int32)
    operators = in_nesting_order(trace, np.flatnonzero(trace.kind == Kind.OPERATOR))
    nest(trace, operators, parent, depth)

    launch = _launches(trace)
    operator_of_launch = np.full(count, -1, dtype=np.int64)
    launched = np.flatnonzero(launch >= 0)
    calls = launch[launched]
    operator_of_launch[launched] = enclosing_operators(
        trace, operators, parent, lanes=trace.lane[calls], moments_ns=trace.start_ns[calls]
    )
    _fall_back_to_external_ids(trace, operators, launch, operator_of_launch)

    by_name = trace.names_where(lambda name: name.startswith(_BACKWARD_PREFIXES))
    is_backward = (trace.kind == Kind.OPERATOR) & ((trace.forward_thread > 0) | by_name)
    for level in range(1, int(depth.max(initial=0)) + 1):
        rows = operators[depth[operators] == level]
        is_backward[rows] |= is_backward[parent[rows]]
    backward_lanes = np.zeros(len(trace.lanes), dtype=bool)
    backward_lanes[trace.lane[is_backward]] = True
    return Links(operators, parent, depth, launch, operator_of_launch, is_backward, backward_lanes)


def enclosing_operators(
    trace: Trace, operators: Ints, parent: Ints, *, lanes: npt.NDArray[np.int32], moments_ns: Ints
) -> Ints:
    """For each moment in a lane, the row of the innermost operator then running there, -1 where there is none."""
    if not len(operators) or not len(moments_ns):
        return np.full(len(moments_ns), -1, dtype=np.int64)
    found = np.full(len(moments_ns), -1, dtype=np.int64)
    for lane in distinct(lanes):
        here = operators[trace.lane[operators] == lane]
        if not len(here):
            continue
        wanted = np.flatnonzero(lanes == lane)
        moments = moments_ns[wanted]
        last = np.searchsorted(trace.start_ns[here], moments, side="right") - 1
        rows = np.where(last >= 0, here[np.maximum(last, 0)], -1)
        # What encloses the moment is the operator that began last before it, or encloses that operator.
        while len(ended := np.flatnonzero((rows >= 0) & (trace.end_ns[rows] <= moments))):
            rows[ended] = parent[rows[ended]]
        found[wanted] = rows
    return found


def find_steps(trace: Trace) -> Steps:
    """Steps by the profiler's marks, extended to the last device event that was launched in them.

    A step begins where the one before it ended, if that is later than its own mark, so no moment is in two steps. What
    was launched before the first step and still runs in it puts off that step's start in the same way.

    The first and the last mark are left out where they are no whole steps: see ``whole_steps``.
    """
    numbers = {index: number for index, name in enumerate(trace.names) if (number := step_number(name)) is not None}
    marks = np.flatnonzero((trace.kind == Kind.ANNOTATION) & np.isin(trace.name, list(numbers)))
    if not len(marks):
        return _whole_trace(trace)
    marks = marks[np.argsort(trace.start_ns[marks], kind="stable")]
    host_start, host_end = trace.start_ns[marks], trace.end_ns[marks]
    host_end = np.minimum(host_end, np.append(host_start[1:], host_end[-1:]))
    has_operators = bool((trace.kind == Kind.OPERATOR).any())
    whole, odd = whole_steps(
        trace,
        [numbers[int(name)] for name in trace.name[marks]],
        mark_lanes=trace.lane[marks],
        host_start=host_start,
        host_end=host_end,
        launched_ns=None if has_operators else _launched_ns(trace, trace.device_rows)[1],
    )
    marks, host_start, host_end = marks[whole], host_start[whole], host_end[whole]
    start, end = host_start.copy(), host_end.copy()
    if trace.has_device:
        rows = trace.device_rows
        calls, launched = _launched_ns(trace, rows)
        step = np.searchsorted(host_start, launched, side="right") - 1
        inside = (calls >= 0) & (step >= 0) & (launched < host_end[np.maximum(step, 0)])
        np.maximum.at(end, step[inside], trace.end_ns[rows[inside]])
        earlier = trace.end_ns[rows[step < 0]]
        start[0] = max(int(start[0]), int(earlier.max(initial=start[0])))
        for index in range(len(start)):
            start[index] = max(start[index], end[index - 1]) if index else start[index]
            end[index] = max(start[index], end[index])
    return Steps(True, tuple(numbers[int(name)] for name in trace.name[marks]), host_start, host_end, start, end, odd)


def _launched_ns(trace: Trace, rows: Ints) -> tuple[Ints, Ints]:
    """For each device event in *rows* the call that launched it, or -1, and when; without a call, when it began."""
    calls = trace.links.launch[rows]
    return calls, np.where(calls >= 0, trace.start_ns[np.maximum(calls, 0)], trace.start_ns[rows])


def _whole_trace(trace: Trace) -> Steps:
    rows = np.flatnonzero(trace.kind > Kind.PYTHON)
    start = np.array([trace.start_ns[rows].min()], dtype=np.int64)
    end = np.array([trace.end_ns[rows].max()], dtype=np.int64)
    return Steps(False, (None,), start, end, start, end)


def in_nesting_order(trace: Trace, rows: Ints) -> Ints:
    """*rows* thread by thread, by start, outer before inner: as ``nest`` needs them, and as files mostly have them."""
    rows = rows[order_by(trace.lane[rows])]
    lanes, starts, lengths = trace.lane[rows], trace.start_ns[rows], trace.duration_ns[rows]
    later = np.diff(starts)
    sorted_already = (np.diff(lanes) > 0) | (later > 0) | ((later == 0) & (np.diff(lengths) <= 0))
    return rows if sorted_already.all() else rows[np.lexsort((-lengths, starts, lanes))]


def nest(trace: Trace, operators: Ints, parent: Ints, depth: npt.NDArray[np.int32] | None = None) -> None:
    """Fill in what encloses each of *operators*, which are sorted by thread, then by start, outer before inner.

    Args:
        trace: whose rows *operators* are.
        operators: rows.
        parent: gets, for each of these rows, the innermost one around it, where there is one.
        depth: gets how many enclose it.
    """
    count = len(operators)
    starts, ends, lanes = trace.start_ns[operators], trace.end_ns[operators], trace.lane[operators]
    # Whoever encloses an operator is the one right before it or encloses that one. All operators look at once: where
    # the candidate has ended, its own candidate is next, and what that one passed over has ended too.
    around = np.arange(-1, count - 1)
    firsts = np.flatnonzero(np.diff(lanes, prepend=-1)).tolist()
    for first, end in pairwise([*firsts, count]):
        # Where all that began before has ended, nothing encloses: of a long row of operators nobody looks far.
        reached = np.maximum.accumulate(ends[first:end])
        around[first + 1 : end][reached[:-1] <= starts[first + 1 : end]] = -1
        around[first] = -1
    looking = np.flatnonzero(around >= 0)
    while len(looking := looking[ends[around[looking]] <= starts[looking]]):
        around[looking] = around[around[looking]]
        looking = looking[around[looking] >= 0]
    inside = around >= 0
    parent[operators] = np.where(inside, operators[around], -1) if count else parent[operators]
    if depth is not None:
        levels = np.zeros(count, dtype=np.int32)
        above = around
        while inside.any():
            levels += inside
            above = np.where(inside, around[above], -1)
            inside = above >= 0
        depth[operators] = levels


def _launches(trace: Trace) -> Ints:
    launch = np.full(len(trace), -1, dtype=np.int64)
    calls = np.flatnonzero((trace.kind == Kind.RUNTIME) & (trace.correlation >= 0))
    rows = np.flatnonzero(trace.on_device & (trace.correlation >= 0))
    if not len(calls) or not len(rows):
        return launch
    # A driver call inside a runtime call may carry the same number: the outer one, which began first, is the launch.
    calls = calls[np.lexsort((trace.start_ns[calls], trace.correlation[calls]))]
    known = trace.correlation[calls]
    index = np.searchsorted(known, trace.correlation[rows], side="left")
    index[index == len(known)] = 0
    match = known[index] == trace.correlation[rows]
    launch[rows[match]] = calls[index[match]]
    return launch


def _fall_back_to_external_ids(trace: Trace, operators: Ints, launch: Ints, operator_of_launch: Ints) -> None:
    rows = np.flatnonzero(trace.on_device & (launch < 0) & (trace.external_id > 0))
    if not len(rows) or not len(operators):
        return
    by_id = operators[np.argsort(trace.external_id[operators], kind="stable")]
    known = trace.external_id[by_id]
    index = np.searchsorted(known, trace.external_id[rows])
    index[index == len(known)] = 0
    match = known[index] == trace.external_id[rows]
    operator_of_launch[rows[match]] = by_id[index[match]]
