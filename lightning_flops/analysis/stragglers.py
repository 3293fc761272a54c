"""Ranks that the others wait for: who, by how much, and in what part of their step.

What separates the ranks is their *own* time: a part of a step without the communication in the traced steps that no
computation hides, in which a rank may be waiting for others. Each part is tested by itself, as a part that never waits
is far steadier than one that does: a rank is late in it if its own time there differs from the median of the others' by
more than four standard errors, six where they are of few means. It is a straggler if the parts in which it is late, or
else all parts together, take longer by more than the thresholds. Unless all ranks were traced, waits for data and
transfers alone are compared: elsewhere work cannot be separated from waiting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from lightning_flops.analysis.flop_counts import grouped
from lightning_flops.analysis.rank_record import RankRecord
from lightning_flops.config import AdviceThresholds
from lightning_flops.schema.trace import Straggler, TracedPart
from lightning_flops.units import duration, percent

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
            names, delays = _delays(peers)
            for name, chance in zip(names, delays.chance.max(axis=0).tolist(), strict=True):
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
        own_sec[part.name], means = part.mean_sec, _batch_means(part.steps_sec)
        if sum(one.exposed_sec for one in inside) > _WAITS * sum(one.wall_sec for one in inside):
            # Of a traced step that was late by chance, no more than usual.
            own_sec[part.name] = min(part.mean_sec, sum(_own(inside).values()))
            means = [math.fsum(of) for of in zip(*(one.own_steps_sec for one in inside), strict=True)] or means
        errors = _FEW if len(means) < _MANY else 1.0
        variances[part.name] = errors**2 * _variance(means) / len(means)
    return _Rank(record.rank, profile.timing.global_step_sec, own_sec, variances, record)


def _batch_means(steps_sec: Sequence[float]) -> list[float]:
    """Means of n^(1/3) neighbouring steps, which are alike where other programs slow some of them."""
    length = max(1, round(len(steps_sec) ** (1 / 3)))
    return [fmean(steps_sec[at : at + length]) for at in range(0, len(steps_sec) - length + 1, length)]


def _variance(values: Sequence[float]) -> float:  # in floats: exact fractions of thousands of ranks take seconds
    mean = fmean(values)
    return math.fsum((one - mean) ** 2 for one in values) / max(1, len(values) - 1)


class _Delays(NamedTuple):
    """By how much each rank (row) is later than the median of the others in each part (column), in seconds."""

    late: Any
    chance: Any  #: So much may be by chance.


def _delays(peers: Sequence[_Rank]) -> tuple[list[str], _Delays]:
    import numpy as np  # here, as reports are read without it

    names = list(dict.fromkeys(name for one in peers for name in one.own_sec))
    own = np.array([[one.own_sec.get(name, 0.0) for name in names] for one in peers])
    variances = np.array([[one.variances.get(name, 0.0) for name in names] for one in peers])
    chance = _STANDARD_ERRORS * np.sqrt(variances + _of_others(variances))
    return names, _Delays(own - _of_others(own), chance)


def _of_others(table: Any) -> Any:
    """The median of all other rows, by row and column."""
    import numpy as np

    # Sorted once for jobs of thousands: what stands behind a value moves up by one place.
    ordered, middle = np.sort(table, axis=0), ((len(table) - 2) // 2, (len(table) - 1) // 2)
    return sum(np.where(table <= ordered[at], ordered[at + 1], ordered[at]) for at in middle) / 2


def _of_peers(peers: Sequence[_Rank], thresholds: AdviceThresholds | None) -> list[Straggler]:
    """The stragglers among ranks that do the same work, the latest first; none of a rank alone."""
    if len(peers) < 2:
        return []
    import numpy as np

    limits, (names, delays) = thresholds or AdviceThresholds(), _delays(peers)
    others_sec = _of_others(np.array([[one.step_sec] for one in peers]))[:, 0]
    least_sec = np.maximum(limits.straggler_sec, (limits.straggler - 1.0) * others_sec)
    by_part = delays.late * (np.abs(delays.late) > delays.chance)
    is_by_part = by_part.sum(axis=1) > least_sec
    is_whole = delays.late.sum(axis=1) > np.maximum(least_sec, np.sqrt((delays.chance**2).sum(axis=1)))
    late = np.where(is_by_part[:, None], by_part, delays.late)
    late_sec, found = late.sum(axis=1), []
    for place in np.argsort(-late_sec, kind="stable").tolist():
        if is_by_part[place] or is_whole[place]:
            part, part_sec = _main(names, late[place], late_sec[place])
            records = [one.record for one in (peers[place], *peers[:place], *peers[place + 1 :])]
            module, outside = (None, False) if part is None or part_sec is None else _module(part, part_sec, *records)
            straggler = Straggler(
                rank=peers[place].rank,
                late_sec=float(late_sec[place]),
                share=float(late_sec[place] / others_sec[place]),
                part=part,
                part_sec=part_sec,
                module=module,
                outside_modules=outside,
            )
            found.append(straggler)
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
    import numpy as np

    own = None if mine is None else _own_ns(part, mine)
    if mine is None or own is None:
        return None, False
    alike = [_own_ns(part, other) for other in others if other and other.module_names == mine.module_names]
    if not alike:
        return None, False
    delays_sec = 1e-9 * (own - np.median(np.array(alike), axis=0))
    return _main(mine.module_names, delays_sec, part_sec)[0], bool(delays_sec.sum() < _MAIN_SHARE * part_sec)


def _own_ns(part: str, record: RankRecord) -> Any:
    """Traced nanoseconds of each module in *part*; None where there are none."""
    import numpy as np

    times, traced = getattr(record, f"own_{part}_ns", None), record.profile.traced
    if not times or traced is None:
        return None
    return np.array(times) / getattr(traced, f"{part}_scale")


def straggler_evidence(straggler: Straggler) -> str:
    """Who waits for whom, how long, and where that comes from, in a sentence."""
    late = f"The other ranks wait {duration(straggler.late_sec)} a step ({percent(straggler.share)} of it) for "
    late += f"rank {straggler.rank}"
    if straggler.part is None:
        return f"{late}: no part of its step stands out alone."
    part = "what is in no named part of its step" if straggler.part == "other" else f"its {straggler.part}"
    # Not by how much in the module: that is of the traced step, and the part's figure may be of all timed ones.
    module = "" if straggler.module is None else f", mostly in {straggler.module or 'the root module'}"
    if straggler.outside_modules:
        module = ", outside its modules"
    return f"{late}: {part} takes {duration(straggler.part_sec)} longer than theirs{module}."


def straggler_action(straggler: Straggler) -> str:
    """What to try, in a sentence."""
    if straggler.part == "data wait":
        return "Look at how that rank gets its data: its storage, its workers, the lengths of its samples."
    if straggler.module is not None:
        return f"Look at what {straggler.module or 'the root module'} is given there, and at that rank's device."
    if straggler.outside_modules:
        return f"Look at what that rank does around its modules in its {straggler.part}: losses, metrics, hooks."
    return "Balance the work between ranks, and look at that rank's device."
