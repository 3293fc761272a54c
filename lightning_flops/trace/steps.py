"""Where steps begin and end, the phases of training and the marked parts in them, and what filled all of these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import astuple, dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from lightning_flops.records import marked_phase
from lightning_flops.schema.tables import STEP_PARTS, KindTime, Row, StepTime, StepTimes
from lightning_flops.schema.trace import Overlap, PartFilling, TracedPart
from lightning_flops.trace.columns import (
    Kind,
    Trace,
    computes_on_host,
    is_users_scope,
    may_use_tensor_cores,
    multiplies,
    once,
    phase_of,
    step_number,
)
from lightning_flops.trace.intervals import (
    NOTHING,
    NS_PER_SEC,
    NS_PER_US,
    Intervals,
    Ints,
    Mask,
    counted_once,
    covered_within,
    durations_of,
    group_by,
    inside,
    intersect,
    merge,
    numbered,
    ratio,
    split_by,
    subtract,
    table,
    union,
)
from lightning_flops.trace.structure import launch_ns_of, launches_of, links_of

_UNMARKED = "other"


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Steps in order of time; they do not overlap."""

    marked: bool  #: False when the trace has no profiler steps; the whole trace is then one step.
    numbers: tuple[int | None, ...]  #: The profiler's number of each step.
    host_start_ns: Ints
    host_end_ns: Ints  #: The step's own mark on the host.
    start_ns: Ints
    end_ns: Ints  #: With the device: up to the last event launched in the step, from where the step before it ended.
    odd: tuple[str, ...] = ()  #: Marks that are no whole steps, in sentences.

    def __len__(self) -> int:
        return len(self.start_ns)

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
        return np.where((index >= 0) & (moments_ns < self.host_end_ns[index]), index, -1).astype(np.int64)


@once
def steps_of(trace: Trace) -> Steps:
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
    # torch.profiler marks what lies between two calls of its ``step``. The last mark is no whole step where the loop
    # ended before the schedule did, nor the first one where ``step`` is called in the middle of a step's work: there,
    # an edge has less than half of the calls of any other mark: of a backward if there is one, else of all operators.
    operators = links_of(trace).operators
    backward = operators[links_of(trace).is_backward[operators]]
    called = next((rows for rows in (backward, operators) if len(rows)), trace.device_rows)
    moments = np.sort(launch_ns_of(trace)[called])
    calls = np.searchsorted(moments, host_end) - np.searchsorted(moments, host_start)
    least = int(min(calls[1:-1], default=max(calls)))
    is_whole = 2 * calls >= least
    is_whole[1:-1] = True
    numbers = np.array([step_number(trace.name_of(row)) for row in marks.tolist()])
    odd = tuple(
        f"Step {number} is left out: {f'{count:,} calls' if count else 'no call'} ran in it, and {least:,} or more in "
        "the others."
        for number, count in zip(numbers[~is_whole].tolist(), calls[~is_whole].tolist(), strict=True)
    )
    host_start, host_end = host_start[is_whole], host_end[is_whole]
    start, end = host_start.copy(), host_end.copy()
    launched, rows = launches_of(trace)
    steps = Steps(True, tuple(numbers[is_whole].tolist()), host_start, host_end, start, end, odd)
    step = steps.of(launched)
    np.maximum.at(end, step[step >= 0], trace.end_ns[rows[step >= 0]])
    before = trace.device_rows[launch_ns_of(trace)[trace.device_rows] < host_start[0]]
    start[0] = trace.end_ns[before].max(initial=start[0])
    end = np.maximum.accumulate(np.maximum(start, end))
    start[1:] = np.maximum(start[1:], end[:-1])
    return replace(steps, end_ns=end)


def _of_kinds(trace: Trace) -> dict[str, Mask]:
    """Rows of each kind of event that fills steps, in order of priority."""
    kind, collective = trace.kind, trace.is_collective
    return {
        "kernel_us": (kind == Kind.KERNEL) & ~collective,
        "memcpy_us": kind == Kind.MEMCPY,
        "memset_us": kind == Kind.MEMSET,
        "communication_us": collective,
        "runtime_us": kind == Kind.RUNTIME,
        "data_loader_us": trace.where(lambda name: phase_of(name) == "data loader", Kind.ANNOTATION),
        "cpu_us": kind == Kind.OPERATOR,
    }


