"""All tables of a trace: of a window's traced steps, or of files, one of each rank, with the ranks side by side.

Modules and operators of traced steps have the median over these, so a call that the system interrupted changes nothing.
torch.profiler slows the host, so the host's times are scaled to what forward and backward of a typical step take.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_flops.analysis.advice import advise
from lightning_flops.analysis.counts import grouped, with_those_below
from lightning_flops.analysis.devices import DeviceAbilities, device_abilities
from lightning_flops.analysis.evidence import DATA_WAIT, Evidence, with_trace
from lightning_flops.analysis.ranks import TracedRank, compare, find_stragglers_in_traces
from lightning_flops.analysis.rates import ratio, why_no_flops
from lightning_flops.analysis.timing import build_timing, timed_steps
from lightning_flops.config import ADVICE_THRESHOLDS, ProfilerConfig
from lightning_flops.errors import LightningFlopsError
from lightning_flops.records import WindowRecord
from lightning_flops.schema.step import Advice
from lightning_flops.schema.tables import ModuleRow, ModuleTable
from lightning_flops.schema.trace import (
    PartFilling,
    RankComparison,
    RankRow,
    Straggler,
    TracedPart,
    TracedStep,
    TraceReport,
    TracesReport,
)
from lightning_flops.trace import tables
from lightning_flops.trace.columns import Kind, Trace
from lightning_flops.trace.flops import Formulas, find_work
from lightning_flops.trace.modules import module_table
from lightning_flops.trace.read import load_trace
from lightning_flops.trace.steps import kind_times, overlap, phase_table, step_filling, step_parts, step_times, steps_of
from lightning_flops.trace.structure import launch_ns_of, links_of
from lightning_flops.units import name_files

_US_PER_SEC = 1e6
_FAR = 2.0  # traced and typical steps whose forward or backward differ by more than so many times are not compared
_LEAST_STEPS = 4  # fewer traced steps say nothing of their spread
# Standard error of a median by that of a mean. The deviation of a few steps is about the width of their middle half,
# which one that something held up does not widen; of many it is less.
_OF_A_MEDIAN = math.sqrt(math.pi / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzedTrace(TracedRank):
    """One trace's tables, and what the others' reports need of it: small, whatever the size of the trace."""

    report: TraceReport
    abilities: DeviceAbilities  #: Of the device that ran the kernels; a trace lists all devices of its machine.
    parts: tuple[TracedPart, ...]  #: Of its steps: for a comparison with other ranks.
    step_sums: tables.StepSums | None = None  #: Its steps one by one: for a comparison with another run's, else None.


def analyze_trace(
    trace: Trace, *, formulas: Formulas | None = None, given: ProfilerConfig | None = None
) -> TraceReport:
    """Every table of *trace*; FLOPs with *formulas* alone, shares of the peak by a user's own peaks if *given*."""
    collectives, (kernels, kernel_summary) = tables.collective_table(trace), tables.kernel_tables(trace)
    work = None if formulas is None else find_work(trace, formulas, given)
    if work is not None and kernels is not None:
        of_kernels = work.of_kernels()
        kernels = tuple(replace(row, flops=of_kernels.get(row.name)) for row in kernels)
    modules = module_table(trace)
    return TraceReport(
        source=trace.source,
        rank=trace.rank,
        events=len(trace),
        step_times=step_times(trace),
        modules=work.of_modules(modules) if work and modules else modules,
        device_metrics=tables.device_metrics(trace),
        phases=phase_table(trace),
        overlap=overlap(trace) if collectives else None,
        collectives=collectives or None,
        kernel_summary=kernel_summary,
        kernels=kernels,
        operators=tables.operator_table(trace) or None,
        operators_by_shape=tables.operators_by_shape(trace, work.of_shapes() if work else {}) or None,
        memory=tables.memory_table(trace),
        transfers=tables.transfer_table(trace),
        user_scopes=tables.user_scope_table(trace) or None,
        idle=tables.idle_times(trace),
        notes=(*trace.notes, *steps_of(trace).odd, *_launch_notes(trace)),
        memory_curves=tables.memory_curves(trace),
        kinds=kind_times(trace),
        flops=None if work is None else work.totals(),
    )


