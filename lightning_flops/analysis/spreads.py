"""One figure over the ranks of a job: how much they differ, and which rank has the least and the greatest."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple, get_args

from lightning_flops.records import TimePhase
from lightning_flops.schema.ranks import RankFigures


class RankSpread(NamedTuple):
    """One figure over ranks. If ranks tie, the lowest number is named."""

    ranks: int
    """Ranks that have the figure."""
    least: float
    least_rank: int
    median: float
    greatest: float
    greatest_rank: int


def part_names(ranks: Iterable[RankFigures]) -> list[str]:
    """Names of the parts of a step that some of *ranks* have, in the order of a step."""
    names = dict.fromkeys(name for one in ranks for name in one.parts_sec)
    phases = [phase.replace("_", " ") for phase in get_args(TimePhase)]
    return sorted(names, key=lambda name: phases.index(name.split(" + ")[0]))


def spread_over(values: Mapping[int, float]) -> RankSpread | None:
    """Least, median and greatest of *values* by rank; None without any."""
    if not values:
        return None
    least, greatest = (choose(sorted(values), key=values.__getitem__) for choose in (min, max))
    median = statistics.median(values.values())
    return RankSpread(len(values), values[least], least, median, values[greatest], greatest)
