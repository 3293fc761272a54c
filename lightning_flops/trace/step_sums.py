"""What each kernel, operator, module and phase of a trace took in each of its steps: what two runs are compared by.

An event belongs to the step in whose mark on the host it was launched, or began if nothing launched it; what lies
outside of every step is left out. Times are whole nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lightning_flops.trace.columns import Trace
from lightning_flops.trace.communication import collective_name
from lightning_flops.trace.intervals import Ints, covered_within, distinct, occupied_by, sums_by
from lightning_flops.trace.modules import Frames, Phase, launched_in_frames, own_host_ns
from lightning_flops.trace.steps import launched_ns, merged
from lightning_flops.trace.structure import launched_at
from lightning_flops.trace.tables import device_ns_of_operators, self_host_ns

if TYPE_CHECKING:
    from lightning_flops.schema.trace_comparison import TableName

Clock = Literal["host", "device"]

OTHERS = "others"
"""Stands among the phases for what is in none of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSums:
    """What things of one kind took in each step: a row for each step, a column for each name."""

    names: tuple[str, ...]
    ns: Ints
    calls: Ints
    """All zero for what is not called."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceBySteps:
    """The steps of one trace one by one: small, whatever the size of the trace."""

    marked: bool
    numbers: tuple[int | None, ...]
    """The profiler's number of each step."""
    odd: tuple[str, ...]
    """Marks that are no steps of it."""
    tables: Mapping[tuple[TableName, Clock], StepSums]
    """Sums that the trace has anything for."""


def by_steps(trace: Trace) -> TraceBySteps:
    """What each thing in *trace* took in each step."""
    found = {(of, clock): sums for of, clock, sums in _tables(trace) if sums.names}
    return TraceBySteps(marked=trace.steps.marked, numbers=trace.steps.numbers, odd=trace.steps.odd, tables=found)


_Part = tuple[Any, Any, Any, Any]
"""Columns of some events: index of the name, step or -1, nanoseconds, calls."""


def _tables(trace: Trace) -> Iterator[tuple[TableName, Clock, StepSums]]:
    host, device = _phases(trace)
    yield "phases", "host", host
    if trace.has_device:
        yield "phases", "device", device
    clock: Clock = "device" if trace.has_device else "host"
    if trace.frames is not None:
        yield "modules", clock, _sums(trace, trace.frames.modules, *_modules(trace, trace.frames))
    rows = trace.device_rows
    yield "kernels", "device", _sums(trace, trace.names, _events(trace, trace.name[rows], rows))
    if trace.has_device:
        yield "operators", "device", _operators(trace, device_ns_of_operators(trace), everything=False)
    yield "operators", "host", _operators(trace, self_host_ns(trace), everything=True)
    rows = trace.by_start(trace.is_collective)
    names: dict[str, int] = {}
    numbers = [names.setdefault(collective_name(trace, row), len(names)) for row in rows.tolist()]
    yield "collectives", clock, _sums(trace, tuple(names), _events(trace, numbers, rows))


def _sums(trace: Trace, names: Sequence[str], *parts: _Part) -> StepSums:
    """The sums of all *parts* by step and name, of the names that are in a step."""
    name, step, ns, calls = (np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True))
    inside = step >= 0
    used = distinct(name[inside])
    place = step[inside] * len(used) + np.searchsorted(used, name[inside])
    sums, counts = (
        sums_by(place, values[inside], len(trace.steps) * len(used)).reshape(-1, len(used)) if len(used) else values[:0]
        for values in (ns, calls)
    )
    return StepSums(names=tuple(names[index] for index in used.tolist()), ns=sums, calls=counts)


def _events(trace: Trace, name: Any, rows: Ints) -> _Part:
    return name, trace.steps.of(launched_at(trace, rows)), trace.duration_ns[rows], np.ones(len(rows))


def _operators(trace: Trace, spent_ns: Ints, *, everything: bool) -> StepSums:
    """Operators without what they call; a call inside a call of the same operator is a part of it."""
    rows = trace.links.operators
    if not everything:  # of operators that launch nothing, the device knows nothing
        rows = rows[np.isin(trace.name[rows], distinct(trace.name[rows[spent_ns[rows] > 0]]))]
    calls = trace.operator_times.outermost[rows] == rows
    return _sums(trace, trace.names, (trace.name[rows], trace.steps.of(trace.start_ns[rows]), spent_ns[rows], calls))


def _modules(trace: Trace, frames: Frames) -> Iterator[_Part]:
    """Forward and backward of each module together, without the modules inside; on the device where there is one."""
    steps, count, called = len(trace.steps), len(frames.modules), frames.calls()
    yield frames.owner[called], trace.steps.of(trace.start_ns[called]), np.zeros(len(called)), np.ones(len(called))
    if not trace.has_device:
        mine = (frames.owner[frames.rows] >= 0) & (frames.phase[frames.rows] > 0)
        rows = frames.rows[mine]
        spent = own_host_ns(trace, frames)[mine]
        yield frames.owner[rows], trace.steps.of(trace.start_ns[rows]), spent, np.zeros(len(rows))
        return
    events, frame = launched_in_frames(trace, frames)
    owner, phase, step = frames.owner[frame], frames.phase[frame], trace.steps.of(launched_at(trace, events))
    for one in (Phase.FORWARD, Phase.BACKWARD):
        mine = (phase == one) & (owner >= 0) & (step >= 0)
        of = events[mine]
        occupied = occupied_by(owner[mine] * steps + step[mine], trace.start_ns[of], trace.end_ns[of], count * steps)
        yield np.repeat(np.arange(count), steps), np.tile(np.arange(steps), count), occupied, np.zeros(count * steps)


def _phases(trace: Trace) -> Iterator[StepSums]:
    """Phases on the host, and what was launched in them; what is in none of them is ``OTHERS``."""
    steps, known, covered = trace.steps, trace.phases, merged(trace.phases)
    start, end, every = steps.host_start_ns, steps.host_end_ns, np.arange(len(steps))
    host = [spans.host_ns() for spans in known.values()]
    device = [launched_ns(trace, spans.starts, spans.ends, without=spans.lent) for spans in known.values()]
    rests = (end - start - covered_within(covered, start, end), launched_ns(trace, start, end, without=covered))
    for found, rest in zip((host, device), rests, strict=True):
        parts = [
            (np.full(len(ns), index), steps.of(spans.starts), ns, np.ones(len(ns)))
            for index, (spans, ns) in enumerate(zip(known.values(), found, strict=True))
        ]
        nothing = np.zeros(len(steps))
        yield _sums(trace, (*known, OTHERS), *parts, (np.full(len(steps), len(known)), every, rest, nothing))
