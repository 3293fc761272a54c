"""The whole job in one profile: what every rank measured, merged, and which ranks did not answer.

Sums and rates are of the ranks that answered; nothing is guessed for the others. Only figures of one copy of the model
are averages.

Collectives are matched call by call: the i-th call of a collective in a process group and step on one rank belongs to
the i-th on the others; ranks' clocks are never compared. Of the calls that belong together the shortest is the
transfer: the rank that came last waited for no other. What the others took longer was waiting.

What separates the ranks is their *own* time: a part of a step without the communication in the traced steps that no
computation hides, in which a rank may be waiting for others. Each part is tested by itself, as a part that never waits
is far steadier than one that does: a rank is late in it if its own time there differs from the median of the others' by
more than four standard errors, six where they are of few means. It is a straggler if the parts in which it is late, or
else all parts together, take longer by more than the thresholds. On a host, what a rank does in its modules is no
wait, whatever communication is under way meanwhile: where their times are known, a part is tested by these as well.
What a rank waited for processors, as far as the others waited for them too, is chance. Unless all ranks were traced,
waits for data and transfers alone are compared: elsewhere work cannot be separated from waiting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from operator import add
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_flops.analysis.advice import ON_COMMUNICATION, advise
from lightning_flops.analysis.compare_figures import batch_means
from lightning_flops.analysis.counts import grouped
from lightning_flops.analysis.evidence import Evidence
from lightning_flops.analysis.names import name_ranks
from lightning_flops.analysis.rank_record import RankAbsence, RankRecord, TracedRank
from lightning_flops.analysis.rates import peak_seconds, per_second, ratio, sum_if_all_known, whole
from lightning_flops.config import ADVICE_THRESHOLDS
from lightning_flops.errors import LightningFlopsError
from lightning_flops.records import RunContext
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import JobRates, PartTiming, StepFlops
from lightning_flops.schema.trace import (
    CollectiveCalls,
    RankCollectiveRow,
    RankComparison,
    RankFigures,
    RankRow,
    RanksProfile,
    StageProfile,
    Straggler,
    TracedPart,
)


def with_ranks(
    profile: Profile,
    answers: Sequence[RankRecord | RankAbsence],
    *,
    thresholds: Mapping[str, float] = ADVICE_THRESHOLDS,
) -> Profile:
    """*profile*, of the rank that reports, with what all ranks did together: *answers* of each, its own among them."""
    records = sorted((one for one in answers if isinstance(one, RankRecord)), key=lambda one: one.rank)
    absences = sorted((one for one in answers if isinstance(one, RankAbsence)), key=lambda one: one.rank)
    profiles = [record.profile for record in records]
    model, hardware = _flops_by_dtype(profiles, "model"), _flops_by_dtype(profiles, "hardware")
    rates, unavailable = _job_rates(profiles, model=model, hardware=hardware)
    traced = [record.traced for record in records if record.traced is not None]
    ranks = RanksProfile(
        absences={
            why: tuple(one.rank for one in ranks) for why, ranks in grouped(absences, lambda one: one.reason).items()
        },
        flops=reduce(add, (one.flops for one in profiles)),
        devices=dict(Counter(sorted(one.context.device_name for one in profiles)).most_common()),
        peak_flops_per_sec=sum_if_all_known(_peak(one, model) for one in profiles),
        rates=rates,
        unavailable=unavailable,
        pipeline_stages=profile.context.pp_size,
        stages=_stages(profiles),
        communication=compare(traced) if len(traced) > 1 else None,
        stragglers=find_stragglers(records, thresholds=thresholds),
        chance_sec=chance_sec(records),
        notes=_notes(records),
        ranks=tuple(map(_figures, profiles)),
    )
    evidence, known = _evidence(ranks), profile.advice
    if evidence.shares.get("waiting") is not None:
        known = tuple(one for one in known if one.rule not in ON_COMMUNICATION)
    advice = () if profile.timing is None or profile.timing.few_steps else advise(evidence, thresholds, known=known)
    return replace(profile, ranks=ranks, advice=advice)


def _evidence(ranks: RanksProfile) -> Evidence:
    """Evidence of all ranks together; for communication, the median rank's."""
    evidence = Evidence(straggler=ranks.stragglers[0] if ranks.stragglers else None)
    rows = () if ranks.communication is None else ranks.communication.ranks
    waits_us = [row.wait_us / row.steps for row in rows if row.wait_us is not None]
    if not waits_us:
        return evidence
    wall_us = median(row.overlap.wall_us / row.steps for row in rows)
    exposed_us = median(row.overlap.exposed_us / row.steps for row in rows)
    shares_us = {"exposed_communication": exposed_us, "waiting": min(exposed_us, median(waits_us))}
    return replace(evidence, shares={rule: ratio(part=part, whole=wall_us) for rule, part in shares_us.items()})


