"""FLOPs of a trace by step, operator and kernel: by the shapes in it, joined with the time of the kernels.

The outermost operator that a formula is known for counts, and what it called does not, as in the counter: operators
that are only made of others (``aten::linear``) leave it to these. An operator for which the file does not say enough
leaves it to those it called, too; if none of them counts, it is listed.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lightning_flops.analysis.devices import device_named
from lightning_flops.analysis.rates import MOST_OF_PEAK, NO_MFU, peak_for
from lightning_flops.config import ProfilerConfig
from lightning_flops.schema.tables import Flops, ModuleTable, OperatorFlops, TracedStepFlops, TraceFlops, UncountedRow
from lightning_flops.trace.columns import Kind, RecordedInputs, RecordedWork, Trace, multiplies, uses_tensor_cores
from lightning_flops.trace.intervals import (
    NS_PER_SEC,
    NS_PER_US,
    Ints,
    Mask,
    Values,
    group_by,
    inside,
    numbered,
    ratio,
    split_by,
    sums_by,
    table,
)
from lightning_flops.trace.modules import frames_of, with_modules_above
from lightning_flops.trace.steps import phases_of, steps_of
from lightning_flops.trace.structure import enclosing, links_of, nearest
from lightning_flops.trace.tables import by_shape, times_of, with_callees
from lightning_flops.units import si

Formulas = Callable[[str, RecordedInputs], RecordedWork]  # measure.counting.recorded_calls has them, by torch
PARTS = ("forward", "backward", "recompute", "optimizer")  # the buckets that an operator's FLOPs belong to, by number
_FORWARD, _BACKWARD, _RECOMPUTE, _OPTIMIZER = range(len(PARTS))
_CAPTURE = re.compile(r"(cuda|hip)Stream(Begin|End)Capture")
# A library's convolution, and the halves of its backward up to torch 1.10.
_OLD_CONVOLUTION = re.compile(r"aten::\w+_convolution(_backward_(input|weights?))?$")
_Sizes = tuple[int, ...]
_MOST = 2**58  # FLOPs of a call: five minutes of an H100
Sums = Callable[[Values], list[Any]]  # the sums of a column of all calls in each of some groups


def count_trace(trace: Trace, works: Sequence[RecordedWork], work: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Which operators of *trace* count, by what ``works_of`` returns.

    First the rows of the calls that count, by start, none of which encloses another. Then for each row of an operator
    the row of the call that counts for it, itself or one around it, or -1; and the number of its part. Last the rows of
    operators that may have FLOPs and are not counted.
    """
    parent = links_of(trace).parent

    def where(holds: Callable[[RecordedWork], bool]) -> Mask:
        return np.array([*map(holds, works), False])[work]

    def outermost(chosen: Mask) -> Ints:
        """For each row the outermost *chosen* one that it is or that encloses it; -1 without."""
        around = np.append(nearest(parent, chosen), -1)[parent]
        return nearest(parent, chosen & (around < 0))

    counts, captured = where(lambda one: one.role == "counts"), _captured(trace)
    settled = outermost(counts | where(lambda one: one.role == "free") | captured)
    counting = counts & ~captured & (settled == np.arange(len(trace)))
    # Of calls that nothing around them answers for, the innermost do, if nothing counts in them.
    composite = where(lambda one: one.role == "composite" and one.flops > 0)
    open_ = (settled < 0) & (composite | where(lambda one: one.may_have_flops and one.role in ("unread", "unknown")))
    innermost = open_ & (with_callees(trace, (counting | open_).astype(np.int64)) == 1)
    counting |= innermost & composite
    owner, parts = outermost(counting), _parts(trace)
    broken = _broken_off(trace, np.flatnonzero(counting), parts)
    counting[broken], owner[broken] = False, -1
    return trace.by_start(counting), owner, parts, np.flatnonzero(innermost & ~composite)


