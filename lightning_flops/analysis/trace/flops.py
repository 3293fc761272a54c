"""FLOPs of a trace from the shapes in it, joined with the time of the kernels that spent them.

The outermost operator that a formula is known for counts, and what it called does not, as in the counter: operators
that are only made of others (``aten::linear``) leave it to these. An operator for which the file does not say enough
leaves it to those it called, too (``aten::_convolution`` of an old file to ``aten::cudnn_convolution``); if none of
them counts, it is listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.memory_bandwidth import memory_bytes_per_sec
from lightning_flops.analysis.peak_flops import peak_flops_per_sec
from lightning_flops.analysis.trace.columns import Trace
from lightning_flops.analysis.trace.durations import NS_PER_US, ratio
from lightning_flops.analysis.trace.event_names import Kind, multiplies, uses_tensor_cores
from lightning_flops.analysis.trace.intervals import Ints
from lightning_flops.analysis.trace.modules import modules_above, with_below
from lightning_flops.analysis.trace.operator_tables import by_shapes, device_ns_of_operators, with_callees
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

Formulas = Callable[[RecordedCall], RecordedWork]
"""What one recorded call spent. ``instrument.counting.recorded_calls`` has the one there is; it needs torch."""

_NODE = "autograd::engine::evaluate_function:"
_ACCUMULATES = "AccumulateGrad"
_NO_INPUTS = RecordedInputs(dims=(), types=())
_NS_PER_SEC = 1e9
_GRADIENT_OF = {"input": 0, "weight": 2, "weights": 2}
"""A part of a convolution's backward makes the gradient of one argument. This is where that argument stands in the
backward as a whole."""

_NO_SHAPES = "its shapes were not recorded"
_TOO_MANY = "its shapes give more FLOPs or bytes than a trace can have"
_LARGEST_SUM = 2**61
"""No sum over a trace is larger, so that three of them together are still an integer of a column."""


class FlopPart(IntEnum):
    """The bucket that an operator's FLOPs belong to."""

    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2
    OPTIMIZER = 3


_OF_MODULES = (FlopPart.FORWARD, FlopPart.BACKWARD, FlopPart.RECOMPUTE)


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """What each operator of a trace spent; columns over all rows of the trace."""

    works: tuple[RecordedWork, ...]
    """Every different answer once."""
    work: npt.NDArray[np.int32]
    """Index into ``works``; -1 for rows that are no operators."""
    rows: Ints
    """Rows of the calls that count, by start; no one of them encloses another."""
    owner: Ints
    """For each row of an operator, the row of the call that counts for it: itself or one around it; -1 without."""
    part: npt.NDArray[np.int8]
    """For each row of an operator, a ``FlopPart``."""
    uncounted: Ints
    """Rows of operators that may have spent FLOPs and are not counted."""

    def works_of(self, rows: Ints, field: str) -> Ints:
        """One number of the work of each of *rows*."""
        values = np.array([getattr(work, field) or 0 for work in self.works], dtype=np.int64)
        return values[self.work[rows]]


