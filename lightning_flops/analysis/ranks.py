"""The whole job in one profile: what every rank measured, merged, and which ranks did not answer.

``with_ranks`` merges the ranks' records into a ``RanksProfile``. Sums, spreads and rates are of the ranks that
answered; nothing is guessed for the others. Only figures of one copy of the model are averages.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from statistics import median
from typing import get_args

from lightning_flops.analysis.advice import ON_COMMUNICATION, advise
from lightning_flops.analysis.budget import link_advice
from lightning_flops.analysis.collectives import TracedRank, compare
from lightning_flops.analysis.evidence import Evidence
from lightning_flops.analysis.job_rates import (
    build_job_rates,
    device_groups,
    flops_by_dtype,
    global_step_sec,
    of_different_data,
    ranks_of_one_copy,
)
from lightning_flops.analysis.rank_names import name_ranks
from lightning_flops.analysis.rates import ratio, sum_if_all_known
from lightning_flops.analysis.spreads import spread_over
from lightning_flops.analysis.stragglers import find_stragglers
from lightning_flops.config import AdviceThresholds
from lightning_flops.records import TimePhase
from lightning_flops.schema.communication import RankComparison
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.rank_record import RankRecord, RankSummary
from lightning_flops.schema.ranks import RankAbsence, RankFigures, RanksPart, RanksProfile, StageProfile
from lightning_flops.schema.step import StepFlops


def with_ranks(
    profile: Profile,
    answers: Sequence[RankRecord | RankAbsence],
    *,
    waited_sec: float,
    thresholds: AdviceThresholds | None = None,
) -> Profile:
    """*profile* with what all ranks did together.

    Args:
        profile: of the rank that reports.
        answers: of all ranks, in any order; a rank that is not among them counts as one that sent nothing.
        waited_sec: how long the caller waited for them.
        thresholds: of the advice; None for the defaults.

    Returns:
        *profile* unchanged if *answers* has no record, not even of its own rank.
    """
    records, absences = _sorted_out(profile, answers)
    if not records:
        return profile
    limits = AdviceThresholds() if thresholds is None else thresholds
    ranks = _merged(records, absences, waited_sec=waited_sec, thresholds=limits)
    evidence, known = _evidence(ranks), profile.advice
    if evidence.waiting_share is not None:
        known = tuple(one for one in known if one.rule not in ON_COMMUNICATION)
    advice = () if profile.timing is None or profile.timing.few_steps else advise(evidence, limits, known=known)
    budget = None if profile.budget is None else link_advice(profile.budget, advice)
    return replace(profile, ranks=ranks, advice=advice, budget=budget)


def _evidence(ranks: RanksProfile) -> Evidence:
    """Evidence of all ranks together; for communication, the median rank's."""
    evidence = Evidence(
        straggler=ranks.stragglers[0] if ranks.stragglers else None,
    )
    if ranks.communication is None:
        return evidence
    rows = ranks.communication.ranks
    wall_us = median(row.overlap.wall_us / row.steps for row in rows)
    exposed_us = median(row.overlap.exposed_us / row.steps for row in rows)
    waits_us = [row.wait_us / row.steps for row in rows if row.wait_us is not None]
    if not waits_us:
        return evidence
    return replace(
        evidence,
        exposed_communication_share=ratio(part=exposed_us, whole=wall_us),
        waiting_share=ratio(part=min(exposed_us, median(waits_us)), whole=wall_us),
    )


def _communication(records: Iterable[RankRecord]) -> RankComparison | None:
    """Communication in the ranks' traced steps; None if fewer than two have traces that show any."""
    traced = [
        TracedRank(
            rank=record.rank,
            source=f"rank {record.rank}",
            steps=record.summary.traced_steps,
            overlap=record.summary.overlap,
            collectives=record.collectives,
        )
        for record in records
        if record.summary.overlap is not None and record.summary.traced_steps
    ]
    return compare(traced) if len(traced) > 1 else None


def _sorted_out(
    profile: Profile, answers: Iterable[RankRecord | RankAbsence]
) -> tuple[list[RankRecord], tuple[RankAbsence, ...]]:
    """The records of *profile*'s own window by rank, and for every other rank of the job why there is none."""
    world_size = profile.context.world_size
    reasons = dict.fromkeys(range(world_size), "nothing came from it")
    records: dict[int, RankRecord] = {}
    for answer in answers:
        if answer.rank not in reasons:
            continue  # of no rank of this job
        if isinstance(answer, RankAbsence):
            reasons[answer.rank] = answer.reason
            continue
        summary = answer.summary
        if summary.context.world_size != world_size:
            reasons[answer.rank] = f"its record is of a job of {summary.context.world_size} ranks"
        elif summary.profile_step != profile.profile_step:
            reasons[answer.rank] = f"its record is of step {summary.profile_step}"
        else:
            records[answer.rank] = answer
    return (
        [records[rank] for rank in sorted(records)],
        tuple(RankAbsence(rank=rank, reason=reasons[rank]) for rank in reasons if rank not in records),
    )