def _launch_notes(trace: Trace) -> list[str]:
    """What is not known of launches, or looks wrong, in sentences."""
    rows, launch, ambiguous = trace.device_rows, links_of(trace).launch[trace.device_rows], links_of(trace).ambiguous
    missing, early = int((launch < 0).sum()) - ambiguous, int((launch_ns_of(trace)[rows] > trace.start_ns[rows]).sum())
    nothing = not trace.has_device and bool((trace.kind == Kind.RUNTIME).any())
    found = (
        (missing, "No launch is in the file of {}: no operator has their time."),
        (ambiguous, "Several launches have the number of {}, at times that fit: no operator has theirs."),
        (early, "The clocks of host and device differ: {} begin before the call that launched them."),
        (
            nothing,
            "Calls of the runtime launched no kernel, copy or memset that was recorded: its work is in no table.",
        ),
    )
    of_all = f"of the {len(rows):,} kernels, copies and memsets"
    return [sentence.format(f"{number:,} {of_all}") for number, sentence in found if number]


def analyze_one(
    trace: Trace, *, stepwise: bool = False, formulas: Formulas | None = None, given: ProfilerConfig | None = None
) -> AnalyzedTrace:
    """What *trace* says by itself, for other ranks, and *stepwise* for another run; no *formulas*: without torch."""
    report = analyze_trace(trace, formulas=formulas, given=given)
    why = why_no_flops(report)
    notes = (f"FLOPs are n/a: {why}.",) if why and not stepwise else ()  # a comparison says so of its figures
    used = trace.used_device
    return AnalyzedTrace(
        report=replace(report, notes=(*report.notes, *notes), children=tables.children_table(trace) or None),
        abilities=device_abilities(
            device_type="cuda" if trace.has_device else "cpu",
            name=used.name if used else None,
            # A device without a name may be any vendor's.
            compute_capability=used.compute_capability if used and used.name else None,
        ),
        parts=step_parts(trace),
        rank=trace.rank,
        source=trace.source,
        steps=len(steps_of(trace)),
        overlap=overlap(trace),
        collectives=tables.collective_calls(trace),
        step_sums=tables.step_sums(trace) if stepwise else None,
    )


class RanksError(LightningFlopsError, ValueError):
    """Traces that cannot be of one run; the message names them and the contradiction."""


def refuse_mixed_ranks(traces: Sequence[TracedRank]) -> None:
    """Refuse traces that cannot be one of each rank.

    Raises:
        RanksError: two traces are of the same rank, some say their rank and some do not, or none is given.
    """
    if not traces:
        raise RanksError("no trace to compare")
    by_rank = grouped(traces, lambda one: one.rank)
    for rank, alike in by_rank.items():
        if rank is not None and len(alike) > 1:
            raise RanksError(
                f"{alike[0].source} and {alike[1].source} are both of rank {rank}: give one trace for each rank"
            )
    if None in by_rank and len(by_rank) > 1:
        raise RanksError(f"{by_rank[None][0].source} does not say which rank it is of, though other traces do")