def count_trace(trace: Trace, formulas: Formulas) -> Counted:
    """What each operator of *trace* spent; *formulas* is asked once for each different call."""
    works, work = _ask(trace, formulas)
    links = trace.links
    depth = links.depth[links.operators]
    levels = [links.operators[depth == level] for level in range(int(depth.max(initial=0)) + 1)]
    roles = np.array([one.role for one in works] or ["unknown"], dtype=object)
    is_counting, is_free = (roles == "counts")[work], (roles == "free")[work]
    can_count = np.array([one.role == "composite" and one.flops > 0 for one in works] or [False])[work]
    is_heavy = np.array([one.heavy and one.role in ("unread", "unknown") for one in works] or [False])[work]

    owner = np.full(len(trace), -1, dtype=np.int64)
    settled = np.zeros(len(trace), dtype=bool)
    """Rows that a call around them, or they themselves, answer for."""
    for rows in levels:
        around = links.parent[rows]
        inside = around >= 0
        owner[rows[inside]] = owner[around[inside]]
        settled[rows[inside]] = settled[around[inside]]
        fresh = rows[~settled[rows]]
        counting = fresh[is_counting[fresh]]
        owner[counting] = counting
        settled[fresh[is_counting[fresh] | is_free[fresh]]] = True
    # From below: who encloses a call that counts, or one that is listed, is answered for by it.
    answered = owner >= 0
    listed = np.zeros(len(trace), dtype=bool)
    for rows in reversed(levels):
        here = rows[~settled[rows] & ~answered[rows]]
        whole = here[can_count[here]]
        owner[whole] = whole
        listed[here[is_heavy[here]]] = True
        answered[whole] = True
        answered[here[is_heavy[here]]] = True
        done = rows[answered[rows] & (links.parent[rows] >= 0)]
        answered[links.parent[done]] = True
    # A composite call without any below it has taken these over.
    for rows in levels:
        inside = rows[(links.parent[rows] >= 0) & (owner[rows] < 0)]
        owner[inside] = owner[links.parent[inside]]
    counted = links.operators[owner[links.operators] == links.operators]
    parts = _parts(trace, levels)
    broken = _broken_off(trace, counted, parts)
    owner[broken] = -1
    counted = counted[~np.isin(counted, broken)]
    by_start = counted[np.argsort(trace.start_ns[counted], kind="stable")]
    return Counted(works, work, by_start, owner, parts, np.flatnonzero(listed))


def _broken_off(trace: Trace, rows: Ints, parts: npt.NDArray[np.int8]) -> Ints:
    """Those of *rows* that were called and never ran.

    Checkpointing without reentry ends its repetition once it has what it needs, by an exception within the call of an
    operator. That call stands in the trace with nothing inside but what keeps its inputs for the backward, where the
    same call of the forward has something.
    """
    links = trace.links
    inside = np.zeros(len(trace), dtype=bool)
    called = links.operators[(links.parent[links.operators] >= 0) & ~trace.names_where(_keeps_input)[links.operators]]
    inside[links.parent[called]] = True
    launched = links.operator_of_launch[trace.device_rows]
    inside[launched[launched >= 0]] = True
    calls = trace.name[rows] * np.int64(len(trace.recorded_inputs) + 1) + trace.inputs[rows] + 1
    repeats = parts[rows] == FlopPart.RECOMPUTE
    with_something = np.unique(calls[~repeats & inside[rows]])
    found: Ints = rows[repeats & ~inside[rows] & np.isin(calls, with_something)]
    return found


def _keeps_input(name: str) -> bool:
    return name in ("aten::detach", "detach")


def _ask(trace: Trace, formulas: Formulas) -> tuple[tuple[RecordedWork, ...], npt.NDArray[np.int32]]:
    """The answers, and for each row of the trace the index of its own."""
    rows = trace.links.operators
    told = _results_told(trace)
    results = {sizes: index for index, sizes in enumerate(dict.fromkeys(told.values()))}
    result = np.full(len(trace), -1, dtype=np.int64)
    result[list(told)] = [results[sizes] for sizes in told.values()]
    # One number for name, inputs and result; the last two may be -1.
    many, more = len(trace.recorded_inputs) + 1, len(results) + 1
    calls = (trace.name[rows] * np.int64(many) + trace.inputs[rows] + 1) * more + result[rows] + 1
    different, index = np.unique(calls, return_inverse=True)
    sizes_of = tuple(results)
    works = []
    for call in different.tolist():
        name, inputs, sizes = call // more // many, call // more % many - 1, call % more - 1
        recorded = _NO_INPUTS if inputs < 0 else trace.recorded_inputs[inputs]
        known = None if sizes < 0 else sizes_of[sizes]
        work = formulas(RecordedCall(operator=trace.names[name], inputs=recorded, result=known))
        works.append(work if inputs >= 0 else _without_shapes(work))
    numbers = np.full(len(trace), -1, dtype=np.int32)
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


