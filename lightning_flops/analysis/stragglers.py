"""Ranks that the others wait for: who, by how much, and in what part of their step.

In synchronous training every rank's step is as long as the slowest rank's. What tells the ranks apart is their *own*
time: the step without the communication that no computation hides, in which a rank may be waiting for others. Own time
is looked at in two ways.

- Over all timed steps, in the parts in which neither the rank nor the others exposed much communication in the traced
  step: a longer wait for data is then its own. This rests on many steps, and sees nothing of the parts in which ranks
  wait for each other.
- In the traced step, whole: its communication says how long the rank waited, in every part. This rests on one step. So
  it counts only as far as the others may have waited so long in every one of their timed steps. If the rank was late
  by chance, or if the ranks are late in turn, some of these steps were too short for that.

The command that reads traces knows no timed steps: there the traced steps alone decide, by the same rule.

Where the traces tell nothing, only waits for data and transfers to the device are a rank's own for certain. Steps that
differ by chance make no straggler: a delay is named if it stands out from how far the steps lie apart, and the ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from lightning_flops.config import AdviceThresholds
from lightning_flops.schema.communication import RankComparison
from lightning_flops.schema.rank_record import RankRecord
from lightning_flops.schema.ranks import Straggler
from lightning_flops.schema.step import PartTiming, TimingProfile, phases_text
from lightning_flops.schema.trace import TracedPart

_NS_PER_SEC = 1e9

_MAIN_SHARE = 0.5
"""A part, or a module, is named if it has at least this share of what a rank is late by."""

_MANY_RANKS = 8
"""From so many on the ranks' own spread says how late the latest of them usually is."""

_RANKS_WITH_MODULES = 8
"""Of a stage's stragglers so many are looked into module by module, the latest ones."""

_TYPICAL_RANKS = 31
"""Most ranks that a straggler's modules are held against."""

_WAITING_SHARE = 0.1
"""Parts of which at most this share is exposed communication, on a rank and on most others, are their own work."""

_STANDARD_ERRORS = 4.0
"""A difference of means over the timed steps that is more than so many standard errors is no chance."""

_STANDARD_DEVIATIONS = 2.0
"""A delay in a single step, as far as all timed steps leave room for it, may be by chance up to so many of their
standard deviations."""

_DEVIATION_OVER_MEDIAN = 1.4826
"""Standard deviation of a normal distribution ÷ the median of the deviations from its middle."""

_NEVER_WAITS = ("data wait", "transfer")
"""Parts in which no rank waits for another, as far as anybody can tell without a trace."""


def find_stragglers(
    records: Sequence[RankRecord], *, thresholds: AdviceThresholds | None = None
) -> tuple[Straggler, ...]:
    """The ranks that the others wait for, the one that they wait for longest first; none where all keep pace.

    Args:
        records: of the ranks of one job. Of a pipeline, each is held against the ranks of its own stage.
        thresholds: how late is late; None for the defaults.
    """
    limits = AdviceThresholds() if thresholds is None else thresholds
    stages: defaultdict[int, list[_Rank]] = defaultdict(list)
    for record in sorted(records, key=lambda one: one.rank):
        if record.summary.timing is not None:
            stages[record.summary.context.pp_rank].append(_of_record(record, record.summary.timing))
    found = [one for peers in stages.values() for one in _of_peers(peers, limits)]
    return tuple(sorted(found, key=_latest_first))


def find_stragglers_in_traces(
    ranks: Sequence[Sequence[TracedPart]], *, thresholds: AdviceThresholds | None = None
) -> tuple[Straggler, ...]:
    """The same, where nothing is known of the ranks but their traces.

    Args:
        ranks: the parts of each rank's traced steps.
        thresholds: how late is late; None for the defaults.

    Returns:
        Stragglers whose ``rank`` is a place in *ranks*.
    """
    limits = AdviceThresholds() if thresholds is None else thresholds
    return tuple(_of_peers([_of_trace(place, parts) for place, parts in enumerate(ranks)], limits))


def are_compared(comparison: RankComparison) -> bool:
    """Whether the ranks of *comparison* are held against each other: files may be of different runs."""
    return any(row.compute_over_median is not None for row in comparison.ranks)


