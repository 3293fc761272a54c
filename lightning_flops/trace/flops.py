"""FLOPs of a trace by step, operator, kernel and module, joined with the time of the kernels that spent them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_flops.analysis.devices import device_like
from lightning_flops.analysis.memory_bandwidth import memory_bytes_per_sec
from lightning_flops.analysis.peak_flops import peak_for
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
from lightning_flops.trace.counting import Counted, FlopPart, Formulas, count_trace
from lightning_flops.trace.intervals import NS_PER_SEC, NS_PER_US, Ints, Mask, ratio
from lightning_flops.trace.modules import modules_above, with_below
from lightning_flops.trace.names import Kind, multiplies, uses_tensor_cores
from lightning_flops.trace.operators import by_shapes, device_ns_of_operators, with_callees

MOST_OF_PEAK = 2
"""Figures beyond so many times the peak are impossible, whatever the clocks and the shapes say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """A user's own figures of the device, which win over the table's."""

    flops_per_sec: float | Mapping[str, float] | None = None
    """Dense peak, one for all dtypes or some by dtype."""
    memory_bytes_per_sec: float | None = None


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
        self.skipped = counted.of("skipped")
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
        return found | {"skipped": int(self.skipped[here].sum())}

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
    columns |= {"skipped": groups.sums(calls.skipped[known]).tolist(), "calls": groups.calls().tolist()}
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
