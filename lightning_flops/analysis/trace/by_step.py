"""What each kernel, operator, module and phase of a trace took in each of its steps: what two runs are compared by.

An event belongs to the step in whose mark on the host it was launched, or began if nobody launched it; what lies
outside of every step is left out. Times are whole nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from lightning_flops.analysis.trace.columns import Trace
from lightning_flops.analysis.trace.communication import collective_name, collective_rows_by_start
from lightning_flops.analysis.trace.flops import step_of
from lightning_flops.analysis.trace.intervals import Ints, covered_within, distinct, union
from lightning_flops.analysis.trace.modules import calls_of_modules, occupied_by, own_host_ns, owned_device_events
from lightning_flops.analysis.trace.operator_tables import device_ns_of_operators, outermost_calls, self_host_ns
from lightning_flops.analysis.trace.phases import launched_ns
from lightning_flops.analysis.trace.whole_steps import OddMark

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
    odd: tuple[OddMark, ...]
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


def _step_of_start(trace: Trace, rows: Ints) -> Ints:
    """The step in which each of *rows* was launched, or began if no launch of it is known; -1 outside of steps."""
    launch = trace.links.launch[rows]
    return step_of(trace, np.where(launch >= 0, trace.start_ns[np.maximum(launch, 0)], trace.start_ns[rows]))


def _kernels(trace: Trace) -> StepSums:
    rows = trace.device_rows
    return _sums(
        trace,
        trace.names,
        name=trace.name[rows].astype(np.int64),
        step=_step_of_start(trace, rows),
        ns=trace.duration_ns[rows],
        calls=np.ones(len(rows), dtype=np.int64),
    )


def _operators(trace: Trace, spent_ns: Ints, *, everything: bool) -> StepSums:
    """Operators without what they call; a call inside a call of the same operator is a part of it."""
    rows = trace.links.operators
    if not everything:  # of operators that launch nothing, the device knows nothing
        launching = distinct(trace.name[rows[spent_ns[rows] > 0]])
        rows = rows[np.isin(trace.name[rows], launching)]
    return _sums(
        trace,
        trace.names,
        name=trace.name[rows].astype(np.int64),
        step=step_of(trace, trace.start_ns[rows]),
        ns=spent_ns[rows],
        calls=(outermost_calls(trace)[rows] == rows).astype(np.int64),
    )


def _collectives(trace: Trace) -> StepSums:
    rows = collective_rows_by_start(trace)
    names: dict[str, int] = {}
    numbers = [names.setdefault(collective_name(trace, row), len(names)) for row in rows.tolist()]
    return _sums(
        trace,
        tuple(names),
        name=np.array(numbers, dtype=np.int64),
        step=_step_of_start(trace, rows),
        ns=trace.duration_ns[rows],
        calls=np.ones(len(rows), dtype=np.int64),
    )


def _modules(trace: Trace) -> StepSums:
    """Forward and backward of each module together, without the modules inside; on the device where there is one."""
    frames = trace.frames
    nothing = np.zeros(0, dtype=np.int64)
    if frames is None:
        return _sums(trace, (), name=nothing, step=nothing, ns=nothing, calls=nothing)
    steps, count = len(trace.steps), len(frames.modules)
    names, at, spent, calls = [], [], [], []
    called = calls_of_modules(frames)
    names.append(frames.owner[called])
    at.append(step_of(trace, trace.start_ns[called]))
    spent.append(np.zeros(len(called), dtype=np.int64))
    calls.append(np.ones(len(called), dtype=np.int64))
    if trace.has_device:
        events, owner, phase = owned_device_events(trace, frames)
        step = _step_of_start(trace, events)
        for one in (1, 2):
            mine = np.flatnonzero((phase == one) & (owner >= 0) & (step >= 0))
            key = owner[mine] * steps + step[mine]
            events_of = events[mine]
            occupied = occupied_by(key, trace.start_ns[events_of], trace.end_ns[events_of], count * steps)
            names.append(np.repeat(np.arange(count), steps))
            at.append(np.tile(np.arange(steps), count))
            spent.append(occupied)
            calls.append(np.zeros(count * steps, dtype=np.int64))
    else:
        rows = frames.rows
        mine = np.flatnonzero((frames.owner[rows] >= 0) & (frames.phase[rows] > 0))
        names.append(frames.owner[rows[mine]])
        at.append(step_of(trace, trace.start_ns[rows[mine]]))
        spent.append(own_host_ns(trace, frames)[mine])
        calls.append(np.zeros(len(mine), dtype=np.int64))
    return _sums(
        trace,
        frames.modules,
        name=np.concatenate(names),
        step=np.concatenate(at),
        ns=np.concatenate(spent),
        calls=np.concatenate(calls),
    )


def _phases(trace: Trace) -> tuple[StepSums, StepSums]:
    """Phases on the host, and what was launched in them; what is in none of them is ``OTHERS``."""
    steps, phases = trace.steps, trace.phases
    found = {
        "data loader": phases.data_loader,
        "forward": phases.forward,
        "backward": phases.backward,
        "optimizer": phases.optimizer,
    }
    known = {name: spans for name, spans in found.items() if spans is not None}
    covered = union(*(spans.merged() for spans in known.values()))
    names, at, on_host, on_device, calls = [], [], [], [], []
    for index, spans in enumerate(known.values()):
        names.append(np.full(len(spans.starts), index, dtype=np.int64))
        at.append(step_of(trace, spans.starts))
        on_host.append(spans.ends - spans.starts - covered_within(spans.lent, spans.starts, spans.ends))
        on_device.append(launched_ns(trace, spans.starts, spans.ends, without=spans.lent))
        calls.append(np.ones(len(spans.starts), dtype=np.int64))
    start, end = steps.host_start_ns, steps.host_end_ns
    names.append(np.full(len(steps), len(known), dtype=np.int64))
    at.append(np.arange(len(steps), dtype=np.int64))
    on_host.append(end - start - covered_within(covered, start, end))
    on_device.append(launched_ns(trace, start, end, without=covered))
    calls.append(np.zeros(len(steps), dtype=np.int64))
    host, device = (
        _sums(
            trace,
            (*known, OTHERS),
            name=np.concatenate(names),
            step=np.concatenate(at),
            ns=np.concatenate(times),
            calls=np.concatenate(calls),
        )
        for times in (on_host, on_device)
    )
    return host, device
