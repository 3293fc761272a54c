"""Where steps begin and end, the phases of training and the marked parts in them, and what filled all of these."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from lightning_flops.records import marked_phase
from lightning_flops.schema.trace import PartFilling, StepFilling, TracedPart
from lightning_flops.schema.trace_steps import Durations, PhaseRow, StepTime, StepTimes
from lightning_flops.trace.communication import communication_and_computation
from lightning_flops.trace.intervals import (
    NOTHING,
    NS_PER_SEC,
    NS_PER_US,
    Intervals,
    Ints,
    Mask,
    covered_within,
    durations_of,
    inside,
    merge,
    subtract,
    table,
    union,
)
from lightning_flops.trace.names import (
    Kind,
    computes_on_host,
    may_use_tensor_cores,
    multiplies,
    phase_of,
    step_number,
)
from lightning_flops.trace.structure import launched_at

if TYPE_CHECKING:
    from lightning_flops.trace.columns import Trace

_UNMARKED = "other"


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
    # torch.profiler marks what lies between two calls of its ``step``. The last mark is no whole step where the loop
    # ended before the schedule did, nor the first one where ``step`` is called in the middle of a step's work: there,
    # an edge has less than half of the calls of any other mark.
    calls = _calls(trace, host_start, host_end)
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
    launched, rows = trace.launches
    steps = Steps(True, tuple(numbers[is_whole].tolist()), host_start, host_end, start, end, odd)
    step = steps.of(launched)
    np.maximum.at(end, step[step >= 0], trace.end_ns[rows[step >= 0]])
    before = trace.device_rows[launched_at(trace, trace.device_rows) < host_start[0]]
    start[0] = trace.end_ns[before].max(initial=start[0])
    end = np.maximum.accumulate(np.maximum(start, end))
    start[1:] = np.maximum(start[1:], end[:-1])
    return replace(steps, end_ns=end)


def _calls(trace: Trace, host_start: Ints, host_end: Ints) -> Ints:
    """For each mark how much was called in it: of a backward if there is one, else of all operators, else launched."""
    operators = trace.links.operators
    backward = operators[trace.links.is_backward[operators]]
    rows = next((rows for rows in (backward, operators) if len(rows)), trace.device_rows)
    moments = np.sort(launched_at(trace, rows))
    return np.searchsorted(moments, host_end) - np.searchsorted(moments, host_start)


def step_times(trace: Trace) -> StepTimes:
    """Where each step's wall time went: one name for every moment of it."""
    steps, kind, collective = trace.steps, trace.kind, trace.is_collective
    wall = steps.end_ns - steps.start_ns
    covered, before = NOTHING, np.zeros(len(steps), dtype=np.int64)
    parts: dict[str, Ints | None] = {"wall_us": wall}
    by_priority = {
        "kernel_us": (kind == Kind.KERNEL) & ~collective,
        "memcpy_us": kind == Kind.MEMCPY,
        "memset_us": kind == Kind.MEMSET,
        "communication_us": collective,
        "runtime_us": kind == Kind.RUNTIME,
        "data_loader_us": trace.where(lambda name: phase_of(name) == "data loader", Kind.ANNOTATION),
        "cpu_us": kind == Kind.OPERATOR,
    }
    for name, rows in by_priority.items():
        covered = union(covered, trace.merged(rows))
        reached = covered_within(covered, steps.start_ns, steps.end_ns)
        of_device = trace.has_device and name in ("kernel_us", "memcpy_us", "memset_us", "runtime_us")
        parts[name] = reached - before if of_device or rows.any() else None
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


# ---- phases


@dataclass(frozen=True, slots=True, eq=False)
class PhaseSpans:
    """When a phase ran."""

    starts: Ints
    ends: Ints
    source: Literal["scopes", "operators", "rest"]
    lent: Intervals = NOTHING
    """Moments in the phase that belong to something else."""

    def merged(self) -> Intervals:
        """The moments in the phase."""
        return subtract(merge(self.starts, self.ends), self.lent)

    def host_ns(self) -> Ints:
        """The length of each span, without what is lent."""
        return self.ends - self.starts - covered_within(self.lent, self.starts, self.ends)


def find_phases(trace: Trace) -> dict[str, PhaseSpans]:
    """The phases of *trace*: by the names of scopes where there are any, else by its operators.

    By its operators, a forward goes from the first to the last operator with gradients on before a backward. A backward
    goes from the first to the last operator that autograd ran, until something else follows.
    """
    found = {name: _by_scopes(trace, name) for name in ("data loader", "forward", "backward", "optimizer")}
    if found["forward"] is None or found["backward"] is None:
        runs = _by_operators(trace, found["data loader"], found["optimizer"])
        found |= {name: found[name] or run for name, run in zip(("forward", "backward"), runs, strict=True)}
    phases = {name: spans for name, spans in found.items() if spans is not None}
    if (optimizer := phases.pop("optimizer", None)) is not None:
        # The closure, and whatever other part is marked there, is not its own.
        pieces = _pieces_on_host(trace)
        own = np.array(pieces.names) == "optimizer"
        rest = subtract(optimizer.merged(), merge(pieces.starts[own], pieces.ends[own]))
        phases["optimizer"] = replace(optimizer, lent=rest if own.any() else merged(phases))
    return phases