def _without_shapes(work: RecordedWork) -> RecordedWork:
    if work.role not in ("unread", "unknown"):
        return work
    return RecordedWork(role=work.role, operator=work.operator, heavy=work.heavy, reason=_NO_SHAPES)


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
    convolves = trace.names_where(lambda name: "convolution" in name.lower())
    operators = trace.links.operators
    here = operators[convolves[operators]]
    nodes = here[(trace.forward_thread[here] > 0) & (trace.sequence[here] >= 0) & (trace.inputs[here] >= 0)]
    gradients = {
        number: sizes_at(inputs, 0)
        for number, inputs in zip(trace.sequence[nodes].tolist(), trace.inputs[nodes].tolist(), strict=True)
    }
    for row in here[trace.inputs[here] >= 0].tolist():
        name, above = trace.names[trace.name[row]], int(trace.links.parent[row])
        sizes = None
        if (place := _GRADIENT_OF.get(name.rpartition("_backward_")[2])) is not None:
            sizes = sizes_at(int(trace.inputs[above]), place) if above >= 0 else None
        elif trace.forward_thread[row] <= 0 and trace.sequence[row] >= 0:
            sizes = gradients.get(int(trace.sequence[row]))
            values, weight = (sizes_at(int(trace.inputs[row]), place) for place in (0, 1))
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


def _parts(trace: Trace, levels: Sequence[Ints]) -> npt.NDArray[np.int8]:
    """The bucket of each operator.

    Autograd runs its own operators with gradients off, unless a graph is kept for another backward. An operator that
    has a sequence number there has gradients on: it repeats a part of the forward.
    """
    links = trace.links
    parts = np.full(len(trace), FlopPart.FORWARD, dtype=np.int8)
    is_node = links.is_backward & (
        (trace.forward_thread > 0)
        | trace.names_where(lambda name: name.startswith(_NODE) or name.endswith(_ACCUMULATES))
    )
    accumulates = is_node & trace.names_where(lambda name: name.endswith(_ACCUMULATES))
    with_gradients = (trace.sequence >= 0) & ~is_node
    keeps_graph = _keeps_graph(trace, levels, is_node, with_gradients)
    for rows in levels:
        rows = rows[links.is_backward[rows]]
        parts[rows] = FlopPart.BACKWARD
        inside = rows[links.parent[rows] >= 0]
        around = links.parent[inside]
        handed_down = (parts[around] == FlopPart.OPTIMIZER) | ((parts[around] == FlopPart.RECOMPUTE) & ~is_node[inside])
        parts[inside[handed_down]] = parts[around[handed_down]]
        repeats = with_gradients[inside] & ~keeps_graph[inside] & (parts[inside] == FlopPart.BACKWARD)
        parts[inside[repeats]] = FlopPart.RECOMPUTE
        parts[rows[accumulates[rows]]] = FlopPart.OPTIMIZER
    optimizer = trace.phases.optimizer
    if optimizer is not None and len((spans := optimizer.merged()).starts):
        operators = links.operators
        moments = trace.start_ns[operators]
        index = np.searchsorted(spans.starts, moments, side="right") - 1
        inside_step = (index >= 0) & (moments < spans.ends[np.maximum(index, 0)])
        parts[operators[inside_step]] = FlopPart.OPTIMIZER
    return parts


def _keeps_graph(
    trace: Trace,
    levels: Sequence[Ints],
    is_node: npt.NDArray[np.bool_],
    with_gradients: npt.NDArray[np.bool_],
) -> npt.NDArray[np.bool_]:
    """Rows inside nodes of a backward that keeps a graph: there every operator that a node calls has gradients on."""
    parent = trace.links.parent
    called = trace.links.operators
    called = called[(parent[called] >= 0) & ~is_node[called]]
    called = called[is_node[parent[called]]]
    off, on = np.zeros(len(trace), dtype=bool), np.zeros(len(trace), dtype=bool)
    off[parent[called[~with_gradients[called]]]] = True
    on[parent[called[with_gradients[called]]]] = True
    keeps = is_node & on & ~off
    for rows in levels:
        inside = rows[(parent[rows] >= 0) & ~is_node[rows]]
        keeps[inside] |= keeps[parent[inside]]
    return keeps


