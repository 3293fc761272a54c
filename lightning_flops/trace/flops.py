"""FLOPs of a trace from the shapes in it, joined with the time of the kernels that spent them.

The outermost operator that a formula is known for counts, and what it called does not, as in the counter: operators
that are only made of others (``aten::linear``) leave it to these. An operator for which the file does not say enough
leaves it to those it called, too (``aten::_convolution`` of an old file to ``aten::cudnn_convolution``); if none of
them counts, it is listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache, partial
from typing import Any

import numpy as np

from lightning_flops.analysis.devices import device_like
from lightning_flops.analysis.memory_bandwidth import memory_bytes_per_sec
from lightning_flops.analysis.peak_flops import peak_for
from lightning_flops.records import RecordedCall, RecordedInputs, RecordedWork
from lightning_flops.schema.trace_flops import (
    KernelFlops,
    OperatorFlops,
    ShapeFlops,
    TracedModuleFlops,
    TracedStepFlops,
    TraceFlops,
    UncountedRow,
)
from lightning_flops.schema.trace_steps import ModuleTable
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.intervals import NS_PER_SEC, NS_PER_US, Intervals, Ints, Mask, inside, ratio
from lightning_flops.trace.modules import modules_above, with_below
from lightning_flops.trace.names import Kind, multiplies, uses_tensor_cores
from lightning_flops.trace.structure import NODE
from lightning_flops.trace.tables import by_shapes, device_ns_of_operators, with_callees

Formulas = Callable[[RecordedCall], RecordedWork]
"""What one recorded call spent. ``instrument.counting.recorded_calls`` has the one there is; it needs torch."""

MOST_OF_PEAK = 2
"""Figures beyond so many times the peak are impossible, whatever the clocks and the shapes say."""

_ACCUMULATES = "AccumulateGrad"
_BEGINS_CAPTURE = re.compile(r"(cuda|hip)StreamBeginCapture")
_ENDS_CAPTURE = re.compile(r"(cuda|hip)StreamEndCapture")
_NO_INPUTS = RecordedInputs(dims=(), types=())
_GRADIENT_OF = {"input": 0, "weight": 2, "weights": 2}
"""A part of a convolution's backward makes the gradient of one argument. This is where that argument stands in the
backward as a whole."""

_NO_SHAPES = "its shapes were not recorded"
_TOO_MANY = "its shapes give more FLOPs or bytes than a trace can have"
_LARGEST_SUM = 2**61
"""No sum over a trace is larger, so that three of them together are still an integer of a column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """A user's own figures of the device, which win over the table's."""

    flops_per_sec: float | Mapping[str, float] | None = None
    """Dense peak, one for all dtypes or some by dtype."""
    memory_bytes_per_sec: float | None = None


