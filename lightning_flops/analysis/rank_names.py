"""Ranks in words, and one figure over the ranks of a job."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, get_args

from lightning_flops.records import TimePhase
from lightning_flops.schema.ranks import RankFigures
from lightning_flops.units import plural, run_text, runs_of

_RUNS_NAMED = 4
"""Runs of ranks that a list names."""


def name_ranks(ranks: Iterable[int]) -> str:
    """*ranks* in words, however many there are: "rank 3", "ranks 0-2 and 5", "ranks 0, 2, 4, 6 and 20 more"."""
    runs = runs_of(ranks)
    shown = [run_text(run) for run in runs[:_RUNS_NAMED]]
    if more := sum(map(len, runs[_RUNS_NAMED:])):
        shown.append(f"{more} more")
    words = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{plural('rank', sum(map(len, runs)))} {words}"


def name_files(sources: Sequence[str]) -> list[str]:
    """The last part of each of *sources*, or all of it where the last parts are the same."""
    last = [os.path.basename(source.rstrip("/")) or source for source in sources]
    return [short if last.count(short) == 1 else source for short, source in zip(last, sources, strict=True)]


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
