"""The whole job in one profile: what every rank sent, merged; nothing is guessed for ranks that did not answer.

Collectives are matched call by call: the i-th call of a collective in a process group and step on one rank belongs to
the i-th on the others; ranks' clocks are never compared. Of the calls that belong together the shortest is the
transfer: the rank that came last waited for no other. What the others took longer was waiting.
What separates the ranks is their *own* time, tested part by part: docs/distributed.md, "When a rank is named".
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from lightning_flops.analysis.advice import ON_COMMUNICATION, advise
from lightning_flops.analysis.counts import grouped
from lightning_flops.analysis.differences import batch_means
from lightning_flops.analysis.evidence import Evidence
from lightning_flops.analysis.rates import job_at_peaks, ratio, sum_if_all_known, whole
from lightning_flops.config import ADVICE_THRESHOLDS
from lightning_flops.records import RunContext
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import DtypeFlops, JobRates, PartTiming, StepFlops
from lightning_flops.schema.trace import (
    CollectiveCalls,
    Integers,
    Overlap,
    RankCollectiveRow,
    RankComparison,
    RankFigures,
    RankRow,
    RanksProfile,
    StageProfile,
    Straggler,
    TracedPart,
)
from lightning_flops.units import name_ranks

RECORD_LIMIT_BYTES, _INFLATED_LIMIT_BYTES = 65_536, 4 << 20  # of a packed record, and of one before it is compressed


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRank:
    """What the trace of one rank says for a comparison with the others."""

    rank: int | None  #: None where no trace says its rank.
    source: str = ""  #: Where a trace file came from.
    steps: int
    overlap: Overlap
    collectives: tuple[CollectiveCalls, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank sends to the one that reports, as compressed msgpack."""

    profile: Profile  #: Without what has a part for each module, operator or collective.
    traced: TracedRank | None  #: None without a traced step that has collectives.
    module_names: tuple[str, ...] = ()  #: Modules with times, in tree order.
    own_forward_ns: Integers  #: Of each of them in the traced step, without the modules below it.
    own_backward_ns: Integers  #: Of their backwards.
    #: Standard error of all modules' times in the traced steps together, where the host's clock has them. None: not.
    modules_error_sec: float | None = None
    is_shortened: bool = False  #: Times of modules and of each single call of a collective did not fit.

    @property
    def rank(self) -> int:
        """Number of the rank in the job."""
        return self.profile.context.rank


class RankAbsence(NamedTuple):
    """A rank whose measurements are missing in the merged report, and why, as the end of a sentence."""

    rank: int
    reason: str


