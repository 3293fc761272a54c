"""All tables of one trace, or of one trace for each rank, in one frozen record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_flops.analysis.trace.columns import Trace
from lightning_flops.analysis.trace.communication import collective_table, overlap
from lightning_flops.analysis.trace.device import (
    device_metrics,
    idle_times,
    kernel_summary,
    kernel_table,
    launch_statistics,
)
from lightning_flops.analysis.trace.module_memory import module_memory_table
from lightning_flops.analysis.trace.modules import module_table
from lightning_flops.analysis.trace.operators import memory_table, operator_table
from lightning_flops.analysis.trace.phases import model_summary
from lightning_flops.analysis.trace.ranks import compare_ranks, rank_numbers
from lightning_flops.analysis.trace.scopes import device_summary, overview, transfer_table, user_scope_table
from lightning_flops.analysis.trace.step_time import step_times
from lightning_flops.analysis.trace_advice import advise_on_traces
from lightning_flops.analysis.trace_tables import (
    TraceReport,
    TracesReport,
)
from lightning_flops.config import AdviceThresholds

SCHEMA_VERSION = 2


def analyze_trace(trace: Trace) -> TraceReport:
    """Every table of *trace*."""
    collectives = collective_table(trace)
    return TraceReport(
        source=trace.source,
        rank=trace.rank or 0,
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
    )


def analyze_traces(traces: Sequence[Trace], *, thresholds: AdviceThresholds | None = None) -> TracesReport:
    """Every table of each of *traces*, one for each rank, and the ranks side by side.

    Args:
        traces: each of another rank.
        thresholds: from where on something is worth a word of advice; None for the defaults.

    Raises:
        RanksError: two traces are of the same rank, or none is given.
    """
    ranks = rank_numbers(traces)
    order = sorted(range(len(traces)), key=ranks.__getitem__)
    reports = tuple(replace(analyze_trace(traces[index]), rank=ranks[index]) for index in order)
    comparison = compare_ranks(traces) if len(traces) > 1 else None
    # The devices of one machine are alike as a rule, and a trace names all of them.
    capabilities = {
        ranks[index]: next((one.compute_capability for one in traces[index].devices), None) for index in order
    }
    return TracesReport(
        schema_version=SCHEMA_VERSION,
        traces=reports,
        ranks=comparison,
        advice=advise_on_traces(reports, comparison, compute_capabilities=capabilities, thresholds=thresholds),
    )