def kind_times(trace: Trace) -> tuple[KindTime, ...]:
    """Time of each kind of event in the steps, overlaps within the kind counted once."""
    spans, kinds = steps_of(trace).spans, _of_kinds(trace)
    kinds = {
        **{label: kinds[field] for label, field in STEP_PARTS if field in kinds},
        "user scopes": trace.where(is_users_scope, Kind.ANNOTATION),
        "python": trace.kind == Kind.PYTHON,
    }
    begins = inside(spans, trace.start_ns)
    calls = {name: int((mask & begins).sum()) for name, mask in kinds.items()}
    times = [int(covered_within(trace.merged(mask & begins), *spans).sum()) for mask in kinds.values()]
    return tuple(
        KindTime(name=name, calls=calls[name], time_us=ns / NS_PER_US, ratio=ratio(ns, spans.total))
        for name, ns in zip(kinds, times, strict=True)
        if calls[name]
    )


def step_times(trace: Trace) -> StepTimes:
    """Where each step's wall time went: one name for every moment of it."""
    steps, rows = steps_of(trace), _of_kinds(trace)
    spent = _shares(map(trace.merged, rows.values()), steps.start_ns, steps.end_ns)
    columns = {"wall_us": steps.end_ns - steps.start_ns, **dict(zip([*rows, "other_us"], spent, strict=True))}
    of_device = ("kernel_us", "memcpy_us", "memset_us", "runtime_us") if trace.has_device else ()
    # The last one is the mean.
    us = {name: [*(ns / NS_PER_US).tolist(), int(ns.sum()) / (NS_PER_US * len(ns))] for name, ns in columns.items()}
    us |= {name: [None] * (len(steps) + 1) for name in rows if name not in of_device and not rows[name].any()}
    *each, mean = table(StepTime, number=(*steps.numbers, None), **us)
    return StepTimes(marked=steps.marked, steps=tuple(each), mean=mean)


def _shares(kinds: Iterable[Intervals], starts: Ints, ends: Ints) -> Ints:
    """What each of *kinds* takes of each span, a row for each, and the rest; a shared moment is the first one's."""
    covered, reached = NOTHING, [np.zeros(len(starts), dtype=np.int64)]
    for moments in kinds:
        covered = union(covered, moments) if len(moments.starts) else covered
        reached.append(covered_within(covered, starts, ends) if len(moments.starts) else reached[-1])
    return np.diff([*reached, ends - starts], axis=0)


def overlap(trace: Trace) -> Overlap:
    """Computation, communication and their overlap over all steps."""
    communication, computation = communication_and_computation(trace)
    shared = intersect(computation, communication).total
    other = subtract(steps_of(trace).spans, union(computation, communication)).total
    return Overlap(
        wall_us=steps_of(trace).spans.total / NS_PER_US,
        computation_us=computation.total / NS_PER_US,
        communication_us=communication.total / NS_PER_US,
        overlap_us=shared / NS_PER_US,
        other_us=other / NS_PER_US,
        overlap_ratio=ratio(shared, communication.total),
    )


def communication_and_computation(trace: Trace) -> tuple[Intervals, Intervals]:
    """The moments of the steps in which the rank communicated, and those in which it computed."""
    spans, collective = steps_of(trace).spans, trace.is_collective
    if trace.has_device:
        computes = trace.kind == Kind.KERNEL
    else:
        computes = trace.where(computes_on_host, Kind.OPERATOR)
        # Operators inside a host collective are the copies that it consists of.
        for lane, around in split_by(trace.lane, np.flatnonzero(collective)):
            rows = np.flatnonzero(computes & (trace.lane == lane))
            computes[rows[inside(trace.merged(around), trace.start_ns[rows])]] = False
    communication = intersect(trace.merged(collective), spans)
    return communication, intersect(trace.merged(computes & ~collective), spans)


class Phase(NamedTuple):
    """When a phase ran."""

    starts: Ints  #: Of its calls.
    ends: Ints
    own: Intervals  #: Without what is another phase's.


@once
def phases_of(trace: Trace) -> dict[str, Phase]:
    """The phases that scopes name, the innermost first; a forward or backward that none names is known by operators."""
    part_of, starts, ends = _pieces(trace, lambda name: phase_of(name) or (marked_phase(name) and _UNMARKED))
    scopes, names = _in_steps(trace, phase_of), np.array(part_of, dtype=str)
    called = np.array([phase_of(name) for name in trace.texts(trace.name[scopes])], dtype=str)

    def by_scopes(name: str) -> Phase:
        # A scope that only others of the phase fill, such as a wrapper's forward in a training step's, is no call.
        calls = scopes[called == name]
        until = trace.end_ns[calls]
        begins = counted_once(np.zeros_like(calls), trace.start_ns[calls], until)
        own = merge(starts[names == name], ends[names == name])
        return Phase(begins[begins < until], until[begins < until], own)

    found = {name: by_scopes(name) for name in ("data loader", "forward", "backward", "optimizer")}
    for name, guess in _by_operators(trace, found["data loader"], found["optimizer"]).items():
        if not len(found[name].own.starts):
            found[name] = guess
    return {
        f"{name} (by operators)" if name in ("forward", "backward") and name not in called else name: phase
        for name, phase in found.items()
        if len(phase.own.starts)
    }