def _notes(records: Sequence[RankRecord]) -> tuple[str, ...]:
    """What some of the records lack, and whose FLOPs are lower bounds."""
    lacking = grouped((one for one in records if one.left_out), lambda one: one.left_out)
    notes = [f"Left out of the record of {name_ranks(one.rank for one in of)}: {what}." for what, of in lacking.items()]
    bound = [one.rank for one in records if one.profile.lower_bound]
    return (*notes, *([f"LOWER BOUND: FLOPs and their rates, because of {name_ranks(bound)}."] if bound else []))


def _figures(profile: Profile) -> RankFigures:
    return RankFigures(
        rank=profile.context.rank,
        model_flops=profile.flops.model,
        parts_sec={} if profile.timing is None else {part.name: part.mean_sec for part in profile.timing.parts},
        local_params=profile.local_params,
        peak_memory_bytes=None if profile.memory is None else profile.memory.run_peak_bytes,
        traced=profile.traced is not None and bool(profile.traced.parts),
    )


def _stages(profiles: Sequence[Profile]) -> tuple[StageProfile, ...]:
    """The stages of which a rank answered; one without a pipeline. FLOPs are those of one copy."""
    parts, stages = _ranks_of_one_copy(profiles[0].context), grouped(profiles, lambda one: one.context.pp_rank)
    of_stages = {stage: asdict(reduce(add, (one.flops for one in ranks))) for stage, ranks in stages.items()}
    return tuple(
        StageProfile(
            stage=stage,
            params=ranks[0].params,  # each rank answers for the whole stage
            trainable_params=ranks[0].trainable_params,
            flops=StepFlops(**{name: whole(parts * one, of=len(ranks)) for name, one in of_stages[stage].items()}),
        )
        for stage, ranks in sorted(stages.items())
    )


