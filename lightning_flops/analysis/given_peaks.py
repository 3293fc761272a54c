"""A profile held against a user's own figures of the device, given after the run."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from lightning_flops.analysis.budget import SecondsAtPeak, build_budget
from lightning_flops.analysis.impossible import possible_operators, possible_times
from lightning_flops.analysis.measured_peaks import COPY, measured_peaks
from lightning_flops.analysis.peak_flops import peak_for
from lightning_flops.analysis.rates import impossible, mean, per_second
from lightning_flops.analysis.step_rates import seconds_at_peak
from lightning_flops.schema.budget import Budget
from lightning_flops.schema.modules import ModuleProfile
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import Roofline

_NUMERATORS: Mapping[str, Literal["model", "hardware"]] = {"mfu": "model", "hfu": "hardware"}


def with_measured_peaks(profile: Profile) -> Profile:
    """*profile* with what ``lightning-flops peak`` has measured since, if it ran here and had no peak."""
    measured = measured_peaks(profile.context.host, profile.context.device_name)
    if not measured or profile.peaks_flops_per_sec or profile.context.host != platform.node():
        return profile
    given = profile.settings
    held = with_given_peaks(
        profile,
        flops_per_sec={name: rate for name, rate in measured.items() if name != COPY},
        memory_bytes_per_sec=profile.memory_bytes_per_sec or measured.get(COPY),
    )
    return replace(held, settings=replace(given, measured=True))


def with_given_peaks(
    profile: Profile, *, flops_per_sec: float | Mapping[str, float] | None, memory_bytes_per_sec: float | None
) -> Profile:
    """*profile* with MFU, HFU, breakdown, shares of the peak and rooflines of these figures; advice is still the run's.

    What the profile does not keep by dtype is n/a where several dtypes have FLOPs: shares, rooflines, the breakdown.

    Args:
        profile: as it was read.
        flops_per_sec: dense peak of one device, one for all dtypes or some by dtype; None for the profile's own.
        memory_bytes_per_sec: bandwidth of its memory; None for the profile's own.
    """
    if flops_per_sec is None and memory_bytes_per_sec is None:
        return profile
    bandwidth, known = memory_bytes_per_sec or profile.memory_bytes_per_sec, dict(profile.peaks_flops_per_sec)
    for dtype in {*known, *(flops_per_sec if isinstance(flops_per_sec, Mapping) else ()), *_dtypes(profile)}:
        peak = peak_for(device_name="", dtype=dtype, given=flops_per_sec)
        known |= {} if peak is None else {dtype: peak}

    def roofline(old: Roofline | None, dtypes: tuple[str, ...]) -> Roofline | None:
        peak = known.get(dtypes[0]) if len(dtypes) == 1 else None
        if old is None or old.flops_per_byte is None or peak is None or bandwidth is None:
            return None if old is None else replace(old, attainable_flops_per_sec=None)
        return replace(old, attainable_flops_per_sec=min(peak, old.flops_per_byte * bandwidth))

    shares, notes = possible_times(
        {one.name: replace(one.times, **_shares(one, known, _dtypes(profile))) for one in profile.modules if one.times}
    )
    operators, more = possible_operators(
        [replace(one, roofline=roofline(one.roofline, one.dtypes)) for one in profile.operators], known.get
    )
    modules = [
        replace(one, times=shares.get(one.name), roofline=roofline(one.roofline, _dtypes(profile)))
        for one in profile.modules
    ]
    given: dict[str, Any] = {"peak_given": flops_per_sec is not None, "memory_given": memory_bytes_per_sec is not None}
    return replace(
        profile,
        **_rates(profile, known),
        peaks_flops_per_sec=known,
        memory_bytes_per_sec=bandwidth,
        budget=_budget(profile, known, bandwidth),
        settings=replace(profile.settings, **{name: here for name, here in given.items() if here}),
        modules=tuple(modules),
        operators=operators,
        notes=(*profile.notes, *notes, *more),
    )


def _budget(profile: Profile, peaks: Mapping[str, float], bandwidth: float | None) -> Budget | None:
    """The breakdown of a step at the peak of the one dtype that has FLOPs; padding is not separated from others."""
    dtypes, flops = _dtypes(profile), profile.flops_total
    peak = peaks.get(dtypes[0]) if len(dtypes) == 1 else None
    if profile.budget is None or peak is None:
        return None

    def seconds(amount: int) -> float:
        return profile.per_step(amount) / peak

    moved = sum(one.bytes_read + one.bytes_written for one in profile.operators if not one.flops.total)
    found = build_budget(
        timing=profile.timing,
        traced=profile.traced,
        at_peak=SecondsAtPeak(
            model=seconds(flops.model),
            others=seconds(flops.recompute + flops.optimizer - flops.skipped),
        ),
        memory_sec=None if bandwidth is None else profile.per_step(moved) / bandwidth,
        advice=profile.advice,
        lower_bound=profile.lower_bound,
        step_word=profile.context.step_word,
    )
    return None if found is None else replace(found, run=profile.budget.run)


def _dtypes(profile: Profile) -> tuple[str, ...]:
    return tuple(one.dtype for one in profile.dtypes if one.hardware)


def _shares(module: ModuleProfile, peaks: Mapping[str, float], dtypes: tuple[str, ...]) -> dict[str, Any]:
    peak = peaks.get(dtypes[0]) if len(dtypes) == 1 else None
    return {
        f"{phase}_utilization": per_second(amount=getattr(module.times, f"{phase}_flops_per_sec"), seconds=peak)
        for phase in ("forward", "backward")
    }


def _rates(profile: Profile, peaks: Mapping[str, float]) -> dict[str, Any]:
    """The fields that follow from the peak of each dtype; a job's MFU and HFU change as those of this rank do."""
    dtypes = tuple(replace(one, peak_flops_per_sec=peaks.get(one.dtype)) for one in profile.dtypes)
    steps = max(1, len(profile.counted_steps))
    at_peak = {name: mean(total=seconds_at_peak(dtypes, of), steps=steps) for name, of in _NUMERATORS.items()}
    sec = None if profile.timing is None else profile.timing.global_step_sec
    shares = {name: per_second(amount=seconds, seconds=sec) for name, seconds in at_peak.items()}
    reasons = {name: why for name, why in profile.unavailable.items() if shares.get(name) is None}
    for name, share in tuple(shares.items()):
        if reason := impossible(name.upper(), share):
            shares[name], reasons[name] = None, reason
    found: dict[str, Any] = {
        "dtypes": dtypes,
        "rates": replace(profile.rates, **shares),
        "unavailable": reasons,
    }
    if profile.ranks is not None:
        job = {}
        for name, share in shares.items():
            before, own = getattr(profile.ranks.rates, name), getattr(profile.rates, name)
            job[name] = None if before is None or not own or share is None else before * share / own
        found["ranks"] = replace(profile.ranks, rates=replace(profile.ranks.rates, **job))
    return found
