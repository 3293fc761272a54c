"""Where steps begin and end, which marks are whole steps, and what filled each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lightning_flops.schema.trace_steps import StepTime, StepTimes
from lightning_flops.trace.intervals import (
    NOTHING,
    NS_PER_US,
    Intervals,
    Ints,
    Lanes,
    Mask,
    covered_within,
    merge,
    union,
)
from lightning_flops.trace.names import Kind, is_data_loader, step_number

if TYPE_CHECKING:
    from lightning_flops.trace.columns import Trace


@dataclass(frozen=True, slots=True)
class OddMark:
    """A mark at an edge of the recording that is no whole step, or may be none."""

    number: int
    is_step: bool
    """Whether it is taken for a step; what ran in one that is not is outside of the steps."""
    reason: str
    """Why not, or why one may doubt it: a clause."""

    def words(self, source: str = "") -> str:
        """The same in a sentence; *source* is what its run is called."""
        of = f" of {source}" if source else ""
        return f"Step {self.number}{of} is {'taken for whole, though' if self.is_step else 'left out:'} {self.reason}."


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

    def __len__(self) -> int:
        """Steps."""
        return len(self.start_ns)

    @property
    def total_ns(self) -> int:
        """All steps together."""
        return int((self.end_ns - self.start_ns).sum())

    @property
    def host_ns(self) -> int:
        """All marks together."""
        return int((self.host_end_ns - self.host_start_ns).sum())

    @property
    def spans(self) -> Intervals:
        """The moments inside any step."""
        return merge(self.start_ns, self.end_ns)

    def of(self, moments_ns: Ints) -> Ints:
        """For each moment on the host the step in whose own mark it lies; -1 outside of them."""
        index = np.searchsorted(self.host_start_ns, moments_ns, side="right") - 1
        inside = (index >= 0) & (moments_ns < self.host_end_ns[np.maximum(index, 0)])
        return np.where(inside, index, -1).astype(np.int64)


def find_steps(trace: Trace) -> Steps:
    """Steps by the profiler's marks, extended to the last device event that was launched in them.

    A step begins where the one before it ended, if that is later than its own mark, so no moment is in two steps. What
    was launched before the first step and still runs in it puts off that step's start in the same way.
    """
    marks = np.flatnonzero(trace.where(lambda name: step_number(name) is not None, Kind.ANNOTATION))
    if not len(marks):
        rows = np.flatnonzero(trace.kind > Kind.PYTHON)
        first, last = trace.start_ns[rows].min(keepdims=True), trace.end_ns[rows].max(keepdims=True)
        return Steps(False, (None,), first, last, first, last)
    marks = marks[np.argsort(trace.start_ns[marks], kind="stable")]
    host_start, host_end = trace.start_ns[marks], trace.end_ns[marks]
    host_end = np.minimum(host_end, np.append(host_start[1:], host_end[-1:]))
    numbers = [int(step_number(trace.names[name]) or 0) for name in trace.name[marks].tolist()]
    whole, odd = _whole_steps(trace, numbers, trace.lane[marks], host_start, host_end)
    host_start, host_end = host_start[whole], host_end[whole]
    start, end = host_start.copy(), host_end.copy()
    rows = trace.device_rows
    if len(rows):
        launched = launched_at(trace, rows)
        step = np.searchsorted(host_start, launched, side="right") - 1
        inside = (trace.links.launch[rows] >= 0) & (step >= 0) & (launched < host_end[np.maximum(step, 0)])
        np.maximum.at(end, step[inside], trace.end_ns[rows[inside]])
        start[0] = max(int(start[0]), int(trace.end_ns[rows[step < 0]].max(initial=start[0])))
        for index in range(len(start)):
            start[index] = max(start[index], end[index - 1]) if index else start[index]
            end[index] = max(start[index], end[index])
    return Steps(True, tuple(numbers[whole]), host_start, host_end, start, end, odd)


def launched_at(trace: Trace, rows: Ints) -> Ints:
    """When each of *rows* was launched, or began if no launch of it is known."""
    calls = trace.links.launch[rows]
    return np.where(calls >= 0, trace.start_ns[np.maximum(calls, 0)], trace.start_ns[rows])


def _whole_steps(
    trace: Trace, numbers: Sequence[int], mark_lanes: Lanes, host_start: Ints, host_end: Ints
) -> tuple[slice, tuple[OddMark, ...]]:
    """Which of the marks are whole steps, and what is to be said of the others.

    torch.profiler marks what lies between two calls of its ``step``. The last mark is no whole step where the loop
    ended before the schedule did, nor the first one where ``step`` is called in the middle of a step's work.
    """
    lanes = _calls(trace, mark_lanes, host_start, host_end)
    count = sum((lane.end - lane.first for lane in lanes), start=np.zeros(len(numbers), dtype=np.int64))
    backward = sum((lane.backward for lane in lanes), start=np.zeros(len(numbers), dtype=np.int64))
    first, end = 0, len(numbers)
    odd = []
    for edge in (len(numbers) - 1, 0):
        found = None if end - first < 2 else _judge(edge, numbers, lanes, count, backward)
        if found is not None:
            odd.append(found)
            if not found.is_step:
                first, end = (first, end - 1) if edge else (1, end)
    return slice(first, end), tuple(reversed(odd))


def _judge(edge: int, numbers: Sequence[int], lanes: Sequence[_Lane], count: Ints, backward: Ints) -> OddMark | None:
    """What is to be said of the first or the last mark; None where it is like the others."""
    others = [mark for mark in range(len(numbers)) if mark != edge]
    whole = list(range(1, len(numbers) - 1)) or others  # two marks have one another alone
    mine, fewest, number = int(count[edge]), int(count[whole].min()), numbers[edge]
    if not mine and fewest:
        return OddMark(number, False, "no operator ran in it, and no kernel was launched")
    if any(count[mark] == mine and all(lane.begins(edge, mark) for lane in lanes) for mark in whole):
        return None
    if not backward[edge] and backward[whole].all():
        return OddMark(number, False, "it has no backward, and the others have one")
    pieces_of = [
        mark
        for mark in others
        if mine < count[mark] and all(lane.begins(edge, mark) if edge else lane.ends(edge, mark) for lane in lanes)
    ]
    if pieces_of:
        # Much of a backward is not done without the rest. With all of it, a step lacks the optimizer, as in gradient
        # accumulation, or the little that is done in some steps alone: setting gradients to zero, writing a log.
        of, times = (backward, 1) if backward.any() else (count, 2)
        cut = [mark for mark in pieces_of if times * of[edge] < of[mark]]
        mark = (cut or pieces_of)[0]
        piece = "first" if edge else "last"
        reason = f"it has the {piece} {mine:,} of step {numbers[mark]}'s {count[mark]:,} calls, and no more"
        return OddMark(number, not cut, reason)
    if 2 * mine >= fewest:
        return None
    if len(others) == 1:
        return OddMark(number, True, f"step {numbers[others[0]]} has {fewest:,} calls, and it {mine:,}")
    reason = f"it has {mine:,} calls of operators or kernels, and those between the first and the last {fewest:,}"
    return OddMark(number, bool(backward.any()), f"{reason} or more")


@dataclass(frozen=True, slots=True, eq=False)
class _Lane:
    """The calls of a thread that trains, in order: of operators, or launches of kernels in a trace without these."""

    names: Lanes
    first: Ints
    """Where the calls of each mark begin."""
    end: Ints
    backward: Ints
    """How many calls of each mark are a backward's."""

    def begins(self, part: int, whole: int) -> bool:
        """Whether what was called in mark *part* is what *whole* begins with."""
        names, others = self._called(part), self._called(whole)
        return len(names) <= len(others) and np.array_equal(names, others[: len(names)])

    def ends(self, part: int, whole: int) -> bool:
        """Whether it is what *whole* ends with."""
        names, others = self._called(part), self._called(whole)
        return len(names) <= len(others) and np.array_equal(names, others[len(others) - len(names) :])

    def _called(self, mark: int) -> Lanes:
        return self.names[self.first[mark] : self.end[mark]]