def _ranks_of_one_copy(context: RunContext) -> int:
    """Ranks of one stage that work on the same data: they hold parts of one copy of it."""
    return max(1, context.world_size // max(1, context.dp_size * context.pp_size))


def _flops_by_dtype(profiles: Iterable[Profile], which: Literal["model", "hardware"]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(int)
    for one in profiles:
        for dtype in one.dtypes:
            total[dtype.dtype] += getattr(dtype, which)
    return dict(total)


def _peak(profile: Profile, flops: Mapping[str, float]) -> float | None:
    """Peak of the rank's device for the dtypes of *flops*: all of them / the seconds they take it at its peaks."""
    seconds = peak_seconds(flops=flops, peaks_flops_per_sec=profile.peaks_flops_per_sec)
    return per_second(amount=sum(flops.values()), seconds=seconds)


def _job_rates(
    profiles: Sequence[Profile], *, model: Mapping[str, float], hardware: Mapping[str, float]
) -> tuple[JobRates, dict[str, str]]:
    """Every ratio of the job, and the reason for each one that is None: that of the ranks that do not know it."""
    rates = {"mfu": _utilization(profiles, model), "hfu": _utilization(profiles, hardware)}
    of_data = ("samples_per_sec", "iter_samples_per_sec", "tokens_per_sec")
    rates |= {name: _of_different_data(profiles, name) for name in of_data}
    reasons = {}
    for name, value in rates.items():
        without = [one for one in profiles if getattr(one.rates, name) is None]
        if without and (value is None or name not in of_data):
            rates[name] = None
            whose = f" ({name_ranks(one.context.rank for one in without)})" if len(without) < len(profiles) else ""
            reasons[name] = f"{without[0].unavailable[name]}{whose}"
        elif value is None:
            reasons[name] = "no dense peak of some rank's device is known for all dtypes of the job"
    return JobRates(**rates), reasons


def _of_different_data(profiles: Sequence[Profile], name: str) -> float | None:
    """Sum over the ranks that see different data of their rate of that *name*; None if one does not know it.

    Every stage of a pipeline sees the same data, so it is their mean. A rank's own rate is that of all dp_size ranks
    that see different data, if they did the same.
    """
    stages = grouped(profiles, lambda one: one.context.pp_rank).values()
    totals = (sum_if_all_known(getattr(one.rates, name) for one in ranks) for ranks in stages)
    known, context = [total for total in totals if total is not None], profiles[0].context
    return fmean(known) / (context.dp_size * _ranks_of_one_copy(context)) if known else None


def _utilization(profiles: Iterable[Profile], flops: Mapping[str, float]) -> float | None:
    """*flops* of all ranks / what their devices could have done in that time."""
    possible = sum_if_all_known(
        None if one.timing is None or (peak := _peak(one, flops)) is None else peak * one.timing.global_step_sec
        for one in profiles
    )
    return ratio(part=sum(flops.values()), whole=possible)


_US = 1e-3


class RanksError(LightningFlopsError, ValueError):
    """Traces that cannot be of one run; the message names them and the contradiction."""


def compare(traced: Sequence[TracedRank]) -> RankComparison:
    """Computation, communication and waiting of several ranks of one run, given by rank.

    Where the ranks of a group made different numbers of calls in a step, these stay unmatched; the notes say so.
    """
    tables, notes = _match([one.collectives for one in traced])
    rows = tuple(
        RankRow(
            rank=one.rank,
            steps=one.steps,
            overlap=one.overlap,
            transfer_us=_sum_up_to((row.transfer_us for row in table), most=one.overlap.communication_us),
            wait_us=_sum_up_to((row.wait_us for row in table), most=one.overlap.communication_us),
            collectives=table,
        )
        for one, table in zip(traced, tables, strict=True)
    )
    return RankComparison(ranks=rows, notes=notes)


def refuse_mixed_ranks(traces: Sequence[TracedRank]) -> None:
    """Refuse traces that cannot be one of each rank.

    Raises:
        RanksError: two traces are of the same rank, some say their rank and some do not, or none is given.
    """
    if not traces:
        raise RanksError("no trace to compare")
    by_rank = grouped(traces, lambda one: one.rank)
    for rank, alike in by_rank.items():
        if rank is not None and len(alike) > 1:
            same = f"{alike[0].source} and {alike[1].source} are both of rank {rank}"
            raise RanksError(f"{same}: give one trace for each rank")
    if None in by_rank and len(by_rank) > 1:
        raise RanksError(f"{by_rank[None][0].source} does not say which rank it is of, though other traces do")


_UNMATCHED = "Calls of {} whose counterparts in the other traces are not known, so neither is their waiting: {}."
_PARTIAL = "Calls of {} in groups that have ranks without a trace here, so waiting may be counted as transfer: {}."


def _match(ranks: Sequence[Iterable[CollectiveCalls]]) -> tuple[list[tuple[RankCollectiveRow, ...]], tuple[str, ...]]:
    """The collectives of each rank by name, the longest first, and sentences on what could not be matched."""
    tables = [defaultdict[str, Counter[str]](Counter) for _ in ranks]
    together = defaultdict[tuple[object, str, int | None], list[tuple[Counter[str], CollectiveCalls]]](list)
    missing: Counter[tuple[str, str]] = Counter()
    for table, listed in zip(tables, ranks, strict=True):
        for one in listed:
            sums = table[one.name]
            sums.update(calls=one.calls, ns=one.total_ns, bytes=one.bytes or 0, without_bytes=one.bytes is None)
            together[one.group or id(one), one.name, one.step].append((sums, one))
    for (_, name, _), taking_part in together.items():
        calls = [one.calls for _, one in taking_part]
        if len(calls) < 2 or len(set(calls)) > 1:
            missing[_UNMATCHED, name] += sum(calls)
            continue
        if len(calls) < (taking_part[0][1].group_size or 0):
            missing[_PARTIAL, name] += calls[0]
        # The transfer of calls that one rank left out is not known.
        known = min(len(one.latency_ns) for _, one in taking_part)
        latency_ns = np.array([one.latency_ns[:known] for _, one in taking_part], dtype=np.int64)
        transfer_ns = int(latency_ns.min(axis=0).sum())
        for (sums, _), total_ns in zip(taking_part, latency_ns.sum(axis=1).tolist(), strict=True):
            sums.update(matched=known, transfer_ns=transfer_ns, wait_ns=total_ns - transfer_ns)
    rows = [tuple(sorted(map(_row, one.items()), key=lambda row: (-row.latency_us, row.name))) for one in tables]
    notes = [sentence.format(name, calls) for (sentence, name), calls in sorted(missing.items())]
    return rows, tuple(notes) if len(ranks) > 1 else ()


def _row(item: tuple[str, Counter[str]]) -> RankCollectiveRow:
    name, sums = item
    return RankCollectiveRow(
        name=name,
        calls=sums["calls"],
        matched_calls=sums["matched"],
        bytes=None if sums["without_bytes"] else sums["bytes"],
        latency_us=sums["ns"] * _US,
        transfer_us=sums["transfer_ns"] * _US if sums["matched"] else None,
        wait_us=sums["wait_ns"] * _US if sums["matched"] else None,
    )


def _sum_up_to(values: Iterable[float | None], *, most: float) -> float | None:
    """The sum of those known, at most *most*: calls that overlap add up to more than the time they are under way."""
    known = [value for value in values if value is not None]
    return min(sum(known), most) if known else None


_MAIN_SHARE = 0.5  # a part, or a module, is named if it has at least this share of what a rank is late by
_STANDARD_ERRORS = 4.0  # a difference of means that is less than so many standard errors may be by chance
_FEW, _MANY = 1.5, 10  # from fewer means than so many, so many times as many standard errors: their spread is unsure
_WAITS = 0.05  # a part waits for others if this share of it is communication that nothing hides
_NEVER_WAITS = {"data_wait", "transfer"}  # phases in which no rank waits for another


class _Rank(NamedTuple):
    """What is compared of one rank."""

    rank: int
    step_sec: float
    own: Mapping[str, tuple[float, float]]  #: Seconds of each part, and the variance of their mean; 0 of a trace alone.
    record: RankRecord | None = None
    starved_share: float = 0.0


def find_stragglers(
    records: Sequence[RankRecord], *, thresholds: Mapping[str, float] = ADVICE_THRESHOLDS
) -> tuple[Straggler, ...]:
    """The ranks of one job that the others wait for, longest first; each is held against its own pipeline stage."""
    found: list[Straggler] = []
    for peers, by_modules in _peers(records):
        found += _of_peers(by_modules, thresholds) or _of_peers(peers, thresholds)
    return tuple(sorted(found, key=lambda one: -one.late_sec))


def chance_sec(records: Sequence[RankRecord]) -> dict[str, float]:
    """How far the own time of a rank may differ from the others' by chance, by part: the most over the ranks."""
    most: dict[str, float] = {}
    for peers, _ in _peers(records):
        names, _, chances = _delays(peers)
        for name, chance in zip(names, chances.max(axis=0).tolist(), strict=True):
            most[name] = max(chance, most.get(name, 0.0))
    return most


def _peers(records: Sequence[RankRecord]) -> Iterator[tuple[list[_Rank], list[_Rank]]]:
    """Several ranks that do the same work; and again, a part that waits by modules, where all know these times."""
    timed = [record for record in records if record.profile.timing is not None]
    for peers in grouped(timed, lambda one: one.profile.context.pp_rank).values():
        if len(peers) > 1:
            traced = all(one.profile.traced is not None and one.profile.traced.parts for one in peers)
            knows_modules = all(one.modules_error_sec is not None for one in peers)
            own = [_of_record(one, traced=traced, by_modules=False) for one in peers]
            yield own, [_of_record(one, traced=traced, by_modules=True) for one in peers] if knows_modules else own


def find_stragglers_in_traces(
    ranks: Mapping[int, Sequence[TracedPart]], *, thresholds: Mapping[str, float] = ADVICE_THRESHOLDS
) -> list[Straggler]:
    """Stragglers among several *ranks*, of which nothing is known but the parts of their traced steps."""
    own = {
        rank: {one.name.replace("_", " "): (one.wall_sec - one.exposed_sec, 0.0) for one in parts}
        for rank, parts in ranks.items()
    }
    peers = [_Rank(rank, sum(part.wall_sec for part in parts), own[rank]) for rank, parts in ranks.items()]
    return _of_peers(peers, thresholds)


def _of_record(record: RankRecord, *, traced: bool, by_modules: bool) -> _Rank:
    profile, timing = record.profile, record.profile.timing
    assert timing is not None
    trace = {part.name: part for part in profile.traced.parts} if traced and profile.traced is not None else {}
    own = {
        part.name: _own_time(
            part, [trace[phase] for phase in part.phases if phase in trace], record if by_modules else None
        )
        for part in timing.parts
        if traced or _NEVER_WAITS.issuperset(part.phases)
    }
    return _Rank(record.rank, timing.global_step_sec, own, record, timing.starved_share or 0.0)


def _own_time(part: PartTiming, inside: Sequence[TracedPart], record: RankRecord | None) -> tuple[float, float]:
    """The rank's own seconds of a part, and the variance of their mean; those of a *record*'s modules if it waits."""
    own_sec, means = part.mean_sec, batch_means(np.array(part.steps_sec))
    wall_sec, exposed_sec = (sum(getattr(one, name) for one in inside) for name in ("wall_sec", "exposed_sec"))
    if exposed_sec > _WAITS * wall_sec:
        if record and (own_ns := _own_ns(part.name, record)) is not None:
            return 1e-9 * float(own_ns.sum()), (_FEW * (record.modules_error_sec or 0.0)) ** 2
        # Of a traced step that was late by chance, no more than usual.
        own_sec = min(part.mean_sec, wall_sec - exposed_sec)
        of_steps = np.array([one.own_steps_sec for one in inside]).sum(axis=0)
        means = of_steps if len(of_steps) else means
    errors = _FEW if len(means) < _MANY else 1.0
    return own_sec, errors**2 * float(means.var(ddof=1)) / len(means) if len(means) > 1 else 0.0


def _own_ns(part: str, record: RankRecord) -> Any:
    """Traced nanoseconds of each module in *part*; None where there are none.

    They are as they were traced, not scaled: what scales them may be what happened outside of them.
    """
    times = getattr(record, f"own_{part}_ns", None)
    return np.array(times) / getattr(record.profile.traced, f"{part}_scale") if times else None


def _delays(peers: Sequence[_Rank]) -> tuple[list[str], Any, Any]:
    """By how many seconds each rank (row) is later than the median of the others in each part, and by chance."""
    names = list(dict.fromkeys(name for one in peers for name in one.own))
    own, variances = (
        np.array([[one.own.get(name, (0.0, 0.0)) for name in names] for one in peers])
        .reshape(len(peers), -1, 2)
        .transpose(2, 0, 1)
    )
    shares = np.array([[one.starved_share] for one in peers])
    starved = own * np.minimum(shares, _of_others(shares))
    chance = _STANDARD_ERRORS * np.sqrt(variances + _of_others(variances)) + starved + _of_others(starved)
    return names, own - _of_others(own), chance


def _of_others(table: Any) -> Any:
    """The median of all other rows, by row and column."""
    # Sorted once for jobs of thousands: what stands behind a value moves up by one place.
    ordered, middle = np.sort(table, axis=0), ((len(table) - 2) // 2, (len(table) - 1) // 2)
    return sum(np.where(table <= ordered[at], ordered[at + 1], ordered[at]) for at in middle) / 2


def _of_peers(peers: Sequence[_Rank], thresholds: Mapping[str, float]) -> list[Straggler]:
    """The stragglers among ranks that do the same work, the latest first."""
    names, delays, chance = _delays(peers)
    others_sec = _of_others(np.array([[one.step_sec] for one in peers]))[:, 0]
    least_sec = np.maximum(thresholds["straggler_sec"], (thresholds["straggler"] - 1.0) * others_sec)
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
    """The module that stands out in *part* against the same one of the other ranks, and whether all modules do not."""
    alike = [one for one in (mine, *others) if mine and one and one.module_names == mine.module_names]
    times = [own_ns for one in alike if (own_ns := _own_ns(part, one)) is not None]
    if mine is None or len(times) < 2:
        return None, False
    delays_sec = 1e-9 * (times[0] - np.median(times[1:], axis=0))
    return _main(mine.module_names, delays_sec, part_sec)[0], bool(delays_sec.sum() < _MAIN_SHARE * part_sec)
