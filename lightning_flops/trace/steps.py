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
    Mask,
    covered_within,
    merge,
    table,
    union,
)
from lightning_flops.trace.names import Kind, is_data_loader, step_number

if TYPE_CHECKING:
    from lightning_flops.trace.columns import Trace


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
    odd: tuple[str, ...] = ()
    """Marks that are no whole steps, in sentences."""

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
    marks = trace.by_start(trace.where(lambda name: step_number(name) is not None, Kind.ANNOTATION))
    if not len(marks):
        rows = np.flatnonzero(trace.kind > Kind.PYTHON)
        first, last = trace.start_ns[rows].min(keepdims=True), trace.end_ns[rows].max(keepdims=True)
        return Steps(False, (None,), first, last, first, last)
    host_start, host_end = trace.start_ns[marks], trace.end_ns[marks]
    host_end = np.minimum(host_end, np.append(host_start[1:], host_end[-1:]))
    numbers = [step_number(trace.name_of(row)) for row in marks.tolist()]
    whole, odd = _whole_steps(numbers, _calls(trace, marks, host_start, host_end))
    host_start, host_end = host_start[whole], host_end[whole]
    start, end = host_start.copy(), host_end.copy()
    rows = trace.device_rows
    launched = launched_at(trace, rows)
    step = np.searchsorted(host_start, launched, side="right") - 1
    inside = (trace.links.launch[rows] >= 0) & (step >= 0) & (launched < host_end[np.maximum(step, 0)])
    np.maximum.at(end, step[inside], trace.end_ns[rows[inside]])
    start[0] = trace.end_ns[rows[step < 0]].max(initial=start[0])
    for index in range(len(start)):
        start[index] = max(start[index], end[index - 1]) if index else start[index]
        end[index] = max(start[index], end[index])
    return Steps(True, tuple(numbers[whole]), host_start, host_end, start, end, odd)


def launched_at(trace: Trace, rows: Ints) -> Ints:
    """When each of *rows* was launched, or began if no launch of it is known."""
    calls = trace.links.launch[rows]
    return np.where(calls >= 0, trace.start_ns[np.maximum(calls, 0)], trace.start_ns[rows])


def _whole_steps(numbers: Sequence[int | None], calls: Sequence[int]) -> tuple[slice, tuple[str, ...]]:
    """Which of the marks are whole steps, and what is to be said of the others.

    torch.profiler marks what lies between two calls of its ``step``. The last mark is no whole step where the loop
    ended before the schedule did, nor the first one where ``step`` is called in the middle of a step's work: there, an
    edge has less than half of the calls of any other mark.
    """
    first, end, odd = 0, len(numbers), []
    for edge in (end - 1, 0):
        inner = calls[1:-1] if len(calls) > 2 else [calls[one] for one in range(first, end) if one != edge]
        least = min(inner, default=0)
        if end - first > 1 and 2 * calls[edge] < least:
            few = f"{calls[edge]:,} calls" if calls[edge] else "no call"
            odd.append(f"Step {numbers[edge]} is left out: {few} ran in it, and {least:,} or more in the others.")
            first, end = (first, end - 1) if edge else (1, end)
    return slice(first, end), tuple(reversed(odd))


def _calls(trace: Trace, marks: Ints, host_start: Ints, host_end: Ints) -> list[int]:
    """For each mark how much was called in it: of a backward if there is one, else of its own thread, else launched.

    Threads that pin memory or load data call when they can, a little more in one step than in the next.
    """
    operators = trace.links.operators
    backward = operators[trace.links.is_backward[operators]]
    own = operators[np.isin(trace.lane[operators], trace.lane[marks])]
    rows = next((rows for rows in (backward, own, operators) if len(rows)), trace.device_rows)
    moments = np.sort(launched_at(trace, rows))
    found: list[int] = (np.searchsorted(moments, host_end) - np.searchsorted(moments, host_start)).tolist()
    return found


def parts_of_steps(trace: Trace) -> dict[str, Mask]:
    """What fills a step, by priority: the rows of each field of ``StepTime``."""
    kind, collective = trace.kind, trace.is_collective
    return {
        "kernel_us": (kind == Kind.KERNEL) & ~collective,
        "memcpy_us": kind == Kind.MEMCPY,
        "memset_us": kind == Kind.MEMSET,
        "communication_us": collective,
        "runtime_us": kind == Kind.RUNTIME,
        "data_loader_us": trace.where(is_data_loader, Kind.ANNOTATION),
        "cpu_us": kind == Kind.OPERATOR,
    }


def step_times(trace: Trace) -> StepTimes:
    """Where each step's wall time went: one name for every moment of it."""
    steps = trace.steps
    wall = steps.end_ns - steps.start_ns
    covered, before = NOTHING, np.zeros(len(steps), dtype=np.int64)
    parts: dict[str, Ints | None] = {"wall_us": wall}
    for name, rows in parts_of_steps(trace).items():
        covered = union(covered, trace.merged(rows))
        reached = covered_within(covered, steps.start_ns, steps.end_ns)
        of_device = name in ("kernel_us", "memcpy_us", "memset_us", "runtime_us") and trace.has_device
        known = of_device or (rows.any() and name not in ("kernel_us", "memcpy_us", "memset_us"))
        parts[name] = reached - before if known else None
        before = reached
    parts["other_us"] = wall - before
    nothing = [None] * len(steps)
    columns = {name: nothing if ns is None else (ns / NS_PER_US).tolist() for name, ns in parts.items()}
    per_step = NS_PER_US * len(steps)
    means = {name: None if ns is None else int(ns.sum()) / per_step for name, ns in parts.items()}
    return StepTimes(
        marked=steps.marked,
        steps=table(StepTime, number=steps.numbers, **columns),
        mean=StepTime(number=None, **means),  # type: ignore[arg-type]  # only the unknown may be None
    )