class FlopPart(IntEnum):
    """The bucket that an operator's FLOPs belong to, by the field of the reports that has them."""

    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2
    OPTIMIZER = 3

    @property
    def field(self) -> str:
        """As reports call it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """What each operator of a trace spent; columns over all rows of the trace."""

    works: tuple[RecordedWork, ...]
    """Every different answer once."""
    work: Ints
    """Index into ``works``; -1 for rows that are no operators."""
    rows: Ints
    """Rows of the calls that count, by start; no one of them encloses another."""
    owner: Ints
    """For each row of an operator, the row of the call that counts for it: itself or one around it; -1 without."""
    part: Ints
    """For each row of an operator, a ``FlopPart``."""
    uncounted: Ints
    """Rows of operators that may have spent FLOPs and are not counted."""
    reasons: Mapping[int, str]
    """Why, by the index of the work, where the work does not say it."""

    def of(self, field: str) -> Ints:
        """One number of the work of each call that counts."""
        values = np.array([getattr(work, field) or 0 for work in self.works], dtype=np.int64)
        return values[self.work[self.rows]]

    def without(self, works: Sequence[int], reasons: Mapping[int, str]) -> Counted:
        """The same with the calls of these *works* listed instead of counted."""
        dropped = self.rows[np.isin(self.work[self.rows], works)]
        return replace(
            self,
            rows=self.rows[~np.isin(self.rows, dropped)],
            owner=np.where(np.isin(self.owner, dropped), -1, self.owner),
            uncounted=np.union1d(self.uncounted, dropped),
            reasons=reasons,
        )


def count_trace(trace: Trace, formulas: Formulas) -> Counted:
    """What each operator of *trace* spent; *formulas* is asked once for each different call."""
    works, work = _ask(trace, formulas)
    links, levels = trace.links, trace.links.levels

    def where(holds: Callable[[RecordedWork], bool]) -> Mask:
        return np.array([*map(holds, works), False])[work]

    is_counting, is_free = where(lambda one: one.role == "counts"), where(lambda one: one.role == "free")
    can_count = where(lambda one: one.role == "composite" and one.flops > 0)
    is_heavy = where(lambda one: one.heavy and one.role in ("unread", "unknown"))
    owner, listed = np.full(len(trace), -1, dtype=np.int64), np.zeros(len(trace), dtype=bool)
    settled = _captured(trace)
    """Rows that a call around them, or they themselves, answer for."""
    for rows in levels:
        around = links.parent[rows]
        inner = around >= 0
        owner[rows[inner]] = owner[around[inner]]
        settled[rows[inner]] |= settled[around[inner]]
        fresh = rows[~settled[rows]]
        owner[fresh[is_counting[fresh]]] = fresh[is_counting[fresh]]
        settled[fresh[is_counting[fresh] | is_free[fresh]]] = True
    # From below: who encloses a call that counts, or one that is listed, is answered for by it.
    answered = owner >= 0
    for rows in reversed(levels):
        here = rows[~settled[rows] & ~answered[rows]]
        whole = here[can_count[here]]
        owner[whole] = whole
        listed[here[is_heavy[here]]] = True
        answered[here[can_count[here] | is_heavy[here]]] = True
        answered[links.parent[rows[answered[rows] & (links.parent[rows] >= 0)]]] = True
    # A composite call without any below it has taken these over.
    for rows in levels:
        below = rows[(links.parent[rows] >= 0) & (owner[rows] < 0)]
        owner[below] = owner[links.parent[below]]
    counted = links.operators[owner[links.operators] == links.operators]
    parts = _parts(trace)
    broken = _broken_off(trace, counted, parts)
    owner[broken] = -1
    counted = counted[~np.isin(counted, broken)]
    by_start = counted[np.argsort(trace.start_ns[counted], kind="stable")]
    return Counted(works, work, by_start, owner, parts, np.flatnonzero(listed), {})


def _captured(trace: Trace) -> Mask:
    """Operators that only recorded a graph, in a thread between the begin and the end of a stream capture: none ran."""
    found = np.zeros(len(trace), dtype=bool)
    begins = np.flatnonzero(trace.where(lambda name: _BEGINS_CAPTURE.match(name) is not None, Kind.RUNTIME))
    ends = np.flatnonzero(trace.where(lambda name: _ENDS_CAPTURE.match(name) is not None, Kind.RUNTIME))
    for lane in np.unique(trace.lane[begins]).tolist():
        starts = np.sort(trace.start_ns[begins[trace.lane[begins] == lane]])
        until = np.append(np.sort(trace.start_ns[ends[trace.lane[ends] == lane]]), np.iinfo(np.int64).max)
        spans = Intervals(starts, np.minimum(until[np.searchsorted(until, starts)], np.append(starts[1:], until[-1])))
        rows = trace.links.operators[trace.lane[trace.links.operators] == lane]
        found[rows[inside(spans, trace.start_ns[rows])]] = True
    return found


def _broken_off(trace: Trace, rows: Ints, parts: Ints) -> Ints:
    """Those of *rows* that were called and never ran.

    Checkpointing without reentry ends its repetition once it has what it needs, by an exception within the call of an
    operator. That call stands in the trace with nothing inside but what keeps its inputs for the backward, where the
    same call of the forward has something.
    """
    links = trace.links
    holds = np.zeros(len(trace), dtype=bool)
    keeps = trace.where(lambda name: name in ("aten::detach", "detach"), Kind.OPERATOR)
    holds[links.parent[links.operators[(links.parent[links.operators] >= 0) & ~keeps[links.operators]]]] = True
    launched = links.operator_of_launch[trace.device_rows]
    holds[launched[launched >= 0]] = True
    calls = trace.name[rows] * np.int64(len(trace.recorded_inputs) + 1) + trace.inputs[rows] + 1
    repeats = parts[rows] == FlopPart.RECOMPUTE
    found: Ints = rows[repeats & ~holds[rows] & np.isin(calls, calls[~repeats & holds[rows]])]
    return found


def _ask(trace: Trace, formulas: Formulas) -> tuple[tuple[RecordedWork, ...], Ints]:
    """The answers, and for each row of the trace the index of its own."""
    rows, told = trace.links.operators, _results_told(trace)
    results = {sizes: index for index, sizes in enumerate(dict.fromkeys(told.values()))}
    result = np.full(len(trace), -1, dtype=np.int64)
    result[list(told)] = [results[sizes] for sizes in told.values()]
    # One number for name, inputs and result; the last two may be -1.
    many, more = len(trace.recorded_inputs) + 1, len(results) + 1
    calls = (trace.name[rows] * np.int64(many) + trace.inputs[rows] + 1) * more + result[rows] + 1
    different, index = np.unique(calls, return_inverse=True)
    sizes_of, works = tuple(results), []
    for call in different.tolist():
        name, inputs, sizes = call // more // many, call // more % many - 1, call % more - 1
        recorded = _NO_INPUTS if inputs < 0 else trace.recorded_inputs[inputs]
        known = None if sizes < 0 else sizes_of[sizes]
        work = formulas(RecordedCall(operator=trace.names[name], inputs=recorded, result=known))
        if inputs < 0 and work.role in ("unread", "unknown"):
            work = replace(work, reason=_NO_SHAPES)
        works.append(work)
    numbers = np.full(len(trace), -1, dtype=np.int64)
    numbers[rows] = index.reshape(-1)
    return _summable(works, np.bincount(index.reshape(-1)).tolist()), numbers


def _summable(works: Sequence[RecordedWork], uses: Sequence[int]) -> tuple[RecordedWork, ...]:
    """*works*, each used so often; if their sums would not fit a column, without those that are to blame."""
    largest = [max(work.flops, work.recompute, work.causal_skipped, work.bytes or 0) for work in works]
    if sum(one * used for one, used in zip(largest, uses, strict=True)) <= _LARGEST_SUM:
        return tuple(works)
    most = _LARGEST_SUM // sum(uses)
    return tuple(
        work if one <= most else RecordedWork(role="unread", operator=work.operator, heavy=True, reason=_TOO_MANY)
        for work, one in zip(works, largest, strict=True)
    )


def _results_told(trace: Trace) -> dict[int, tuple[int, ...]]:
    """Sizes of what convolutions returned, if the file does not have their strides, as files from before torch 2.0.

    The result of a forward is as large as the gradient that its node was given in the backward; both carry the same
    sequence number. The gradient of an input or a weight is as large as that input or weight, which is an argument of
    the call around it.
    """
    if all(one.concrete is not None for one in trace.recorded_inputs):
        return {}  # what torch writes since 2.0
    told: dict[int, tuple[int, ...]] = {}
    sizes_at = lru_cache(maxsize=None)(partial(_sizes_at, trace))
    here = np.flatnonzero(trace.where(lambda name: "convolution" in name.lower(), Kind.OPERATOR) & (trace.inputs >= 0))
    nodes = here[(trace.forward_thread[here] > 0) & (trace.sequence[here] >= 0)]
    columns = (trace.sequence[nodes].tolist(), trace.inputs[nodes].tolist())
    gradients = {number: sizes_at(inputs, 0) for number, inputs in zip(*columns, strict=True)}
    # Files of torch 1.8 have no such numbers: there the sizes of what went in tell which backward belongs to it.
    by_sizes: dict[Any, Any] = {}
    for row in here[trace.where(lambda name: name.endswith("convolution_backward"), Kind.OPERATOR)[here]].tolist():
        values, gradient, weight = (sizes_at(int(trace.inputs[row]), place) for place in range(3))
        by_sizes[values, weight] = gradient if by_sizes.get((values, weight), gradient) == gradient else None
    for row in here.tolist():
        name, above = trace.names[trace.name[row]], int(trace.links.parent[row])
        sizes = None
        if (place := _GRADIENT_OF.get(name.rpartition("_backward_")[2])) is not None:
            sizes = sizes_at(int(trace.inputs[above]), place) if above >= 0 else None
        elif trace.forward_thread[row] <= 0 and "backward" not in name:
            values, weight = (sizes_at(int(trace.inputs[row]), place) for place in (0, 1))
            numbered = trace.sequence[row] >= 0
            sizes = gradients.get(int(trace.sequence[row])) if numbered else by_sizes.get((values, weight))
            # The number may be another node's, where this call made none.
            if sizes is not None and (values is None or weight is None or sizes[:2] != (*values[:1], *weight[:1])):
                sizes = None
        if sizes is not None:
            told[row] = sizes
    return told


def _sizes_at(trace: Trace, inputs: int, place: int) -> tuple[int, ...] | None:
    dims = trace.recorded_inputs[inputs].dims if inputs >= 0 else ()
    sizes = dims[place] if len(dims) > place else None
    if not isinstance(sizes, Sequence) or not sizes or not all(type(size) is int for size in sizes):
        return None
    return tuple(sizes)


def _parts(trace: Trace) -> Ints:
    """The bucket of each operator.

    Autograd runs its own operators with gradients off, unless a graph is kept for another backward. An operator that
    has a sequence number there has gradients on: it repeats a part of the forward.
    """
    links = trace.links
    parts = np.full(len(trace), int(FlopPart.FORWARD), dtype=np.int64)
    accumulates = trace.where(lambda name: name.endswith(_ACCUMULATES), Kind.OPERATOR)
    is_node = trace.where(lambda name: NODE.match(name) is not None, Kind.OPERATOR) | (trace.forward_thread > 0)
    is_node &= links.is_backward
    with_gradients = (trace.sequence >= 0) & ~is_node
    keeps_graph = _keeps_graph(trace, is_node, with_gradients)
    for rows in links.levels:
        rows = rows[links.is_backward[rows]]
        parts[rows] = FlopPart.BACKWARD
        inner = rows[links.parent[rows] >= 0]
        around = links.parent[inner]
        handed_down = (parts[around] == FlopPart.OPTIMIZER) | ((parts[around] == FlopPart.RECOMPUTE) & ~is_node[inner])
        parts[inner[handed_down]] = parts[around[handed_down]]
        repeats = with_gradients[inner] & ~keeps_graph[inner] & (parts[inner] == FlopPart.BACKWARD)
        parts[inner[repeats]] = FlopPart.RECOMPUTE
        parts[rows[accumulates[rows] & is_node[rows]]] = FlopPart.OPTIMIZER
    if trace.phases.optimizer is not None:
        in_optimizer = inside(trace.phases.optimizer.merged(), trace.start_ns[links.operators])
        parts[links.operators[in_optimizer]] = FlopPart.OPTIMIZER
    return parts


def _keeps_graph(trace: Trace, is_node: Mask, with_gradients: Mask) -> Mask:
    """Rows inside nodes of a backward that keeps a graph: there every operator that a node calls has gradients on."""
    parent, called = trace.links.parent, trace.links.operators
    called = called[(parent[called] >= 0) & ~is_node[called]]
    called = called[is_node[parent[called]]]
    off, on = np.zeros(len(trace), dtype=bool), np.zeros(len(trace), dtype=bool)
    off[parent[called[~with_gradients[called]]]] = True
    on[parent[called[with_gradients[called]]]] = True
    keeps = is_node & on & ~off
    for rows in trace.links.levels[1:]:
        inner = rows[~is_node[rows]]
        keeps[inner] |= keeps[parent[inner]]
    return keeps


def trace_flops(
    trace: Trace, formulas: Formulas, modules: ModuleTable | None = None, peaks: Peaks | None = None
) -> tuple[TraceFlops | None, tuple[str, ...]]:
    """FLOPs of *trace* by step, operator, kernel and module, and notes on them; None where no shapes were recorded.

    Args:
        trace: what to count.
        formulas: what a recorded call spent.
        modules: the trace's own table of modules, whose times rates are over.
        peaks: a user's own figures of the device.
    """
    if not (trace.inputs[trace.links.operators] >= 0).any():
        return None, ()
    counted = count_trace(trace, formulas)
    calls = _Calls(trace, counted, peaks or Peaks())
    if impossible := calls.impossible():
        counted = counted.without(list(impossible), impossible)
        calls = _Calls(trace, counted, peaks or Peaks())
    kernels_alone = _kernels_alone(trace, counted)
    uncounted = _uncounted(trace, counted, kernels_alone)
    steps = _steps(trace, calls, np.concatenate([counted.uncounted, kernels_alone]))
    beyond = [step for step in steps if step.hfu is not None and step.hfu > MOST_OF_PEAK]
    if beyond:
        steps = tuple(replace(step, mfu=None, hfu=None) if step in beyond else step for step in steps)
        uncounted += tuple(
            UncountedRow(
                name="the whole trace" if step.step is None else f"step {step.step}",
                calls=1,
                reason=f"no MFU: its FLOPs take {step.hfu:.1f} times its time at the peak, so time is missing",
            )
            for step in beyond
        )
    return TraceFlops(
        device=calls.device,
        devices=calls.devices,
        peaks=calls.peaks,
        memory_bytes_per_sec=calls.bandwidth,
        steps=steps,
        outside_steps=int(calls.executed[calls.step < 0].sum()),
        operators=_operators(calls),
        shapes=_shapes(trace, calls),
        kernels=_kernels(trace, calls) if trace.has_device else None,
        modules=None if modules is None else _modules(trace, calls, modules),
        unattributed=None if modules is None else int(calls.executed[_owners(trace, calls) < 0].sum()),
        uncounted=uncounted,
        lower_bound=bool(uncounted),
    ), calls.notes


class _Calls:
    """The calls that count, a column for each property, and the device that ran them."""

    def __init__(self, trace: Trace, counted: Counted, peaks: Peaks) -> None:
        rows = self.rows = counted.rows
        self.counted = counted
        model, again, part = counted.of("flops"), counted.of("recompute"), counted.part[rows]
        self.parts: dict[FlopPart, Ints] = {one: np.where(part == one, model, 0) for one in FlopPart}
        # What a kernel repeats of a forward is recomputation wherever it runs; in the optimizer it is the optimizer's.
        in_optimizer = part == FlopPart.OPTIMIZER
        self.parts[FlopPart.RECOMPUTE] += np.where(in_optimizer, 0, again)
        self.parts[FlopPart.OPTIMIZER] += np.where(in_optimizer, again, 0)
        self.skipped = counted.of("causal_skipped")
        self.executed: Ints = model + again - self.skipped
        self.step = trace.steps.of(trace.start_ns[rows])
        spent = with_callees(trace, device_ns_of_operators(trace)) if trace.has_device else trace.duration_ns
        self.time_ns: Ints = spent[rows]
        self.dtypes = ("tf32", *dict.fromkeys(work.dtype for work in counted.works))
        self.dtype = self._dtypes_of(trace)
        self._find_device(trace, peaks)

    def _dtypes_of(self, trace: Trace) -> Ints:
        """For each call the index of its dtype."""
        index = {dtype: place for place, dtype in enumerate(self.dtypes)}
        written = np.array([index[work.dtype] for work in self.counted.works], dtype=np.int64)
        dtypes = written[self.counted.work[self.rows]]
        if trace.names_tell_tensor_cores:
            events = np.flatnonzero(trace.where(uses_tensor_cores, Kind.KERNEL))
            launchers = trace.links.operator_of_launch[events]
            owners = self.counted.owner[launchers[launchers >= 0]]
            dtypes[np.isin(self.rows, owners) & (dtypes == index.get("float32", -1))] = index["tf32"]
        return dtypes

    def _find_device(self, trace: Trace, peaks: Peaks) -> None:
        used = np.unique(trace.device[trace.kind == Kind.KERNEL]).tolist()
        found = [trace.described(index) for index in used]
        kinds = {(one.name, one.compute_capability, one.sm_count) if one else ("", None, None) for one in found}
        name, capability, sm_count = kinds.pop() if len(kinds) == 1 else ("", None, None)
        alike = device_like(name, capability, sm_count)
        self.device, self.devices = name or alike or None, len(used)
        self.notes: tuple[str, ...] = ()
        if alike is not None:
            self.notes = (
                f"No figures are known for a device called {name!r}: by its compute capability and its {sm_count} "
                f"multiprocessors it is taken for {alike}, so its peak and all shares of it are a guess.",
            )
        known = alike or name
        self._peak = {
            dtype: peak_for(device_name=known, dtype=dtype, given=peaks.flops_per_sec if used else None)
            for dtype in {*self.dtypes, "tf32", "float32"}
        }
        here = sorted({self.dtypes[index] for index in np.unique(self.dtype).tolist()})
        self.peaks = {dtype: peak for dtype in here if (peak := self._peak[dtype]) is not None}
        self.bandwidth = peaks.memory_bytes_per_sec or memory_bytes_per_sec(known)

    def impossible(self) -> dict[int, str]:
        """Works whose calls would have run beyond what the device can do, and why they cannot have."""
        found = {}
        timed = self.time_ns > 0
        work = self.counted.work[self.rows]
        for one in np.unique(work[timed]).tolist():
            here = timed & (work == one)
            dtype = self.dtypes[int(self.dtype[here][0])]
            # Which units computed float32 is not always told.
            peak = max(self._peak[name] or 0.0 for name in (("tf32", "float32") if dtype == "float32" else (dtype,)))
            rate = int(self.executed[here].sum()) / int(self.time_ns[here].sum()) * NS_PER_SEC
            if peak and rate > MOST_OF_PEAK * peak:
                found[one] = f"its shapes and its time give {rate / peak:,.0f} times the peak in {dtype}: impossible"
        return found

    def sums(self, here: Mask) -> dict[str, int]:
        """The FLOPs of some calls by bucket, and what was skipped of them."""
        found = {part.field: int(values[here].sum()) for part, values in self.parts.items()}
        return found | {"causal_skipped": int(self.skipped[here].sum())}

    def by_dtype(self, flops: Ints, here: Mask) -> dict[str, int]:
        """*flops* of some calls by dtype."""
        used = np.unique(self.dtype[here]).tolist()
        return {self.dtypes[index]: int(flops[here & (self.dtype == index)].sum()) for index in used}

    def of_peak(self, flops_by_dtype: Mapping[str, int], seconds: float) -> float | None:
        """Seconds that these FLOPs take at the peak of all devices ÷ *seconds*; None where a peak is not known."""
        at_peak = self.sec_at_peak(flops_by_dtype)
        return None if at_peak is None else ratio(at_peak / self.devices, seconds)

    def sec_at_peak(self, flops_by_dtype: Mapping[str, int]) -> float | None:
        """Seconds that these FLOPs take at the peak of one device; None where a peak is not known."""
        spent = {dtype: flops for dtype, flops in flops_by_dtype.items() if flops}
        if not self.devices or not self.peaks.keys() >= spent.keys():
            return None
        return sum(flops / self.peaks[dtype] for dtype, flops in spent.items())


def _steps(trace: Trace, calls: _Calls, uncounted: Ints) -> tuple[TracedStepFlops, ...]:
    incomplete = set(trace.steps.of(trace.start_ns[uncounted]).tolist())
    model = calls.parts[FlopPart.FORWARD] + calls.parts[FlopPart.BACKWARD]
    found = []
    for index, wall_ns in enumerate((trace.steps.end_ns - trace.steps.start_ns).tolist()):
        here = calls.step == index
        found.append(
            TracedStepFlops(
                step=trace.steps.numbers[index],
                wall_us=wall_ns / NS_PER_US,
                mfu=calls.of_peak(calls.by_dtype(model, here), wall_ns / NS_PER_SEC),
                hfu=calls.of_peak(calls.by_dtype(calls.executed, here), wall_ns / NS_PER_SEC),
                lower_bound=index in incomplete,
                **calls.sums(here),
            )
        )
    return tuple(found)


def _operators(calls: _Calls) -> tuple[OperatorFlops, ...]:
    works, work = calls.counted.works, calls.counted.work[calls.rows]
    names = tuple(dict.fromkeys(one.operator for one in works))
    places = {name: place for place, name in enumerate(names)}
    kind = np.array([places[one.operator] for one in works], dtype=np.int64)[work] * len(calls.dtypes) + calls.dtype
    unknown, size = np.array([one.bytes is None for one in works])[work], calls.counted.of("bytes")
    found = []
    for one in np.unique(kind).tolist():
        name, dtype = names[one // len(calls.dtypes)], calls.dtypes[one % len(calls.dtypes)]
        here = kind == one
        timed = here & (calls.time_ns > 0)
        time_ns, peak = int(calls.time_ns[timed].sum()), calls.peaks.get(dtype)
        rate = ratio(int(calls.executed[timed].sum()) * NS_PER_SEC, time_ns)
        moved = None if unknown[here].any() else int(size[here].sum())
        intensity = None if moved is None else ratio(int(calls.executed[here].sum()), moved)
        roof = None
        if intensity is not None and peak is not None and calls.bandwidth is not None:
            roof = min(peak, intensity * calls.bandwidth)
        found.append(
            OperatorFlops(
                operator=name,
                dtype=dtype,
                calls=int(here.sum()),
                bytes=moved,
                time_us=time_ns / NS_PER_US if timed.any() else None,
                flops_per_sec=rate,
                peak_share=None if rate is None or peak is None else rate / peak,
                flops_per_byte=intensity,
                attainable_flops_per_sec=roof,
                **calls.sums(here),
            )
        )
    return tuple(sorted(found, key=lambda row: (-(row.time_us or 0.0), row.operator, row.dtype)))


def _shapes(trace: Trace, calls: _Calls) -> tuple[ShapeFlops, ...]:
    known = np.flatnonzero(trace.inputs[calls.rows] >= 0)
    listed, groups = by_shapes(trace, calls.rows[known])
    time_ns, dtype = calls.time_ns[known], calls.dtype[known]
    timed = np.where(time_ns > 0, calls.executed[known], 0)
    by_dtype = {
        calls.dtypes[index]: groups.sums(np.where(dtype == index, timed, 0)).tolist()
        for index in np.unique(dtype).tolist()
    }
    columns: dict[str, Any] = {part.field: groups.sums(values[known]).tolist() for part, values in calls.parts.items()}
    columns |= {"causal_skipped": groups.sums(calls.skipped[known]).tolist(), "calls": groups.calls().tolist()}
    spent, spent_ns = groups.sums(timed).tolist(), groups.sums(time_ns).tolist()
    found = []
    for index, key in enumerate(groups.keys.tolist()):
        inputs, dtypes = listed[key % len(listed)]
        at_peak = calls.sec_at_peak({name: sums[index] for name, sums in by_dtype.items()})
        found.append(
            ShapeFlops(
                name=trace.names[key // len(listed)],
                inputs=inputs,
                dtypes=dtypes,
                flops_per_sec=ratio(spent[index] * NS_PER_SEC, spent_ns[index]),
                peak_share=None if at_peak is None else ratio(at_peak * NS_PER_SEC, spent_ns[index]),
                **{name: values[index] for name, values in columns.items()},
            )
        )
    return tuple(sorted(found, key=lambda row: (row.name, row.inputs, row.dtypes)))


def _kernels(trace: Trace, calls: _Calls) -> tuple[KernelFlops, ...]:
    """FLOPs of each kernel: an operator's are those of the kernels in it whose names say that they multiply.

    Where there are several, such as both halves of a convolution's backward, they are divided by time. Where no name
    says so, all kernels of the operator stand for it.
    """
    events = np.flatnonzero(trace.kind == Kind.KERNEL)
    launchers = trace.links.operator_of_launch[events]
    owners = np.where(launchers >= 0, calls.counted.owner[launchers], -1)
    events, owners = events[owners >= 0], owners[owners >= 0]
    place = np.full(len(trace), -1, dtype=np.int64)
    place[calls.rows] = np.arange(len(calls.rows))
    call, count = place[owners], len(calls.rows)
    says_so = trace.where(multiplies, Kind.KERNEL)[events]
    with_one = np.bincount(call[says_so], minlength=count) > 0
    mine = says_so | ~with_one[call]
    events, call = events[mine], call[mine]
    lengths, flops = trace.duration_ns[events], calls.executed[call]
    alone = np.bincount(call, minlength=count)[call] == 1
    together = np.zeros(count, dtype=np.int64)
    np.add.at(together, call, lengths)
    share = flops * np.where(together[call] > 0, lengths / np.maximum(together[call], 1), 0.0)
    found = []
    for name in np.unique(trace.name[events]).tolist():
        here = trace.name[events] == name
        time_ns, own = int(lengths[here].sum()), int(flops[here & alone].sum())
        shared = round(float(share[here & ~alone].sum()))
        rate = ratio((own + shared) * NS_PER_SEC, time_ns)
        dtypes = np.unique(calls.dtype[call[here]]).tolist()
        peak = calls.peaks.get(calls.dtypes[dtypes[0]]) if len(dtypes) == 1 else None
        found.append(
            KernelFlops(
                name=trace.names[name],
                calls=int(here.sum()),
                flops=own,
                shared_flops=shared,
                time_us=time_ns / NS_PER_US,
                flops_per_sec=rate,
                peak_share=None if rate is None or peak is None else rate / peak,
            )
        )
    return tuple(sorted(found, key=lambda row: (-row.time_us, row.name)))


def _owners(trace: Trace, calls: _Calls) -> Ints:
    """For each call the index of the module that owns it; below zero where none does, as in an optimizer."""
    assert trace.frames is not None  # there is a table of modules
    return trace.frames.owner_at(trace, trace.lane[calls.rows], trace.start_ns[calls.rows])[0]


def _modules(trace: Trace, calls: _Calls, table: ModuleTable) -> tuple[TracedModuleFlops, ...]:
    owner = _owners(trace, calls)
    owned, names = owner >= 0, [] if trace.frames is None else list(trace.frames.modules)
    parents = modules_above(tuple(names))

    def own(flops: Ints) -> Ints:
        sums = np.zeros(len(names), dtype=np.int64)
        np.add.at(sums, owner[owned], flops[owned])
        return sums

    parts = {part.field: own(values) for part, values in calls.parts.items() if part != FlopPart.OPTIMIZER}
    selfs = sum(parts.values(), start=np.zeros(len(names), dtype=np.int64)).tolist()
    totals = {field: with_below(values, parents).tolist() for field, values in parts.items()}
    by_dtype = {
        dtype: with_below(own(np.where(calls.dtype == index, calls.executed, 0)), parents).tolist()
        for index, dtype in enumerate(calls.dtypes)
    }
    times = {row.name: (row.forward_us + row.backward_us) / 1e6 for row in table.rows}
    found = []
    for index, name in enumerate(names):
        spent = {field: values[index] for field, values in totals.items()}
        if any(spent.values()):
            seconds = times.get(name, 0.0)
            executed = {dtype: values[index] for dtype, values in by_dtype.items()}
            found.append(
                TracedModuleFlops(
                    name=name,
                    own=selfs[index],
                    flops_per_sec=ratio(sum(executed.values()), seconds),
                    peak_share=calls.of_peak(executed, seconds),
                    **spent,
                )
            )
    return tuple(sorted(found, key=lambda row: row.name.split(".")))


def _kernels_alone(trace: Trace, counted: Counted) -> Ints:
    """Kernels that multiply, by their names, and that no operator launched which counts or is listed."""
    answered = counted.owner >= 0
    answered[counted.uncounted] = True
    for rows in trace.links.levels[1:]:
        answered[rows] |= answered[trace.links.parent[rows]]
    kernels = np.flatnonzero(trace.where(multiplies, Kind.KERNEL) & ~trace.is_collective)
    launcher = trace.links.operator_of_launch[kernels]
    return kernels[(launcher < 0) | ~answered[launcher]]


def _uncounted(trace: Trace, counted: Counted, kernels: Ints) -> tuple[UncountedRow, ...]:
    found: dict[tuple[str, str], int] = {}
    for index in counted.work[counted.uncounted].tolist():
        work = counted.works[index]
        key = (work.operator, counted.reasons.get(index, work.reason))
        found[key] = found.get(key, 0) + 1
    for name in trace.name[kernels].tolist():
        key = (trace.names[name], "a kernel that multiplies, launched by no operator that was counted")
        found[key] = found.get(key, 0) + 1
    rows = [UncountedRow(name=name, calls=calls, reason=reason) for (name, reason), calls in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.calls, row.name, row.reason)))
