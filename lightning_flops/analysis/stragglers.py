"""Ranks that the others wait for: who, by how much, and in what part of their step.

In synchronous training every rank's step is as long as the slowest rank's. What tells the ranks apart is their *own*
time: the step without the communication that no computation hides, in which a rank may be waiting for others. Own time
is looked at in two ways.

- Over all timed steps, in the parts in which the rank exposed no communication in the traced step: a longer wait for
  data is then its own. This rests on many steps, and sees nothing of the parts in which ranks wait for each other.
- In the traced step, whole: its communication says how long the rank waited, in every part. This rests on one step, so
  it counts as far as every timed step of the others leaves room for such a wait: for a hiccup of the traced step, or
  where now this rank is the last and now that one, some of them were too fast.

Where the traces tell nothing, only waits for data and transfers to the device are a rank's own for certain. Steps that
differ by chance make no straggler: a delay is named if it stands out from how far the steps lie apart, and the ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from lightning_flops.config import AdviceThresholds

if TYPE_CHECKING:
    from lightning_flops.analysis.rank_record import RankRecord, RankSummary
    from lightning_flops.analysis.timing import PartTiming

_NS_PER_SEC = 1e9

_MAIN_SHARE = 0.5
"""A part, or a module, is named if it has at least this share of what a rank is late by."""

_MANY_RANKS = 8
"""From so many on the ranks' own spread says how late the latest of them usually is."""

_TYPICAL_RANKS = 31
"""Most ranks that a straggler's modules are held against."""

_OWN_SHARE = 0.95
"""A part of which at least this share is no exposed communication is the rank's own."""

_STANDARD_ERRORS = 4.0
"""What the means over the timed steps differ by more than so many standard errors is no chance."""

_STANDARD_DEVIATIONS = 2.0
"""Of the timed steps: what they all leave of a single step's delay is below this by chance."""

_DEVIATION_OVER_MEDIAN = 1.4826
"""Standard deviation of a normal distribution ÷ the median of the deviations from its middle."""

_NEVER_WAITS = ("data wait", "transfer")
"""Parts in which no rank waits for another, as far as anybody can tell without a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that the others wait for, and what shows it; seconds are of one step."""

    rank: int
    late_sec: float
    """How much longer its own work takes than that of the median of the other ranks: what they wait for it."""
    share: float
    """Of the other ranks' median step."""
    shown_by: Literal["timed steps", "traced step"]
    part: str | None
    """The part of a step, as in ``PartTiming``, that has most of it; None if no part has half of it."""
    part_sec: float | None
    """How much longer that part takes than on the median of the other ranks."""
    module: str | None
    """Qualified name of the module that has at least half of that, children left out; None if there is none."""
    module_sec: float | None
    exposed_sec: float | None
    """Its own communication that no computation hides, in the traced step; None if the step was not traced."""
    others_exposed_sec: float | None
    """The median of the other ranks': the longer, the longer they wait."""