def _captured(trace: Trace) -> Mask:
    """Operators that only recorded a graph, in a thread between the begin and the end of a stream capture: none ran."""
    found = np.zeros(len(trace), dtype=bool)
    edges, begins = trace.where(_CAPTURE.match, Kind.RUNTIME), trace.where(lambda name: "Begin" in name, Kind.RUNTIME)
    for lane, here in split_by(trace.lane, trace.by_start(edges)):
        rows = np.flatnonzero(trace.lane == lane)
        last = np.searchsorted(trace.start_ns[here], trace.start_ns[rows]) - 1
        found[rows] = (last >= 0) & begins[here[last]]
    return found


def _broken_off(trace: Trace, rows: Ints, parts: Ints) -> Ints:
    """The calls among *rows* that never ran: checkpointing without reentry ends its repetition by an exception."""
    # It has nothing inside but what keeps inputs for the backward, where the same call of the forward has something.
    links, holds = links_of(trace), np.zeros(len(trace) + 1, dtype=bool)
    keeps = trace.where(lambda name: name in ("aten::detach", "detach"), Kind.OPERATOR)
    holds[links.parent[links.operators[~keeps[links.operators]]]] = True
    holds[links.operator_of_launch[trace.device_rows]] = True
    calls, repeats = group_by(trace.name[rows], trace.inputs[rows]).number, parts[rows] == _RECOMPUTE
    found: Mask = repeats & ~holds[rows] & np.isin(calls, calls[~repeats & holds[rows]])
    return rows[found]


def works_of(trace: Trace, formulas: Formulas) -> tuple[list[RecordedWork], Ints]:
    """What *formulas* say of each different call, and for each row of the trace the index of its own."""
    rows, works = links_of(trace).operators, list[RecordedWork]()
    groups = group_by(trace.name[rows], _inputs_of(trace)[rows])
    for name, number in zip(trace.texts(groups.keys[0]), groups.keys[1].tolist(), strict=True):
        inputs = trace.recorded_inputs[number] if number >= 0 else RecordedInputs()
        work = formulas(name, inputs)
        if number < 0 and work.role in ("unread", "unknown"):
            work = replace(work, reason="its shapes were not recorded")
        values, result, weight = _sizes(inputs)
        if _OLD_CONVOLUTION.match(name) and inputs.concrete is None and result[:2] == (*values[:1], *weight[:1]) != ():
            dtype = {"c10::half": "float16", "double": "float64"}.get(str(inputs.types[0]).lower(), "float32")
            flops = max(0, 2 * math.prod(result) * math.prod(weight[1:]))
            size = sum(map(math.prod, (values, result, weight))) * {"float16": 2, "float64": 8}.get(dtype, 4)
            work = RecordedWork(role="counts", operator=work.operator, dtype=dtype, flops=flops, bytes=size)
        if max(work.flops, work.recompute, work.skipped, work.bytes or 0) > _MOST:
            reason = "its shapes give more FLOPs or bytes than a trace can have"
            work = RecordedWork(role="unread", operator=work.operator, may_have_flops=True, reason=reason)
        works.append(work)
    numbers = np.full(len(trace), -1, dtype=np.int64)
    numbers[rows] = groups.number
    return works, numbers


def _inputs_of(trace: Trace) -> Ints:
    """For each row the index of its inputs; of a convolution in a file without strides that of its backward."""
    # There stand the sizes of values, result and weight: a half is called by it, a forward has its values and weight.
    found, parent = trace.inputs.astype(np.int64), links_of(trace).parent
    is_old = trace.where(_OLD_CONVOLUTION.match, Kind.OPERATOR) & (found >= 0)
    halves = is_old & trace.where(lambda name: "_backward_" in name, Kind.OPERATOR) & (parent >= 0)
    wholes = trace.where(lambda name: name.endswith("_convolution_backward"), Kind.OPERATOR) & (found >= 0)
    results = defaultdict[tuple[_Sizes, _Sizes], dict[_Sizes, int]](dict)
    for number in np.unique(found[wholes]).tolist():
        values, result, weight = _sizes(trace.recorded_inputs[number])
        results[values, weight][result] = number
    for number in np.unique(found[is_old & ~halves]).tolist():
        values, weight, _ = _sizes(trace.recorded_inputs[number])
        if len(same := results[values, weight]) == 1:  # else strides differ, which the file does not say
            found[is_old & (trace.inputs == number)] = next(iter(same.values()))
    found[halves] = trace.inputs[parent[halves]]
    return found


