"""All tables of one trace, or of one trace for each rank, in one frozen record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_flops.analysis.device_abilities import UNKNOWN_DEVICE, DeviceAbilities, device_abilities
from lightning_flops.analysis.stragglers import are_compared, find_stragglers_in_traces
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
from lightning_flops.analysis.trace.module_memory import module_memory_table
from lightning_flops.analysis.trace.modules import module_table
from lightning_flops.analysis.trace.operators import memory_table, operator_table
from lightning_flops.analysis.trace.parts import step_parts
from lightning_flops.analysis.trace.phases import model_summary
from lightning_flops.analysis.trace.ranks import compare_ranks, rank_numbers
from lightning_flops.analysis.trace.scopes import device_summary, overview, transfer_table, user_scope_table
from lightning_flops.analysis.trace.step_time import step_times
from lightning_flops.analysis.trace_advice import advise_on_traces
from lightning_flops.config import AdviceThresholds
from lightning_flops.schema.ranks import Straggler
from lightning_flops.schema.trace import SCHEMA_VERSION, TraceReport, TracesReport

_NO_TORCH = "FLOPs are n/a: working them out from shapes needs torch, which is not installed."
_NO_SHAPES = "FLOPs are n/a: the trace was taken without record_shapes=True."


def analyze_trace(trace: Trace, *, formulas: Formulas | None = None) -> TraceReport:
    """Every table of *trace*.

    Args:
        trace: what to analyze.
        formulas: what a recorded call spent; without them the report has no FLOPs.
    """
    collectives = collective_table(trace)
    return TraceReport(
        source=trace.source,
        rank=trace.rank,
        events=len(trace),
        step_times=step_times(trace),
        modules=module_table(trace),
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
        notes=trace.notes,
        flops=None if formulas is None else trace_flops(trace, formulas),
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
    rank_numbers(traces)  # refuse traces of the same rank before the work
    ordered = sorted(traces, key=lambda trace: -1 if trace.rank is None else trace.rank)
    reports = tuple(_with_words(analyze_trace(trace, formulas=formulas), trace) for trace in ordered)
    comparison = compare_ranks(traces) if len(traces) > 1 else None
    stragglers: tuple[Straggler, ...] = ()
    if comparison is not None and are_compared(comparison):
        stragglers = find_stragglers_in_traces([step_parts(trace) for trace in ordered], thresholds=thresholds)
    return TracesReport(
        schema_version=SCHEMA_VERSION,
        traces=reports,
        ranks=comparison,
        advice=advise_on_traces(
            reports,
            comparison,
            straggler=stragglers[0] if stragglers else None,
            devices=tuple(map(_abilities, ordered)),
            thresholds=thresholds,
        ),
    )


def _with_words(report: TraceReport, trace: Trace) -> TraceReport:
    """*report* with a sentence on why it has no FLOPs, where it has none."""
    if report.flops is not None:
        return report
    has_shapes = bool((trace.inputs >= 0).any())
    return replace(report, notes=(*report.notes, _NO_TORCH if has_shapes else _NO_SHAPES))


def _abilities(trace: Trace) -> DeviceAbilities:
    """What the device that ran the kernels can do; a trace lists all devices of its machine."""
    if not trace.has_device:
        return UNKNOWN_DEVICE
    used = set(trace.device[trace.on_device].tolist())
    kinds = {(one.name, one.compute_capability) for one in trace.devices if one.index in used}
    name, capability = kinds.pop() if len(kinds) == 1 else ("", None)
    # A device without a name may be any vendor's.
    return device_abilities(device_type="cuda", name=name, compute_capability=capability if name else None)
