"""Advice from traces alone: what each rank's trace shows, and whom the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_flops.analysis.advice import in_order
from lightning_flops.analysis.advice_claims import Claim, claim, set_apart
from lightning_flops.analysis.advice_rules import seen_alone
from lightning_flops.analysis.device_abilities import DeviceAbilities
from lightning_flops.analysis.evidence import Evidence, with_trace
from lightning_flops.analysis.rank_names import name_files
from lightning_flops.analysis.rates import ratio
from lightning_flops.config import AdviceThresholds
from lightning_flops.schema.advice import Advice
from lightning_flops.schema.communication import RankComparison, RankRow
from lightning_flops.schema.ranks import Straggler
from lightning_flops.schema.trace import TraceReport

_US_PER_SEC = 1e6


def advise_on_traces(
    traces: Sequence[TraceReport],
    ranks: RankComparison | None,
    *,
    straggler: Straggler | None,
    devices: Sequence[DeviceAbilities],
    thresholds: AdviceThresholds | None = None,
) -> tuple[Advice, ...]:
    """What to try, the most at stake first; of several ranks to which a rule applies, the one with most at stake.

    Args:
        traces: the tables of each rank's trace.
        ranks: the ranks side by side, in the same order; None for a single one.
        straggler: the rank that the others wait for longest, by its place in *traces*; None if there is none.
        devices: what each rank's device can do, in the same order.
        thresholds: None for the defaults.
    """
    limits = AdviceThresholds() if thresholds is None else thresholds
    found: dict[str, Claim] = {}
    rows: Sequence[RankRow | None] = [None] * len(traces) if ranks is None else ranks.ranks
    files = name_files([trace.source for trace in traces])
    names = [file if trace.rank is None else f"Rank {trace.rank}" for trace, file in zip(traces, files, strict=True)]
    for place, (trace, row, device) in enumerate(zip(traces, rows, devices, strict=True)):
        mean = trace.step_times.mean
        evidence = Evidence(
            data_wait_share=ratio(part=mean.data_loader_us, whole=mean.wall_us),
            waiting_share=_waiting_share(row),
            device=device,
        )
        whose = names[place]
        for advice in seen_alone(with_trace(evidence, trace, limits), limits):
            mine = replace(advice, evidence=f"{whose}: {advice.evidence}") if len(traces) > 1 else advice
            other = found.get(mine.rule)
            if other is None or (mine.stake or 0.0) > (other.advice.stake or 0.0):
                found[mine.rule] = claim(mine, whose=whose, knows_waiting=evidence.waiting_share is not None)
    if straggler is not None:
        place = straggler.rank
        rank = traces[place].rank
        waited_for = (
            Evidence(straggler=straggler, straggler_name=files[place])
            if rank is None
            else Evidence(straggler=replace(straggler, rank=rank))
        )
        for advice in seen_alone(waited_for, limits):
            found[advice.rule] = claim(advice, whose=names[place], knows_waiting=True)
        found.pop("waiting", None)  # the others wait for the straggler
    return in_order(set_apart(found.values()))


def _waiting_share(row: RankRow | None) -> float | None:
    if row is None or row.wait_us is None:
        return None
    exposed_us = row.overlap.communication_us - row.overlap.overlap_us
    return ratio(part=min(exposed_us, row.wait_us), whole=row.overlap.wall_us)
