"""Ranks that the others wait for: who, by how much, and in what part of their step.

In synchronous training every rank's step is as long as the slowest rank's. What separates the ranks is their *own*
time: a part of a step without the communication in the traced step that no computation hides, in which a rank may be
waiting for others. A rank is a straggler if its own time is longer than the median of the others' by more than the
thresholds and by more than four standard errors of these means. Parts in which a rank's traced step shows no
communication rest on all timed steps; so do waits for data and transfers where nothing was traced, and other parts are
left out there, as work cannot be separated from waiting. Where a trace is all there is, the thresholds alone decide.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_flops.config import AdviceThresholds
from lightning_flops.schema.communication import RankComparison
from lightning_flops.schema.rank_record import RankRecord
from lightning_flops.schema.ranks import Straggler
from lightning_flops.schema.step import TimingProfile
from lightning_flops.schema.trace import TracedPart

_NS_PER_SEC = 1e9

_MAIN_SHARE = 0.5
"""A part, or a module, is named if it has at least this share of what a rank is late by."""

_WITH_MODULES = 8
"""So many stragglers, the latest ones, are looked into module by module."""

_STANDARD_ERRORS = 4.0
"""A difference of means that is less than so many standard errors may be by chance."""

_NEVER_WAITS = {"data_wait", "transfer"}
"""Phases in which no rank waits for another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """What is compared of one rank."""

    rank: int
    step_sec: float
    own_sec: Mapping[str, float]
    """By part; parts are left out if without a trace the rank may have waited in them."""
    variance: float = 0.0
    """Of the mean of all these parts together."""
    exposed_sec: float | None = None
    """Communication that no computation hides; None without a trace."""
    record: RankRecord | None = None
    """None where a trace is all there is."""


def find_stragglers(
    records: Sequence[RankRecord], *, thresholds: AdviceThresholds | None = None
) -> tuple[Straggler, ...]:
    """The ranks that the others wait for, the one that they wait for longest first; none where all keep pace.

    Args:
        records: of the ranks of one job. Of a pipeline, each is held against the ranks of its own stage.
        thresholds: how late is late; None for the defaults.
    """
    stages: defaultdict[int, list[_Rank]] = defaultdict(list)
    for record in records:
        if record.summary.timing is not None:
            stages[record.summary.context.pp_rank].append(_of_record(record, record.summary.timing))
    found = [one for peers in stages.values() for one in _of_peers(peers, thresholds or AdviceThresholds())]
    return tuple(sorted(found, key=_latest_first))


def find_stragglers_in_traces(
    ranks: Sequence[Sequence[TracedPart]], *, thresholds: AdviceThresholds | None = None
) -> tuple[Straggler, ...]:
    """Stragglers, where nothing is known of the ranks but the parts of their traced steps.

    Returns:
        Stragglers whose ``rank`` is a place in *ranks*.
    """
    peers = [
        _Rank(
            rank=place,
            step_sec=sum(part.wall_sec for part in parts),
            own_sec={part.name.replace("_", " "): part.wall_sec - part.exposed_sec for part in parts},
            exposed_sec=sum(part.exposed_sec for part in parts),
        )
        for place, parts in enumerate(ranks)
    ]
    return tuple(_of_peers(peers, thresholds or AdviceThresholds()))


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


def _of_record(record: RankRecord, timing: TimingProfile) -> _Rank:
    traced = {part.name: part for part in record.summary.traced_parts}
    own_sec, variance = {}, 0.0
    for part in timing.parts:
        if not traced and not _NEVER_WAITS.issuperset(part.phases):
            continue
        inside = [traced[phase] for phase in part.phases if phase in traced]
        own = part.mean_sec
        if any(one.exposed_sec for one in inside):  # of a traced step that was late by chance, no more than usual
            own = min(own, sum(one.wall_sec - one.exposed_sec for one in inside))
        own_sec[part.name] = own
        variance += part.deviation_sec**2 / timing.timed_steps
    return _Rank(
        rank=record.rank,
        step_sec=timing.global_step_sec,
        own_sec=own_sec,
        variance=variance,
        exposed_sec=sum(part.exposed_sec for part in traced.values()) if traced else None,
        record=record,
    )