def _by_operators(trace: Trace, *boundaries: Phase) -> dict[str, Phase]:
    """Forward and backward of a trace whose scopes do not name them."""
    # A forward goes from the first to the last operator with gradients on before a backward, a backward over all that
    # autograd ran. Each ends where something else follows, or one of *boundaries*.
    links = links_of(trace)
    rows = links.operators[links.parent[links.operators] < 0]
    rows = trace.by_start(rows[(trace.sequence[rows] >= 0) | links.is_backward[rows]])
    rows = rows[steps_of(trace).of(trace.start_ns[rows]) >= 0]
    backward = links.is_backward[rows]
    if not backward.any():
        return {}
    edges = [steps_of(trace).host_start_ns, *(edge for one in boundaries for edge in one[:2])]
    section = np.searchsorted(np.sort(np.concatenate(edges)), trace.start_ns[rows], side="right")
    firsts = np.flatnonzero(np.append(True, (backward[1:] != backward[:-1]) | (section[1:] != section[:-1])))
    starts, ends = trace.start_ns[rows[firsts]], np.maximum.reduceat(trace.end_ns[rows], firsts)
    backward = backward[firsts]
    runs = {"forward": np.append(~backward[:-1] & backward[1:], False), "backward": backward}
    return {name: Phase(starts[run], ends[run], merge(starts[run], ends[run])) for name, run in runs.items()}


def launched_ns(trace: Trace, starts: Ints, ends: Ints, *, within: Intervals | None = None) -> Ints:
    """Lengths of all device events launched in each span, and *within* these moments if given, by any thread."""
    moments, rows = launches_of(trace)
    values = trace.duration_ns[rows] * (1 if within is None else inside(within, moments))
    before: Ints = np.append(0, np.cumsum(values))
    return before[np.searchsorted(moments, ends)] - before[np.searchsorted(moments, starts)]


def phase_table(trace: Trace) -> tuple[Row, ...] | None:
    """Calls and time of the steps, of each phase and of the rest, on the host and by launches; None without a phase."""
    steps, marks = steps_of(trace), (steps_of(trace).host_start_ns, steps_of(trace).host_end_ns)
    device_ns = int(launched_ns(trace, *marks).sum())

    def row(name: str, starts: Ints, ends: Ints, own: Intervals) -> Row:
        launched = launched_ns(trace, starts, ends, within=own)
        return Row(
            name=name,
            calls=len(starts),
            host=durations_of(covered_within(own, starts, ends), whole_ns=steps.host_ns),
            device=durations_of(launched, whole_ns=device_ns) if trace.has_device else None,
        )

    found = [row("step", *marks, merge(*marks)), *(row(name, *phase) for name, phase in phases_of(trace).items())]
    covered = union(*(phase.own for phase in phases_of(trace).values()))
    return (*found, row("others", *marks, subtract(merge(*marks), covered))) if phases_of(trace) else None


def _in_steps(trace: Trace, holds: Callable[[str], object]) -> Ints:
    """Rows of scopes for whose names *holds*, and which begin inside a step's own mark; outer before inner."""
    rows = np.flatnonzero(trace.where(holds, Kind.ANNOTATION))
    rows = rows[steps_of(trace).of(trace.start_ns[rows]) >= 0]
    return rows[np.lexsort((-trace.duration_ns[rows], trace.start_ns[rows]))]


def step_parts(trace: Trace) -> tuple[TracedPart, ...]:
    """The parts of the steps of *trace* by the marks around them, in order of their first moments; else by kind."""
    # With a device, a part ends when the work launched before its end is done, as an event recorded there on the
    # device's stream would show. Communication does not move a boundary, so a wait stays in the part that waited.
    parts, mean = step_filling(trace), step_times(trace).mean
    if {*parts} == {_UNMARKED} and trace.has_device:
        kernel_us, wait_us, exposed_us = (mean.kernel_us or 0.0), (mean.data_loader_us or 0.0), mean.communication_us
        rest_us = mean.wall_us - kernel_us - wait_us
        kinds = (("kernel time", kernel_us, 0.0), ("data_wait", wait_us, 0.0), (_UNMARKED, rest_us, exposed_us or 0.0))
        return tuple(TracedPart(name=name, wall_sec=us / 1e6, exposed_sec=of / 1e6) for name, us, of in kinds if us)
    # Of each part in each step what is no communication that nothing hides.
    _, spent = _spent(trace, ())
    own_sec = (spent.sum(axis=0) - spent[_FILLINGS.index("communication_ns")]) / NS_PER_SEC
    return table(
        TracedPart,
        name=parts,
        wall_sec=[sum(astuple(one)) / NS_PER_SEC for one in parts.values()],
        exposed_sec=[one.communication_ns / NS_PER_SEC for one in parts.values()],
        own_steps_sec=map(tuple, own_sec.tolist()),
    )


