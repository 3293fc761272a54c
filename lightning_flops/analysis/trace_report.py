"""All tables of a trace; and of several, one of each rank, with the ranks side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_flops.analysis.advice import advise
from lightning_flops.analysis.devices import DeviceAbilities, device_abilities
from lightning_flops.analysis.evidence import Evidence, with_trace
from lightning_flops.analysis.names import name_files
from lightning_flops.analysis.rank_record import TracedRank
from lightning_flops.analysis.ranks import compare, find_stragglers_in_traces, refuse_mixed_ranks
from lightning_flops.analysis.rates import NO_FLOPS, ratio
from lightning_flops.config import ADVICE_THRESHOLDS
from lightning_flops.schema.step import Advice
from lightning_flops.schema.trace import RankComparison, RankRow, Straggler, TracedPart, TraceReport, TracesReport
from lightning_flops.trace import tables
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.flops import Formulas, Peaks, find_work
from lightning_flops.trace.modules import module_table
from lightning_flops.trace.names import Kind
from lightning_flops.trace.steps import kind_times, overlap, phase_table, step_parts, step_times, steps_of
from lightning_flops.trace.structure import launch_ns_of, links_of

_US_PER_SEC = 1e6
_NO_KERNELS = "Calls of the runtime launched no kernel, copy or memset that was recorded: its work is in no table."
_UNMARKED = "No rank is named a straggler: not every trace has marks of steps, so what a rank did in one is not known."
_NO_TORCH = f"{NO_FLOPS}working them out from shapes needs torch, which is not installed."
_NO_SHAPES = f"{NO_FLOPS}the trace was taken without record_shapes=True."


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzedTrace(TracedRank):
    """One trace's tables, and what the others' reports need of it: small, whatever the size of the trace."""

    report: TraceReport
    abilities: DeviceAbilities  #: Of the device that ran the kernels; a trace lists all devices of its machine.
    parts: tuple[TracedPart, ...]  #: Of its steps: for a comparison with other ranks.
    step_sums: tables.StepSums | None = None  #: Its steps one by one: for a comparison with another run's, else None.


def analyze_trace(trace: Trace, *, formulas: Formulas | None = None, peaks: Peaks | None = None) -> TraceReport:
    """Every table of *trace*; FLOPs with *formulas* alone, shares of the peak by a user's own *peaks* if given."""
    collectives, (kernels, kernel_summary) = tables.collective_table(trace), tables.kernel_tables(trace)
    work = None if formulas is None else find_work(trace, formulas, peaks)
    if work is not None and kernels is not None:
        of_kernels = work.of_kernels()
        kernels = tuple(replace(row, flops=of_kernels.get(row.name)) for row in kernels)
    modules = module_table(trace)
    nothing = () if trace.has_device or not (trace.kind == Kind.RUNTIME).any() else (_NO_KERNELS,)
    return TraceReport(
        source=trace.source,
        rank=trace.rank,
        events=len(trace),
        step_times=step_times(trace),
        modules=work.of_modules(modules) if work and modules else modules,
        device_metrics=tables.device_metrics(trace),
        phases=phase_table(trace),
        overlap=overlap(trace) if collectives is not None else None,
        collectives=collectives,
        kernel_summary=kernel_summary,
        kernels=kernels,
        operators=tables.operator_table(trace),
        operators_by_shape=tables.operators_by_shape(trace, work.of_shapes() if work else {}),
        memory=tables.memory_table(trace),
        transfers=tables.transfer_table(trace),
        user_scopes=tables.user_scope_table(trace),
        idle=tables.idle_times(trace),
        notes=(*trace.notes, *steps_of(trace).odd, *nothing, *_launch_notes(trace)),
        memory_curves=tables.memory_curves(trace),
        kinds=kind_times(trace),
        flops=None if work is None else work.totals(),
    )


def _launch_notes(trace: Trace) -> Iterator[str]:
    """What is not known of launches, or looks wrong, in sentences."""
    rows, launch, ambiguous = trace.device_rows, links_of(trace).launch[trace.device_rows], links_of(trace).ambiguous
    missing, early = int((launch < 0).sum()) - ambiguous, int((launch_ns_of(trace)[rows] > trace.start_ns[rows]).sum())
    of_all = f"of the {len(rows):,} kernels, copies and memsets"
    if missing:
        yield f"No launch is in the file of {missing:,} {of_all}: no operator has their time."
    if ambiguous:
        yield f"Several launches have the number of {ambiguous:,} {of_all}, at times that fit: no operator has theirs."
    if early:
        yield f"The clocks of host and device differ: {early:,} {of_all} begin before the call that launched them."