def _sizes(inputs: RecordedInputs) -> list[_Sizes]:
    """Sizes of the first three arguments; empty for one that is no tensor."""
    known = [isinstance(one, list) and all(type(size) is int for size in one) for one in inputs.dims[:3]]
    return [*(tuple(one) if fits else () for one, fits in zip(inputs.dims, known, strict=False)), (), (), ()][:3]


def _parts(trace: Trace) -> Ints:
    """The bucket of each operator: one in the backward that has a sequence number repeats a part of the forward."""
    # Autograd runs its own operators with gradients off, unless a graph is kept for another backward: there every
    # operator that a node calls has them on.
    links, parent, is_node = links_of(trace), links_of(trace).parent, links_of(trace).is_node
    with_gradients = links.is_backward & (trace.sequence >= 0) & ~is_node
    off = np.zeros(len(trace) + 1, dtype=bool)  # the last is that of no node
    off[parent[~is_node & ~with_gradients]] = True
    off[-1] = False
    repeats = np.append(with_gradients & off[nearest(parent, is_node)], False)
    parts = np.where(links.is_backward, _BACKWARD, _FORWARD)
    parts[repeats[nearest(parent, is_node | repeats[:-1])]] = _RECOMPUTE
    accumulates = is_node & trace.where(lambda name: name.endswith("AccumulateGrad"), Kind.OPERATOR)
    parts[nearest(parent, accumulates) >= 0] = _OPTIMIZER
    if (optimizer := phases_of(trace).get("optimizer")) is not None:
        parts[inside(optimizer.own, trace.start_ns)] = _OPTIMIZER
    return parts


def find_work(trace: Trace, formulas: Formulas, given: ProfilerConfig | None = None) -> Work | None:
    """The calls that count, FLOPs by *formulas*; what exceeds twice the peak is listed instead. None without shapes.

    A user's own figures of the device, *given* as settings, win over the table's.
    """
    if not (trace.inputs[links_of(trace).operators] >= 0).any():
        return None
    works, work = works_of(trace, formulas)
    found = Work(trace, works, work, given or ProfilerConfig())
    impossible = found.impossible()
    for index, reason in impossible.items():
        works[index] = replace(works[index], role="unread", may_have_flops=True, reason=reason)
    return Work(trace, works, work, given or ProfilerConfig()) if impossible else found


def _device_of(trace: Trace, dtypes: Iterable[str], given: ProfilerConfig) -> TraceFlops:
    """The devices that ran the kernels, which are alike, and their peaks by dtype; of no call yet."""
    used, count = trace.used_device, len(np.unique(trace.device[trace.kind == Kind.KERNEL]))
    name = used.name if used else ""
    own, row = given.peak_flops_per_sec if count else None, device_named(name)
    found = {dtype: peak_for(device_name=name, dtype=dtype, given=own) for dtype in dtypes}
    return TraceFlops(
        device=name or None,
        devices=count,
        peaks={dtype: peak for dtype, peak in found.items() if peak is not None},
        memory_bytes_per_sec=given.memory_bytes_per_sec or (row and row.memory_bytes_per_sec),
        steps=(),
        mfu=None,
        hfu=None,
        operators=(),
        uncounted=(),
    )


