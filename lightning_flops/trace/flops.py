"""FLOPs of a trace by step, operator, shape, kernel and module, joined with the time of the kernels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.devices import device_like, device_named
from lightning_flops.analysis.peaks import peak_for
from lightning_flops.analysis.rates import MOST_OF_PEAK
from lightning_flops.schema.tables import Flops, ModuleRow, OperatorFlops, TracedStepFlops, TraceFlops, UncountedRow
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.counting import Counted, FlopPart, Formulas, count_trace, works_of
from lightning_flops.trace.intervals import NS_PER_SEC, NS_PER_US, Ints, distinct, group_by, ratio, sums_by, table
from lightning_flops.trace.modules import modules_above, with_below
from lightning_flops.trace.names import Kind, multiplies, uses_tensor_cores
from lightning_flops.trace.structure import nearest
from lightning_flops.trace.tables import by_shapes

Sums = Callable[[npt.NDArray[Any]], list[Any]]
"""The sums of a column of all calls in each of some groups."""
_KERNEL_ALONE = "a kernel that multiplies, launched by no operator that was counted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """A user's own figures of the device, which win over the table's."""

    flops_per_sec: float | Mapping[str, float] | None = None
    """Dense peak, one for all dtypes or some by dtype."""
    memory_bytes_per_sec: float | None = None


def find_work(trace: Trace, formulas: Formulas, peaks: Peaks | None = None) -> Work | None:
    """The calls of *trace* that count, with FLOPs by *formulas*; None where no shapes were recorded.

    Calls whose FLOPs would take over twice the peak are left out, and listed.
    """
    if not (trace.inputs[trace.links.operators] >= 0).any():
        return None
    works, number = works_of(trace, formulas)
    work = Work(trace, count_trace(trace, works, number), peaks or Peaks())
    if not (impossible := work.impossible()):
        return work
    for index, reason in impossible.items():
        works[index] = replace(works[index], role="unread", heavy=True, reason=reason)
    return Work(trace, count_trace(trace, works, number), peaks or Peaks())


class Work:
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
        times = trace.operator_times
        self.time_ns: Ints = (times.device if trace.has_device else times.host)[rows]
        self.dtypes = ("tf32", *dict.fromkeys(work.dtype for work in counted.works))
        self.dtype = self._dtypes_of()
        used = trace.used_device
        name, capability, sm_count = (used.name, used.compute_capability, used.sm_count) if used else ("", None, None)
        alike = device_like(name, capability, sm_count)
        self.devices = len(distinct(trace.device[trace.kind == Kind.KERNEL]))
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
        row = device_named(alike or name)
        self.bandwidth = peaks.memory_bytes_per_sec or (row and row.memory_bytes_per_sec)
        peak = np.array([self._peak[dtype] or np.nan for dtype in self.dtypes])[self.dtype]
        self._ns_per_flop = NS_PER_SEC / (peak if self.devices else peak * np.nan)
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

    def _columns(self, of: Sums, over_ns: list[float] | None = None, devices: int = 1) -> dict[str, list[Any]]:
        """FLOPs by phase, rate and share of the peak of each group: over its calls' time, or *over_ns* if given."""
        timed = np.where(self.time_ns > 0, self.executed, 0) if over_ns is None else self.executed
        time_ns = of(self.time_ns) if over_ns is None else over_ns
        rates = [ratio(flops * NS_PER_SEC, ns) for flops, ns in zip(of(timed), time_ns, strict=True)]
        hfu = self._of_peak(timed, of, time_ns, devices)
        return {**{name: of(values) for name, values in self.parts.items()}, "flops_per_sec": rates, "hfu": hfu}

    def _of_peak(self, flops: Ints, of: Sums, time_ns: list[float], devices: int) -> list[float | None]:
        """Time that *flops* of each group take at the devices' peak ÷ *time_ns*; None where a peak is not known."""
        at_peak = of(np.where(flops > 0, flops * self._ns_per_flop, 0.0))
        return [
            None if not devices or np.isnan(one) else ratio(one / devices, ns)
            for one, ns in zip(at_peak, time_ns, strict=True)
        ]

    def totals(self) -> TraceFlops:
        """FLOPs by step and operator, the device's figures, and what was not counted."""
        alone = self._kernels_alone()
        uncounted, steps = self._uncounted(alone), list(self._steps(np.concatenate([self.counted.uncounted, alone])))
        for place, step in enumerate(steps):
            if step.hfu is not None and step.hfu > 1:
                name = "the whole trace" if step.step is None else f"step {step.step}"
                reason = f"no MFU: its FLOPs take {step.hfu:.1f} times its time at the peak, so time is missing"
                uncounted.append(UncountedRow(name=name, calls=1, reason=reason))
                steps[place] = replace(step, mfu=None, hfu=None)
        here = sorted(self.dtypes[index] for index in distinct(self.dtype).tolist())
        peaks = {dtype: peak for dtype in here if (peak := self._peak[dtype]) is not None}
        return TraceFlops(
            device=self.device,
            devices=self.devices,
            peaks=peaks,
            memory_bytes_per_sec=self.bandwidth,
            steps=tuple(steps),
            mfu=_of_all([(step.mfu, step.wall_us) for step in steps]),
            hfu=_of_all([(step.hfu, step.wall_us) for step in steps]),
            operators=self._operators(peaks),
            uncounted=tuple(uncounted),
        )

    def _steps(self, uncounted: Ints) -> tuple[TracedStepFlops, ...]:
        trace, steps = self.trace, self.trace.steps
        walls = (steps.end_ns - steps.start_ns).tolist()
        step = steps.of(trace.start_ns[self.rows])

        def of(values: npt.NDArray[Any]) -> list[Any]:
            # The first are outside of all steps.
            return sums_by(step + 1, values, len(steps) + 1)[1:].tolist()  # type: ignore[no-any-return]

        return table(
            TracedStepFlops,
            step=steps.numbers,
            wall_us=[wall / NS_PER_US for wall in walls],
            mfu=self._of_peak(self.parts["forward"] + self.parts["backward"], of, walls, self.devices),
            lower_bound=np.isin(np.arange(len(steps)), steps.of(trace.start_ns[uncounted])).tolist(),
            **self._columns(of, walls, self.devices),
        )

    def _operators(self, peaks: Mapping[str, float]) -> tuple[OperatorFlops, ...]:
        works, work, count = self.counted.works, self.counted.work[self.rows], len(self.dtypes)
        names, number = np.unique([one.operator for one in works], return_inverse=True)
        groups = group_by(number[work] * count + self.dtype)
        dtypes = [self.dtypes[key % count] for key in groups.keys.tolist()]
        moved = groups.sums_known(self.counted.of("bytes"), np.array([one.bytes is not None for one in works])[work])
        intensities = [
            (size and flops / size) or None for flops, size in zip(groups.sums(self.executed), moved, strict=True)
        ]
        return table(
            OperatorFlops,
            lambda row: (-(row.time_us or 0.0), row.name, row.dtype),
            name=names[groups.keys // count].tolist(),
            dtype=dtypes,
            calls=groups.calls,
            time_us=[ns / NS_PER_US if ns else None for ns in groups.sums(self.time_ns)],
            bytes=moved,
            flops_per_byte=intensities,
            attainable_flops_per_sec=[
                min(peaks[dtype], one * self.bandwidth) if one and dtype in peaks and self.bandwidth else None
                for one, dtype in zip(intensities, dtypes, strict=True)
            ],
            **self._columns(groups.sums),
        )

    def of_shapes(self) -> dict[tuple[str, str, str], Flops]:
        """FLOPs of operators by name, sizes and dtypes, as in ``operators_by_shape``."""
        known = np.flatnonzero(self.trace.inputs[self.rows] >= 0)
        words, groups = by_shapes(self.trace, self.rows[known])
        names = self.trace.texts(self.trace.name[self.rows[known[groups.order[groups.firsts]]]])
        found = table(Flops, **self._columns(lambda values: groups.sums(values[known])))
        return dict(zip(zip(names, words["inputs"], words["dtypes"], strict=True), found, strict=True))

    def of_kernels(self) -> dict[str, Flops]:
        """FLOPs by kernel: an operator's are those of the kernels in it whose names say that they multiply.

        Where there are several, such as both halves of a convolution's backward, they are divided by time. Where no
        name says so, all kernels of the operator stand for it.
        """
        trace, count = self.trace, len(self.rows)
        place = np.full(len(trace) + 1, -1, dtype=np.int64)  # the last is that of no call
        place[self.rows] = np.arange(count)
        events = trace.of(Kind.KERNEL)
        call = place[np.append(self.counted.owner, -1)[trace.links.operator_of_launch[events]]]
        events, call = events[call >= 0], call[call >= 0]
        says_so = trace.where(multiplies, Kind.KERNEL)[events]
        mine = says_so | (np.bincount(call[says_so], minlength=count) == 0)[call]
        events, call = events[mine], call[mine]
        lengths, shared = trace.duration_ns[events], np.bincount(call, minlength=count)[call] > 1
        part = np.where(shared, lengths / np.maximum(sums_by(call, lengths, count)[call], 1), 1.0)
        groups = group_by(trace.name[events])

        def of(values: npt.NDArray[Any]) -> list[Any]:
            whole, divided = np.where(shared, 0, values[call]), np.where(shared, values[call] * part, 0.0)
            rest = groups.sums(divided) if values.dtype.kind == "f" else map(round, groups.sums(divided))
            return [one + more for one, more in zip(groups.sums(whole), rest, strict=True)]

        return dict(zip(trace.texts(groups.keys), table(Flops, **self._columns(of, groups.sums(lengths))), strict=True))

    def of_modules(self, modules: Mapping[str, ModuleRow]) -> dict[str, Flops]:
        """FLOPs of modules by name, with those below, over the times in *modules*, the trace's own table."""
        trace, frames = self.trace, self.trace.frames
        assert frames is not None  # there is a table of modules
        owner = frames.owner_at(trace, trace.lane[self.rows], trace.start_ns[self.rows])[0]
        owned, above = owner >= 0, modules_above(frames.modules)

        def of(values: npt.NDArray[Any]) -> list[Any]:
            return with_below(sums_by(owner[owned], values[owned], len(above)), above).tolist()  # type: ignore[no-any-return]

        rows = [modules[name] for name in frames.modules]
        times = [(row.forward_us + row.backward_us) * NS_PER_US for row in rows]
        found = zip(frames.modules, table(Flops, **self._columns(of, times, self.devices)), strict=True)
        return {name: flops for name, flops in found if flops.total}

    def _kernels_alone(self) -> Ints:
        """Kernels that multiply, by their names, and that no operator launched which counts or is listed."""
        trace, answered = self.trace, np.append(self.counted.owner >= 0, False)  # the last is that of no operator
        answered[self.counted.uncounted] = True
        rows: Ints = np.flatnonzero(trace.where(multiplies, Kind.KERNEL) & ~trace.is_collective)
        launchers, around = trace.links.operator_of_launch[rows], np.append(trace.links.parent, -1)
        found: Ints = rows[~answered[launchers] & (nearest(launchers, around, answered) < 0)]
        return found

    def _uncounted(self, kernels: Ints) -> list[UncountedRow]:
        works = [self.counted.works[index] for index in self.counted.work[self.counted.uncounted].tolist()]
        found = Counter((work.operator, work.reason) for work in works)
        found.update((self.trace.name_of(row), _KERNEL_ALONE) for row in kernels.tolist())
        rows = [UncountedRow(name=name, calls=calls, reason=reason) for (name, reason), calls in found.items()]
        return sorted(rows, key=lambda row: (-row.calls, row.name, row.reason))


def _of_all(shares: list[tuple[float | None, float]]) -> float | None:
    """Shares of the peak, each over its own wall time, as one over the time of all."""
    at_peak = [share * wall_us for share, wall_us in shares if share is not None]
    whole_us = math.fsum(wall_us for _, wall_us in shares)
    return math.fsum(at_peak) / whole_us if whole_us and len(at_peak) == len(shares) else None