def _pieces(trace: Trace, part_of: Callable[[str], str | None] = marked_phase) -> tuple[list[str], Ints, Ints]:
    """The steps' own marks, cut without gaps at the ends of every part: the innermost part's name, starts and ends."""
    steps, rows = steps_of(trace), _in_steps(trace, part_of)
    starts = trace.start_ns[rows]
    ends = np.minimum(trace.end_ns[rows], steps.host_end_ns[steps.of(starts)])
    cuts = group_by(np.concatenate([steps.host_start_ns, steps.host_end_ns, starts, ends])).keys[0]
    names = [_UNMARKED] * (len(cuts) - 1)
    begins, until = np.searchsorted(cuts, starts).tolist(), np.searchsorted(cuts, ends).tolist()
    for row, begin, end in zip(rows.tolist(), begins, until, strict=True):  # outer before inner
        names[begin:end] = [part_of(trace.name_of(row)) or ""] * (end - begin)
    within = np.flatnonzero(steps.of(cuts[:-1]) >= 0)
    return [names[at] for at in within.tolist()], cuts[within], cuts[within + 1]


def step_filling(trace: Trace, *, counted: Collection[str] = ()) -> dict[str, PartFilling]:
    """What filled each part of the steps, mean over these; *counted* operators, as ``aten.mm``, are matmul-like."""
    parts, spent = _spent(trace, counted)
    # Rounded as running sums, so that the means add up to the part's as well.
    sums = np.cumsum(spent.sum(axis=2), axis=0) / len(steps_of(trace))
    means = np.diff(np.rint(sums).astype(np.int64), axis=0, prepend=0)
    columns = dict(zip(_FILLINGS, means.tolist(), strict=True))
    return dict(zip(parts, table(PartFilling, **columns), strict=True))


_FILLINGS = [one.name for one in fields(PartFilling)]


def _spent(trace: Trace, counted: Collection[str]) -> tuple[list[str], Ints]:
    """The parts that the steps are cut into; and what of each filling, in each part (a row), each step has."""
    (names, cuts, _), steps, (launched, rows) = _pieces(trace), steps_of(trace), launches_of(trace)
    # Boundaries are moved, as ``step_parts`` says, to when what was launched before them is done.
    computes = ~trace.is_collective[rows]
    done = np.maximum.accumulate(np.append(np.iinfo(np.int64).min, trace.end_ns[rows[computes]]))
    moved = np.maximum(cuts, done[np.searchsorted(launched[computes], cuts, side="left")])
    step = steps.of(cuts)
    first, last, begins = steps.start_ns[step], steps.end_ns[step], np.append(True, step[1:] != step[:-1])
    starts = np.where(begins, first, np.clip(moved, first, last))
    ends = np.where(np.append(begins[1:], True), last, np.append(starts[1:], 0))
    spent = _shares(_fillings(trace, {name.replace(".", "::", 1) for name in counted}), starts, ends)
    parts, part = numbered(names)
    found = np.zeros((len(spent), len(parts), len(steps)), dtype=np.int64)
    for filling, ns in zip(found, spent, strict=True):
        np.add.at(filling, (part, step), ns)
    return parts, found


def _fillings(trace: Trace, counted: Collection[str]) -> tuple[Intervals, Intervals, Intervals, Intervals]:
    """The moments of matmul-like operators, of all operators, of copies and of communication; they may overlap."""
    communication, computation = communication_and_computation(trace)
    is_matmul = trace.where(lambda name: may_use_tensor_cores(name) or name in counted, Kind.OPERATOR)
    if not trace.has_device:
        return intersect(trace.merged(is_matmul), computation), computation, NOTHING, communication
    # A kernel is of the operator that launched it; it goes by its own name where no operator of torch did.
    launcher = links_of(trace).operator_of_launch
    of_torch = trace.where(lambda name: name.startswith("aten::"), Kind.OPERATOR) | is_matmul
    by_name = trace.where(multiplies, Kind.KERNEL)
    is_product = np.where((launcher >= 0) & of_torch[launcher], is_matmul[launcher], by_name)
    products = trace.merged((trace.kind == Kind.KERNEL) & ~trace.is_collective & is_product)
    copies = trace.merged((trace.kind == Kind.MEMCPY) | (trace.kind == Kind.MEMSET))
    return products, computation, copies, communication