def join_analyses(
    analyzed: Sequence[AnalyzedTrace], *, thresholds: Mapping[str, float] = ADVICE_THRESHOLDS
) -> TracesReport:
    """Reports of several traces, and their ranks side by side; traces that do not say theirs are of separate runs.

    Raises:
        RanksError: two traces are of the same rank, or none is given.
    """
    refuse_mixed_ranks(analyzed)
    ordered = sorted(analyzed, key=lambda one: -1 if one.rank is None else one.rank)
    comparison = straggler = None
    if len(ordered) > 1 and ordered[0].rank is not None:
        comparison = compare(ordered)
        if all(one.report.step_times.marked for one in ordered):
            parts = {one.rank or 0: one.parts for one in ordered}
            straggler = next(iter(find_stragglers_in_traces(parts, thresholds=thresholds)), None)
        else:
            comparison = replace(
                comparison,
                notes=(
                    "No rank is named a straggler: not every trace has marks of steps, so what a rank did in one is "
                    "not known.",
                    *comparison.notes,
                ),
            )
    return TracesReport(
        traces=tuple(one.report for one in ordered),
        ranks=comparison,
        advice=_advise_on_traces(ordered, comparison, straggler, thresholds),
    )


def _advise_on_traces(
    traces: Sequence[AnalyzedTrace],
    ranks: RankComparison | None,
    straggler: Straggler | None,
    thresholds: Mapping[str, float],
) -> tuple[Advice, ...]:
    """Advice from traces alone, in whose order *ranks* are; by each rule for the rank that saves most."""
    files, every = name_files([trace.source for trace in traces]), list[Advice]()
    for place, (one, file) in enumerate(zip(traces, files, strict=True)):
        whose = "" if len(traces) == 1 else f"{file}: " if one.rank is None else f"Rank {one.rank}: "
        whole = "step" if one.report.step_times.marked else "trace"
        row = None if ranks is None else ranks.ranks[place]
        evidence = _of_trace(one, row, unmatched=ranks is not None and bool(ranks.notes))
        for advice in advise(evidence, thresholds):
            if straggler is None or advice.rule != "waiting":  # the others wait for the straggler
                every.append(replace(advice, fact=f"{whose}{advice.fact}".replace("he step", f"he {whole}")))
    ordered = advise(Evidence(straggler=straggler), thresholds, known=every)
    return tuple({one.rule: one for one in reversed(ordered)}.values())[::-1]


def _of_trace(one: AnalyzedTrace, row: RankRow | None, *, unmatched: bool) -> Evidence:
    trace, mean, waiting = one.report, one.report.step_times.mean, None
    if row is not None and row.wait_us is not None:
        waiting = ratio(part=min(row.overlap.exposed_us, row.wait_us), whole=row.overlap.wall_us)
    calls = next((row.calls for row in trace.phases or () if row.name == "data loader"), 0)  # one a batch
    evidence = Evidence(
        step_sec=mean.wall_us / _US_PER_SEC,
        batches=max(1.0, calls / len(trace.step_times.steps)),
        parts={DATA_WAIT: ratio(part=mean.data_loader_us, whole=mean.wall_us) or 0.0},
        shares={"waiting": waiting, "unmatched": float(unmatched)},
        device=one.abilities,
    )
    return with_trace(evidence, trace)


def build_traced_step(window: WindowRecord) -> TracedStep:
    """The traced step of *window*, which has traces: of several, the last that can be compared with the counted one.

    Raises:
        LightningFlopsError: the trace cannot be read.
    """
    context, counted = window.context, {step.signature for step in window.counted_steps[:1]}
    like = [record for record in window.traces if not window.variable and set(record.signatures) == counted]
    best = (like or window.traces)[-1]
    trace = load_trace(best.path)
    report, steps = analyze_trace(trace), range(len(steps_of(trace)))
    of_steps = [table for step in steps if (table := module_table(trace, step)) is not None]
    modules = _medians(of_steps) if len(of_steps) > 1 else report.modules
    with_flops = frozenset(cell.operator for cell in window.flops.cells if cell.flops)
    filling: dict[str, PartFilling] | None = step_filling(trace, counted=with_flops)
    if context.device_type != "cpu" and not trace.has_device:
        # The host only launches the device's work: its time is neither the modules' nor the step's.
        modules = filling = None
    forward_scale, backward_scale, is_apart = _scales(
        modules,
        window,
        work=statistics.fmean(step.signature.elements for step in window.counted_steps)
        / statistics.fmean(one.elements for one in best.signatures),  # 1 if like the counted one
    )
    # Some frameworks run their collectives all the same: a rank alone waits for none.
    is_alone = context.world_size == 1
    return TracedStep(
        index=best.index,
        like_counted=bool(like),
        files=(),
        tables=replace(
            report,
            rank=context.rank,
            source="(this run)",
            modules=modules,
            overlap=None if is_alone else report.overlap,
        ),
        parts=step_parts(trace),
        filling=filling,
        steps=len(steps),
        forward_scale=forward_scale,
        backward_scale=backward_scale,
        is_apart=is_apart,
        collectives=() if is_alone else tables.collective_calls(trace),
    )


