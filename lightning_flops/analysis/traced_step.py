"""The traced step of a window: the tables of its trace, and what they come to for each module of the model."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.analysis.rates import mean, per_second, ratio
from lightning_flops.analysis.trace_tables import ModuleTable, TraceReport
from lightning_flops.errors import LightningFlopsError
from lightning_flops.records import OUTSIDE, PhaseFlops, TracedStepRecord

_US = 1e-6

NEEDS_NUMPY = "reading a trace needs numpy: pip install 'lightning-flops[trace]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One step that ran under torch.profiler."""

    index: int
    """Steps of the fit before it."""
    like_counted: bool
    """It has the counted step's signature, so FLOPs of the one over seconds of the other is a rate."""
    file: str | None
    """Path or URL where its trace was kept; None if none was asked for, or it could not be written."""
    tables: TraceReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTimes:
    """Seconds of one module in one step, those of the modules below it included unless named *own*."""

    clock: Literal["host", "device"]
    """``device``: time in which work launched in the module ran on the device. ``host``: where there is none."""
    forward_sec: float
    own_forward_sec: float
    backward_sec: float
    """With what the backward repeats of the forward; without gradient accumulation."""
    own_backward_sec: float
    forward_kernels: float | None
    backward_kernels: float | None
    forward_flops_per_sec: float | None
    """Forward FLOPs of the counted step / seconds; None where there are none, or the two steps differ."""
    backward_flops_per_sec: float | None
    """Backward and recomputed FLOPs / seconds."""
    forward_utilization: float | None
    """Share of the device's peak, for the dtypes it computes in; None if one of them has no known peak."""
    backward_utilization: float | None


def can_read_traces() -> bool:
    """Whether what the arithmetic on traces needs is installed."""
    return importlib.util.find_spec("numpy") is not None


def analyze_traced_step(record: TracedStepRecord, *, rank: int, like_counted: bool, file: str | None) -> TracedStep:
    """The tables of a traced step.

    Args:
        record: what was recorded.
        rank: the rank it was recorded on.
        like_counted: it has the counted step's signature.
        file: where its trace was kept.

    Raises:
        LightningFlopsError: numpy is not installed, or the trace cannot be read.
    """
    if not can_read_traces():
        raise LightningFlopsError(NEEDS_NUMPY)
    from lightning_flops.analysis.trace import analyze_trace, load_trace, trace_from_columns

    if record.columns is not None:
        trace = trace_from_columns(record.columns, process=record.process, metadata=record.metadata)
    elif record.path is not None:
        trace = load_trace(record.path)
    else:
        raise LightningFlopsError("the traced step left no events")
    tables = replace(analyze_trace(trace), rank=rank, source=file or "(this run)")
    return TracedStep(index=record.index, like_counted=like_counted, file=file, tables=tables)


def module_times(
    traced: TracedStep, counts: FlopCounts, *, counted_steps: int, peak_of: Callable[[str], float | None]
) -> dict[str, ModuleTimes]:
    """Times of each module in one step, by qualified name; empty if no module was marked.

    Args:
        traced: the traced step.
        counts: what was counted, for the rates.
        counted_steps: over so many steps.
        peak_of: dense peak in FLOP/s for a dtype's name, None where it is not known.
    """
    table = traced.tables.modules
    if table is None:
        return {}
    flops = counts.by_module() if traced.like_counted else {}
    at_peak = _seconds_at_peak(counts, peak_of)
    return {
        row.name: _times(
            table,
            place,
            flops=flops.get(row.name, PhaseFlops()),
            at_peak=at_peak.get(row.name, (0.0, 0.0)),
            counted_steps=max(1, counted_steps),
        )
        for place, row in enumerate(table.rows)
    }


