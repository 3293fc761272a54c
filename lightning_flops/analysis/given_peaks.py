"""A profile held against a user's own figures of the device, given after the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from lightning_flops.analysis.impossible import possible_operators, possible_times
from lightning_flops.analysis.peak_flops import peak_for
from lightning_flops.analysis.rates import impossible, mean, per_second
from lightning_flops.analysis.step_rates import seconds_at_peak
from lightning_flops.schema.modules import ModuleProfile
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import Roofline

_NUMERATORS: Mapping[str, Literal["model", "hardware"]] = {"mfu": "model", "hfu": "hardware"}


def with_given_peaks(
    profile: Profile, *, flops_per_sec: float | Mapping[str, float] | None, memory_bytes_per_sec: float | None
) -> Profile:
    """*profile* with MFU, HFU, shares of the peak and rooflines of these figures; advice stays that of the run.

    What the profile does not keep by dtype is n/a where several dtypes have FLOPs, and so is the step time breakdown.

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
        budget=None,
        settings=replace(profile.settings, **{name: here for name, here in given.items() if here}),
        modules=tuple(modules),
        operators=operators,
        notes=(*profile.notes, *notes, *more),
    )


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
