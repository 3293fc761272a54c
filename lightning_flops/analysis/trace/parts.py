"""The parts of traced steps, and in which of them the rank may have waited for others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightning_flops.analysis.trace.columns import Trace
from lightning_flops.analysis.trace.communication import communication_and_computation
from lightning_flops.analysis.trace.event_names import Kind
from lightning_flops.analysis.trace.intervals import Intervals, Ints, covered_within, merge, subtract
from lightning_flops.analysis.trace_marks import marked_phase
from lightning_flops.schema.trace import TracedPart

_UNMARKED = "other"
_NS_PER_SEC = 1e9


def step_parts(trace: Trace) -> tuple[TracedPart, ...]:
    """The parts of the steps of *trace* by the marks around them, in order of their first moments.

    With a device, a part ends when the work launched before its end is done, as an event recorded there on the device's
    stream would show. Communication does not move a border, so a wait stays in the part that waited.
    """
    communication, computation = communication_and_computation(trace)
    pieces, count = pieces_of_steps(trace), len(trace.steps)
    wall_ns = pieces.sums_by_name(pieces.ends - pieces.starts)
    exposed_ns = pieces.sums_by_name(pieces.covered_by(subtract(communication, computation)))
    return tuple(
        TracedPart(name=name, wall_sec=total / count / _NS_PER_SEC, exposed_sec=exposed_ns[name] / count / _NS_PER_SEC)
        for name, total in wall_ns.items()
    )


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """All steps of a trace, cut where a part begins or ends; without gaps inside a step."""

    names: tuple[str, ...]
    """The part that each piece is of."""
    starts: Ints
    ends: Ints

    def covered_by(self, moments: Intervals) -> Ints:
        """Nanoseconds of each piece that *moments* has."""
        return covered_within(moments, self.starts, self.ends)

    def sums_by_name(self, values_ns: Ints) -> dict[str, int]:
        """One value of each piece, added up by part, in order of the parts' first moments."""
        sums: dict[str, int] = {}
        for name, value in zip(self.names, values_ns.tolist(), strict=True):
            sums[name] = sums.get(name, 0) + value
        return sums


def pieces_of_steps(trace: Trace) -> Pieces:
    """The pieces of the steps of *trace*, borders moved as ``step_parts`` says."""
    steps = trace.steps
    names: list[str] = []
    starts, ends = [], []
    marks = _marks(trace)
    for index in range(len(steps)):
        of_step, host = _segments(marks, int(steps.host_start_ns[index]), int(steps.host_end_ns[index]))
        first, last = steps.start_ns[index], steps.end_ns[index]
        borders = np.clip(_on_device(trace, host), first, last)
        borders[0], borders[-1] = first, last
        names += of_step
        starts.append(borders[:-1])
        ends.append(borders[1:])
    return Pieces(tuple(names), np.concatenate(starts), np.concatenate(ends))


def moments_of(trace: Trace, part: str) -> Intervals | None:
    """Moments of the steps whose innermost mark is that of *part*; None if no part is marked."""
    starts, ends = [], []
    marked = False
    marks = _marks(trace)
    for first, last in zip(trace.steps.host_start_ns.tolist(), trace.steps.host_end_ns.tolist(), strict=True):
        names, cuts = _segments(marks, first, last)
        marked |= len(names) > 1
        mine = np.flatnonzero([name == part for name in names])
        starts.append(cuts[mine])
        ends.append(cuts[mine + 1])
    return merge(np.concatenate(starts), np.concatenate(ends)) if marked else None


def _marks(trace: Trace) -> list[tuple[int, int, str]]:
    """Start, end and part of every mark, by start, outer before inner."""
    parts = [marked_phase(name) for name in trace.names]
    is_mark = np.array([part is not None for part in parts], dtype=bool)
    rows = np.flatnonzero((trace.kind == Kind.ANNOTATION) & is_mark[trace.name])
    rows = rows[np.lexsort((-trace.duration_ns[rows], trace.start_ns[rows]))]
    columns = (trace.start_ns[rows].tolist(), trace.end_ns[rows].tolist(), trace.name[rows].tolist())
    return [(start, end, part) for start, end, name in zip(*columns, strict=True) if (part := parts[name]) is not None]


def _segments(marks: list[tuple[int, int, str]], first: int, last: int) -> tuple[list[str], Ints]:
    """The step from *first* to *last* cut at every mark's borders: the innermost part of each piece, and the cuts."""
    begin, end = bisect_left(marks, (first,)), bisect_left(marks, (last,))
    inside = [(start, min(until, last), part) for start, until, part in marks[begin:end]]
    names, cuts = [], [first]
    for end, part in _pieces(inside, last):
        names.append(part)
        cuts.append(end)
    return names, np.array(cuts, dtype=np.int64)


def _pieces(marks: list[tuple[int, int, str]], last: int) -> Iterator[tuple[int, str]]:
    """End and part of each piece, in order; *marks* are by start, outer before inner."""
    around: list[tuple[int, str]] = [(last, _UNMARKED)]
    for start, end, part in marks:
        while around[-1][0] <= start and len(around) > 1:
            yield around.pop()
        yield start, around[-1][1]
        around.append((end, part))
    while around:
        yield around.pop()


def _on_device(trace: Trace, moments_ns: Ints) -> Ints:
    """When the device has finished what was launched before each moment on the host; never before that moment."""
    rows = trace.device_rows
    rows = rows[~trace.is_collective[rows]]
    launch = trace.links.launch[rows] if len(rows) else rows
    rows, launch = rows[launch >= 0], launch[launch >= 0]
    if not len(rows):
        return moments_ns
    launched = trace.start_ns[launch]
    order = np.argsort(launched, kind="stable")
    done = np.maximum.accumulate(trace.end_ns[rows[order]])
    index = np.searchsorted(launched[order], moments_ns, side="left") - 1
    return np.where(index < 0, moments_ns, np.maximum(moments_ns, done[np.maximum(index, 0)]))
