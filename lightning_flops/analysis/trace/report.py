"""All tables of one trace, or of one trace for each rank, in one frozen record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_flops.analysis.device_abilities import UNKNOWN_DEVICE, DeviceAbilities, device_abilities
from lightning_flops.analysis.stragglers import are_compared, find_stragglers_in_traces
from lightning_flops.analysis.trace.by_step import TraceBySteps, by_steps
from lightning_flops.analysis.trace.columns import Trace
from lightning_flops.analysis.trace.communication import collective_table, overlap
from lightning_flops.analysis.trace.device import (
    device_metrics,
    idle_times,
    kernel_summary,
    kernel_table,
    launch_statistics,
)
from lightning_flops.analysis.trace.flops import Formulas, trace_flops
from lightning_flops.analysis.trace.head import WITH_MODULES
from lightning_flops.analysis.trace.job import job_flops
from lightning_flops.analysis.trace.memory_curve import memory_curves
from lightning_flops.analysis.trace.module_memory import module_memory_table
from lightning_flops.analysis.trace.modules import module_table
from lightning_flops.analysis.trace.operators import memory_table, operator_table, operators_by_shape
from lightning_flops.analysis.trace.parts import step_parts
from lightning_flops.analysis.trace.phases import model_summary
from lightning_flops.analysis.trace.ranks import RankSummary, compare_ranks, rank_summary, refuse_mixed_ranks
from lightning_flops.analysis.trace.scopes import device_summary, overview, transfer_table, user_scope_table
from lightning_flops.analysis.trace.step_time import step_times
from lightning_flops.analysis.trace_advice import advise_on_traces
from lightning_flops.config import AdviceThresholds
from lightning_flops.schema.ranks import Straggler
from lightning_flops.schema.trace import SCHEMA_VERSION, TracedPart, TraceReport, TracesReport
from lightning_flops.schema.trace_flops import JobFlops

NO_FLOPS = "FLOPs are n/a: "
"""What a note begins with that says why."""

_NO_TORCH = f"{NO_FLOPS}working them out from shapes needs torch, which is not installed."
_NO_SHAPES = f"{NO_FLOPS}the trace was taken without record_shapes=True."
_NO_CALLS_OF_MODULES = (
    "Modules are n/a: with_modules=True alone has torch name those of TorchScript programs, and record no calls. With "
    "with_stack=True it records the calls of all modules."
)


def analyze_trace(trace: Trace, *, formulas: Formulas | None = None) -> TraceReport:
    """Every table of *trace*.

    Args:
        trace: what to analyze.
        formulas: what a recorded call spent; without them the report has no FLOPs.
    """
    collectives = collective_table(trace)
    modules = module_table(trace)
    return TraceReport(
        source=trace.source,
        rank=trace.rank,
        events=len(trace),
        step_times=step_times(trace),
        modules=modules,
        device_metrics=device_metrics(trace),
        device_summary=device_summary(trace),
        overview=overview(trace),
        model_summary=model_summary(trace),
        overlap=overlap(trace) if collectives is not None else None,
        collectives=collectives,
        kernel_summary=kernel_summary(trace),
        kernels=kernel_table(trace),
        operators=operator_table(trace),
        memory=memory_table(trace),
        module_memory=module_memory_table(trace),
        transfers=transfer_table(trace),
        user_scopes=user_scope_table(trace),
        idle=idle_times(trace),
        launches=launch_statistics(trace),
        notes=trace.notes + tuple(cut.words() for cut in trace.steps.cut),
        memory_curves=memory_curves(trace),
        operators_by_shape=operators_by_shape(trace),
        flops=None if formulas is None else trace_flops(trace, formulas, modules),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzedTrace:
    """What one trace says, and what the others' reports need of it: small, whatever the size of the trace."""

    report: TraceReport
    abilities: DeviceAbilities
    parts: tuple[TracedPart, ...]
    """Of its steps, as ``summary``: for a comparison with other ranks, empty where there is none."""
    summary: RankSummary | None
    by_steps: TraceBySteps | None = None
    """Its steps one by one: for a comparison with another run's, else None."""