def trace_flops(trace: Trace, formulas: Formulas, modules: ModuleTable | None = None) -> TraceFlops | None:
    """FLOPs of *trace* by step, operator, kernel and module; None where no shapes were recorded, or no operators.

    Args:
        trace: what to count.
        formulas: what a recorded call spent.
        modules: the trace's own table of modules, whose times rates are over.
    """
    if not (trace.inputs >= 0).any() or not len(trace.links.operators):
        return None
    counted = count_trace(trace, formulas)
    calls = CountedCalls(trace, counted)
    kernels_alone = _kernels_alone(trace, counted)
    uncounted = _uncounted(trace, counted, kernels_alone)
    return TraceFlops(
        device=calls.device,
        devices=calls.devices,
        peaks=calls.peaks,
        memory_bytes_per_sec=calls.bandwidth,
        steps=_steps(trace, calls, np.concatenate([counted.uncounted, kernels_alone])),
        outside_steps=int(calls.executed[calls.step < 0].sum()),
        operators=_operators(calls),
        shapes=_shapes(trace, calls),
        kernels=_kernels(trace, calls) if trace.has_device else None,
        modules=None if modules is None else _modules(trace, calls, modules),
        unattributed=None if modules is None else int(calls.executed[_owners(trace, calls) < 0].sum()),
        uncounted=uncounted,
        lower_bound=bool(uncounted),
    )


class CountedCalls:
    """The calls that count, a column for each property, and the device that ran them."""

    def __init__(self, trace: Trace, counted: Counted) -> None:
        rows = counted.rows
        self.rows = rows
        self.counted = counted
        model = counted.works_of(rows, "flops")
        again = counted.works_of(rows, "recompute")
        part = counted.part[rows]
        self.parts: dict[FlopPart, Ints] = {one: np.where(part == one, model, 0) for one in FlopPart}
        # What a kernel repeats of a forward is recomputation wherever it runs; in the optimizer it is the optimizer's.
        in_optimizer = part == FlopPart.OPTIMIZER
        self.parts[FlopPart.RECOMPUTE] = self.parts[FlopPart.RECOMPUTE] + np.where(in_optimizer, 0, again)
        self.parts[FlopPart.OPTIMIZER] = self.parts[FlopPart.OPTIMIZER] + np.where(in_optimizer, again, 0)
        self.skipped = counted.works_of(rows, "causal_skipped")
        self.executed: Ints = model + again - self.skipped
        self.step = step_of(trace, trace.start_ns[rows])
        if trace.has_device:
            spent = with_callees(trace, device_ns_of_operators(trace))[rows]
        else:
            spent = trace.duration_ns[rows]
        self.time_ns: Ints = spent
        self.operators = [work.operator for work in counted.works]
        self.dtypes = ("tf32", *dict.fromkeys(work.dtype for work in counted.works))
        self.dtype = self._dtypes_of(trace)
        names = {entry.index: entry.name for entry in trace.devices}
        used = set(trace.device[trace.kind == Kind.KERNEL].tolist())
        kinds = {names.get(index, "") for index in used}
        self.device = kinds.pop() or None if len(kinds) == 1 else None
        self.devices = len(used)
        self.peaks = {
            dtype: peak
            for dtype in sorted({self.dtypes[index] for index in np.unique(self.dtype).tolist()})
            if self.device is not None and (peak := peak_flops_per_sec(self.device, dtype)) is not None
        }
        self.bandwidth = None if self.device is None else memory_bytes_per_sec(self.device)

    def _dtypes_of(self, trace: Trace) -> Ints:
        """For each call the index of its dtype."""
        index = {dtype: place for place, dtype in enumerate(self.dtypes)}
        written = np.array([index[work.dtype] for work in self.counted.works], dtype=np.int64)
        dtypes = written[self.counted.work[self.rows]]
        if not trace.names_tell_tensor_cores:
            return dtypes
        events = trace.device_rows
        events = events[trace.names_where(uses_tensor_cores)[events]]
        launchers = trace.links.operator_of_launch[events]
        owners = self.counted.owner[launchers[launchers >= 0]]
        on_tensor_cores = np.isin(self.rows, owners[owners >= 0])
        dtypes[on_tensor_cores & (dtypes == index.get("float32", -1))] = index["tf32"]
        return dtypes

    def of_peak(self, flops_by_dtype: Mapping[str, int], seconds: float) -> float | None:
        """Seconds that these FLOPs take at the peak of all devices ÷ *seconds*; None where a peak is not known."""
        at_peak = self.sec_at_peak(flops_by_dtype)
        return None if at_peak is None else ratio(at_peak / self.devices, seconds)

    def sec_at_peak(self, flops_by_dtype: Mapping[str, int]) -> float | None:
        """Seconds that these FLOPs take at the peak of one device; None where a peak is not known."""
        if any(dtype not in self.peaks for dtype, flops in flops_by_dtype.items() if flops):
            return None
        if not self.devices or self.device is None:
            return None
        return sum(flops / self.peaks[dtype] for dtype, flops in flops_by_dtype.items() if flops)