class Work:
    """The calls that count, a column for each property, and the device that ran them."""

    def __init__(self, trace: Trace, works: Sequence[RecordedWork], work: Ints, given: ProfilerConfig) -> None:
        self.trace, self.works, self.work_of = trace, works, work
        self.rows, self.owner, part, self.uncounted = count_trace(trace, works, work)
        self.work, part, times = work[self.rows], part[self.rows], times_of(trace)
        figures = [(one.flops, one.recompute, one.skipped, -1 if one.bytes is None else one.bytes) for one in works]
        model, again, skipped, self.bytes = np.array(figures, dtype=np.int64).T[:, self.work]
        self.parts: dict[str, Ints] = {name: np.where(part == one, model, 0) for one, name in enumerate(PARTS)}
        # What a kernel repeats of a forward is recomputation wherever it runs; in the optimizer it is the optimizer's.
        self.parts["recompute"] += np.where(part == _OPTIMIZER, 0, again)
        self.parts["optimizer"] += np.where(part == _OPTIMIZER, again, 0)
        self.parts["skipped"] = skipped
        self.executed: Ints = model + again - skipped
        self.time_ns: Ints = (times.device if trace.has_device else times.host)[self.rows]
        self.dtypes, dtype = numbered(("tf32", "float32", *(one.dtype for one in works)))
        self.dtype = dtype[2:][self.work]
        # Which units computed float32 is not always known; before compute capability 8.0 none has TF32.
        may_be_tf32 = (self.dtype == 1) & ((getattr(trace.used_device, "compute_capability", None) or (8, 0)) >= (8, 0))
        if trace.names_tell_tensor_cores:
            launchers = links_of(trace).operator_of_launch[trace.where(uses_tensor_cores, Kind.KERNEL)]
            self.dtype[may_be_tf32 & np.isin(self.rows, self.owner[launchers[launchers >= 0]])] = 0
        self.device = _device_of(trace, self.dtypes, given)
        known = np.array([self.device.peaks.get(dtype, np.nan) for dtype in self.dtypes])
        self._peak = known[self.dtype]  # of each call in its dtype; NaN where that is not known
        # Of each call in the dtypes in which it may have run; NaN where that of one is not known.
        self._highest_peak = np.where(may_be_tf32, np.maximum(self._peak, known[0]), self._peak)

    def impossible(self) -> dict[int, str]:
        """Works whose calls would have run beyond what the device can do, and why they cannot have."""
        found = {}
        timed = np.flatnonzero(self.time_ns > 0)
        groups = group_by(self.work[timed])
        sums = (groups.sums(self.executed[timed]), groups.sums(self.time_ns[timed]))
        peaks = groups.reduced(np.maximum, self._highest_peak[timed])  # NaN where one is
        for work, flops, time_ns, peak in zip(groups.keys[0].tolist(), *sums, peaks, strict=True):
            times = flops / time_ns * NS_PER_SEC / peak
            if times > MOST_OF_PEAK:
                found[work] = f"its shapes give {si(flops, 'FLOPs')} at {times:,.0f} times the peak: impossible"
        return found

    def _columns(self, of: Sums, over_ns: list[float] | None = None) -> dict[str, list[Any]]:
        """FLOPs by phase, rate and share of the peak of each group: over its calls' time, or *over_ns* if given."""
        timed = np.where(self.time_ns > 0, self.executed, 0) if over_ns is None else self.executed
        time_ns = of(self.time_ns) if over_ns is None else over_ns
        rates = [ratio(flops * NS_PER_SEC, ns) for flops, ns in zip(of(timed), time_ns, strict=True)]
        pairs = zip(rates, self._of_peak(timed, of, time_ns), strict=True)
        possible = [(rate, share) if (share or 0) <= MOST_OF_PEAK else (None, None) for rate, share in pairs]
        columns = {name: of(values) for name, values in self.parts.items()}
        return columns | {"flops_per_sec": [one[0] for one in possible], "of_peak": [one[1] for one in possible]}

    def _of_peak(self, flops: Ints, of: Sums, time_ns: list[float]) -> list[float | None]:
        """Time that *flops* of each group take at the devices' peak ÷ *time_ns*; None where a peak is not known."""
        at_peak = of(np.where(flops > 0, flops * (NS_PER_SEC / self._peak), 0.0))
        return [None if np.isnan(one) else ratio(one, ns) for one, ns in zip(at_peak, time_ns, strict=True)]

    def totals(self) -> TraceFlops:
        """FLOPs by step and operator, the device's figures, and what was not counted."""
        uncounted, rows = self._uncounted()
        steps = [*self._steps(rows)]
        left_out = "".join(f" ({one.reason})" for one in uncounted[:1])
        nothing = "" if any(step.total for step in steps) else f"no call with FLOPs was counted in it{left_out}"
        for place, step in enumerate(steps):
            if nothing or (step.hfu or 0) > 1:
                steps[place] = replace(step, mfu=None, hfu=None, of_peak=None, flops_per_sec=None)
                uncounted.append(_impossible(step, nothing))
        walls = [step.wall_us for step in steps]
        shares = np.array([(step.mfu, step.hfu) for step in steps], dtype=np.float64)  # None is NaN
        means = np.average(shares, axis=0, weights=walls).tolist() if any(walls) else [math.nan] * 2
        mfu, hfu = (None if math.isnan(one) else one for one in means)
        here = sorted(self.dtypes[index] for index in np.unique(self.dtype).tolist())
        peaks = {dtype: self.device.peaks[dtype] for dtype in here if dtype in self.device.peaks}
        return replace(
            self.device,
            peaks=peaks,
            steps=tuple(steps),
            mfu=mfu,
            hfu=hfu,
            operators=self._operators(peaks),
            uncounted=tuple(uncounted),
        )

    def _steps(self, uncounted: Ints) -> tuple[TracedStepFlops, ...]:
        trace, steps, devices = self.trace, steps_of(self.trace), self.device.devices
        walls = (steps.end_ns - steps.start_ns).tolist()
        of_devices = [devices * wall for wall in walls]
        step = steps.of(trace.start_ns[self.rows])

        def of(values: Values) -> list[Any]:
            # The first are outside of all steps.
            return sums_by(step + 1, values, len(steps) + 1)[1:].tolist()  # type: ignore[no-any-return]

        model = self.parts["forward"] + self.parts["backward"]
        counted = {"mfu": model, "hfu": self.executed + self.parts["skipped"]}
        shares = {name: self._of_peak(flops, of, of_devices) for name, flops in counted.items()}
        rates = [ratio(flops * NS_PER_SEC, wall) for flops, wall in zip(of(self.executed), walls, strict=True)]
        return table(
            TracedStepFlops,
            step=steps.numbers,
            wall_us=[wall / NS_PER_US for wall in walls],
            lower_bound=np.isin(np.arange(len(steps)), steps.of(trace.start_ns[uncounted])).tolist(),
            **self._columns(of, of_devices) | shares | {"flops_per_sec": rates},
        )

    def _operators(self, peaks: Mapping[str, float]) -> tuple[OperatorFlops, ...]:
        bandwidth = self.device.memory_bytes_per_sec
        names, number = numbered(one.operator for one in self.works)
        groups = group_by(number[self.work], self.dtype)
        dtypes = [self.dtypes[key] for key in groups.keys[1].tolist()]
        moved = groups.sums_known(self.bytes)
        sums = zip(groups.sums(self.executed), moved, strict=True)
        intensities = [(size and flops / size) or None for flops, size in sums]
        roofs = [
            min(peaks[dtype], one * bandwidth) if one and dtype in peaks and bandwidth else None
            for one, dtype in zip(intensities, dtypes, strict=True)
        ]
        return table(
            OperatorFlops,
            lambda row: (-(row.time_us or 0.0), row.name, row.dtype),
            name=[names[key] for key in groups.keys[0].tolist()],
            dtype=dtypes,
            calls=groups.calls,
            time_us=[ns / NS_PER_US if ns else None for ns in groups.sums(self.time_ns)],
            bytes=moved,
            flops_per_byte=intensities,
            attainable_flops_per_sec=roofs,
            **self._columns(groups.sums),
        )

    def of_shapes(self) -> dict[tuple[str, str], Flops]:
        """FLOPs of operators by name and sizes of inputs."""
        known = np.flatnonzero(self.trace.inputs[self.rows] >= 0)
        keys, groups = by_shape(self.trace, self.rows[known])
        return dict(zip(keys, table(Flops, **self._columns(lambda values: groups.sums(values[known]))), strict=True))

    def of_kernels(self) -> dict[str, Flops]:
        """FLOPs by kernel: an operator's are those of its kernels whose names say that they multiply, by their time."""
        trace, count = self.trace, len(self.rows)
        place = np.full(len(trace) + 1, -1, dtype=np.int64)  # the last is that of no call
        place[self.rows] = np.arange(count)
        events = np.flatnonzero(trace.kind == Kind.KERNEL)
        call = place[np.append(self.owner, -1)[links_of(trace).operator_of_launch[events]]]
        events, call = events[call >= 0], call[call >= 0]
        says_so = trace.where(multiplies, Kind.KERNEL)[events]
        # Where no name says so, all kernels of the operator stand for it.
        mine = says_so | (np.bincount(call[says_so], minlength=count) == 0)[call]
        events, call = events[mine], call[mine]
        lengths, groups = trace.duration_ns[events], group_by(trace.name[events])
        part = lengths / np.maximum(sums_by(call, lengths, count)[call], 1)

        def of(values: Values) -> list[Any]:
            sums = groups.sums(values[call] * part)
            return sums if values.dtype.kind == "f" else [round(one) for one in sums]

        found = table(Flops, **self._columns(of, groups.sums(lengths)))
        return dict(zip(trace.texts(groups.keys[0]), found, strict=True))

    def of_modules(self, modules: ModuleTable) -> ModuleTable:
        """*modules* with the FLOPs of the calls in each and below it, over its time in forward and backward."""
        trace, frames = self.trace, frames_of(self.trace)
        assert frames is not None  # there is a table of them
        frame = enclosing(trace, frames.rows, frames.parent, trace.lane[self.rows], trace.start_ns[self.rows])
        owner = np.where(frame >= 0, frames.owner[frame], -1)
        owners, which = with_modules_above(owner[owner >= 0], np.flatnonzero(owner >= 0), frames.modules)

        def of(values: Values) -> list[Any]:
            return sums_by(owners, values[which], len(frames.modules)).tolist()  # type: ignore[no-any-return]

        spent = {row.name: NS_PER_US * (row.forward_us + row.backward_us) for row in modules.rows}
        found = table(Flops, **self._columns(of, [spent[name] for name in frames.modules]))
        flops = dict(zip(frames.modules, found, strict=True))
        return replace(modules, rows=tuple(replace(row, flops=flops[row.name]) for row in modules.rows))

    def _uncounted(self) -> tuple[list[UncountedRow], Ints]:
        """What may have FLOPs and is not counted, kernels that multiply in no counted operator, too; and rows."""
        trace, answered = self.trace, np.append(self.owner >= 0, False)  # the last is that of no operator
        answered[self.uncounted] = True
        kernels = np.flatnonzero(trace.where(multiplies, Kind.KERNEL) & ~trace.is_collective)
        launchers, around = links_of(trace).operator_of_launch[kernels], np.append(links_of(trace).parent, -1)
        alone = kernels[nearest(around, answered)[launchers] < 0]
        works = [self.works[index] for index in self.work_of[self.uncounted].tolist()]
        found = Counter((work.operator, work.reason) for work in works)
        reason = "a kernel that multiplies, launched by no operator that was counted"
        found.update((trace.name_of(row), reason) for row in alone.tolist())
        rows = [UncountedRow(name=name, calls=calls, reason=reason) for (name, reason), calls in found.items()]
        rows.sort(key=lambda row: (-row.calls, row.name, row.reason))
        return rows, np.concatenate([self.uncounted, alone])


def _impossible(step: TracedStepFlops, nothing: str) -> UncountedRow:
    """Why the MFU of *step* is no figure: there is *nothing* in it, in words, or it is beyond the peak."""
    name = "the whole trace" if step.step is None else f"step {step.step}"
    why = "so time is missing" if (step.of_peak or 0) > 1 else "with those of masked attention, which do not run"
    missing = f"its FLOPs take {step.hfu or 0:.1f} times its time at the peak, {why}"
    return UncountedRow(name=name, calls=1, reason=NO_MFU + (nothing or missing))