def _merged(
    records: Sequence[RankRecord],
    absences: tuple[RankAbsence, ...],
    *,
    waited_sec: float,
    thresholds: AdviceThresholds,
) -> RanksProfile:
    summaries = [record.summary for record in records]
    context = summaries[0].context
    stages = _stages(summaries)
    whole = stages if len(stages) == context.pp_size else None
    model, hardware = flops_by_dtype(summaries, "model"), flops_by_dtype(summaries, "hardware")
    devices = device_groups(summaries, model)
    rates, unavailable = build_job_rates(summaries, model=model, hardware=hardware)
    step_sec = spread_over(_of_ranks(summaries, global_step_sec))
    model_flops = spread_over(_of_ranks(summaries, lambda one: one.flops.model))
    assert model_flops is not None, "every rank has counted"
    return RanksProfile(
        world_size=context.world_size,
        answered=len(records),
        absences=absences,
        waited_sec=waited_sec,
        flops=_step_flops(lambda name: sum(getattr(one.flops, name) for one in summaries)),
        flops_of_model=None
        if whole is None
        else _step_flops(lambda name: sum(getattr(one.flops, name) for one in whole)),
        lower_bound=any(one.lower_bound for one in summaries),
        params=None if whole is None else sum_if_all_known(one.params for one in whole),
        trainable_params=None if whole is None else sum_if_all_known(one.trainable_params for one in whole),
        samples=of_different_data(summaries, lambda one: one.samples),
        tokens=of_different_data(summaries, lambda one: one.tokens),
        parts=stages[0].parts if len(stages) == 1 else _parts(summaries),
        global_step=None if step_sec is None else RanksPart(phases=(), seconds=step_sec),
        model_flops=model_flops,
        local_params=spread_over(_of_ranks(summaries, lambda one: one.local_params)),
        peak_memory_bytes=spread_over(_of_ranks(summaries, lambda one: one.peak_memory_bytes)),
        devices=devices,
        peak_flops_per_sec=sum_if_all_known(
            None if one.peak_flops_per_sec is None else one.ranks * one.peak_flops_per_sec for one in devices
        ),
        rates=rates,
        unavailable=unavailable,
        stages=stages if context.pp_size > 1 else (),
        communication=_communication(records),
        stragglers=find_stragglers(records, thresholds=thresholds),
        left_out=_left_out(records),
        ranks=tuple(map(_figures, summaries)),
    )


def _left_out(records: Iterable[RankRecord]) -> tuple[str, ...]:
    by_sentence: defaultdict[str, list[int]] = defaultdict(list)
    for record in records:
        for sentence in record.left_out:
            by_sentence[sentence].append(record.rank)
    return tuple(f"{name_ranks(ranks)}: {sentence}" for sentence, ranks in by_sentence.items())


# ---- one figure over ranks


def _of_ranks(summaries: Iterable[RankSummary], figure: Callable[[RankSummary], float | None]) -> dict[int, float]:
    """*figure* of each rank that has it."""
    return {one.context.rank: value for one in summaries if (value := figure(one)) is not None}


def _step_flops(figure: Callable[[str], int]) -> StepFlops:
    """FLOPs whose every field is *figure* of its name."""
    return StepFlops(**{field.name: figure(field.name) for field in fields(StepFlops)})


def _figures(summary: RankSummary) -> RankFigures:
    return RankFigures(
        rank=summary.context.rank,
        host=summary.context.host,
        stage=summary.context.pp_rank,
        model_flops=summary.flops.model,
        hardware_flops=summary.flops.hardware,
        parts_sec=_parts_sec(summary),
        global_step_sec=global_step_sec(summary),
        peak_memory_bytes=summary.peak_memory_bytes,
        traced=bool(summary.traced_parts),
        notes=summary.notes,
    )


def _parts_sec(summary: RankSummary) -> dict[str, float]:
    return {} if summary.timing is None else {part.name: part.mean_sec for part in summary.timing.parts}


def _parts(summaries: Iterable[RankSummary]) -> tuple[RanksPart, ...]:
    """Every part that some rank has, in the order of a step."""
    by_phases: defaultdict[tuple[TimePhase, ...], dict[int, float]] = defaultdict(dict)
    ranks = []
    for one in summaries:
        if one.timing is None:
            continue
        ranks.append(one.context.rank)
        for part in one.timing.parts:
            by_phases[part.phases][one.context.rank] = part.mean_sec
    if _BUBBLE in by_phases:  # a rank that never waited for another stage does not list it
        by_phases[_BUBBLE] = {rank: by_phases[_BUBBLE].get(rank, 0.0) for rank in ranks}
    return tuple(
        RanksPart(phases=phases, seconds=spread)
        for phases in sorted(by_phases, key=lambda phases: _PHASES.index(phases[0]))
        if (spread := spread_over(by_phases[phases])) is not None
    )


_BUBBLE: tuple[TimePhase, ...] = ("bubble",)
_PHASES = get_args(TimePhase)


# ---- copies of the model


def _stages(summaries: Sequence[RankSummary]) -> tuple[StageProfile, ...]:
    """The stages of which a rank answered; one without a pipeline."""
    by_stage: defaultdict[int, list[RankSummary]] = defaultdict(list)
    for one in summaries:
        by_stage[one.context.pp_rank].append(one)
    return tuple(_stage(stage, by_stage[stage]) for stage in sorted(by_stage))


def _stage(stage: int, summaries: Sequence[RankSummary]) -> StageProfile:
    copies = Fraction(len(summaries), ranks_of_one_copy(summaries[0].context))

    def of_one_copy(name: str) -> int:
        total: int = sum(getattr(one.flops, name) for one in summaries)
        return math.floor(total / copies + Fraction(1, 2))

    return StageProfile(
        stage=stage,
        answered=len(summaries),
        # Each rank answers for the whole stage; one that could not look is passed over.
        params=max((one.params for one in summaries if one.params is not None), default=None),
        trainable_params=max(
            (one.trainable_params for one in summaries if one.trainable_params is not None), default=None
        ),
        flops=_step_flops(of_one_copy),
        parts=_parts(summaries),
    )
