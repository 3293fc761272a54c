"""Rates of a whole job: what all ranks did / what their devices could have done, or / the time they took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from lightning_flops.analysis.rank_names import name_ranks
from lightning_flops.analysis.rates import (
    MOST_OF_PEAK,
    impossible,
    mean,
    peak_seconds,
    per_second,
    ratio,
    sum_if_all_known,
)
from lightning_flops.analysis.step_rates import GIVE_PEAK, NO_SAMPLES, NO_TOKENS
from lightning_flops.records import RunContext
from lightning_flops.schema.rank_record import RankSummary
from lightning_flops.schema.ranks import DeviceGroup, JobRates

_Figure = Callable[[RankSummary], float | None]


def global_step_sec(summary: RankSummary) -> float | None:
    """Mean wall time of the rank's steps; None if none was timed."""
    return None if summary.timing is None else summary.timing.global_step_sec


def ranks_of_one_copy(context: RunContext) -> int:
    """Ranks of one stage that work on the same data: they hold parts of one copy of it."""
    return max(1, context.world_size // max(1, context.dp_size * context.pp_size))


def of_different_data(summaries: Sequence[RankSummary], amount: _Figure) -> float | None:
    """Sum of *amount* over the ranks that see different data; None if one does not know it.

    Every stage of a pipeline sees the same data: the stage of which most ranks answered is used.
    """
    by_stage: defaultdict[int, list[float | None]] = defaultdict(list)
    for one in summaries:
        by_stage[one.context.pp_rank].append(amount(one))
    known = {stage: total for stage, amounts in by_stage.items() if (total := sum_if_all_known(amounts)) is not None}
    if not known:
        return None
    stage = max(sorted(known), key=lambda stage: len(by_stage[stage]))
    return known[stage] / ranks_of_one_copy(summaries[0].context)


def flops_by_dtype(summaries: Iterable[RankSummary], which: Literal["model", "hardware"]) -> dict[str, float]:
    """FLOPs of one step of all ranks, by dtype."""
    total: defaultdict[str, float] = defaultdict(int)
    for one in summaries:
        for dtype in one.dtypes:
            flops = dtype.model if which == "model" else dtype.hardware
            total[dtype.dtype] += mean(total=flops, steps=max(1, one.counted_steps)) or 0
    return dict(total)


def _peak(summary: RankSummary, flops: Mapping[str, float]) -> float | None:
    """Peak of the rank's device for the dtypes of *flops*: all of them / the seconds they take it at its peaks."""
    return per_second(
        amount=sum(flops.values()), seconds=peak_seconds(flops=flops, peaks_flops_per_sec=summary.peaks_flops_per_sec)
    )


def device_groups(summaries: Iterable[RankSummary], model: Mapping[str, float]) -> tuple[DeviceGroup, ...]:
    """Which devices the ranks have, and what each can do of the FLOPs in *model*."""
    groups: defaultdict[tuple[str, float | None], int] = defaultdict(int)
    for one in summaries:
        groups[one.context.device_name, _peak(one, model)] += 1
    return tuple(
        DeviceGroup(device_name=name, ranks=ranks, peak_flops_per_sec=peak)
        for (name, peak), ranks in sorted(groups.items(), key=lambda item: (-item[1], item[0][0], item[0][1] or 0.0))
    )


def build_job_rates(
    summaries: Sequence[RankSummary], *, model: Mapping[str, float], hardware: Mapping[str, float]
) -> tuple[JobRates, dict[str, str]]:
    """Every ratio of the job, and the reason for each one that is None.

    Args:
        summaries: of the ranks that answered.
        model: model FLOPs of all of them by dtype.
        hardware: hardware FLOPs of them.
    """
    reasons: dict[str, str] = {}

    def rate(name: str, amount: _Figure, seconds: _Figure, unknown: str) -> float | None:
        value = of_different_data(summaries, lambda one: per_second(amount=amount(one), seconds=seconds(one)))
        if value is None:
            reasons[name] = _no_rate(summaries, amount, seconds, unknown)
        return value

    def iter_sec(one: RankSummary) -> float | None:
        return None if one.timing is None else one.timing.iter_sec

    tokens_per_sec = rate("tokens_per_sec", lambda one: one.tokens, global_step_sec, NO_TOKENS)
    beyond = _impossible(summaries)
    rates = JobRates(
        mfu=_utilization(summaries, model),
        hfu=_utilization(summaries, hardware),
        samples_per_sec=rate("samples_per_sec", lambda one: one.samples, global_step_sec, NO_SAMPLES),
        iter_samples_per_sec=rate("iter_samples_per_sec", lambda one: one.samples, iter_sec, NO_SAMPLES),
        tokens_per_sec=tokens_per_sec,
        tokens_per_sec_per_device=ratio(part=tokens_per_sec, whole=len(summaries)),
    )
    if "tokens_per_sec" in reasons:
        reasons["tokens_per_sec_per_device"] = reasons["tokens_per_sec"]
    for name, value, flops in (("mfu", rates.mfu, model), ("hfu", rates.hfu, hardware)):
        if reason := beyond or impossible(name.upper(), value):
            rates, reasons[name] = replace(rates, **{name: None}), reason
        elif value is None:
            reasons[name] = _no_utilization(summaries, flops)
    return rates, reasons


def _utilization(summaries: Iterable[RankSummary], flops: Mapping[str, float]) -> float | None:
    """*flops* of all ranks / what their devices could have done in that time."""
    possible = sum_if_all_known(
        None if (seconds := global_step_sec(one)) is None or (peak := _peak(one, flops)) is None else peak * seconds
        for one in summaries
    )
    return ratio(part=sum(flops.values()), whole=possible)


def _impossible(summaries: Sequence[RankSummary]) -> str:
    """Ranks whose FLOPs no device could have done in their time, in words; empty if there are none."""
    shares = {one.context.rank: _utilization([one], flops_by_dtype([one], "hardware")) or 0.0 for one in summaries}
    beyond = [rank for rank, share in shares.items() if share > MOST_OF_PEAK]
    return f"on {name_ranks(beyond)} {impossible('HFU', max(shares.values()))}" if beyond else ""


def _untimed(summaries: Sequence[RankSummary]) -> str:
    untimed = [one.context.rank for one in summaries if one.timing is None]
    return f"{name_ranks(untimed)} timed no step" if untimed else ""


def _no_utilization(summaries: Sequence[RankSummary], flops: Mapping[str, float]) -> str:
    """Why there is no utilization of *flops*."""
    spending = {dtype for dtype, spent in flops.items() if spent}
    unknown = [one for one in summaries if spending - set(one.peaks_flops_per_sec)]
    if (untimed := _untimed(summaries)) or not unknown:
        return untimed or "no FLOPs were counted"
    dtypes = sorted({dtype for one in unknown for dtype in spending - set(one.peaks_flops_per_sec)})
    devices = sorted({one.context.device_name or one.context.device_type for one in unknown})
    whose = f" ({name_ranks(one.context.rank for one in unknown)})" if len(unknown) < len(summaries) else ""
    return f"no dense peak is known for {', '.join(dtypes)} on {', '.join(devices)}{whose}; {GIVE_PEAK}"


def _no_rate(summaries: Sequence[RankSummary], amount: _Figure, seconds: _Figure, unknown: str) -> str:
    """Why there is no rate of *amount* over *seconds*; *unknown* says what to do where the amount is not known."""
    if untimed := _untimed(summaries):
        return untimed
    if without := [one.context.rank for one in summaries if amount(one) is None]:
        return unknown if len(without) == len(summaries) else f"{unknown} ({name_ranks(without)})"
    if mixed := [one.context.rank for one in summaries if seconds(one) is None]:
        return f"the times of these phases cannot be separated on {name_ranks(mixed)}"
    return "what was measured cannot be right"
