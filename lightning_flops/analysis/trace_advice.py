"""The advice that traces support by themselves: what each rank's trace shows, and who holds the others up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_flops.analysis.advice import Advice, advise, in_order
from lightning_flops.analysis.evidence import Evidence, with_trace
from lightning_flops.analysis.rates import ratio
from lightning_flops.analysis.trace_tables import RankComparison, RankRow, TraceReport
from lightning_flops.config import AdviceThresholds

_US_PER_SEC = 1e6


def advise_on_traces(
    traces: Sequence[TraceReport],
    ranks: RankComparison | None,
    *,
    compute_capabilities: Mapping[int, tuple[int, int] | None],
    thresholds: AdviceThresholds | None = None,
) -> tuple[Advice, ...]:
    """What to try, the most at stake first; of several ranks to which a rule applies, the one with most at stake.

    Args:
        traces: the tables of each rank's trace.
        ranks: the ranks side by side; None for a single one.
        compute_capabilities: of each rank's device, by rank.
        thresholds: None for the defaults.
    """
    limits = AdviceThresholds() if thresholds is None else thresholds
    found: dict[str, Advice] = {}
    rows = {} if ranks is None else {row.rank: row for row in ranks.ranks}
    for trace in traces:
        mean = trace.step_times.mean
        evidence = Evidence(
            data_wait_share=ratio(part=mean.data_loader_us, whole=mean.wall_us),
            waiting_share=_waiting_share(rows.get(trace.rank)),
            compute_capability=compute_capabilities.get(trace.rank),
        )
        for advice in advise(with_trace(evidence, trace, limits), limits):
            mine = replace(advice, evidence=f"Rank {trace.rank}: {advice.evidence}") if len(traces) > 1 else advice
            other = found.get(mine.rule)
            if other is None or (mine.stake or 0.0) > (other.stake or 0.0):
                found[mine.rule] = mine
    for advice in advise(_straggler(ranks), limits):
        found[advice.rule] = advice
        found.pop("waiting", None)  # which is for the straggler
    return in_order(found.values())


def _waiting_share(row: RankRow | None) -> float | None:
    if row is None or row.wait_us is None:
        return None
    exposed_us = row.overlap.communication_us - row.overlap.overlap_us
    return ratio(part=min(exposed_us, row.wait_us), whole=row.overlap.wall_us)


def _straggler(ranks: RankComparison | None) -> Evidence:
    rows = ranks.ranks if ranks is not None else ()
    known = [(row.compute_over_median, row) for row in rows if row.compute_over_median is not None]
    if not known:
        return Evidence()
    factor, slowest = max(known, key=lambda item: item[0])
    longer_us = slowest.overlap.computation_us * (1.0 - 1.0 / factor)
    return Evidence(
        slowest_rank=slowest.rank,
        slowest_over_median=factor,
        slowest_longer_sec=longer_us / slowest.steps / _US_PER_SEC,
        slowest_longer_share=ratio(part=longer_us, whole=slowest.overlap.wall_us),
    )
