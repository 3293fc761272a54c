"""One figure over the ranks of a job: how far they lie apart, and who lies where."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpread:
    """One figure over ranks: the least, the median and the greatest; of ranks that tie, the lowest is named."""

    ranks: int
    """Ranks that have the figure."""
    least: float
    """The figure of the rank that has the least."""
    least_rank: int
    """Which rank that is."""
    median: float
    """Of all ranks that have the figure."""
    greatest: float
    """The figure of the rank that has the most."""
    greatest_rank: int
    """Which rank that is."""


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
