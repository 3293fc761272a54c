"""Rates of a whole job: what all ranks did / what their devices could have done, or / the time they took."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from lightning_flops.analysis.rank_names import name_ranks
from lightning_flops.analysis.rates import mean, peak_seconds, per_second, ratio, sum_if_all_known
from lightning_flops.records import RunContext
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.ranks import DeviceGroup, JobRates


def ranks_of_one_copy(context: RunContext) -> int:
    """Ranks of one stage that work on the same data: they hold parts of one copy of it."""
    return max(1, context.world_size // max(1, context.dp_size * context.pp_size))


def flops_by_dtype(profiles: Iterable[Profile], which: Literal["model", "hardware"]) -> dict[str, float]:
    """FLOPs of one step of all ranks, by dtype."""
    total: defaultdict[str, float] = defaultdict(int)
    for one in profiles:
        for dtype in one.dtypes:
            flops = dtype.model if which == "model" else dtype.hardware
            total[dtype.dtype] += mean(total=flops, steps=max(1, len(one.counted_steps))) or 0
    return dict(total)


def _peak(profile: Profile, flops: Mapping[str, float]) -> float | None:
    """Peak of the rank's device for the dtypes of *flops*: all of them / the seconds they take it at its peaks."""
    seconds = peak_seconds(flops=flops, peaks_flops_per_sec=profile.peaks_flops_per_sec)
    return per_second(amount=sum(flops.values()), seconds=seconds)


def device_groups(profiles: Iterable[Profile], model: Mapping[str, float]) -> tuple[DeviceGroup, ...]:
    """Which devices the ranks have, most ranks first, and what each can do of the FLOPs in *model*."""
    groups = Counter((one.context.device_name, _peak(one, model)) for one in profiles)
    return tuple(
        DeviceGroup(device_name=name, ranks=ranks, peak_flops_per_sec=peak)
        for (name, peak), ranks in sorted(groups.items(), key=lambda item: (-item[1], item[0][0], item[0][1] or 0.0))
    )


def build_job_rates(
    profiles: Sequence[Profile], *, model: Mapping[str, float], hardware: Mapping[str, float]
) -> tuple[JobRates, dict[str, str]]:
    """Every ratio of the job, and the reason for each one that is None: that of the ranks that do not know it.

    Args:
        profiles: of the ranks that answered.
        model: model FLOPs of all of them by dtype.
        hardware: hardware FLOPs of them.
    """
    rates = {
        "mfu": _utilization(profiles, model),
        "hfu": _utilization(profiles, hardware),
        "samples_per_sec": _of_different_data(profiles, lambda one: one.rates.samples_per_sec),
        "iter_samples_per_sec": _of_different_data(profiles, lambda one: one.rates.iter_samples_per_sec),
        "tokens_per_sec": _of_different_data(profiles, lambda one: one.rates.tokens_per_sec),
    }
    reasons = {}
    for name, value in rates.items():
        without = [one for one in profiles if getattr(one.rates, name) is None]
        if without and (value is None or name in ("mfu", "hfu")):
            rates[name] = None
            whose = f" ({name_ranks(one.context.rank for one in without)})" if len(without) < len(profiles) else ""
            reasons[name] = f"{without[0].unavailable[name]}{whose}"
        elif value is None:
            reasons[name] = "no dense peak of some rank's device is known for all dtypes of the job"
    return JobRates(**rates), reasons


def _of_different_data(profiles: Sequence[Profile], rate: Callable[[Profile], float | None]) -> float | None:
    """Sum over the ranks that see different data of what each does in a second; None if one does not know it.

    Every stage of a pipeline sees the same data: the stage of which most ranks answered is used. A rank's own *rate* is
    that of all dp_size ranks that see different data, if they did the same.
    """
    by_stage: defaultdict[int, list[float | None]] = defaultdict(list)
    for one in profiles:
        by_stage[one.context.pp_rank].append(rate(one))
    known = {stage: total for stage, rates in by_stage.items() if (total := sum_if_all_known(rates)) is not None}
    if not known:
        return None
    context, stage = profiles[0].context, max(sorted(known), key=lambda stage: len(by_stage[stage]))
    return known[stage] / (context.dp_size * ranks_of_one_copy(context))


def _utilization(profiles: Iterable[Profile], flops: Mapping[str, float]) -> float | None:
    """*flops* of all ranks / what their devices could have done in that time."""
    possible = sum_if_all_known(
        None if one.timing is None or (peak := _peak(one, flops)) is None else peak * one.timing.global_step_sec
        for one in profiles
    )
    return ratio(part=sum(flops.values()), whole=possible)
