"""Which of the profiler's marks are whole steps, by what ran in them.

torch.profiler marks what lies between two calls of its ``step``, and begins and ends a recording at such a call, so a
mark in the middle is whole. The last one is not where the loop ended before the schedule did: the profiler's ``stop``
closes the mark in which the next step had only begun. The first one is not where ``step`` is called before a step's
work, or in its middle: it holds what stood before the first call. How many calls a mark has tells neither, since the
steps of gradient accumulation differ by as much; the calls themselves do, and whether a backward is among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace.intervals import Ints

if TYPE_CHECKING:
    from lightning_flops.analysis.trace.columns import Trace

_FEWER = 2
"""If a mark has so many times fewer calls than every other one, a note says so; where nothing else is known, it is then
no step."""


@dataclass(frozen=True, slots=True)
class OddMark:
    """A mark at an edge of the recording that is no whole step, or may be none."""

    number: int
    """The profiler's."""
    is_step: bool
    """Whether it is taken for a step; what ran in one that is not is outside of the steps."""
    reason: str
    """Why not, or why one may doubt it: a clause."""

    def words(self, source: str = "") -> str:
        """The same in a sentence; *source* is what its run is called."""
        of = f" of {source}" if source else ""
        return f"Step {self.number}{of} is {'taken for whole, though' if self.is_step else 'left out:'} {self.reason}."


@dataclass(frozen=True, slots=True)
class _Lane:
    """The calls of a thread that trains, in order: of operators, or launches of kernels in a trace without these."""

    names: npt.NDArray[np.int32]
    first: Ints
    """Where the calls of each mark begin."""
    end: Ints


@dataclass(frozen=True, slots=True)
class _Calls:
    """What was called in each of the marks."""

    lanes: tuple[_Lane, ...]
    count: Ints
    backward: Ints
    """Operators of a backward."""

    def begin_or_end(self, part: int, whole: int, *, end: bool) -> bool:
        """Whether what was called in mark *part* is what *whole* begins with, or ends with, thread by thread."""
        for lane in self.lanes:
            names = lane.names[lane.first[part] : lane.end[part]]
            others = lane.names[lane.first[whole] : lane.end[whole]]
            if len(others) < len(names):
                return False
            if not np.array_equal(names, others[len(others) - len(names) :] if end else others[: len(names)]):
                return False
        return True


def whole_steps(
    trace: Trace,
    numbers: Sequence[int],
    *,
    mark_lanes: npt.NDArray[np.int32],
    host_start: Ints,
    host_end: Ints,
    launched_ns: Ints | None,
) -> tuple[slice, tuple[OddMark, ...]]:
    """Which of the marks are whole steps, and what is to be said of the others.

    Args:
        trace: whose marks they are.
        numbers: of the marks, by time.
        mark_lanes: the lane of each.
        host_start: when each begins; they do not overlap.
        host_end: when it ends.
        launched_ns: in a trace without operators, when each of its ``device_rows`` was launched; else None.
    """
    calls = _calls(trace, mark_lanes, host_start, host_end, launched_ns)
    first, end = 0, len(numbers)
    odd = []
    for edge in (len(numbers) - 1, 0):
        found = None if end - first < 2 else _judge(calls, edge, numbers)
        if found is None:
            continue
        odd.append(found)
        if not found.is_step:
            first, end = (first, end - 1) if edge else (1, end)
    return slice(first, end), tuple(reversed(odd))


def _judge(calls: _Calls, edge: int, numbers: Sequence[int]) -> OddMark | None:
    """What is to be said of the first or the last mark; None where it is like the others."""
    others = [mark for mark in range(len(numbers)) if mark != edge]
    whole = list(range(1, len(numbers) - 1)) or others  # two marks have one another alone
    count = int(calls.count[edge])
    fewest = int(calls.count[whole].min())
    if not count and fewest:
        return OddMark(numbers[edge], False, "no operator ran in it, and no kernel was launched")
    if any(calls.count[mark] == count and calls.begin_or_end(edge, mark, end=False) for mark in whole):
        return None
    if not calls.backward[edge] and calls.backward[whole].all():
        return OddMark(numbers[edge], False, "it has no backward, and the others have one")
    pieces_of = [mark for mark in others if count < calls.count[mark] and calls.begin_or_end(edge, mark, end=not edge)]
    if pieces_of:
        # Much of a backward is not done without the rest. With all of it, a step lacks the optimizer, as in gradient
        # accumulation, or the little that is done in some steps alone: setting gradients to zero, writing a log.
        cut = [mark for mark in pieces_of if _lacks_much(calls, edge, mark)]
        mark = (cut or pieces_of)[0]
        piece = "first" if edge else "last"
        reason = f"it has the {piece} {count:,} of step {numbers[mark]}'s {calls.count[mark]:,} calls, and no more"
        return OddMark(numbers[edge], not cut, reason)
    if _FEWER * count >= fewest:
        return None
    if len(others) == 1:
        return OddMark(numbers[edge], True, f"step {numbers[others[0]]} has {fewest:,} calls, and it {count:,}")
    reason = f"it has {count:,} calls of operators or kernels, and those between the first and the last {fewest:,}"
    return OddMark(numbers[edge], bool(calls.backward.any()), f"{reason} or more")


def _lacks_much(calls: _Calls, edge: int, mark: int) -> bool:
    """Whether what *mark* has before or behind the calls of *edge* is more than some steps do without."""
    if calls.backward.any():
        return bool(calls.backward[edge] < calls.backward[mark])
    return bool(_FEWER * calls.count[edge] < calls.count[mark])


def _calls(
    trace: Trace, mark_lanes: npt.NDArray[np.int32], host_start: Ints, host_end: Ints, launched_ns: Ints | None
) -> _Calls:
    lanes = []
    backward = np.zeros(len(host_start), dtype=np.int64)
    if launched_ns is not None:
        order = np.argsort(launched_ns, kind="stable")
        lanes.append(_lane(trace.device_rows[order], launched_ns[order], trace, host_start, host_end))
    else:
        rows = trace.links.operators  # by thread, then by start
        # Those that pin memory or load data call when they can, a little more in one step than in the next.
        training = trace.links.backward_lanes.copy()
        training[mark_lanes] = True
        rows = rows[training[trace.lane[rows]]] if training[trace.lane[rows]].any() else rows
        borders = np.flatnonzero(np.diff(trace.lane[rows])) + 1
        for here in np.split(rows, borders):
            lane = _lane(here, trace.start_ns[here], trace, host_start, host_end)
            before = np.append(0, np.cumsum(trace.links.is_backward[here]))
            backward += before[lane.end] - before[lane.first]
            lanes.append(lane)
    count = np.zeros(len(host_start), dtype=np.int64)
    for lane in lanes:
        count += lane.end - lane.first
    return _Calls(tuple(lanes), count, backward)


def _lane(rows: Ints, moments_ns: Ints, trace: Trace, host_start: Ints, host_end: Ints) -> _Lane:
    return _Lane(trace.name[rows], np.searchsorted(moments_ns, host_start), np.searchsorted(moments_ns, host_end))