def merged(phases: dict[str, PhaseSpans]) -> Intervals:
    """The moments in any phase."""
    return union(*(spans.merged() for spans in phases.values()))


def in_steps(trace: Trace, rows: Ints) -> Ints:
    """Places of *rows* that begin inside a step's own mark on the host, by start."""
    return trace.by_start(rows[trace.steps.of(trace.start_ns[rows]) >= 0])


def _by_scopes(trace: Trace, phase: str) -> PhaseSpans | None:
    rows = in_steps(trace, np.flatnonzero(trace.where(lambda name: phase_of(name) == phase, Kind.ANNOTATION)))
    if not len(rows):
        return None
    # A scope inside one of the same phase, such as a wrapper's forward in a training step, is no call of its own.
    ends = trace.end_ns[rows]
    outer = np.append(True, ends[1:] > np.maximum.accumulate(ends)[:-1])
    return PhaseSpans(trace.start_ns[rows[outer]], ends[outer], "scopes")


def _by_operators(
    trace: Trace, data_loader: PhaseSpans | None, optimizer: PhaseSpans | None
) -> tuple[PhaseSpans | None, PhaseSpans | None]:
    links = trace.links
    rows = in_steps(trace, links.levels[0] if links.levels else links.operators)
    backward = links.is_backward[rows]
    with_gradients = (trace.sequence[rows] >= 0) & ~backward
    kept = backward | with_gradients
    rows, backward = rows[kept], backward[kept]
    if not backward.any():
        return None, None
    others = [spans for spans in (data_loader, optimizer) if spans is not None]
    boundaries = [trace.steps.host_start_ns, *(edge for spans in others for edge in (spans.starts, spans.ends))]
    # A run ends where the label changes or a boundary lies between two operators.
    section = np.searchsorted(np.sort(np.concatenate(boundaries)), trace.start_ns[rows], side="right")
    firsts = np.flatnonzero(np.append(True, (backward[1:] != backward[:-1]) | (section[1:] != section[:-1])))
    starts, ends = trace.start_ns[rows[firsts]], np.maximum.reduceat(trace.end_ns[rows], firsts)
    of_backward = backward[firsts]
    before = np.append(~of_backward[:-1] & of_backward[1:], False)
    forward = PhaseSpans(starts[before], ends[before], "operators") if before.any() else None
    return forward, PhaseSpans(starts[of_backward], ends[of_backward], "operators")


def launched_ns(trace: Trace, starts: Ints, ends: Ints, *, without: Intervals = NOTHING) -> Ints:
    """Lengths of all device events launched in each span by any thread, without those launched in *without*."""
    moments, rows = trace.launches
    values = np.where(inside(without, moments), 0, trace.duration_ns[rows])
    before: Ints = np.append(0, np.cumsum(values))
    return before[np.searchsorted(moments, ends)] - before[np.searchsorted(moments, starts)]


def phase_table(trace: Trace) -> tuple[PhaseRow, ...]:
    """Calls and time of the steps, of each phase, and of what is in none, on the host and by launches on the device."""
    steps, covered = trace.steps, merged(trace.phases)
    whole = PhaseSpans(steps.host_start_ns, steps.host_end_ns, "scopes" if steps.marked else "operators")
    rest = PhaseSpans(whole.starts, whole.ends, "rest", lent=covered)
    device_ns = int(launched_ns(trace, whole.starts, whole.ends).sum())

    def device(spans: PhaseSpans) -> Durations | None:
        launched = launched_ns(trace, spans.starts, spans.ends, without=spans.lent)
        return durations_of(launched, whole_ns=device_ns) if trace.has_device else None

    return tuple(
        PhaseRow(
            name=name,
            calls=len(spans.starts),
            host=durations_of(spans.host_ns(), whole_ns=steps.host_ns),
            device=device(spans),
            source=spans.source,
        )
        for name, spans in {"step": whole, **trace.phases, "others": rest}.items()
    )


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """All steps of a trace, cut where a part begins or ends; without gaps inside a step."""

    names: list[str]
    """The part that each piece is of."""
    starts: Ints
    ends: Ints

    def sums(self, covered: Intervals) -> dict[str, int]:
        """Nanoseconds of each part that are *covered*, in order of the parts' first moments."""
        sums = dict.fromkeys(self.names, 0)
        for name, value in zip(self.names, covered_within(covered, self.starts, self.ends).tolist(), strict=True):
            sums[name] += value
        return sums


def step_parts(trace: Trace) -> tuple[TracedPart, ...]:
    """The parts of the steps of *trace* by the marks around them, in order of their first moments.

    With a device, a part ends when the work launched before its end is done, as an event recorded there on the device's
    stream would show. Communication does not move a boundary, so a wait stays in the part that waited.
    """
    communication, computation = communication_and_computation(trace)
    pieces, per_step = _pieces_on_device(trace), len(trace.steps) * NS_PER_SEC
    exposed = pieces.sums(subtract(communication, computation))
    return tuple(
        TracedPart(name=name, wall_sec=total / per_step, exposed_sec=exposed[name] / per_step)
        for name, total in pieces.sums(trace.steps.spans).items()
    )


