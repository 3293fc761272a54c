"""FLOPs of a trace by step, operator, kernel and module, joined with the time of the kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.devices import device_like, memory_bytes_per_sec
from lightning_flops.analysis.peaks import peak_for
from lightning_flops.analysis.rates import MOST_OF_PEAK
from lightning_flops.schema.trace_flops import FlopRow, TracedStepFlops, TraceFlops, UncountedRow
from lightning_flops.schema.trace_steps import ModuleTable
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.counting import Counted, FlopPart, Formulas, count_trace, works_of
from lightning_flops.trace.intervals import NS_PER_SEC, NS_PER_US, Ints, distinct, group_by, ratio, sums_by, table
from lightning_flops.trace.modules import modules_above, with_below
from lightning_flops.trace.names import Kind, multiplies, uses_tensor_cores
from lightning_flops.trace.structure import nearest
from lightning_flops.trace.tables import by_shapes, device_ns_of_operators, with_callees

Sums = Callable[[npt.NDArray[Any]], list[Any]]
"""The sums of a column of all calls in each of some groups."""
_KERNEL_ALONE = "a kernel that multiplies, launched by no operator that was counted"


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

    Rates of modules are over the times in *modules*, the trace's own table.
    """
    if not (trace.inputs[trace.links.operators] >= 0).any():
        return None, ()
    works, work = works_of(trace, formulas)
    calls = _Calls(trace, count_trace(trace, works, work), peaks or Peaks())
    if impossible := calls.impossible():
        for index, reason in impossible.items():
            works[index] = replace(works[index], role="unread", heavy=True, reason=reason)
        calls = _Calls(trace, count_trace(trace, works, work), peaks or Peaks())
    alone = _kernels_alone(trace, calls.counted)
    uncounted = _uncounted(trace, calls.counted, alone)
    steps = _steps(calls, np.concatenate([calls.counted.uncounted, alone]))
    for step in steps:
        if step.hfu is not None and step.hfu > MOST_OF_PEAK:
            name = "the whole trace" if step.step is None else f"step {step.step}"
            reason = f"no MFU: its FLOPs take {step.hfu:.1f} times its time at the peak, so time is missing"
            uncounted.append(UncountedRow(name=name, calls=1, reason=reason))
    return TraceFlops(
        device=calls.device,
        devices=calls.devices,
        peaks=calls.peaks,
        memory_bytes_per_sec=calls.bandwidth,
        steps=tuple(replace(one, mfu=None, hfu=None) if one.hfu and one.hfu > MOST_OF_PEAK else one for one in steps),
        operators=_operators(calls),
        shapes=_shapes(calls),
        kernels=_kernels(calls) if trace.has_device else None,
        modules=None if modules is None else _modules(calls, modules),
        uncounted=tuple(uncounted),
        lower_bound=bool(uncounted),
    ), calls.notes


