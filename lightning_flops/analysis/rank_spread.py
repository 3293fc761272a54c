"""One figure over the ranks of a job: how far they lie apart, and who lies where."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from lightning_flops.schema.ranks import RankSpread


def spread_over(values: Mapping[int, float]) -> RankSpread | None:
    """How far *values*, by rank, lie apart; None without any."""
    if not values:
        return None
    ranks = sorted(values)
    least, greatest = min(ranks, key=values.__getitem__), max(ranks, key=values.__getitem__)
    return RankSpread(
        ranks=len(ranks),
        least=values[least],
        least_rank=least,
        median=statistics.median(values.values()),
        greatest=values[greatest],
        greatest_rank=greatest,
    )
