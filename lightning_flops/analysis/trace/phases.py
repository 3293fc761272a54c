"""The phases of training in a trace: data loading, forward, backward, optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace.columns import Trace
from lightning_flops.analysis.trace.durations import NS_PER_US, durations_of, ratio
from lightning_flops.analysis.trace.event_names import Kind, is_backward, is_data_loader, is_forward, is_optimizer
from lightning_flops.analysis.trace.intervals import NOTHING, Intervals, Ints, covered_within, merge, subtract, union
from lightning_flops.analysis.trace.parts import moments_of
from lightning_flops.schema.trace_steps import ModelSummary, PhaseRow, PhaseSource, Remainder


@dataclass(frozen=True, slots=True, eq=False)
class PhaseSpans:
    """When a phase ran."""

    starts: Ints
    ends: Ints
    source: PhaseSource
    lent: Intervals = NOTHING
    """Moments in the phase that belong to something else."""

    def merged(self) -> Intervals:
        """The moments in the phase."""
        return subtract(merge(self.starts, self.ends), self.lent)


@dataclass(frozen=True, slots=True, eq=False)
class Phases:
    """All phases inside the steps; None for one that the trace does not show."""

    data_loader: PhaseSpans | None
    forward: PhaseSpans | None
    backward: PhaseSpans | None
    optimizer: PhaseSpans | None


def find_phases(trace: Trace) -> Phases:
    """The phases of *trace*: by the names of scopes where there are any, else by its operators.

    By its operators, a forward goes from the first to the last operator with gradients on before a backward. A backward
    goes from the first to the last operator that autograd ran, until something else follows.
    """
    data_loader = _by_scopes(trace, is_data_loader)
    optimizer = _by_scopes(trace, is_optimizer)
    forward = _by_scopes(trace, is_forward)
    backward = _by_scopes(trace, is_backward)
    if forward is None or backward is None:
        forward_runs, backward_runs = _by_operators(trace, data_loader, optimizer)
        forward = forward or forward_runs
        backward = backward or backward_runs
    if optimizer is not None:
        optimizer = replace(optimizer, lent=_lent(trace, optimizer, (data_loader, forward, backward)))
    return Phases(data_loader, forward, backward, optimizer)


def _lent(trace: Trace, optimizer: PhaseSpans, others: Sequence[PhaseSpans | None]) -> Intervals:
    """What is not the optimizer's own in its step: the closure, and whatever other part is marked there."""
    own = moments_of(trace, "optimizer")
    if own is not None:
        return subtract(optimizer.merged(), own)
    return union(*(spans.merged() for spans in others if spans is not None))


def model_summary(trace: Trace) -> ModelSummary:
    """Calls and time of each phase, on the host and by launches on the device."""
    steps = trace.steps
    phases = trace.phases
    host_whole = int((steps.host_end_ns - steps.host_start_ns).sum())
    device_whole = int(launched_ns(trace, steps.host_start_ns, steps.host_end_ns).sum())
    found = (phases.data_loader, phases.forward, phases.backward, phases.optimizer)
    covered = union(*(spans.merged() for spans in found if spans is not None))

    def row(spans: PhaseSpans | None) -> PhaseRow | None:
        if spans is None:
            return None
        host_ns = spans.ends - spans.starts - covered_within(spans.lent, spans.starts, spans.ends)
        host = durations_of(host_ns, whole_ns=host_whole)
        device = durations_of(launched_ns(trace, spans.starts, spans.ends, without=spans.lent), whole_ns=device_whole)
        if host is None:
            return None
        return PhaseRow(
            calls=len(spans.starts), host=host, device=device if trace.has_device else None, source=spans.source
        )

    step = row(PhaseSpans(steps.host_start_ns, steps.host_end_ns, "scopes" if steps.marked else "operators"))
    assert step is not None  # there always is a step
    host_rest = host_whole - int(covered_within(covered, steps.host_start_ns, steps.host_end_ns).sum())
    device_rest = int(launched_ns(trace, steps.host_start_ns, steps.host_end_ns, without=covered).sum())
    return ModelSummary(
        step=step,
        data_loader=row(phases.data_loader),
        forward=row(phases.forward),
        backward=row(phases.backward),
        optimizer=row(phases.optimizer),
        others=Remainder(
            host_us=host_rest / NS_PER_US,
            host_ratio=ratio(host_rest, host_whole),
            device_us=device_rest / NS_PER_US if trace.has_device else None,
            device_ratio=ratio(device_rest, device_whole) if trace.has_device else None,
        ),
    )


