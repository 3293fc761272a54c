"""One figure over the ranks of a job: how much they differ, and which rank has the least and the greatest."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from lightning_flops.schema.ranks import RankSpread


def spread_over(values: Mapping[int, float]) -> RankSpread | None:
    """Least, median and greatest of *values* by rank; None without any."""
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
