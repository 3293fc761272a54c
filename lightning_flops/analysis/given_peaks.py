"""A profile held against a user's own figures of the device, given after the run."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_flops.analysis.budget import build_budget
from lightning_flops.analysis.peak_flops import COPY, measured_peaks, peak_for
from lightning_flops.analysis.profile import peak_seconds_of_step
from lightning_flops.analysis.rates import MOST_OF_PEAK, impossible, per_second
from lightning_flops.schema.modules import ModuleProfile
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import Budget


def with_measured_peaks(profile: Profile) -> Profile:
    """*profile* with what ``lightning-flops peak`` has measured since, if it ran here and had no peak."""
    measured = measured_peaks(profile.context.host, profile.context.device_name)
    if not measured or profile.peaks_flops_per_sec or profile.context.host != platform.node():
        return profile
    held = with_given_peaks(
        profile,
        flops_per_sec={name: rate for name, rate in measured.items() if name != COPY},
        memory_bytes_per_sec=profile.memory_bytes_per_sec or measured.get(COPY),
    )
    return replace(held, settings=replace(profile.settings, peaks_from="measured"))


def with_given_peaks(
    profile: Profile, *, flops_per_sec: float | Mapping[str, float] | None, memory_bytes_per_sec: float | None
) -> Profile:
    """*profile* with MFU, HFU, breakdown, shares of the peak and rooflines of these figures; advice is still the run's.

    None stands for the profile's own. Shares of modules are n/a where several dtypes have FLOPs.
    """
    bandwidth, known = memory_bytes_per_sec or profile.memory_bytes_per_sec, dict(profile.peaks_flops_per_sec)
    dtypes = tuple(one.dtype for one in profile.dtypes)
    for dtype in {*known, *dtypes, *(flops_per_sec if isinstance(flops_per_sec, Mapping) else ())}:
        if (peak := peak_for("", dtype, flops_per_sec)) is not None:
            known[dtype] = peak
    alone = known.get(dtypes[0]) if len(dtypes) == 1 else None

    def held(module: ModuleProfile) -> ModuleProfile:
        if module.times is None:
            return module
        rates: dict[str, Any] = {}
        for name in ("forward", "backward"):
            rate = getattr(module.times, f"{name}_flops_per_sec")
            share = per_second(amount=rate, seconds=alone)
            if share is not None and share > MOST_OF_PEAK:  # time is missing in the trace, or this is not its peak
                rate, share = None, None
            rates |= {f"{name}_flops_per_sec": rate, f"{name}_utilization": share}
        return replace(module, times=replace(module.times, **rates))

    rates, unavailable = _rates(profile, known)
    settings = profile.settings if flops_per_sec is None else replace(profile.settings, peaks_from="given")
    ranks = profile.ranks
    if ranks is not None:  # the job's change as those of this rank do
        job = {}
        for name, here in rates.items():
            before, own = getattr(ranks.rates, name), getattr(profile.rates, name)
            job[name] = None if before is None or not own or here is None else before * here / own
        ranks = replace(ranks, rates=replace(ranks.rates, **job))
    return replace(
        profile,
        rates=replace(profile.rates, **rates),
        unavailable=unavailable,
        ranks=ranks,
        peaks_flops_per_sec=known,
        memory_bytes_per_sec=bandwidth,
        budget=_budget(profile, known, bandwidth),
        settings=settings,
        modules=tuple(map(held, profile.modules)),
    )


def _peak_sec(profile: Profile, peaks: dict[str, float]) -> tuple[float | None, float | None]:
    return peak_seconds_of_step(profile.dtypes, peaks, steps=max(1, len(profile.counted_steps)))


def _budget(profile: Profile, peaks: dict[str, float], bandwidth: float | None) -> Budget | None:
    moved = sum(one.bytes for one in profile.operators if not one.flops.total)
    return build_budget(
        timing=profile.timing,
        traced=profile.traced,
        peak_sec=_peak_sec(profile, peaks),
        memory_sec=None if bandwidth is None else profile.per_step(moved) / bandwidth,
        lower_bound=profile.lower_bound,
        step_word=profile.context.step_word,
    )


def _rates(profile: Profile, peaks: dict[str, float]) -> tuple[dict[str, float | None], dict[str, str]]:
    """MFU and HFU at these peaks, and why rates are not known."""
    sec = None if profile.timing is None else profile.timing.global_step_sec
    shares = {
        name: per_second(amount=amount, seconds=sec)
        for name, amount in zip(("mfu", "hfu"), _peak_sec(profile, peaks), strict=True)
    }
    reasons = {name: why for name, why in profile.unavailable.items() if shares.get(name) is None}
    for name, share in tuple(shares.items()):
        if reason := impossible(name.upper(), share):
            shares[name], reasons[name] = None, reason
    return shares, reasons