class _Calls:
    """The calls that count, a column for each property, and the device that ran them."""

    def __init__(self, trace: Trace, counted: Counted, peaks: Peaks) -> None:
        self.trace, self.counted = trace, counted
        rows = self.rows = counted.rows
        model, again, part = counted.of("flops"), counted.of("recompute"), counted.part[rows]
        self.parts: dict[str, Ints] = {one.name.lower(): np.where(part == one, model, 0) for one in FlopPart}
        # What a kernel repeats of a forward is recomputation wherever it runs; in the optimizer it is the optimizer's.
        in_optimizer = part == FlopPart.OPTIMIZER
        self.parts["recompute"] += np.where(in_optimizer, 0, again)
        self.parts["optimizer"] += np.where(in_optimizer, again, 0)
        self.parts["skipped"] = counted.of("skipped")
        self.executed: Ints = model + again - self.parts["skipped"]
        spent = with_callees(trace, device_ns_of_operators(trace)) if trace.has_device else trace.duration_ns
        self.time_ns: Ints = spent[rows]
        self.dtypes = ("tf32", *dict.fromkeys(work.dtype for work in counted.works))
        self.dtype = self._dtypes_of()
        self._find_device(peaks)
        peak = np.array([self._peak[dtype] or np.nan for dtype in self.dtypes])[self.dtype]
        self.ns_per_flop = NS_PER_SEC / (peak if self.devices else peak * np.nan)
        """Of each call, at the peak of its dtype; NaN where that is not known."""

    def _dtypes_of(self) -> Ints:
        """For each call the index of its dtype."""
        trace, index = self.trace, {dtype: place for place, dtype in enumerate(self.dtypes)}
        written = np.array([index[work.dtype] for work in self.counted.works], dtype=np.int64)
        dtypes = written[self.counted.work[self.rows]]
        if trace.names_tell_tensor_cores:
            launchers = trace.links.operator_of_launch[trace.where(uses_tensor_cores, Kind.KERNEL)]
            owners = self.counted.owner[launchers[launchers >= 0]]
            dtypes[np.isin(self.rows, owners) & (dtypes == index.get("float32", -1))] = index["tf32"]
        return dtypes

    def _find_device(self, peaks: Peaks) -> None:
        used = self.trace.used_device
        name, capability, sm_count = (used.name, used.compute_capability, used.sm_count) if used else ("", None, None)
        alike = device_like(name, capability, sm_count)
        self.devices = len(distinct(self.trace.device[self.trace.kind == Kind.KERNEL]))
        self.device = name or alike or None
        self.notes: tuple[str, ...] = ()
        if alike is not None:
            self.notes = (
                f"No figures are known for a device called {name!r}: by its compute capability and its {sm_count} "
                f"multiprocessors it is taken for {alike}, so its peak and all shares of it are a guess.",
            )
        given = peaks.flops_per_sec if self.devices else None
        self._peak = {
            dtype: peak_for(device_name=alike or name, dtype=dtype, given=given)
            for dtype in {*self.dtypes, "tf32", "float32"}
        }
        here = sorted(self.dtypes[index] for index in distinct(self.dtype).tolist())
        self.peaks = {dtype: peak for dtype in here if (peak := self._peak[dtype]) is not None}
        self.bandwidth = peaks.memory_bytes_per_sec or memory_bytes_per_sec(alike or name)

    def impossible(self) -> dict[int, str]:
        """Works whose calls would have run beyond what the device can do, and why they cannot have."""
        found = {}
        timed = np.flatnonzero(self.time_ns > 0)
        groups = group_by(self.counted.work[self.rows[timed]])
        sums = (groups.sums(self.executed[timed]), groups.sums(self.time_ns[timed]))
        for work, flops, time_ns in zip(groups.keys.tolist(), *sums, strict=True):
            dtype = self.counted.works[work].dtype
            # Which units computed float32 is not always known.
            peak = max(self._peak[name] or 0.0 for name in (("tf32", "float32") if dtype == "float32" else (dtype,)))
            rate = flops / time_ns * NS_PER_SEC
            if peak and rate > MOST_OF_PEAK * peak:
                found[work] = f"its shapes and its time give {rate / peak:,.0f} times the peak in {dtype}: impossible"
        return found

    def columns(self, of: Sums, over_ns: list[float] | None = None) -> dict[str, list[Any]]:
        """FLOPs by bucket, time, rate and share of the peak of each group; *over_ns* is its time if given."""
        timed = self.executed if over_ns is not None else np.where(self.time_ns > 0, self.executed, 0)
        time_ns = of(self.time_ns) if over_ns is None else over_ns
        devices = 1 if over_ns is None else self.devices
        return {
            **{name: of(values) for name, values in self.parts.items()},
            "flops": of(self.executed),
            "time_us": [ns / NS_PER_US if ns else None for ns in time_ns],
            "flops_per_sec": [ratio(one * NS_PER_SEC, ns) for one, ns in zip(of(timed), time_ns, strict=True)],
            "peak_share": self.of_peak(timed, of, time_ns, devices),
        }

    def of_peak(self, flops: Ints, of: Sums, time_ns: Sequence[float], devices: int) -> list[float | None]:
        """Time that *flops* of each group take at the devices' peak ÷ *time_ns*; None where a peak is not known."""
        at_peak = of(np.where(flops > 0, flops * self.ns_per_flop, 0.0))
        return [
            None if not devices or np.isnan(one) else ratio(one / devices, ns)
            for one, ns in zip(at_peak, time_ns, strict=True)
        ]


def _steps(calls: _Calls, uncounted: Ints) -> tuple[TracedStepFlops, ...]:
    trace, steps = calls.trace, calls.trace.steps
    walls = (steps.end_ns - steps.start_ns).tolist()
    step = steps.of(trace.start_ns[calls.rows])

    def of_step(values: npt.NDArray[Any]) -> list[Any]:
        # The first are outside of all steps.
        return sums_by(step + 1, values, len(steps) + 1)[1:].tolist()  # type: ignore[no-any-return]

    return table(
        TracedStepFlops,
        step=steps.numbers,
        wall_us=[wall / NS_PER_US for wall in walls],
        mfu=calls.of_peak(calls.parts["forward"] + calls.parts["backward"], of_step, walls, calls.devices),
        hfu=calls.of_peak(calls.executed, of_step, walls, calls.devices),
        lower_bound=np.isin(np.arange(len(steps)), steps.of(trace.start_ns[uncounted])).tolist(),
        **{name: of_step(values) for name, values in calls.parts.items()},
    )


