"""Ranks that the others wait for: who, by how much, and in what part of their step.

What separates the ranks is their *own* time: a part of a step without the communication in the traced step that no
computation hides, in which a rank may be waiting for others. A rank is a straggler if its own time is longer than the
median of the others' by more than the thresholds and by more than four standard errors of these means. Unless all ranks
were traced, waits for data and transfers alone are compared: elsewhere work cannot be separated from waiting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from lightning_flops.analysis.flop_counts import grouped
from lightning_flops.analysis.rank_record import RankRecord
from lightning_flops.config import AdviceThresholds
from lightning_flops.schema.ranks import Straggler
from lightning_flops.schema.trace import TracedPart
from lightning_flops.units import duration, percent

_MAIN_SHARE = 0.5  # a part, or a module, is named if it has at least this share of what a rank is late by
_STANDARD_ERRORS = 4.0  # a difference of means that is less than so many standard errors may be by chance
_NEVER_WAITS = {"data_wait", "transfer"}  # phases in which no rank waits for another


class _Rank(NamedTuple):
    """What is compared of one rank."""

    rank: int
    step_sec: float
    own_sec: Mapping[str, float]
    variance: float = 0.0  #: Of the mean of all these parts together; 0 where a trace is all there is.
    record: RankRecord | None = None


def find_stragglers(
    records: Sequence[RankRecord], *, thresholds: AdviceThresholds | None = None
) -> tuple[Straggler, ...]:
    """The ranks of one job that the others wait for, longest first; each is held against its own pipeline stage."""
    timed, found = [record for record in records if record.profile.timing is not None], list[Straggler]()
    for peers in grouped(timed, lambda one: one.profile.context.pp_rank).values():
        traced = all(one.profile.traced is not None and one.profile.traced.parts for one in peers)
        found += _of_peers([_of_record(one, traced=traced) for one in peers], thresholds)
    return tuple(sorted(found, key=lambda one: -one.late_sec))


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
    profile, own_sec, variance = record.profile, dict[str, float](), 0.0
    assert profile.timing is not None
    trace = {part.name: part for part in profile.traced.parts} if traced and profile.traced is not None else {}
    for part in profile.timing.parts:
        if not traced and not _NEVER_WAITS.issuperset(part.phases):
            continue
        inside = [trace[phase] for phase in part.phases if phase in trace]
        own_sec[part.name] = part.mean_sec
        if any(one.exposed_sec for one in inside):  # of a traced step that was late by chance, no more than usual
            own_sec[part.name] = min(part.mean_sec, sum(_own(inside).values()))
        if (number := len(part.steps_sec)) > 1:  # in floats: exact fractions of thousands of ranks take seconds
            mean = fmean(part.steps_sec)
            variance += math.fsum((one - mean) ** 2 for one in part.steps_sec) / (number - 1) / number
    return _Rank(record.rank, profile.timing.global_step_sec, own_sec, variance, record)


def _of_peers(peers: Sequence[_Rank], thresholds: AdviceThresholds | None) -> list[Straggler]:
    """The stragglers among ranks that do the same work, the latest first; none of a rank alone."""
    if len(peers) < 2:
        return []
    import numpy as np  # here, as reports are read without it

    limits, names = thresholds or AdviceThresholds(), list(dict.fromkeys(name for one in peers for name in one.own_sec))
    table = np.array([[one.step_sec, one.variance, *(one.own_sec.get(name, 0.0) for name in names)] for one in peers])
    # The median of all others, sorted once for jobs of thousands: what stands behind a value moves up by one place.
    ordered, middle = np.sort(table, axis=0), ((len(peers) - 2) // 2, (len(peers) - 1) // 2)
    others = sum(np.where(table <= ordered[at], ordered[at + 1], ordered[at]) for at in middle) / 2
    delays, (others_sec, chance) = (table - others)[:, 2:], others[:, :2].T
    late_sec, chance_sec = delays.sum(axis=1), _STANDARD_ERRORS * np.sqrt(table[:, 1] + chance)
    least_sec = np.maximum(np.maximum(limits.straggler_sec, (limits.straggler - 1.0) * others_sec), chance_sec)
    found = []
    for place in np.argsort(-late_sec, kind="stable").tolist():
        if late_sec[place] > least_sec[place]:
            part, part_sec = _main(names, delays[place], late_sec[place])
            records = [one.record for one in (peers[place], *peers[:place], *peers[place + 1 :])]
            straggler = Straggler(
                rank=peers[place].rank,
                late_sec=float(late_sec[place]),
                share=float(late_sec[place] / others_sec[place]),
                part=part,
                part_sec=part_sec,
                module=None if part_sec is None else _module(f"own_{part}_ns", part_sec, *records),
            )
            found.append(straggler)
    return found


def _main(names: Sequence[str], delays: Any, total_sec: float) -> tuple[str | None, float | None]:
    """The name with most of *total_sec*, and how much; None if that is less than half."""
    place = max(range(len(names)), key=delays.__getitem__, default=None)
    if place is None or delays[place] < _MAIN_SHARE * total_sec:
        return None, None
    return names[place], float(delays[place])


def _module(field: str, part_sec: float, mine: RankRecord | None, *others: RankRecord | None) -> str | None:
    """The module that stands out in *field* against the same module of the other ranks, if there is one."""
    import numpy as np

    if mine is None or not hasattr(mine, field):
        return None
    alike = [getattr(other, field) for other in others if other and other.module_names == mine.module_names]
    if not alike:
        return None
    delays_sec = 1e-9 * (np.array(getattr(mine, field)) - np.median(np.array(alike), axis=0))
    return _main(mine.module_names, delays_sec, part_sec)[0]


def straggler_evidence(straggler: Straggler) -> str:
    """Who waits for whom, how long, and where that comes from, in a sentence."""
    late = f"The other ranks wait {duration(straggler.late_sec)} a step ({percent(straggler.share)} of it) for "
    late += f"rank {straggler.rank}"
    if straggler.part is None:
        return f"{late}: no part of its step stands out alone."
    part = "what is in no named part of its step" if straggler.part == "other" else f"its {straggler.part}"
    # Not by how much in the module: that is of the traced step, and the part's figure may be of all timed ones.
    module = "" if straggler.module is None else f", mostly in {straggler.module or 'the root module'}"
    return f"{late}: {part} takes {duration(straggler.part_sec)} longer than theirs{module}."


def straggler_action(straggler: Straggler) -> str:
    """What to try, in a sentence."""
    if straggler.part == "data wait":
        return "Look at how that rank gets its data: its storage, its workers, the lengths of its samples."
    if straggler.module is not None:
        return f"Look at what {straggler.module or 'the root module'} is given there, and at that rank's device."
    return "Balance the work between ranks, and look at that rank's device."