def analyze_one(
    trace: Trace, *, stepwise: bool = False, formulas: Formulas | None = None, peaks: Peaks | None = None
) -> AnalyzedTrace:
    """What *trace* says by itself, for other ranks, and *stepwise* for another run; no *formulas*: without torch."""
    report = analyze_trace(trace, formulas=formulas, peaks=peaks)
    notes = report.notes
    if report.flops is None:
        notes += (_NO_TORCH if (trace.inputs >= 0).any() else _NO_SHAPES,)
    used = trace.used_device
    return AnalyzedTrace(
        report=replace(report, notes=notes, children=tables.children_table(trace)),
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


def join_analyses(
    analyzed: Sequence[AnalyzedTrace], *, thresholds: Mapping[str, float] = ADVICE_THRESHOLDS
) -> TracesReport:
    """Reports of several traces, and their ranks side by side; traces that do not say theirs are of separate runs.

    Raises:
        RanksError: two traces are of the same rank, or none is given.
    """
    refuse_mixed_ranks(analyzed)
    ordered = sorted(analyzed, key=lambda one: -1 if one.rank is None else one.rank)
    reports = tuple(one.report for one in ordered)
    comparison = straggler = None
    if len(ordered) > 1 and ordered[0].rank is not None:
        comparison = compare(ordered)
        if all(one.step_times.marked for one in reports):
            parts = {one.rank or 0: one.parts for one in ordered}
            straggler = next(iter(find_stragglers_in_traces(parts, thresholds=thresholds)), None)
        else:
            comparison = replace(comparison, notes=(_UNMARKED, *comparison.notes))
    devices = [one.abilities for one in ordered]
    advice = advise_on_traces(reports, comparison, straggler=straggler, devices=devices, thresholds=thresholds)
    return TracesReport(traces=reports, ranks=comparison, advice=advice)


def advise_on_traces(
    traces: Sequence[TraceReport],
    ranks: RankComparison | None,
    *,
    straggler: Straggler | None,
    devices: Sequence[DeviceAbilities],
    thresholds: Mapping[str, float] = ADVICE_THRESHOLDS,
) -> tuple[Advice, ...]:
    """Advice from traces alone, in whose order *ranks* and *devices* are; by each rule for the rank that saves most."""
    files = name_files([trace.source for trace in traces])
    rows: Sequence[RankRow | None] = [None] * len(traces) if ranks is None else ranks.ranks
    unmatched, every = ranks is not None and bool(ranks.notes), []
    for trace, file, row, device in zip(traces, files, rows, devices, strict=True):
        whose = "" if len(traces) == 1 else f"{file}: " if trace.rank is None else f"Rank {trace.rank}: "
        whole = "step" if trace.step_times.marked else "trace"
        for one in advise(_of_trace(trace, row, device, unmatched=unmatched), thresholds):
            if straggler is None or one.rule != "waiting":  # the others wait for the straggler
                every.append(replace(one, fact=f"{whose}{one.fact}".replace("he step", f"he {whole}")))
    ordered = advise(Evidence(straggler=straggler), thresholds, known=every)
    return tuple({one.rule: one for one in reversed(ordered)}.values())[::-1]


def _of_trace(trace: TraceReport, row: RankRow | None, device: DeviceAbilities, *, unmatched: bool) -> Evidence:
    mean, waiting = trace.step_times.mean, None
    if row is not None and row.wait_us is not None:
        waiting = ratio(part=min(row.overlap.exposed_us, row.wait_us), whole=row.overlap.wall_us)
    calls = next((row.calls for row in trace.phases or () if row.name == "data loader"), 0)  # one a batch
    evidence = Evidence(
        step_sec=mean.wall_us / _US_PER_SEC,
        batches=max(1.0, calls / len(trace.step_times.steps)),
        data_wait_sec=None if mean.data_loader_us is None else mean.data_loader_us / _US_PER_SEC,
        shares={"waiting": waiting, "unmatched": float(unmatched)},
        device=device,
    )
    return with_trace(evidence, trace)
