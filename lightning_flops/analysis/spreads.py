"""One figure over the ranks of a job: how far they lie apart, and who lies where."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One figure over ranks: the least, the median and the greatest; of ranks that tie, the lowest is named."""

    ranks: int
    """Ranks that have the figure."""
    least: float
    least_rank: int
    median: float
    greatest: float
    greatest_rank: int


def spread_over(values: Mapping[int, float]) -> Spread | None:
    """How far *values*, by rank, lie apart; None without any."""
    if not values:
        return None
    ranks = sorted(values)
    least, greatest = min(ranks, key=values.__getitem__), max(ranks, key=values.__getitem__)
    return Spread(
        ranks=len(ranks),
        least=values[least],
        least_rank=least,
        median=statistics.median(values.values()),
        greatest=values[greatest],
        greatest_rank=greatest,
    )