def longest_own_time(comparison: RankComparison) -> int:
    """The place of the rank whose own time in a step is longest: if there are stragglers, it is the first of them."""
    own_us = [
        (row.overlap.wall_us - (row.overlap.communication_us - row.overlap.overlap_us)) / row.steps
        for row in comparison.ranks
    ]
    return own_us.index(max(own_us))


def _latest_first(straggler: Straggler) -> tuple[float, int]:
    return -straggler.late_sec, straggler.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """What is compared of one rank, taken from its record once: a job may have thousands of ranks."""

    rank: int
    record: RankRecord | None = None
    """None where a trace is all there is."""
    timed_steps: int = 0
    step: PartTiming | None = None
    """The timed steps, whole; None if no step was timed."""
    timed: Mapping[str, PartTiming]
    """The timed steps by part."""
    traced_step: int | None = None
    """Index of the traced step; None where it is taken for that of the other ranks."""
    traced_sec: float | None
    """Wall time of the traced step; None if no step was traced."""
    own_sec: Mapping[str, float]
    """By part, in the traced step: without exposed communication."""
    exposed_sec: Mapping[str, float]
    """By part."""

    @property
    def step_sec(self) -> float:
        """Wall time of a step: the mean of the timed ones, or the traced one."""
        return (self.traced_sec or 0.0) if self.step is None else self.step.mean_sec


def _of_record(record: RankRecord, timing: TimingProfile) -> _Rank:
    traced = {part.name.replace("_", " "): part for part in record.summary.traced_parts}
    timed = {part.name: part for part in timing.parts}
    own_sec = {name: part.wall_sec - part.exposed_sec for name, part in traced.items()}
    exposed_sec = {name: part.exposed_sec for name, part in traced.items()}
    for name in timed.keys() - traced.keys():
        # Parts that the timed steps do not tell apart stand together.
        inside = [one for one in (phases_text([phase]) for phase in timed[name].phases) if one in traced]
        if len(inside) > 1:
            own_sec[name] = sum(own_sec.pop(one) for one in inside)
            exposed_sec[name] = sum(exposed_sec.pop(one) for one in inside)
    return _Rank(
        rank=record.rank,
        record=record,
        timed_steps=timing.timed_steps,
        step=timing.global_step,
        timed=timed,
        traced_step=record.summary.traced_step,
        traced_sec=sum(part.wall_sec for part in traced.values()) if traced else None,
        own_sec=own_sec,
        exposed_sec=exposed_sec,
    )


def _of_trace(place: int, parts: Sequence[TracedPart]) -> _Rank:
    traced = {part.name.replace("_", " "): part for part in parts}
    return _Rank(
        rank=place,
        timed={},
        traced_sec=sum(part.wall_sec for part in parts),
        own_sec={name: part.wall_sec - part.exposed_sec for name, part in traced.items()},
        exposed_sec={name: part.exposed_sec for name, part in traced.items()},
    )


@dataclass(frozen=True, slots=True)
class _Delay:
    """How much longer one rank's own work takes than that of the median of the others."""

    total_sec: float
    by_part: Mapping[str, float]
    chance_sec: float
    """What it can be by chance."""


def _of_peers(peers: Sequence[_Rank], limits: AdviceThresholds) -> list[Straggler]:
    """The stragglers among ranks that do the same work; none of a rank alone."""
    if len(peers) < 2:
        return []
    timed, traced = _timed_delays(peers), _traced_delays(peers)
    steps = _medians_of_others([one.step_sec for one in peers])
    exposed = {place: sum(one.exposed_sec.values()) for place, one in enumerate(peers) if one.traced_sec is not None}
    others_exposed: dict[int, float] = {}
    if len(exposed) > 1:
        others_exposed.update(zip(exposed, _medians_of_others(list(exposed.values())), strict=True))
    found: list[tuple[Straggler, _Rank]] = []
    for place, one in enumerate(peers):
        limit_sec = max(limits.straggler_sec, (limits.straggler - 1.0) * steps[place])
        delay, shown_by = _worth_naming(timed.get(place), traced.get(place), limit_sec)
        if delay is None:
            continue
        part, part_sec = _main(delay.by_part, delay.total_sec)
        straggler = Straggler(
            rank=one.rank,
            late_sec=delay.total_sec,
            share=delay.total_sec / steps[place],
            shown_by=shown_by,
            part=part,
            part_sec=part_sec,
            module=None,
            exposed_sec=exposed.get(place),
            others_exposed_sec=others_exposed.get(place),
        )
        found.append((straggler, one))
    found.sort(key=lambda pair: _latest_first(pair[0]))
    return [
        _with_module(straggler, one, peers) if number < _RANKS_WITH_MODULES else straggler
        for number, (straggler, one) in enumerate(found)
    ]