def launched_ns(trace: Trace, starts: Ints, ends: Ints, *, without: Intervals | None = None) -> Ints:
    """Lengths of all device events launched in each span by any thread, without those launched in *without*."""
    rows = trace.device_rows
    calls = trace.links.launch[rows]
    rows, calls = rows[calls >= 0], calls[calls >= 0]
    moments = trace.start_ns[calls]
    order = np.argsort(moments, kind="stable")
    moments, lengths = moments[order], trace.duration_ns[rows[order]]
    if without is not None and len(without.starts):
        index = np.searchsorted(without.starts, moments, side="right") - 1
        lengths = np.where((index >= 0) & (moments < without.ends[np.maximum(index, 0)]), 0, lengths)
    return sums_between(moments, lengths, starts, ends)


def sums_between(moments: Ints, values: Ints, starts: Ints, ends: Ints) -> Ints:
    """For each span ``[start, end)``, the sum of the *values* whose *moments* lie in it; *moments* are sorted."""
    before = np.concatenate([[0], np.cumsum(values)]).astype(np.int64)
    return before[np.searchsorted(moments, ends, side="left")] - before[np.searchsorted(moments, starts, side="left")]


def in_steps(trace: Trace, rows: npt.NDArray[np.bool_] | Ints) -> Ints:
    """Those of *rows* that begin inside a step's own mark on the host, by start."""
    indices = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
    steps = trace.steps
    starts = trace.start_ns[indices]
    step = np.searchsorted(steps.host_start_ns, starts, side="right") - 1
    inside = (step >= 0) & (starts < steps.host_end_ns[np.maximum(step, 0)])
    indices = indices[inside]
    return indices[np.argsort(trace.start_ns[indices], kind="stable")].astype(np.int64)


def _by_scopes(trace: Trace, is_phase: Callable[[str], bool]) -> PhaseSpans | None:
    rows = in_steps(trace, (trace.kind == Kind.ANNOTATION) & trace.names_where(is_phase))
    if not len(rows):
        return None
    # A scope inside one of the same phase, such as a wrapper's forward in a training step, is no call of its own.
    ends = trace.end_ns[rows]
    outer = np.concatenate([[True], ends[1:] > np.maximum.accumulate(ends)[:-1]])
    return PhaseSpans(trace.start_ns[rows[outer]], ends[outer], "scopes")


def _by_operators(
    trace: Trace, data_loader: PhaseSpans | None, optimizer: PhaseSpans | None
) -> tuple[PhaseSpans | None, PhaseSpans | None]:
    links = trace.links
    outermost = links.operators[links.depth[links.operators] == 0]
    rows = in_steps(trace, outermost)
    backward = links.is_backward[rows]
    with_gradients = (trace.sequence[rows] >= 0) & ~backward
    # Merging drops spans without a length: a loader that took no time covers nothing.
    if data_loader is not None and len((loading := data_loader.merged()).starts):
        index = np.searchsorted(loading.starts, trace.start_ns[rows], side="right") - 1
        with_gradients &= (index < 0) | (trace.start_ns[rows] >= loading.ends[np.maximum(index, 0)])
    kept = backward | with_gradients
    rows, backward = rows[kept], backward[kept]
    if not backward.any():
        return None, None
    borders = [trace.steps.host_start_ns]
    borders += [spans.starts for spans in (data_loader, optimizer) if spans is not None]
    # A run ends where the label changes or a border lies between two operators.
    section = np.searchsorted(np.sort(np.concatenate(borders)), trace.start_ns[rows], side="right")
    new = np.concatenate([[True], (backward[1:] != backward[:-1]) | (section[1:] != section[:-1])])
    firsts = np.flatnonzero(new)
    starts = trace.start_ns[rows[firsts]]
    ends = np.maximum.reduceat(trace.end_ns[rows], firsts)
    is_backward = backward[firsts]
    before_backward = np.append(~is_backward[:-1] & is_backward[1:], False)
    forward = PhaseSpans(starts[before_backward], ends[before_backward], "operators") if before_backward.any() else None
    return forward, PhaseSpans(starts[is_backward], ends[is_backward], "operators")