def find_stragglers(
    records: Sequence[RankRecord], *, thresholds: AdviceThresholds | None = None
) -> tuple[Straggler, ...]:
    """The ranks that the others wait for, the one that they wait for longest first; none where all keep pace.

    Args:
        records: of the ranks of one job. Of a pipeline, each is held against the ranks of its own stage.
        thresholds: how late is late; None for the defaults.
    """
    limits = AdviceThresholds() if thresholds is None else thresholds
    stages: defaultdict[int, list[RankRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda one: one.rank):
        if record.summary.timing is not None:
            stages[record.summary.context.pp_rank].append(record)
    found = [one for peers in stages.values() if len(peers) > 1 for one in _of_stage(peers, limits)]
    return tuple(sorted(found, key=lambda one: (-one.late_sec, one.rank)))


@dataclass(frozen=True, slots=True)
class _Delay:
    """How much longer one rank's own work takes than that of the median of the others."""

    total_sec: float
    by_part: Mapping[str, float]
    chance_sec: float
    """What it can be by chance."""


def _of_stage(peers: Sequence[RankRecord], limits: AdviceThresholds) -> list[Straggler]:
    summaries = [record.summary for record in peers]
    timed, traced = _timed_delays(summaries), _traced_delays(summaries)
    steps = _medians_of_others([_step(summary).mean_sec for summary in summaries])
    exposed = [_exposed_sec(summary) for summary in summaries]
    found = []
    for index, record in enumerate(peers):
        limit_sec = max(limits.straggler_sec, (limits.straggler - 1.0) * steps[index])
        delay, shown_by = _worth_naming(timed.get(index), traced.get(index), limit_sec)
        if delay is None:
            continue
        part, part_sec = _main(delay.by_part, delay.total_sec)
        module, module_sec = _module(record, peers, part, part_sec)
        others = [one for place, one in enumerate(exposed) if place != index and one is not None]
        found.append(
            Straggler(
                rank=record.rank,
                late_sec=delay.total_sec,
                share=delay.total_sec / steps[index],
                shown_by=shown_by,
                part=part,
                part_sec=part_sec,
                module=module,
                module_sec=module_sec,
                exposed_sec=exposed[index],
                others_exposed_sec=median(others) if others else None,
            )
        )
    return found


def _worth_naming(
    timed: _Delay | None, traced: _Delay | None, limit_sec: float
) -> tuple[_Delay | None, Literal["timed steps", "traced step"]]:
    """The delay that many steps show, unless one step shows so much more that this alone were worth naming."""
    seen = [
        one if one is not None and one.total_sec > max(limit_sec, one.chance_sec) else None for one in (timed, traced)
    ]
    if seen[1] is not None and (seen[0] is None or seen[1].total_sec > seen[0].total_sec + limit_sec):
        return seen[1], "traced step"
    return seen[0], "timed steps"


# ---- the two ways to look at it


def _timed_delays(summaries: Sequence[RankSummary]) -> dict[int, _Delay]:
    """Of each rank, by its index, over the timed steps, in the parts in which it does not wait for others."""
    parts = [{part.name: part for part in _parts(summary)} for summary in summaries]
    delays: defaultdict[int, dict[str, float]] = defaultdict(dict)
    variances: defaultdict[int, float] = defaultdict(float)
    for name in {name: None for one in parts for name in one}:
        having = [index for index, one in enumerate(parts) if name in one]
        if len(having) < 2:
            continue
        mine = [_usual_sec(parts[index][name], _timed_steps(summaries[index])) for index in having]
        squares = [parts[index][name].deviation_sec ** 2 / _timed_steps(summaries[index]) for index in having]
        for index, own_sec, others_sec, square, others_square in zip(
            having, mine, _medians_of_others(mine), squares, _medians_of_others(squares), strict=True
        ):
            if _is_own(summaries[index], name):
                delays[index][name] = own_sec - others_sec
                variances[index] += square + others_square
    totals = {index: sum(by_part.values()) for index, by_part in delays.items()}
    usual_sec = _usual_extreme(list(totals.values()))
    return {
        index: _Delay(totals[index], by_part, chance_sec=max(usual_sec, _STANDARD_ERRORS * math.sqrt(variances[index])))
        for index, by_part in delays.items()
    }


def _traced_delays(summaries: Sequence[RankSummary]) -> dict[int, _Delay]:
    """Of each rank, by its index, in the traced step, as far as every timed step leaves room for it."""
    by_step: defaultdict[int | None, list[int]] = defaultdict(list)
    for index, summary in enumerate(summaries):
        if summary.traced_parts:
            by_step[summary.traced_step].append(index)
    delays = {}
    for indexes in by_step.values():
        if len(indexes) < 2:
            continue
        traced = [summaries[index] for index in indexes]
        names = {part.name: None for summary in traced for part in summary.traced_parts}
        own = {name: [_own_sec(summary, name) for summary in traced] for name in names}
        others = {name: _medians_of_others(values) for name, values in own.items()}
        whole = _delays([sum(values) for values in zip(*own.values(), strict=True)])
        room = _rooms(traced)
        # By what the traced step was longer than the others' fastest step came with this one step alone.
        longer = _medians_of_others(
            [
                max(0.0, sum(part.wall_sec for part in summary.traced_parts) - _step(summary).minimum_sec)
                for summary in traced
            ]
        )
        apart = _medians_of_others([_step(summary).deviation_sec for summary in traced])
        usual_sec = _usual_extreme(whole)
        for place, index in enumerate(indexes):
            delays[index] = _Delay(
                min(whole[place] - longer[place], room[place]),
                {_spoken(name): values[place] - others[name][place] for name, values in own.items()},
                chance_sec=max(usual_sec, _STANDARD_DEVIATIONS * apart[place]),
            )
    return delays


def _rooms(traced: Sequence[RankSummary]) -> list[float]:
    """For each rank, how long the others may have waited for it in every one of their timed steps.

    What they took for a part at least, without the work of that part and without as much communication as the rank
    itself exposed there: it came last, so that was no waiting.
    """
    rooms = [0.0] * len(traced)
    for name in {part.name: None for summary in traced for part in _parts(summary)}:
        least = [min((part.minimum_sec for part in _parts(one) if part.name == name), default=0.0) for one in traced]
        mine = [_of_traced_parts(summary, name) for summary in traced]
        free = [least_sec - own_sec for least_sec, (own_sec, _) in zip(least, mine, strict=True)]
        for place, free_sec in enumerate(_medians_of_others(free)):
            rooms[place] += max(0.0, free_sec - mine[place][1])
    return rooms


def _of_traced_parts(summary: RankSummary, part: str) -> tuple[float, float]:
    """Own time and exposed communication in the traced step of *part*; parts that are not told apart stand together."""
    mine = [one for one in summary.traced_parts if _spoken(one.name) in part.split(" + ")]
    exposed_sec = sum(one.exposed_sec for one in mine)
    return sum(one.wall_sec for one in mine) - exposed_sec, exposed_sec


def _is_own(summary: RankSummary, part: str) -> bool:
    """Whether the rank waits for no other in *part*, by its traced step."""
    if not summary.traced_parts:
        return part in _NEVER_WAITS
    own_sec, exposed_sec = _of_traced_parts(summary, part)
    return exposed_sec <= (1.0 - _OWN_SHARE) * (own_sec + exposed_sec)


def _usual_sec(part: PartTiming, steps: int) -> float:
    """Mean over the timed steps without the longest: one hiccup makes no straggler."""
    return part.mean_sec if steps < 3 else max(0.0, part.mean_sec * steps - part.maximum_sec) / (steps - 1)


# ---- what stands out


def _main(delays: Mapping[str, float], total_sec: float) -> tuple[str | None, float | None]:
    """Whoever has most of *total_sec*, and how much; None if that is less than half."""
    name = max(delays, key=delays.__getitem__, default=None)
    if name is None or delays[name] < _MAIN_SHARE * total_sec:
        return None, None
    return name, delays[name]


def _module(
    record: RankRecord, peers: Sequence[RankRecord], part: str | None, part_sec: float | None
) -> tuple[str | None, float | None]:
    """The module of the straggler's that stands out against the same module of the other ranks."""
    times = _MODULE_TIMES.get(part or "")
    if times is None or part_sec is None:
        return None, None
    alike = [
        one
        for one in peers
        if one is not record
        and one.module_names == record.module_names
        and one.summary.modules_clock == record.summary.modules_clock
        and len(times(one)) == len(record.module_names)
    ]
    if not alike or len(times(record)) != len(record.module_names):
        return None, None
    alike.sort(key=lambda one: sum(times(one)))
    first = max(0, (len(alike) - _TYPICAL_RANKS) // 2)
    typical = [times(one) for one in alike[first : first + _TYPICAL_RANKS]]
    usual = map(median, zip(*typical, strict=True))
    delays = {
        name: (mine - others) / _NS_PER_SEC
        for name, mine, others in zip(record.module_names, times(record), usual, strict=True)
    }
    return _main(delays, part_sec)


_MODULE_TIMES: Mapping[str, Callable[[RankRecord], Sequence[int]]] = {
    "forward": lambda record: record.own_forward_ns,
    "backward": lambda record: record.own_backward_ns,
}


# ---- small things


def _parts(summary: RankSummary) -> tuple[PartTiming, ...]:
    return () if summary.timing is None else summary.timing.parts


def _timed_steps(summary: RankSummary) -> int:
    return 0 if summary.timing is None else summary.timing.timed_steps


def _step(summary: RankSummary) -> PartTiming:
    assert summary.timing is not None, "only ranks that timed steps are compared"
    return summary.timing.global_step


def _own_sec(summary: RankSummary, name: str) -> float:
    return sum(part.wall_sec - part.exposed_sec for part in summary.traced_parts if part.name == name)


def _exposed_sec(summary: RankSummary) -> float | None:
    return sum(part.exposed_sec for part in summary.traced_parts) if summary.traced_parts else None


def _spoken(name: str) -> str:
    """A part's name as ``PartTiming`` has it."""
    return name.replace("_", " ")


def _delays(values: Sequence[float]) -> list[float]:
    """Each value less the median of the others."""
    return [value - others for value, others in zip(values, _medians_of_others(values), strict=True)]


def _usual_extreme(delays: Sequence[float]) -> float:
    """How late the latest of so many ranks is by chance, if most of them are none but chance's: normally distributed.

    Outliers hardly move the median of the deviations. Of a few ranks it tells nothing, and there it is rare that in
    every step somebody is late.
    """
    if len(delays) < _MANY_RANKS:
        return 0.0
    middle = median(delays)
    deviation = _DEVIATION_OVER_MEDIAN * median(abs(one - middle) for one in delays)
    return deviation * math.sqrt(2.0 * math.log(len(delays)))


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """For each of two or more values the median of all others, sorted once: a job may have thousands of ranks."""
    ordered = sorted(values)
    place_of = {value: place for place, value in enumerate(ordered)}  # of equal values one is as good as the other
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    return [
        (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
        for place in (place_of[value] for value in values)
    ]