def _pieces_on_host(trace: Trace) -> Pieces:
    """The steps' own marks, cut at the ends of every part's mark: each piece is of the innermost part."""
    steps = trace.steps
    rows = in_steps(trace, np.flatnonzero(trace.where(lambda name: marked_phase(name) is not None, Kind.ANNOTATION)))
    rows = rows[np.lexsort((-trace.duration_ns[rows], trace.start_ns[rows]))]
    starts = trace.start_ns[rows]
    ends = np.minimum(trace.end_ns[rows], steps.host_end_ns[steps.of(starts)])
    cuts = np.unique(np.concatenate([steps.host_start_ns, steps.host_end_ns, starts, ends]))
    names = [_UNMARKED] * (len(cuts) - 1)
    begins, until = np.searchsorted(cuts, starts).tolist(), np.searchsorted(cuts, ends).tolist()
    for row, begin, end in zip(rows.tolist(), begins, until, strict=True):  # outer before inner
        names[begin:end] = [marked_phase(trace.name_of(row)) or ""] * (end - begin)
    inside = np.flatnonzero(steps.of(cuts[:-1]) >= 0)
    return Pieces([names[at] for at in inside.tolist()], cuts[inside], cuts[inside + 1])


def _pieces_on_device(trace: Trace) -> Pieces:
    """The same, boundaries moved as ``step_parts`` says."""
    pieces, steps = _pieces_on_host(trace), trace.steps
    step = steps.of(pieces.starts)
    first, last = steps.start_ns[step], steps.end_ns[step]
    begins = np.append(True, step[1:] != step[:-1])
    starts = np.where(begins, first, np.clip(_on_device(trace, pieces.starts), first, last))
    ends = np.where(np.append(begins[1:], True), last, np.append(starts[1:], 0))
    return Pieces(pieces.names, starts, ends)


def _on_device(trace: Trace, moments_ns: Ints) -> Ints:
    """When the device has finished what was launched before each moment on the host; never before that moment."""
    launched, rows = trace.launches
    computes = ~trace.is_collective[rows]
    if not computes.any():
        return moments_ns
    done = np.maximum.accumulate(trace.end_ns[rows[computes]])
    index = np.searchsorted(launched[computes], moments_ns, side="left") - 1
    return np.where(index < 0, moments_ns, np.maximum(moments_ns, done[np.maximum(index, 0)]))


def step_filling(trace: Trace, *, counted: Collection[str] = ()) -> StepFilling:
    """What filled each part of the steps, mean over these; *counted* operators, as ``aten.mm``, are matmul-like."""
    pieces, covered, until = _pieces_on_device(trace), NOTHING, []
    for moments in _fillings(trace, frozenset(name.replace(".", "::", 1) for name in counted)):
        covered = union(covered, moments)
        until.append([*pieces.sums(covered).values()])
    walls = pieces.sums(trace.steps.spans)
    # Rounded as running sums, so that the means add up to the part's as well.
    means = np.rint(np.array([*until, [*walls.values()]]) / len(trace.steps)).astype(np.int64)
    fields = ("matmul_ns", "operators_ns", "copies_ns", "communication_ns", "idle_ns")
    columns = dict(zip(fields, np.diff(means, axis=0, prepend=0).tolist(), strict=True))
    clock: Literal["host", "device"] = "device" if trace.has_device else "host"
    return StepFilling(clock=clock, parts=table(PartFilling, name=walls, **columns))


def _fillings(trace: Trace, counted: Collection[str]) -> tuple[Intervals, Intervals, Intervals, Intervals]:
    """The moments of matmul-like operators, of all others, of copies and of communication; they may overlap."""
    communication = trace.merged(trace.is_collective)
    is_matmul = trace.where(lambda name: may_use_tensor_cores(name) or name in counted, Kind.OPERATOR)
    if not trace.has_device:
        computes = trace.where(computes_on_host, Kind.OPERATOR) & ~trace.is_collective
        # What a collective on the host consists of is not computation.
        others = subtract(trace.merged(computes), communication)
        return trace.merged(computes & is_matmul), others, NOTHING, communication
    kernels = (trace.kind == Kind.KERNEL) & ~trace.is_collective
    copies = trace.merged((trace.kind == Kind.MEMCPY) | (trace.kind == Kind.MEMSET))
    return trace.merged(kernels & _multiplying(trace, is_matmul)), trace.merged(kernels), copies, communication


def _multiplying(trace: Trace, is_matmul: Mask) -> Mask:
    """Kernels that do: by the operator that launched each, by its own name where no operator of torch did."""
    launcher = np.maximum(trace.links.operator_of_launch, 0)
    of_torch = trace.where(lambda name: name.startswith("aten::"), Kind.OPERATOR) | is_matmul
    known = (trace.links.operator_of_launch >= 0) & of_torch[launcher]
    return np.where(known, is_matmul[launcher], trace.where(multiplies, Kind.KERNEL))
