"""What several ranks did together, how much they differ, and who is waited for: of a job, and of traces."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from statistics import median

from lightning_flops.analysis.names import name_ranks, straggler_evidence
from lightning_flops.analysis.rates import sum_if_all_known
from lightning_flops.report.document import Column, Section, Table, all_of, at, points, some_of
from lightning_flops.report.profile_document import devices_of, missing_rates, whose
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import RankCollectiveRow, RankComparison, RankRow, RanksProfile
from lightning_flops.units import duration, percent, plain, si

_SHOWN = 4  # points of a list
_TIMES = {
    "wall": "overlap.wall_us",
    "compute": "overlap.computation_us",
    "comm": "overlap.communication_us",
    "overlap": "overlap.overlap_us",
    "exposed": "overlap.exposed_us",
    "neither": "overlap.other_us",
    "transfer": "transfer_us",
    "wait": "wait_us",
}
# What a trace has of computation and communication: both at once, communication that no computation hides, waits.
OVERLAP = [*all_of(_TIMES, unit="us"), *all_of({"overlap / comm": "overlap.overlap_ratio"}, percent)]
_TRACED = "Exposed: communication that nothing hides. Neither: time without both. Transfer and wait: of collectives."

_first = partial(points, most=_SHOWN, others="in profile.json")


def ranks_section(profile: Profile) -> Section | None:
    """What all ranks did together, how much they differ, and who did not answer; None where there is one rank."""
    ranks = profile.ranks
    if ranks is None:
        return None
    traced = ranks.communication
    return Section(
        "All ranks",
        "",
        [
            *_who(ranks),
            *_stragglers(ranks),
            f"Peak of {some_of(devices_of(ranks), most=_SHOWN)}: {si(ranks.peak_flops_per_sec, 'FLOP/s')} in all.",
            *missing_rates(ranks.unavailable),
            _spreads(profile, ranks),
            *([] if traced is None else [_TRACED, *_collectives(traced)]),
            *_first([*(() if traced is None else traced.notes), *ranks.notes]),
        ],
    )


def _who(ranks: RanksProfile) -> list[str]:
    if not ranks.absences:
        return [f"All {plain(ranks.world_size)} ranks answered."]
    found = sorted(ranks.absences.items(), key=lambda item: (-len(item[1]), item[1][0]))
    reasons = _first([f"{name_ranks(numbers).capitalize()}: {reason}." for reason, numbers in found])
    return [f"{whose(ranks).upper()} ANSWERED, and every figure here is of those.", *reasons]


def _stragglers(ranks: RanksProfile) -> list[str]:
    """Whom the others wait for, or how far it is known that there is no such rank."""
    if ranks.stragglers:
        return _first([f"STRAGGLER: {straggler_evidence(straggler)}" for straggler in ranks.stragglers])
    timed = [one for one in ranks.ranks if one.parts_sec]
    if timed and all(one.traced for one in timed) and ranks.pipeline_stages == 1:
        part, chance = max(ranks.chance_sec.items(), key=itemgetter(1), default=("", 0.0))
        most = f" (± {duration(chance)} in {part}, the least steady part)" if chance else ""
        return [f"Straggler: none beyond chance{most}."]
    words = "Straggler: none was found in data wait and transfer; in the other parts, only ranks that do the same work "
    return [f"{words}and each traced a step can be compared."] if timed and ranks.answered > 1 else []


def _spreads(profile: Profile, ranks: RanksProfile) -> Table:
    """Each figure of a rank over the ranks: the least, the median and the greatest, and whose they are."""
    kind = "" if profile.memory is None else f" ({profile.memory.kind})"
    others = {"model FLOPs": "model_flops", "params on the rank": "local_params"}
    others |= {f"peak memory{kind}, B": "peak_memory_bytes"}
    found = {label: {one.rank: getattr(one, name) for one in ranks.ranks} for label, name in others.items()}
    rows = [_spread(*one, duration, of=ranks.answered) for one in _seconds_of_ranks(profile, ranks)]
    rows += [_spread(*one, si, of=ranks.answered) for one in found.items()]
    heads = enumerate(["of each rank", "min", "", "median", "max", ""])
    columns = [Column(head, itemgetter(place), str, left=place in (0, 2, 5)) for place, head in heads]
    return Table(list(filter(None, rows)), columns, whole=True)


def _seconds_of_ranks(profile: Profile, ranks: RanksProfile) -> Iterator[tuple[str, dict[int, float | None]]]:
    """What each part of the timed steps, and of the traced one, took on each rank."""
    timed = [one for one in ranks.ranks if one.parts_sec]
    for name in dict.fromkeys(name for one in timed for name in one.parts_sec):
        yield name, {one.rank: one.parts_sec.get(name) for one in timed}
    yield profile.step_name, {one.rank: math.fsum(one.parts_sec.values()) for one in timed}
    traced = () if ranks.communication is None else ranks.communication.ranks
    for name, path in _TIMES.items():
        yield f"traced step: {name}", {row.rank or 0: _per_step(row, path, row.steps) for row in traced}


def _spread(label: str, by_rank: Mapping[int, float | None], show: Callable[[float], str], *, of: int) -> list[str]:
    """A row of a figure that *by_rank* has of some *of* the ranks; empty where no rank knows it."""
    known = {rank: value for rank, value in sorted(by_rank.items()) if value is not None}
    if not known:
        return []
    least, greatest = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    some = "" if len(known) == of else f" ({plain(len(known))} ranks)"
    ends = [f"rank {rank}" if known[least] < known[greatest] else "" for rank in (least, greatest)]
    values = [show(value) for value in (known[least], median(known.values()), known[greatest])]
    return [f"{label}{some}", values[0], ends[0], *values[1:], ends[1]]


def _collectives(comparison: RankComparison) -> list[Table | str]:
    """Each collective over all ranks; times are of one step."""
    by_name = defaultdict[str, list[tuple[int, RankCollectiveRow]]](list)
    for rank in comparison.ranks:
        for one in rank.collectives:
            by_name[one.name].append((rank.steps, one))
    columns = [
        Column("collective", itemgetter(0), str, "name"),
        Column("calls", partial(_in_all, "calls"), sort="calls"),
        Column("matched", partial(_in_all, "matched_calls")),
        Column("", partial(_in_all, "bytes"), unit="B"),
        *(Column(label, partial(_typical, f"{label}_us"), unit="s") for label in ("latency", "transfer", "wait")),
    ]
    words = (
        "Matched: the i-th call of each rank of a process group. Transfer: the shortest of the ranks for each call; "
        "wait: the rest, until the last rank came. Times are medians of the ranks, in one step. Bytes are n/a where "
        "the traces do not say them; gloo's do with record_shapes=True."
    )
    rows = sorted(by_name.items(), key=lambda row: (-math.fsum(one.latency_us for _, one in row[1]), row[0]))
    return [Table(rows, columns), words] if rows else []


_Calls = tuple[str, Sequence[tuple[int, RankCollectiveRow]]]  # of one collective, by ranks with their steps


def _in_all(figure: str, row: _Calls) -> float | None:
    return sum_if_all_known(getattr(one, figure) for _, one in row[1])


def _typical(figure: str, row: _Calls) -> float | None:
    found = [_per_step(one, figure, steps) for steps, one in row[1]]
    known = [seconds for seconds in found if seconds is not None]
    return median(known) if known else None


def _per_step(row: RankRow | RankCollectiveRow, path: str, steps: int) -> float | None:
    """Seconds in one of so many *steps* of the microseconds that *row* has at *path*."""
    value = at(path)(row)
    return None if value is None else value * 1e-6 / steps


def rank_section(comparison: RankComparison) -> Section:
    """Ranks side by side."""
    ranks = Table(comparison.ranks, [*all_of({"rank": "rank", "steps": "steps"}, str), *OVERLAP], whole=True)
    return Section("Ranks", _TRACED, [ranks, *_collectives(comparison), *comparison.notes])