def _calls(trace: Trace, mark_lanes: Lanes, host_start: Ints, host_end: Ints) -> list[_Lane]:
    rows = trace.links.operators  # by thread, then by start
    if len(rows):
        # Those that pin memory or load data call when they can, a little more in one step than in the next.
        training = trace.links.backward_lanes.copy()
        training[mark_lanes] = True
        rows = rows[training[trace.lane[rows]]] if training[trace.lane[rows]].any() else rows
        parts = [(here, trace.start_ns[here]) for here in np.split(rows, np.flatnonzero(np.diff(trace.lane[rows])) + 1)]
    else:
        launched = launched_at(trace, trace.device_rows)
        order = np.argsort(launched, kind="stable")
        parts = [(trace.device_rows[order], launched[order])]
    lanes = []
    for here, moments in parts:
        first, end = np.searchsorted(moments, host_start), np.searchsorted(moments, host_end)
        before = np.append(0, np.cumsum(trace.links.is_backward[here]))
        lanes.append(_Lane(trace.name[here], first, end, before[end] - before[first]))
    return lanes


def parts_of_steps(trace: Trace) -> list[tuple[str, Mask]]:
    """What fills a step, by priority: the field of ``StepTime`` and the rows."""
    kind, collective = trace.kind, trace.is_collective
    return [
        ("kernel_us", (kind == Kind.KERNEL) & ~collective),
        ("memcpy_us", kind == Kind.MEMCPY),
        ("memset_us", kind == Kind.MEMSET),
        ("communication_us", collective),
        ("runtime_us", kind == Kind.RUNTIME),
        ("data_loader_us", trace.where(is_data_loader, Kind.ANNOTATION)),
        ("cpu_us", kind == Kind.OPERATOR),
    ]


def step_times(trace: Trace) -> StepTimes:
    """Where each step's wall time went: one name for every moment of it."""
    steps = trace.steps
    wall = steps.end_ns - steps.start_ns
    covered, before = NOTHING, np.zeros(len(steps), dtype=np.int64)
    parts: dict[str, list[int]] = {"wall_us": wall.tolist()}
    unknown = set()
    for name, rows in parts_of_steps(trace):
        of_device = name in ("kernel_us", "memcpy_us", "memset_us")
        if not (trace.has_device if of_device else rows.any() or (name == "runtime_us" and trace.has_device)):
            unknown.add(name)
        covered = union(covered, trace.merged(rows))
        reached = covered_within(covered, steps.start_ns, steps.end_ns)
        parts[name] = (reached - before).tolist()
        before = reached
    parts["other_us"] = (wall - before).tolist()

    def step(number: int | None, values: dict[str, int], count: int) -> StepTime:
        shown = {name: None if name in unknown else total / (NS_PER_US * count) for name, total in values.items()}
        return StepTime(number=number, **shown)  # type: ignore[arg-type]  # only the unknown may be None

    return StepTimes(
        marked=steps.marked,
        steps=tuple(
            step(number, {name: values[index] for name, values in parts.items()}, 1)
            for index, number in enumerate(steps.numbers)
        ),
        mean=step(None, {name: sum(values) for name, values in parts.items()}, len(steps)),
    )