def _operators(calls: _Calls) -> tuple[FlopRow, ...]:
    works, work, count = calls.counted.works, calls.counted.work[calls.rows], len(calls.dtypes)
    names, number = np.unique([one.operator for one in works], return_inverse=True)
    groups = group_by(number[work] * count + calls.dtype)
    dtypes = [calls.dtypes[key % count] for key in groups.keys.tolist()]
    moved = groups.sums_known(calls.counted.of("bytes"), np.array([one.bytes is not None for one in works])[work])
    columns = calls.columns(groups.sums)
    intensities = [size and flops / size for flops, size in zip(columns["flops"], moved, strict=True)]
    peaks = [calls.peaks.get(dtype) for dtype in dtypes]
    return table(
        FlopRow,
        lambda row: (-(row.time_us or 0.0), row.name, row.dtype),
        name=names[groups.keys // count].tolist(),
        dtype=dtypes,
        bytes=moved,
        flops_per_byte=[one or None for one in intensities],
        attainable_flops_per_sec=[
            min(peak, one * calls.bandwidth) if one and peak and calls.bandwidth else None
            for one, peak in zip(intensities, peaks, strict=True)
        ],
        calls=groups.calls,
        **columns,
    )


def _shapes(calls: _Calls) -> tuple[FlopRow, ...]:
    known = np.flatnonzero(calls.trace.inputs[calls.rows] >= 0)
    words, groups = by_shapes(calls.trace, calls.rows[known])
    return table(
        FlopRow,
        lambda row: (row.name, row.inputs, row.dtypes),
        name=calls.trace.texts(calls.trace.name[calls.rows[known[groups.order[groups.firsts]]]]),
        calls=groups.calls,
        **words,
        **calls.columns(lambda values: groups.sums(values[known])),
    )


def _kernels(calls: _Calls) -> tuple[FlopRow, ...]:
    """FLOPs of each kernel: an operator's are those of the kernels in it whose names say that they multiply.

    Where there are several, such as both halves of a convolution's backward, they are divided by time. Where no name
    says so, all kernels of the operator stand for it.
    """
    trace, count = calls.trace, len(calls.rows)
    place = np.full(len(trace) + 1, -1, dtype=np.int64)  # the last is that of no call
    place[calls.rows] = np.arange(count)
    events = trace.of(Kind.KERNEL)
    call = place[np.append(calls.counted.owner, -1)[trace.links.operator_of_launch[events]]]
    events, call = events[call >= 0], call[call >= 0]
    says_so = trace.where(multiplies, Kind.KERNEL)[events]
    mine = says_so | (np.bincount(call[says_so], minlength=count) == 0)[call]
    events, call = events[mine], call[mine]
    lengths = trace.duration_ns[events]
    shared, together = np.bincount(call, minlength=count)[call] > 1, sums_by(call, lengths, count)[call]
    flops = calls.executed[call] * np.where(shared, lengths / np.maximum(together, 1), 1.0)
    groups = group_by(trace.name[events])
    time_ns, spent = groups.sums(lengths), [round(one) for one in groups.sums(flops)]
    at_peak = groups.sums(flops * calls.ns_per_flop[call])
    return table(
        FlopRow,
        lambda row: (-(row.time_us or 0.0), row.name),
        name=trace.texts(groups.keys),
        calls=groups.calls,
        flops=spent,
        estimated=groups.reduced(np.logical_or, shared),
        time_us=[ns / NS_PER_US for ns in time_ns],
        flops_per_sec=[ratio(one * NS_PER_SEC, ns) for one, ns in zip(spent, time_ns, strict=True)],
        peak_share=[None if np.isnan(one) else ratio(one, ns) for one, ns in zip(at_peak, time_ns, strict=True)],
    )


def _modules(calls: _Calls, modules: ModuleTable) -> tuple[FlopRow, ...]:
    trace, frames = calls.trace, calls.trace.frames
    assert frames is not None  # there is a table of modules
    owner = frames.owner_at(trace, trace.lane[calls.rows], trace.start_ns[calls.rows])[0]
    owned, names = owner >= 0, frames.modules
    above = modules_above(names)

    def own(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return sums_by(owner[owned], values[owned], len(names))

    in_table = {row.name: row for row in modules.rows}
    rows = [in_table[name] for name in names]
    columns = calls.columns(
        lambda values: with_below(own(values), above).tolist(),
        [(row.forward_us + row.backward_us) * NS_PER_US for row in rows],
    )
    del columns["optimizer"]
    found = table(
        FlopRow,
        lambda row: row.name.split("."),
        name=names,
        calls=[row.calls for row in rows],
        own=own(calls.parts["forward"] + calls.parts["backward"] + calls.parts["recompute"]).tolist(),
        **columns,
    )
    return tuple(row for row in found if row.counted)


def _kernels_alone(trace: Trace, counted: Counted) -> Ints:
    """Kernels that multiply, by their names, and that no operator launched which counts or is listed."""
    answered = counted.owner >= 0
    answered[counted.uncounted] = True
    rows: Ints = np.flatnonzero(trace.where(multiplies, Kind.KERNEL) & ~trace.is_collective)
    launchers = trace.links.operator_of_launch[rows]
    answered = np.append(answered, False)  # the last is that of no operator
    found: Ints = rows[~answered[launchers] & (nearest(launchers, np.append(trace.links.parent, -1), answered) < 0)]
    return found


def _uncounted(trace: Trace, counted: Counted, kernels: Ints) -> list[UncountedRow]:
    works = [counted.works[index] for index in counted.work[counted.uncounted].tolist()]
    found = Counter((work.operator, work.reason) for work in works)
    found.update((trace.name_of(row), _KERNEL_ALONE) for row in kernels.tolist())
    rows = [UncountedRow(name=name, calls=calls, reason=reason) for (name, reason), calls in found.items()]
    return sorted(rows, key=lambda row: (-row.calls, row.name, row.reason))