def step_of(trace: Trace, moments_ns: Ints) -> Ints:
    """For each moment on the host the step in whose own mark it lies; -1 outside of them."""
    steps = trace.steps
    index = np.searchsorted(steps.host_start_ns, moments_ns, side="right") - 1
    inside = (index >= 0) & (moments_ns < steps.host_end_ns[np.maximum(index, 0)])
    return np.where(inside, index, -1).astype(np.int64)


def _steps(trace: Trace, calls: CountedCalls, uncounted: Ints) -> tuple[TracedStepFlops, ...]:
    incomplete = set(step_of(trace, trace.start_ns[uncounted]).tolist())
    wall_ns = trace.steps.end_ns - trace.steps.start_ns
    model = calls.parts[FlopPart.FORWARD] + calls.parts[FlopPart.BACKWARD]
    found = []
    for index, number in enumerate(trace.steps.numbers):
        here = calls.step == index
        seconds = int(wall_ns[index]) / _NS_PER_SEC
        parts = {one: int(values[here].sum()) for one, values in calls.parts.items()}
        found.append(
            TracedStepFlops(
                step=number,
                forward=parts[FlopPart.FORWARD],
                backward=parts[FlopPart.BACKWARD],
                recompute=parts[FlopPart.RECOMPUTE],
                optimizer=parts[FlopPart.OPTIMIZER],
                causal_skipped=int(calls.skipped[here].sum()),
                wall_us=int(wall_ns[index]) / NS_PER_US,
                mfu=calls.of_peak(_by_dtype(calls, model, here), seconds),
                hfu=calls.of_peak(_by_dtype(calls, calls.executed, here), seconds),
                lower_bound=index in incomplete,
            )
        )
    return tuple(found)


def _by_dtype(calls: CountedCalls, flops: Ints, here: npt.NDArray[np.bool_]) -> dict[str, int]:
    return {
        calls.dtypes[index]: int(flops[here & (calls.dtype == index)].sum())
        for index in np.unique(calls.dtype[here]).tolist()
    }