def _plain(value: object) -> bytes | float | str:  # of ``torch.__version__``, whose class is its own, the text
    return value.tobytes() if isinstance(value, array) else float(value) if isinstance(value, float) else str(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(RankRecord | RankAbsence, dec_hook=lambda _, data: array("q", data))
_shared = lru_cache(maxsize=8)(tuple[str, ...])  # of thousands of ranks, one copy of their modules' names


def make_rank_record(profile: Profile) -> RankRecord:
    """The record of the rank that *profile* is of."""
    timed = {module.name: module.times for module in profile.modules if module.times is not None}
    traced, rank, tables = profile.traced, profile.context.rank, getattr(profile.traced, "tables", None)
    overlap, modules = getattr(tables, "overlap", None), getattr(tables, "modules", None)
    errors_us: list[Any] = [row.own_error_us for row in modules.rows] if modules and modules.clock == "host" else [None]
    small = traced and replace(traced, tables=None, filling=None, collectives=())
    none: dict[str, tuple[()]] = dict.fromkeys(("modules", "operators", "advice", "notes"), ())
    return RankRecord(
        profile=replace(profile, traced=small, ranks=None, budget=None, lines=None, uncounted={}, **none),  # type: ignore[arg-type]
        traced=TracedRank(rank=rank, steps=traced.steps, overlap=overlap, collectives=traced.collectives)
        if traced and overlap
        else None,
        module_names=tuple(timed),
        own_forward_ns=array("q", [round(1e9 * times.own_forward_sec) for times in timed.values()]),
        modules_error_sec=None if None in errors_us else 1e-6 * math.hypot(*errors_us),
        own_backward_ns=array("q", [round(1e9 * (times.own_backward_sec or 0)) for times in timed.values()]),
    )


def pack(record: RankRecord | RankAbsence) -> bytes:
    """*record* in at most ``RECORD_LIMIT_BYTES``, without modules and single calls where it must, or ValueError."""
    if isinstance(record, RankAbsence):
        return zlib.compress(_encoder.encode(record._replace(reason=record.reason[:500])), 1)
    none: dict[str, Any] = {"module_names": (), "own_forward_ns": array("q"), "own_backward_ns": array("q")}
    traced = record.traced and replace(
        record.traced,
        collectives=tuple(replace(one, latency_ns=array("q")) for one in record.traced.collectives),
    )
    for one in (record, replace(record, traced=traced, is_shortened=True, **none)):
        encoded = _encoder.encode(one)
        packed = zlib.compress(encoded, 1)
        if len(packed) <= RECORD_LIMIT_BYTES and len(encoded) <= _INFLATED_LIMIT_BYTES:
            return packed
    raise ValueError(f"without modules and calls the record is still larger than {RECORD_LIMIT_BYTES:,} bytes")


def unpack(data: bytes) -> RankRecord | RankAbsence:
    """What ``pack`` made *data* of; raises an error of zlib or msgspec for anything else."""
    answer: RankRecord | RankAbsence = _decoder.decode(zlib.decompressobj().decompress(data, _INFLATED_LIMIT_BYTES))
    return answer if isinstance(answer, RankAbsence) else replace(answer, module_names=_shared(answer.module_names))


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
    rates, unavailable = _job_rates(profiles)
    traced = [record.traced for record in records if record.traced is not None]
    ranks = RanksProfile(
        absences={
            why: tuple(one.rank for one in ranks) for why, ranks in grouped(absences, lambda one: one.reason).items()
        },
        flops=sum((one.flops for one in profiles[1:]), start=profiles[0].flops),
        dtypes=_dtypes(profiles),
        devices=dict(Counter(sorted(one.context.device_name for one in profiles)).most_common()),
        peak_flops_per_sec=None,
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
    ranks = job_at_peaks(ranks, [one.peaks_flops_per_sec for one in profiles])
    # A rank's own share may be impossible where the job's is not.
    unknown = dict.fromkeys({"mfu", "hfu"} & unavailable.keys())
    ranks = replace(ranks, rates=replace(ranks.rates, **unknown), unavailable={**ranks.unavailable, **unavailable})
    evidence, known = _evidence(ranks), profile.advice
    if evidence.shares.get("waiting") is not None:
        known = tuple(one for one in known if one.rule not in ON_COMMUNICATION)
    advice = () if profile.timing is None or profile.timing.few_steps else advise(evidence, thresholds, known=known)
    return replace(profile, ranks=ranks, advice=advice)


def _evidence(ranks: RanksProfile) -> Evidence:
    """Evidence of all ranks together; for communication, the median rank's."""
    rows = () if ranks.communication is None else ranks.communication.ranks
    waits_us = [row.wait_us / row.steps for row in rows if row.wait_us is not None]
    shares = dict[str, float | None]()
    if waits_us:
        wall_us = median(row.overlap.wall_us / row.steps for row in rows)
        exposed_us = median(row.overlap.exposed_us / row.steps for row in rows)
        shares["exposed_communication"] = ratio(part=exposed_us, whole=wall_us)
        shares["waiting"] = ratio(part=min(exposed_us, median(waits_us)), whole=wall_us)
    return Evidence(straggler=ranks.stragglers[0] if ranks.stragglers else None, shares=shares)


def _notes(records: Sequence[RankRecord]) -> tuple[str, ...]:
    """What some of the records lack, and whose FLOPs are lower bounds."""
    found = {
        "Left out of the record of {}: the times of its modules and of each single call of a collective.": [
            one.rank for one in records if one.is_shortened
        ],
        "LOWER BOUND: FLOPs and their rates, because of {}.": [one.rank for one in records if one.profile.lower_bound],
    }
    return tuple(sentence.format(name_ranks(ranks)) for sentence, ranks in found.items() if ranks)


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
    sums = {stage: sum((one.flops for one in ranks[1:]), start=ranks[0].flops) for stage, ranks in stages.items()}
    return tuple(
        StageProfile(
            stage=stage,
            params=ranks[0].params,  # each rank answers for the whole stage
            trainable_params=ranks[0].trainable_params,
            flops=StepFlops(**{name: whole(parts * one, of=len(ranks)) for name, one in asdict(sums[stage]).items()}),
        )
        for stage, ranks in sorted(stages.items())
    )


def _ranks_of_one_copy(context: RunContext) -> int:
    """Ranks of one stage that work on the same data: they hold parts of one copy of it."""
    return max(1, context.world_size // max(1, context.dp_size * context.pp_size))


def _dtypes(profiles: Iterable[Profile]) -> tuple[DtypeFlops, ...]:
    """FLOPs of all ranks by dtype."""
    alike = grouped((one for profile in profiles for one in profile.dtypes), lambda one: one.dtype)
    names = [one.name for one in fields(DtypeFlops) if one.name != "dtype"]
    return tuple(
        DtypeFlops(dtype=dtype, **{name: sum(getattr(one, name) for one in of) for name in names})
        for dtype, of in alike.items()
    )


def _job_rates(profiles: Sequence[Profile]) -> tuple[JobRates, dict[str, str]]:
    """Every ratio of the job that needs no peak, and why one is None: that of the ranks that do not know it."""
    of_data = ("samples_per_sec", "iter_samples_per_sec", "tokens_per_sec")
    rates, reasons = {name: _of_different_data(profiles, name) for name in of_data}, dict[str, str]()
    for name in ("mfu", "hfu", *of_data):
        without = [one for one in profiles if getattr(one.rates, name) is None]
        if without and rates.get(name) is None:
            whose = f" ({name_ranks(one.context.rank for one in without)})" if len(without) < len(profiles) else ""
            reasons[name] = f"{without[0].unavailable[name]}{whose}"
    return JobRates(mfu=None, hfu=None, **rates), reasons


def _of_different_data(profiles: Sequence[Profile], name: str) -> float | None:
    """Sum over the ranks that see different data of their rate of that *name*; None if one does not know it.

    Stages of a pipeline see the same data: their mean. A rank's rate is as if all dp_size ranks had done the same.
    """
    stages = grouped(profiles, lambda one: one.context.pp_rank).values()
    totals = (sum_if_all_known(getattr(one.rates, name) for one in ranks) for ranks in stages)
    known, context = [total for total in totals if total is not None], profiles[0].context
    return fmean(known) / (context.dp_size * _ranks_of_one_copy(context)) if known else None


def compare(traced: Sequence[TracedRank]) -> RankComparison:
    """Computation, communication and waiting of several ranks of one run, given by rank.

    Where the ranks of a group made different numbers of calls in a step, these stay unmatched; the notes say so.
    """
    tables, notes = _match([one.collectives for one in traced])
    return RankComparison(
        ranks=tuple(
            RankRow(
                rank=one.rank,
                steps=one.steps,
                overlap=one.overlap,
                transfer_us=_sum_up_to((row.transfer_us for row in table), most=one.overlap.communication_us),
                wait_us=_sum_up_to((row.wait_us for row in table), most=one.overlap.communication_us),
                collectives=table,
            )
            for one, table in zip(traced, tables, strict=True)
        ),
        notes=notes,
    )


_UNMATCHED = "Calls of {} whose counterparts in the other traces are not known, so neither is their waiting: {}."
_PARTIAL = "Calls of {} in groups that have ranks without a trace here, so waiting may be counted as transfer: {}."


def _match(ranks: Sequence[Iterable[CollectiveCalls]]) -> tuple[list[tuple[RankCollectiveRow, ...]], tuple[str, ...]]:
    """The collectives of each rank by name, the longest first, and sentences on what could not be matched."""
    every = [(place, one) for place, listed in enumerate(ranks) for one in listed]
    together = grouped(every, lambda item: (item[1].group or id(item), item[1].name, item[1].step))
    tables, missing = [defaultdict[str, list[_Matched]](list) for _ in ranks], Counter[tuple[str, str]]()
    for (_, name, _), taking_part in together.items():
        calls, known = [one.calls for _, one in taking_part], 0
        if len(calls) < 2 or len(set(calls)) > 1:
            missing[_UNMATCHED, name] += sum(calls)
        else:  # of calls that one rank left out no transfer is known
            known = min(len(one.latency_ns) for _, one in taking_part)
            missing[_PARTIAL, name] += calls[0] * (len(calls) < (taking_part[0][1].group_size or 0))
        latency_ns = np.array([one.latency_ns[:known] for _, one in taking_part], dtype=np.int64)
        transfer_ns = int(latency_ns.min(axis=0).sum())
        for (place, one), total_ns in zip(taking_part, latency_ns.sum(axis=1).tolist(), strict=True):
            tables[place][name].append((one, known, transfer_ns, total_ns - transfer_ns))
    rows = [tuple(sorted(map(_row, one.values()), key=lambda row: (-row.latency_us, row.name))) for one in tables]
    notes = [sentence.format(name, calls) for (sentence, name), calls in sorted((+missing).items())]
    return rows, tuple(notes)


_Matched = tuple[CollectiveCalls, int, int, int]  # of which so many were matched, their ns of transfer and of waiting


def _row(calls: Sequence[_Matched]) -> RankCollectiveRow:
    every, matched, transfer_ns, wait_ns = zip(*calls, strict=True)
    return RankCollectiveRow(
        name=every[0].name,
        calls=sum(one.calls for one in every),
        matched_calls=sum(matched),
        bytes=sum_if_all_known(one.bytes for one in every),
        latency_us=sum(one.total_ns for one in every) * 1e-3,
        transfer_us=sum(transfer_ns) * 1e-3 if any(matched) else None,
        wait_us=sum(wait_ns) * 1e-3 if any(matched) else None,
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
    delays = [_delays(peers) for peers, _ in _peers(records)]
    most = [dict(zip(names, chances.max(axis=0).tolist(), strict=True)) for names, _, chances in delays]
    return {name: max(one.get(name, 0.0) for one in most) for of in most for name in of}


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
    peers = [
        _Rank(
            rank,
            step_sec=sum(one.wall_sec for one in parts),
            own={one.name.replace("_", " "): (one.wall_sec - one.exposed_sec, 0.0) for one in parts},
        )
        for rank, parts in ranks.items()
    ]
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
    return _Rank(record.rank, timing.global_step.typical_sec, own, record, timing.starved_share or 0.0)


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
    """Nanoseconds of each module in *part*, not scaled: what scales them may have happened outside. None: none."""
    times = getattr(record, f"own_{part}_ns", None)
    return np.array(times) / getattr(record.profile.traced, f"{part}_scale") if times else None


def _delays(peers: Sequence[_Rank]) -> tuple[list[str], Any, Any]:
    """By how many seconds each rank (row) is later than the median of the others in each part, and by chance."""
    names = list(dict.fromkeys(name for one in peers for name in one.own))
    own, variances = (
        np.array([[one.own.get(name, (0.0, 0.0))[at] for name in names] for one in peers]) for at in (0, 1)
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
