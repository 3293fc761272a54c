"""What each kernel, operator, module and phase of a trace took in each of its steps: what two runs are compared by.

An event belongs to the step in whose mark on the host it was launched, or began if nobody launched it; what lies
outside of every step is left out. Times are whole nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lightning_flops.trace.columns import Trace
from lightning_flops.trace.intervals import Ints, covered_within, distinct, occupied_by
from lightning_flops.trace.modules import launched_in_frames, own_host_ns
from lightning_flops.trace.operators import device_ns_of_operators, outermost_calls, self_host_ns
from lightning_flops.trace.phases import launched_ns, merged
from lightning_flops.trace.steps import launched_at
from lightning_flops.trace.tables import collective_name

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
    """Those that the trace has anything for."""


def by_steps(trace: Trace) -> TraceBySteps:
    """What each thing in *trace* took in each step."""
    found = {(of, clock): sums for of, clock, sums in _tables(trace) if sums.names}
    return TraceBySteps(marked=trace.steps.marked, numbers=trace.steps.numbers, odd=trace.steps.odd, tables=found)


def _tables(trace: Trace) -> Iterator[tuple[TableName, Clock, StepSums]]:
    host, device = _phases(trace)
    yield "phases", "host", host
    if trace.has_device:
        yield "phases", "device", device
    clock: Clock = "device" if trace.has_device else "host"
    yield "modules", clock, _modules(trace)
    yield "kernels", "device", _kernels(trace)
    if trace.has_device:
        yield "operators", "device", _operators(trace, device_ns_of_operators(trace), everything=False)
    yield "operators", "host", _operators(trace, self_host_ns(trace), everything=True)
    yield "collectives", clock, _collectives(trace)


def _sums(trace: Trace, names: Sequence[str], *, name: Ints, step: Ints, ns: Ints, calls: Ints) -> StepSums:
    """The sums of events that have each a name's index, a step (-1: none), a time and a number of calls."""
    inside = step >= 0
    name, step, ns, calls = name[inside], step[inside], ns[inside], calls[inside]
    used = distinct(name)
    steps = len(trace.steps)
    place = (step, np.searchsorted(used, name))
    sums, counts = np.zeros((2, steps, len(used)), dtype=np.int64)
    np.add.at(sums, place, ns)
    np.add.at(counts, place, calls)
    return StepSums(names=tuple(names[index] for index in used.tolist()), ns=sums, calls=counts)


def _kernels(trace: Trace) -> StepSums:
    rows = trace.device_rows
    return _events(trace, trace.names, rows, trace.name[rows].astype(np.int64))


def _collectives(trace: Trace) -> StepSums:
    rows = trace.by_start(trace.is_collective)
    names: dict[str, int] = {}
    numbers = [names.setdefault(collective_name(trace, row), len(names)) for row in rows.tolist()]
    return _events(trace, tuple(names), rows, np.array(numbers, dtype=np.int64))


def _events(trace: Trace, names: Sequence[str], rows: Ints, name: Ints) -> StepSums:
    step, ones = trace.steps.of(launched_at(trace, rows)), np.ones(len(rows), dtype=np.int64)
    return _sums(trace, names, name=name, step=step, ns=trace.duration_ns[rows], calls=ones)


def _operators(trace: Trace, spent_ns: Ints, *, everything: bool) -> StepSums:
    """Operators without what they call; a call inside a call of the same operator is a part of it."""
    rows = trace.links.operators
    if not everything:  # of operators that launch nothing, the device knows nothing
        rows = rows[np.isin(trace.name[rows], distinct(trace.name[rows[spent_ns[rows] > 0]]))]
    return _sums(
        trace,
        trace.names,
        name=trace.name[rows].astype(np.int64),
        step=trace.steps.of(trace.start_ns[rows]),
        ns=spent_ns[rows],
        calls=(outermost_calls(trace)[rows] == rows).astype(np.int64),
    )


def _modules(trace: Trace) -> StepSums:
    """Forward and backward of each module together, without the modules inside; on the device where there is one."""
    frames = trace.frames
    if frames is None:
        return _joined(trace, (), [])
    steps, count = len(trace.steps), len(frames.modules)
    called = frames.calls()
    found: list[tuple[Any, ...]] = [
        (frames.owner[called], trace.steps.of(trace.start_ns[called]), np.zeros(len(called)), np.ones(len(called)))
    ]
    if trace.has_device:
        events, frame = launched_in_frames(trace, frames)
        owner, phase, step = frames.owner[frame], frames.phase[frame], trace.steps.of(launched_at(trace, events))
        for one in (1, 2):
            mine = (phase == one) & (owner >= 0) & (step >= 0)
            key, of = owner[mine] * steps + step[mine], events[mine]
            occupied = occupied_by(key, trace.start_ns[of], trace.end_ns[of], count * steps)
            names, numbers = np.repeat(np.arange(count), steps), np.tile(np.arange(steps), count)
            found.append((names, numbers, occupied, np.zeros(count * steps)))
    else:
        mine = (frames.owner[frames.rows] >= 0) & (frames.phase[frames.rows] > 0)
        rows = frames.rows[mine]
        step = trace.steps.of(trace.start_ns[rows])
        found.append((frames.owner[rows], step, own_host_ns(trace, frames)[mine], np.zeros(len(rows))))
    return _joined(trace, frames.modules, found)


def _joined(trace: Trace, names: Sequence[str], parts: Sequence[tuple[Any, ...]]) -> StepSums:
    name, step, ns, calls = (
        np.concatenate([np.zeros(0, dtype=np.int64), *(part[place] for part in parts)]).astype(np.int64)
        for place in range(4)
    )
    return _sums(trace, names, name=name, step=step, ns=ns, calls=calls)


def _phases(trace: Trace) -> tuple[StepSums, StepSums]:
    """Phases on the host, and what was launched in them; what is in none of them is ``OTHERS``."""
    steps, known, covered = trace.steps, trace.phases, merged(trace.phases)
    clocks: tuple[list[Any], list[Any]] = ([], [])
    for index, spans in enumerate(known.values()):
        count = len(spans.starts)
        on_device = launched_ns(trace, spans.starts, spans.ends, without=spans.lent)
        for found, ns in zip(clocks, (spans.host_ns(), on_device), strict=True):
            found.append((np.full(count, index), steps.of(spans.starts), ns, np.ones(count)))
    start, end, count = steps.host_start_ns, steps.host_end_ns, len(steps)
    rest = (end - start - covered_within(covered, start, end), launched_ns(trace, start, end, without=covered))
    for found, ns in zip(clocks, rest, strict=True):
        found.append((np.full(count, len(known)), np.arange(count), ns, np.zeros(count)))
    host, device = (_joined(trace, (*known, OTHERS), found) for found in clocks)
    return host, device