def _operators(calls: CountedCalls) -> tuple[OperatorFlops, ...]:
    counted = calls.counted
    names = tuple(dict.fromkeys(calls.operators))
    places = {name: place for place, name in enumerate(names)}
    kind = np.array([places[name] for name in calls.operators], dtype=np.int64)[counted.work[calls.rows]]
    kind = kind * len(calls.dtypes) + calls.dtype
    unknown = np.array([work.bytes is None for work in counted.works])[counted.work[calls.rows]]
    size = counted.works_of(calls.rows, "bytes")
    found = []
    for one in np.unique(kind).tolist():
        name, dtype = names[one // len(calls.dtypes)], calls.dtypes[one % len(calls.dtypes)]
        here = kind == one
        timed = here & (calls.time_ns > 0)
        time_ns = int(calls.time_ns[timed].sum())
        executed = int(calls.executed[here].sum())
        rate = ratio(int(calls.executed[timed].sum()) * _NS_PER_SEC, time_ns)
        moved = None if unknown[here].any() else int(size[here].sum())
        peak = calls.peaks.get(dtype)
        intensity = None if moved is None else ratio(executed, moved)
        roof = None
        if intensity is not None and peak is not None and calls.bandwidth is not None:
            roof = min(peak, intensity * calls.bandwidth)
        parts = {one: int(values[here].sum()) for one, values in calls.parts.items()}
        found.append(
            OperatorFlops(
                operator=name,
                dtype=dtype,
                calls=int(here.sum()),
                forward=parts[FlopPart.FORWARD],
                backward=parts[FlopPart.BACKWARD],
                recompute=parts[FlopPart.RECOMPUTE],
                optimizer=parts[FlopPart.OPTIMIZER],
                causal_skipped=int(calls.skipped[here].sum()),
                bytes=moved,
                time_us=time_ns / NS_PER_US if timed.any() else None,
                flops_per_sec=rate,
                peak_share=None if rate is None or peak is None else rate / peak,
                flops_per_byte=intensity,
                attainable_flops_per_sec=roof,
            )
        )
    return tuple(sorted(found, key=lambda row: (-(row.time_us or 0.0), row.operator, row.dtype)))


def _shapes(trace: Trace, calls: CountedCalls) -> tuple[ShapeFlops, ...]:
    known = np.flatnonzero(trace.inputs[calls.rows] >= 0)
    listed, groups = by_shapes(trace, calls.rows[known])
    executed, time_ns, dtype = calls.executed[known], calls.time_ns[known], calls.dtype[known]
    timed = np.where(time_ns > 0, executed, 0)
    by_dtype = {
        calls.dtypes[index]: groups.sums(np.where(dtype == index, timed, 0)).tolist()
        for index in np.unique(dtype).tolist()
    }
    parts = {one: groups.sums(values[known]).tolist() for one, values in calls.parts.items()}
    columns = (groups.keys, groups.calls(), groups.sums(calls.skipped[known]), groups.sums(timed), groups.sums(time_ns))
    found = []
    for index, (key, count, skipped, spent, spent_ns) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        inputs, dtypes = listed[key % len(listed)]
        at_peak = calls.sec_at_peak({name: sums[index] for name, sums in by_dtype.items()})
        found.append(
            ShapeFlops(
                name=trace.names[key // len(listed)],
                inputs=inputs,
                dtypes=dtypes,
                calls=count,
                forward=parts[FlopPart.FORWARD][index],
                backward=parts[FlopPart.BACKWARD][index],
                recompute=parts[FlopPart.RECOMPUTE][index],
                optimizer=parts[FlopPart.OPTIMIZER][index],
                causal_skipped=skipped,
                flops_per_sec=ratio(spent * _NS_PER_SEC, spent_ns),
                peak_share=None if at_peak is None else ratio(at_peak * _NS_PER_SEC, spent_ns),
            )
        )
    return tuple(sorted(found, key=lambda row: (row.name, row.inputs, row.dtypes)))


def _kernels(trace: Trace, calls: CountedCalls) -> tuple[KernelFlops, ...]:
    """FLOPs of each kernel: an operator's are those of the kernels in it whose names say that they multiply.

    Where there are several, such as both halves of a convolution's backward, they are divided by time. Where no name
    says so, all kernels of the operator stand for it.
    """
    events = np.flatnonzero(trace.kind == Kind.KERNEL)
    launchers = trace.links.operator_of_launch[events]
    owners = np.where(launchers >= 0, calls.counted.owner[np.maximum(launchers, 0)], -1)
    events, owners = events[owners >= 0], owners[owners >= 0]
    place = np.full(len(trace), -1, dtype=np.int64)
    place[calls.rows] = np.arange(len(calls.rows))
    call = place[owners]
    says_so = trace.names_where(multiplies)[events]
    with_one = np.zeros(len(calls.rows), dtype=bool)
    with_one[call[says_so]] = True
    mine = says_so | ~with_one[call]
    events, call = events[mine], call[mine]
    lengths = trace.duration_ns[events]
    number = np.bincount(call, minlength=len(calls.rows))
    together = np.zeros(len(calls.rows), dtype=np.int64)
    np.add.at(together, call, lengths)
    alone = number[call] == 1
    flops = calls.executed[call]
    share = np.where(together[call] > 0, lengths / np.maximum(together[call], 1), 0.0)
    found = []
    for name in np.unique(trace.name[events]).tolist():
        here = trace.name[events] == name
        time_ns = int(lengths[here].sum())
        own = int(flops[here & alone].sum())
        shared = round(float((flops * share)[here & ~alone].sum()))
        rate = ratio((own + shared) * _NS_PER_SEC, time_ns)
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


def _owners(trace: Trace, calls: CountedCalls) -> Ints:
    """For each call the index of the module that owns it; below zero where none does, as in an optimizer."""
    frames = trace.frames
    if frames is None:
        return np.full(len(calls.rows), -1, dtype=np.int64)
    frame = frames.at(trace, lanes=trace.lane[calls.rows], moments_ns=trace.start_ns[calls.rows])
    return np.where(frame >= 0, frames.owner[np.maximum(frame, 0)], -1).astype(np.int64)


def _modules(trace: Trace, calls: CountedCalls, table: ModuleTable) -> tuple[TracedModuleFlops, ...]:
    frames = trace.frames
    if frames is None:
        return ()
    owner = _owners(trace, calls)
    owned = np.flatnonzero(owner >= 0)
    parents, count = modules_above(frames.modules), len(frames.modules)

    def of_modules(flops: Ints) -> Ints:
        own = np.zeros(count, dtype=np.int64)
        np.add.at(own, owner[owned], flops[owned])
        return own

    parts = {one: with_below(of_modules(calls.parts[one]), parents).tolist() for one in FlopPart}
    own = of_modules(sum((calls.parts[one] for one in _OF_MODULES), start=np.zeros(len(owner), dtype=np.int64)))
    by_dtype = {
        dtype: with_below(of_modules(np.where(calls.dtype == index, calls.executed, 0)), parents).tolist()
        for index, dtype in enumerate(calls.dtypes)
    }
    times = {row.name: (row.forward_us + row.backward_us) / 1e6 for row in table.rows}
    found = []
    for index, name in enumerate(frames.modules):
        forward, backward, recompute = (parts[one][index] for one in _OF_MODULES)
        if not forward + backward + recompute:
            continue
        seconds = times.get(name, 0.0)
        executed = {dtype: values[index] for dtype, values in by_dtype.items()}
        found.append(
            TracedModuleFlops(
                name=name,
                forward=forward,
                backward=backward,
                recompute=recompute,
                own=int(own[index]),
                flops_per_sec=ratio(sum(executed.values()), seconds),
                peak_share=calls.of_peak(executed, seconds),
            )
        )
    return tuple(sorted(found, key=lambda row: row.name.split(".")))


def _kernels_alone(trace: Trace, counted: Counted) -> Ints:
    """Kernels that multiply, by their names, and that no operator launched which counts or is listed."""
    kernels = np.flatnonzero((trace.kind == Kind.KERNEL) & trace.names_where(multiplies) & ~trace.is_collective)
    launcher = trace.links.operator_of_launch[kernels]
    listed = np.zeros(len(trace), dtype=bool)
    listed[counted.uncounted] = True
    answered = np.zeros(len(kernels), dtype=bool)
    while (inside := launcher >= 0).any():
        rows = np.maximum(launcher, 0)
        answered |= inside & ((counted.owner[rows] >= 0) | listed[rows])
        launcher = np.where(inside, trace.links.parent[rows], -1)
    return kernels[~answered]


def _uncounted(trace: Trace, counted: Counted, kernels: Ints) -> tuple[UncountedRow, ...]:
    found: dict[tuple[str, str], int] = {}
    for row in counted.uncounted.tolist():
        work = counted.works[counted.work[row]]
        key = (work.operator, work.reason)
        found[key] = found.get(key, 0) + 1
    for name in trace.name[kernels].tolist():
        key = (trace.names[name], "a kernel that multiplies, launched by no operator that was counted")
        found[key] = found.get(key, 0) + 1
    rows = [UncountedRow(name=name, calls=calls, reason=reason) for (name, reason), calls in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.calls, row.name, row.reason)))