def _worth_naming(
    timed: _Delay | None, traced: _Delay | None, limit_sec: float
) -> tuple[_Delay | None, Literal["timed steps", "traced step"]]:
    """The delay that the timed steps show, or the traced step's if it is longer by more than the limit."""
    seen = [
        one if one is not None and one.total_sec > max(limit_sec, one.chance_sec) else None for one in (timed, traced)
    ]
    if seen[1] is not None and (seen[0] is None or seen[1].total_sec > seen[0].total_sec + limit_sec):
        return seen[1], "traced step"
    return seen[0], "timed steps"


# ---- the two ways to look at it


def _timed_delays(peers: Sequence[_Rank]) -> dict[int, _Delay]:
    """Of each rank, by its place, over the timed steps, in the parts in which it does not wait for others."""
    delays: defaultdict[int, dict[str, float]] = defaultdict(dict)
    variances: defaultdict[int, float] = defaultdict(float)
    for name in _names(one.timed for one in peers):
        having = [place for place, one in enumerate(peers) if name in one.timed]
        if len(having) < 2:
            continue
        mine = [_usual_sec(peers[place].timed[name], peers[place].timed_steps) for place in having]
        squares = [peers[place].timed[name].deviation_sec ** 2 / peers[place].timed_steps for place in having]
        waits = [_waiting_share(peers[place], name) for place in having]
        for place, own_sec, others_sec, square, others_square, share, others_share in zip(
            having,
            mine,
            _medians_of_others(mine),
            squares,
            _medians_of_others(squares),
            waits,
            _medians_of_others(waits),
            strict=True,
        ):
            if max(share, others_share) <= _WAITING_SHARE:
                delays[place][name] = own_sec - others_sec
                variances[place] += square + others_square
    totals = {place: sum(by_part.values()) for place, by_part in delays.items()}
    usual_sec = _usual_extreme(list(totals.values()))
    return {
        place: _Delay(totals[place], by_part, chance_sec=max(usual_sec, _STANDARD_ERRORS * math.sqrt(variances[place])))
        for place, by_part in delays.items()
    }


def _traced_delays(peers: Sequence[_Rank]) -> dict[int, _Delay]:
    """Of each rank, by its place, in the traced step, as far as every timed step leaves room for it."""
    by_step: defaultdict[int | None, list[int]] = defaultdict(list)
    for place, one in enumerate(peers):
        if one.traced_sec is not None:
            by_step[one.traced_step].append(place)
    delays = {}
    for places in by_step.values():
        if len(places) < 2:
            continue
        traced = [peers[place] for place in places]
        own = {name: [one.own_sec.get(name, 0.0) for one in traced] for name in _names(one.own_sec for one in traced)}
        others = {name: _medians_of_others(values) for name, values in own.items()}
        sums = [sum(values) for values in zip(*own.values(), strict=True)]
        whole = [mine - of_others for mine, of_others in zip(sums, _medians_of_others(sums), strict=True)]
        room = _rooms(traced)
        # What made the traced step longer than the others' fastest step may belong to this one step alone.
        longer = _medians_of_others([_longer_than_fastest(one) for one in traced])
        apart = _medians_of_others([0.0 if one.step is None else one.step.deviation_sec for one in traced])
        usual_sec = _usual_extreme(whole)
        for index, place in enumerate(places):
            delays[place] = _Delay(
                min(whole[index] - longer[index], room[index]),
                {name: values[index] - others[name][index] for name, values in own.items()},
                chance_sec=max(usual_sec, _STANDARD_DEVIATIONS * apart[index]),
            )
    return delays


def _rooms(traced: Sequence[_Rank]) -> list[float]:
    """For each rank, how long the others may have waited for it in every one of their timed steps.

    That is the least that they took for a part, less the work of the part, less the communication that the rank itself
    exposed there: the rank came last, so its communication was no waiting. Without timed steps there is no limit.
    """
    if any(one.step is None for one in traced):
        return [math.inf] * len(traced)
    rooms = [0.0] * len(traced)
    for name in _names(one.timed for one in traced):
        free = [
            (one.timed[name].minimum_sec if name in one.timed else 0.0) - one.own_sec.get(name, 0.0) for one in traced
        ]
        for index, free_sec in enumerate(_medians_of_others(free)):
            rooms[index] += max(0.0, free_sec - traced[index].exposed_sec.get(name, 0.0))
    return rooms