def _scales(table: ModuleTable | None, window: WindowRecord, *, work: float) -> tuple[float, float, bool]:
    """Factors of times in forward and backward, and whether these are far from a typical step's.

    Times of the device are scaled to the counted steps' *work*, which is 1 for traced steps like them; so are the
    host's where no step was timed. The medians of what a phase consists of add up to less than the phase where the
    system interrupts each step somewhere else.
    """
    timing = build_timing(timed_steps(window)[0], mixed_phases=window.mixed_phases, trains=window.context.trains)
    if timing is None or table is None or table.clock == "device":
        return work, work, False
    inside_us = (
        math.fsum(row.own_forward_us for row in table.rows) + table.unattributed_forward_us,
        math.fsum(row.own_backward_us for row in table.rows)
        + table.unattributed_backward_us
        + table.gradient_accumulation_us,
    )
    timed = (timing.seconds_of("forward", typical=True), timing.seconds_of("backward", typical=True))
    if timed == (None, None):  # the two are not separated
        timed, inside_us = (timing.seconds_of("forward", "backward", typical=True),) * 2, (sum(inside_us),) * 2
    scales = [ratio(part=one, whole=us / _US_PER_SEC) or 1.0 for one, us in zip(timed, inside_us, strict=True)]
    return scales[0], scales[1], any(not 1 / _FAR <= one <= _FAR for one in scales)


def _medians(tables: Sequence[ModuleTable]) -> ModuleTable:
    """One step's table: the median over *tables* of each figure."""
    rows = tuple(
        replace(
            of_steps[0],
            calls=statistics.median_low(one.calls for one in of_steps),
            own_error_us=_error_us(of_steps),
            **_median_of(of_steps, _OF_A_ROW),
        )
        for of_steps in zip(*(one.rows for one in tables), strict=True)
    )
    if tables[0].clock == "host":  # there every moment is one module's, so a module has its own and what is below it
        forward = with_those_below({row.name: row.own_forward_us for row in rows}, 0.0)
        backward = with_those_below({row.name: row.own_backward_us for row in rows}, 0.0)
        rows = tuple(replace(row, forward_us=forward[row.name], backward_us=backward[row.name]) for row in rows)
    return replace(tables[0], steps=1, rows=rows, **_median_of(tables, _OF_A_TABLE))


_OF_A_TABLE, _OF_A_ROW = (
    tuple(one.name for one in fields(kind) if one.name.endswith("_us") and one.name != "own_error_us")
    for kind in (ModuleTable, ModuleRow)
)


def _median_of(of_steps: Sequence[ModuleRow] | Sequence[ModuleTable], names: Iterable[str]) -> dict[str, Any]:
    return {name: statistics.median(getattr(one, name) for one in of_steps) for name in names}


def _error_us(of_steps: Sequence[ModuleRow]) -> float | None:
    """Standard error of the median of one module's own time."""
    own = [one.own_forward_us + one.own_backward_us for one in of_steps]
    if len(own) < _LEAST_STEPS:
        return None
    low, _, high = statistics.quantiles(own, n=4, method="inclusive")
    return _OF_A_MEDIAN * (high - low) / math.sqrt(len(own))
