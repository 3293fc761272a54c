"""Ranks that the others wait for: who, by how much, and in what part of their step.

What separates the ranks is their *own* time: a part of a step without the communication in the traced steps that no
computation hides, in which a rank may be waiting for others. Each part is tested by itself, as a part that never waits
is far steadier than one that does: a rank is late in it if its own time there differs from the median of the others' by
more than four standard errors, six where they are of few means. It is a straggler if the parts in which it is late, or
else all parts together, take longer by more than the thresholds. Unless all ranks were traced, waits for data and
transfers alone are compared: elsewhere work cannot be separated from waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from lightning_flops.analysis.compare_figures import batch_means
from lightning_flops.analysis.flop_counts import grouped
from lightning_flops.analysis.rank_record import RankRecord
from lightning_flops.config import AdviceThresholds
from lightning_flops.schema.trace import Straggler, TracedPart

_MAIN_SHARE = 0.5  # a part, or a module, is named if it has at least this share of what a rank is late by
_STANDARD_ERRORS = 4.0  # a difference of means that is less than so many standard errors may be by chance
_FEW, _MANY = 1.5, 10  # from fewer means than so many, so many times as many standard errors: their spread is unsure
_WAITS = 0.05  # a part waits for others if this share of it is communication that nothing hides
_NEVER_WAITS = {"data_wait", "transfer"}  # phases in which no rank waits for another


class _Rank(NamedTuple):
    """What is compared of one rank."""

    rank: int
    step_sec: float
    own_sec: Mapping[str, float]
    variances: Mapping[str, float] = MappingProxyType({})  #: Of the means of these parts; 0 where a trace is all.
    record: RankRecord | None = None


def find_stragglers(
    records: Sequence[RankRecord], *, thresholds: AdviceThresholds | None = None
) -> tuple[Straggler, ...]:
    """The ranks of one job that the others wait for, longest first; each is held against its own pipeline stage."""
    found = [one for peers in _peers(records) for one in _of_peers(peers, thresholds)]
    return tuple(sorted(found, key=lambda one: -one.late_sec))


def chance_sec(records: Sequence[RankRecord]) -> dict[str, float]:
    """How far the own time of a rank may differ from the others' by chance, by part: the most over the ranks."""
    most: dict[str, float] = {}
    for peers in _peers(records):
        if len(peers) > 1:
            names, _, chances = _delays(peers)
            for name, chance in zip(names, chances.max(axis=0).tolist(), strict=True):
                most[name] = max(chance, most.get(name, 0.0))
    return most


def _peers(records: Sequence[RankRecord]) -> Iterator[list[_Rank]]:
    """The ranks that do the same work."""
    timed = [record for record in records if record.profile.timing is not None]
    for peers in grouped(timed, lambda one: one.profile.context.pp_rank).values():
        traced = all(one.profile.traced is not None and one.profile.traced.parts for one in peers)
        yield [_of_record(one, traced=traced) for one in peers]


def find_stragglers_in_traces(
    ranks: Mapping[int, Sequence[TracedPart]], *, thresholds: AdviceThresholds | None = None
) -> list[Straggler]:
    """Stragglers among *ranks*, of which nothing is known but the parts of their traced steps."""
    peers = [_Rank(rank, sum(part.wall_sec for part in parts), _own(parts)) for rank, parts in ranks.items()]
    return _of_peers(peers, thresholds)


def _own(parts: Sequence[TracedPart]) -> dict[str, float]:
    """Seconds of each part, by its name for people, without communication that no computation hides."""
    return {part.name.replace("_", " "): part.wall_sec - part.exposed_sec for part in parts}


def _of_record(record: RankRecord, *, traced: bool) -> _Rank:
    profile, own_sec, variances = record.profile, dict[str, float](), dict[str, float]()
    assert profile.timing is not None
    trace = {part.name: part for part in profile.traced.parts} if traced and profile.traced is not None else {}
    for part in profile.timing.parts:
        if not traced and not _NEVER_WAITS.issuperset(part.phases):
            continue
        inside = [trace[phase] for phase in part.phases if phase in trace]
        own_sec[part.name], means = part.mean_sec, batch_means(np.array(part.steps_sec))
        if sum(one.exposed_sec for one in inside) > _WAITS * sum(one.wall_sec for one in inside):
            # Of a traced step that was late by chance, no more than usual.
            own_sec[part.name] = min(part.mean_sec, sum(_own(inside).values()))
            of_steps = np.array([one.own_steps_sec for one in inside]).sum(axis=0)
            means = of_steps if len(of_steps) else means
        errors = _FEW if len(means) < _MANY else 1.0
        variances[part.name] = errors**2 * float(means.var(ddof=1)) / len(means) if len(means) > 1 else 0.0
    return _Rank(record.rank, profile.timing.global_step_sec, own_sec, variances, record)