def mean_times(times: Sequence[ModuleTimes | None]) -> ModuleTimes | None:
    """What one of several modules that are alike took on average; None if one of them has no times."""
    known = [one for one in times if one is not None]
    if not known or len(known) < len(times):
        return None
    if len(known) == 1:
        return known[0]

    def average(of: Callable[[ModuleTimes], float | None]) -> float | None:
        values = [value for value in map(of, known) if value is not None]
        return sum(values) / len(values) if len(values) == len(known) else None

    def over_all(rate: Callable[[ModuleTimes], float | None], seconds: Callable[[ModuleTimes], float]) -> float | None:
        """A rate of all of them: rates are not averaged, what was done is added up and divided by all the time."""
        rates = [rate(one) for one in known]
        total = sum(seconds(one) for one in known)
        done = [value * seconds(one) for value, one in zip(rates, known, strict=True) if value is not None]
        return sum(done) / total if len(done) == len(known) and total else None

    return ModuleTimes(
        clock=known[0].clock,
        forward_sec=sum(one.forward_sec for one in known) / len(known),
        own_forward_sec=sum(one.own_forward_sec for one in known) / len(known),
        backward_sec=sum(one.backward_sec for one in known) / len(known),
        own_backward_sec=sum(one.own_backward_sec for one in known) / len(known),
        forward_kernels=average(lambda one: one.forward_kernels),
        backward_kernels=average(lambda one: one.backward_kernels),
        forward_flops_per_sec=over_all(lambda one: one.forward_flops_per_sec, lambda one: one.forward_sec),
        backward_flops_per_sec=over_all(lambda one: one.backward_flops_per_sec, lambda one: one.backward_sec),
        forward_utilization=over_all(lambda one: one.forward_utilization, lambda one: one.forward_sec),
        backward_utilization=over_all(lambda one: one.backward_utilization, lambda one: one.backward_sec),
    )


def _times(
    table: ModuleTable,
    place: int,
    *,
    flops: PhaseFlops,
    at_peak: tuple[float | None, float | None],
    counted_steps: int,
) -> ModuleTimes:
    row, steps = table.rows[place], max(1, table.steps)
    forward_sec, backward_sec = row.forward_us * _US / steps, row.backward_us * _US / steps
    forward, backward = flops.forward, flops.backward + flops.recompute

    def rate(amount: int, seconds: float) -> float | None:
        return per_second(amount=mean(total=amount, steps=counted_steps), seconds=seconds) if amount else None

    def utilization(amount: int, peak_sec: float | None, seconds: float) -> float | None:
        return ratio(part=mean(total=peak_sec, steps=counted_steps), whole=seconds) if amount else None

    return ModuleTimes(
        clock=table.clock,
        forward_sec=forward_sec,
        own_forward_sec=row.own_forward_us * _US / steps,
        backward_sec=backward_sec,
        own_backward_sec=row.own_backward_us * _US / steps,
        forward_kernels=None if row.forward_kernels is None else row.forward_kernels / steps,
        backward_kernels=None if row.backward_kernels is None else row.backward_kernels / steps,
        forward_flops_per_sec=rate(forward, forward_sec),
        backward_flops_per_sec=rate(backward, backward_sec),
        forward_utilization=utilization(forward, at_peak[0], forward_sec),
        backward_utilization=utilization(backward, at_peak[1], backward_sec),
    )


def _seconds_at_peak(
    counts: FlopCounts, peak_of: Callable[[str], float | None]
) -> dict[str, tuple[float | None, float | None]]:
    """Seconds that each module's FLOPs, forward and then backward with recomputation, take at the peak."""
    sums: defaultdict[str, list[float | None]] = defaultdict(lambda: [0.0, 0.0])
    peaks: dict[str, float | None] = {}
    for cell in counts.record.cells:
        if not cell.flops or cell.phase == "optimizer" or cell.module == OUTSIDE:
            continue
        if cell.dtype not in peaks:
            peaks[cell.dtype] = peak_of(cell.dtype)
        seconds = per_second(amount=cell.flops, seconds=peaks[cell.dtype])
        side = int(cell.phase != "forward")
        for name in _with_those_above(cell.module):
            before = sums[name][side]
            sums[name][side] = None if before is None or seconds is None else before + seconds
    return {name: (forward, backward) for name, (forward, backward) in sums.items()}


def _with_those_above(name: str) -> Iterator[str]:
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name
