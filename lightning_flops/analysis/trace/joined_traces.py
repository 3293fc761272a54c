"""Traces of several ranks, or of one, in one frozen record."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_flops.analysis.stragglers import are_compared, find_stragglers_in_traces
from lightning_flops.analysis.trace.job import job_flops
from lightning_flops.analysis.trace.one_trace import AnalyzedTrace
from lightning_flops.analysis.trace.ranks import compare_ranks, refuse_mixed_ranks
from lightning_flops.analysis.trace_advice import advise_on_traces
from lightning_flops.config import AdviceThresholds
from lightning_flops.schema.ranks import Straggler
from lightning_flops.schema.trace import SCHEMA_VERSION, TracesReport
from lightning_flops.schema.trace_flops import JobFlops


def join_analyses(analyzed: Sequence[AnalyzedTrace], *, thresholds: AdviceThresholds | None = None) -> TracesReport:
    """Reports of several traces, and their ranks side by side; all analyzed for a comparison if there are several.

    Raises:
        RanksError: two traces are of the same rank, or none is given.
    """
    ordered = sorted(analyzed, key=lambda one: -1 if one.report.rank is None else one.report.rank)
    reports = tuple(one.report for one in ordered)
    refuse_mixed_ranks(reports)
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


def _job_flops(analyzed: Sequence[AnalyzedTrace]) -> JobFlops | None:
    """The FLOPs of all ranks together; None for one trace, and for separate runs."""
    ranks = {one.report.rank: one.report.flops for one in analyzed if one.report.rank is not None}
    if len(analyzed) == 1 or len(ranks) < len(analyzed):
        return None
    return job_flops(ranks, world_sizes=[one.summary.world_size for one in analyzed if one.summary is not None])