def _of_peers(peers: Sequence[_Rank], limits: AdviceThresholds) -> list[Straggler]:
    """The stragglers among ranks that do the same work, the latest first; none of a rank alone."""
    if len(peers) < 2:
        return []
    delays: list[dict[str, float]] = [{} for _ in peers]
    for name in {name: None for one in peers for name in one.own_sec}:
        having = [place for place, one in enumerate(peers) if name in one.own_sec]
        mine = [peers[place].own_sec[name] for place in having]
        for place, own_sec, others_sec in zip(having, mine, _medians_of_others(mine), strict=True):
            delays[place][name] = own_sec - others_sec
    steps = _medians_of_others([one.step_sec for one in peers])
    variances = _medians_of_others([one.variance for one in peers])
    exposed = {one.rank: one.exposed_sec for one in peers if one.exposed_sec is not None}
    others_exposed = dict(zip(exposed, _medians_of_others(list(exposed.values())), strict=True))
    found: list[tuple[Straggler, _Rank]] = []
    for one, by_part, others_sec, others_variance in zip(peers, delays, steps, variances, strict=True):
        late_sec, chance_sec = sum(by_part.values()), _STANDARD_ERRORS * math.sqrt(one.variance + others_variance)
        if late_sec <= max(limits.straggler_sec, (limits.straggler - 1.0) * others_sec, chance_sec):
            continue
        part, part_sec = _main(by_part, late_sec)
        straggler = Straggler(
            rank=one.rank,
            late_sec=late_sec,
            share=late_sec / others_sec,
            part=part,
            part_sec=part_sec,
            module=None,
            exposed_sec=one.exposed_sec,
            others_exposed_sec=others_exposed.get(one.rank) if len(exposed) > 1 else None,
        )
        found.append((straggler, one))
    found.sort(key=lambda pair: _latest_first(pair[0]))
    return [
        replace(straggler, module=_module(straggler, one, peers)) if number < _WITH_MODULES else straggler
        for number, (straggler, one) in enumerate(found)
    ]


def _main(delays: Mapping[str, float], total_sec: float) -> tuple[str | None, float | None]:
    """The name with most of *total_sec*, and how much; None if that is less than half."""
    name = max(delays, key=delays.__getitem__, default=None)
    if name is None or delays[name] < _MAIN_SHARE * total_sec:
        return None, None
    return name, delays[name]


def _module(straggler: Straggler, one: _Rank, peers: Sequence[_Rank]) -> str | None:
    """The module that stands out against the same module of the other ranks, if there is one."""
    mine, field = one.record, f"own_{straggler.part}_ns"
    if mine is None or straggler.part_sec is None or straggler.part not in ("forward", "backward"):
        return None
    others = [
        getattr(peer.record, field)
        for peer in peers
        if peer is not one
        and peer.record is not None
        and peer.record.module_names == mine.module_names
        and peer.record.summary.modules_clock == mine.summary.modules_clock
        and getattr(peer.record, field)
    ]
    if not others or not getattr(mine, field):
        return None
    import numpy as np  # here, as reports are read without it

    delays_ns = np.array(getattr(mine, field)) - np.median(np.array(others), axis=0)
    delays = dict(zip(mine.module_names, (delays_ns / _NS_PER_SEC).tolist(), strict=True))
    return _main(delays, straggler.part_sec)[0]


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """For each value the median of all others, of a single one its own; sorted once, for jobs of thousands."""
    if len(values) < 2:
        return list(values)
    ordered = sorted(values)
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    left, after_left, right, after_right = (ordered[place] for place in (low, low + 1, high, high + 1))
    # Where a value is left out, what stands behind it in the order moves up by one place.
    return [
        ((after_left if value < after_left else left) + (after_right if value < after_right else right)) / 2
        for value in values
    ]