def _longer_than_fastest(one: _Rank) -> float:
    """By how much the traced step was longer than the fastest timed one; zero where no step was timed."""
    return 0.0 if one.step is None else max(0.0, (one.traced_sec or 0.0) - one.step.minimum_sec)


def _waiting_share(one: _Rank, part: str) -> float:
    """The share of *part* in which the rank may have waited for others, by its traced step."""
    if one.traced_sec is None:
        return 0.0 if part in _NEVER_WAITS else 1.0
    own_sec, exposed_sec = one.own_sec.get(part, 0.0), one.exposed_sec.get(part, 0.0)
    return exposed_sec / (own_sec + exposed_sec) if exposed_sec else 0.0


def _usual_sec(part: PartTiming, steps: int) -> float:
    """Mean over the timed steps without the longest: one hiccup makes no straggler."""
    return part.mean_sec if steps < 3 else max(0.0, part.mean_sec * steps - part.maximum_sec) / (steps - 1)


# ---- what stands out


def _main(delays: Mapping[str, float], total_sec: float) -> tuple[str | None, float | None]:
    """The name with most of *total_sec*, and how much; None if that is less than half."""
    name = max(delays, key=delays.__getitem__, default=None)
    if name is None or delays[name] < _MAIN_SHARE * total_sec:
        return None, None
    return name, delays[name]


def _with_module(straggler: Straggler, one: _Rank, peers: Sequence[_Rank]) -> Straggler:
    """*straggler* with the module that stands out against the same module of the other ranks, if there is one."""
    part, part_sec, mine = straggler.part, straggler.part_sec, one.record
    times = _MODULE_TIMES.get(part or "")
    if times is None or part is None or part_sec is None or mine is None:
        return straggler
    alike = [
        (peer.own_sec.get(part, 0.0), times(peer.record))
        for peer in peers
        if peer is not one
        and peer.record is not None
        and peer.record.module_names == mine.module_names
        and peer.record.summary.modules_clock == mine.summary.modules_clock
        and len(times(peer.record)) == len(mine.module_names)
    ]
    if not alike or len(times(mine)) != len(mine.module_names):
        return straggler
    alike.sort(key=lambda peer: peer[0])
    first = max(0, (len(alike) - _TYPICAL_RANKS) // 2)
    usual = map(median, zip(*(of_peer for _, of_peer in alike[first : first + _TYPICAL_RANKS]), strict=True))
    delays = {
        name: (own_ns - others_ns) / _NS_PER_SEC
        for name, own_ns, others_ns in zip(mine.module_names, times(mine), usual, strict=True)
    }
    module, _ = _main(delays, part_sec)
    return replace(straggler, module=module)


_MODULE_TIMES: Mapping[str, Callable[[RankRecord], Sequence[int]]] = {
    "forward": lambda record: record.own_forward_ns,
    "backward": lambda record: record.own_backward_ns,
}


# ---- small things


def _names(mappings: Iterable[Mapping[str, object]]) -> dict[str, None]:
    """The keys of all *mappings*, in the order in which they come first."""
    return {name: None for one in mappings for name in one}


def _usual_extreme(delays: Sequence[float]) -> float:
    """How late the latest of so many ranks is by chance, if the delays of most are normally distributed.

    Outliers hardly move the median of the deviations. It says nothing about a few ranks; among few, it is rare that
    in every step one of them is late.
    """
    if len(delays) < _MANY_RANKS:
        return 0.0
    middle = median(delays)
    deviation = _DEVIATION_OVER_MEDIAN * median(abs(one - middle) for one in delays)
    return deviation * math.sqrt(2.0 * math.log(len(delays)))


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """For each of two or more values the median of all others, sorted once: a job may have thousands of ranks."""
    ordered = sorted(values)
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    left, after_left, right, after_right = (ordered[place] for place in (low, low + 1, high, high + 1))
    # Where a value is left out, what stands behind it in the order moves up by one place.
    return [
        ((after_left if value < after_left else left) + (after_right if value < after_right else right)) / 2
        for value in values
    ]