def analyze_one(
    trace: Trace, *, compared: bool, formulas: Formulas | None = None, stepwise: bool = False
) -> AnalyzedTrace:
    """What *trace* says by itself.

    Args:
        trace: what to analyze.
        compared: whether it will be held against traces of other ranks.
        formulas: as for ``analyze_trace``; None where there is no torch, as the report then says.
        stepwise: whether it will be held against another run's, step by step.
    """
    return AnalyzedTrace(
        report=_with_words(analyze_trace(trace, formulas=formulas), trace),
        abilities=_abilities(trace),
        parts=step_parts(trace) if compared else (),
        summary=rank_summary(trace) if compared else None,
        by_steps=by_steps(trace) if stepwise else None,
    )


def join_analyses(analyzed: Sequence[AnalyzedTrace], *, thresholds: AdviceThresholds | None = None) -> TracesReport:
    """Reports of several traces, and their ranks side by side; all analyzed for a comparison if there are several.

    Raises:
        RanksError: two traces are of the same rank, or none is given.
    """
    ordered = sorted(analyzed, key=lambda one: -1 if one.report.rank is None else one.report.rank)
    reports = tuple(one.report for one in ordered)
    summaries = [one.summary for one in analyzed if one.summary is not None]
    comparison = compare_ranks(summaries) if summaries else None
    stragglers: tuple[Straggler, ...] = ()
    if comparison is not None and are_compared(comparison):
        stragglers = find_stragglers_in_traces([one.parts for one in ordered], thresholds=thresholds)
    return TracesReport(
        schema_version=SCHEMA_VERSION,
        traces=reports,
        ranks=comparison,
        job_flops=_job_flops(ordered),
        advice=advise_on_traces(
            reports,
            comparison,
            straggler=stragglers[0] if stragglers else None,
            devices=tuple(one.abilities for one in ordered),
            thresholds=thresholds,
        ),
    )


def analyze_traces(
    traces: Sequence[Trace], *, thresholds: AdviceThresholds | None = None, formulas: Formulas | None = None
) -> TracesReport:
    """Every table of each of *traces*, one for each rank, and the ranks side by side.

    Args:
        traces: each of another rank.
        formulas: as for ``analyze_trace``; None where there is no torch, as the reports then say.
        thresholds: of the advice; None for the defaults.

    Raises:
        RanksError: two traces are of the same rank, or none is given.
    """
    refuse_mixed_ranks(traces)  # before the work
    analyzed = [analyze_one(trace, compared=len(traces) > 1, formulas=formulas) for trace in traces]
    return join_analyses(analyzed, thresholds=thresholds)


def _job_flops(analyzed: Sequence[AnalyzedTrace]) -> JobFlops | None:
    """The FLOPs of all ranks together; None for one trace, and for separate runs."""
    ranks = {one.report.rank: one.report.flops for one in analyzed if one.report.rank is not None}
    if len(analyzed) == 1 or len(ranks) < len(analyzed):
        return None
    return job_flops(ranks, world_sizes=[one.summary.world_size for one in analyzed if one.summary is not None])


def _with_words(report: TraceReport, trace: Trace) -> TraceReport:
    """*report* with a sentence on why it has no FLOPs, and no modules that were asked for."""
    notes = report.notes
    if report.flops is None:
        notes += (_NO_TORCH if (trace.inputs >= 0).any() else _NO_SHAPES,)
    if report.modules is None and trace.metadata.get(WITH_MODULES):
        notes += (_NO_CALLS_OF_MODULES,)
    return report if notes == report.notes else replace(report, notes=notes)


def _abilities(trace: Trace) -> DeviceAbilities:
    """What the device that ran the kernels can do; a trace lists all devices of its machine."""
    if not trace.has_device:
        return UNKNOWN_DEVICE
    used = set(trace.device[trace.on_device].tolist())
    kinds = {(one.name, one.compute_capability) for one in trace.devices if one.index in used}
    name, capability = kinds.pop() if len(kinds) == 1 else ("", None)
    # A device without a name may be any vendor's.
    return device_abilities(device_type="cuda", name=name, compute_capability=capability if name else None)