def _delays(peers: Sequence[_Rank]) -> tuple[list[str], Any, Any]:
    """By how many seconds each rank (row) is later than the median of the others in each part, and by chance."""
    names = list(dict.fromkeys(name for one in peers for name in one.own_sec))
    own = np.array([[one.own_sec.get(name, 0.0) for name in names] for one in peers])
    variances = np.array([[one.variances.get(name, 0.0) for name in names] for one in peers])
    chance = _STANDARD_ERRORS * np.sqrt(variances + _of_others(variances))
    return names, own - _of_others(own), chance


def _of_others(table: Any) -> Any:
    """The median of all other rows, by row and column."""
    # Sorted once for jobs of thousands: what stands behind a value moves up by one place.
    ordered, middle = np.sort(table, axis=0), ((len(table) - 2) // 2, (len(table) - 1) // 2)
    return sum(np.where(table <= ordered[at], ordered[at + 1], ordered[at]) for at in middle) / 2


def _of_peers(peers: Sequence[_Rank], thresholds: AdviceThresholds | None) -> list[Straggler]:
    """The stragglers among ranks that do the same work, the latest first; none of a rank alone."""
    if len(peers) < 2:
        return []
    limits, (names, delays, chance) = thresholds or AdviceThresholds(), _delays(peers)
    others_sec = _of_others(np.array([[one.step_sec] for one in peers]))[:, 0]
    least_sec = np.maximum(limits.straggler_sec, (limits.straggler - 1.0) * others_sec)
    by_part = delays * (np.abs(delays) > chance)
    is_by_part = by_part.sum(axis=1) > least_sec
    is_whole = delays.sum(axis=1) > np.maximum(least_sec, np.sqrt((chance**2).sum(axis=1)))
    late = np.where(is_by_part[:, None], by_part, delays)
    late_sec, found = late.sum(axis=1), []
    for place in np.argsort(-late_sec, kind="stable").tolist():
        if is_by_part[place] or is_whole[place]:
            part, part_sec = _main(names, late[place], late_sec[place])
            records = [one.record for one in (peers[place], *peers[:place], *peers[place + 1 :])]
            module, outside = (None, False) if part is None or part_sec is None else _module(part, part_sec, *records)
            found.append(
                Straggler(
                    rank=peers[place].rank,
                    late_sec=float(late_sec[place]),
                    share=float(late_sec[place] / others_sec[place]),
                    part=part,
                    part_sec=part_sec,
                    module=module,
                    outside_modules=outside,
                )
            )
    return found


def _main(names: Sequence[str], delays: Any, total_sec: float) -> tuple[str | None, float | None]:
    """The name with most of *total_sec*, and how much; None if that is less than half."""
    place = max(range(len(names)), key=delays.__getitem__, default=None)
    if place is None or delays[place] < _MAIN_SHARE * total_sec:
        return None, None
    return names[place], float(delays[place])


def _module(part: str, part_sec: float, mine: RankRecord | None, *others: RankRecord | None) -> tuple[str | None, bool]:
    """The module that stands out in *part* against the same module of the other ranks, and whether all modules do not.

    Their times are as they were traced, not scaled: what scales them may be what happened outside of them.
    """
    if mine is None or not getattr(mine, f"own_{part}_ns", None):
        return None, False
    times = [
        np.array(getattr(one, f"own_{part}_ns")) / getattr(one.profile.traced, f"{part}_scale")
        for one in (mine, *others)
        if one is not None and one.module_names == mine.module_names
    ]
    if len(times) < 2:
        return None, False
    delays_sec = 1e-9 * (times[0] - np.median(times[1:], axis=0))
    return _main(mine.module_names, delays_sec, part_sec)[0], bool(delays_sec.sum() < _MAIN_SHARE * part_sec)
