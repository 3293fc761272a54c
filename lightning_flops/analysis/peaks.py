"""The peak that rates are held against: the user's figure, the vendor's (``devices.py``), or a measured one."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_flops.analysis.devices import device_named, why_no_peak
from lightning_flops.analysis.rates import (
    GIVE_PEAK,
    MOST_OF_PEAK,
    NO_TIME,
    UNUSUAL,
    mean,
    peak_seconds,
    per_second,
    ratio,
    utilization,
)
from lightning_flops.analysis.timing import build_budget
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import ModuleProfile
from lightning_flops.schema.trace import RanksProfile, TraceReport

COPY = "copy"  # the name of the bandwidth of a copy, in bytes/s, among the FLOP/s of dtypes
_BEYOND, _NAMED = "Left out, as they would be beyond the device's peak: FLOP/s of", 4
NO_FLOPS = "FLOPs are n/a: "  # what a note of a trace's report begins with that says why it has none
NO_MFU = "no MFU: "  # and what a row of ``TraceFlops.uncounted`` does

ModuleFlops = dict[tuple[str, str], Mapping[str, float]]
"""FLOPs by dtype of each module and those below it, in its ``forward`` or ``backward``, recomputation in the latter."""


def peak_for(
    device_name: str,
    dtype: str,
    given: float | Mapping[str, float] | None = None,
    measured: Mapping[str, float] | None = None,
) -> float | None:
    """Dense peak in FLOP/s of *dtype*: *given* (as ``peak_flops_per_sec``), else the vendor's, else a *measured* one.

    None if the device of this name, or its rate in the dtype, is not known.
    """
    if isinstance(given, Mapping):
        given = given.get(dtype)
    if given is not None:
        return given
    device = device_named(device_name)
    return (device.peaks if device else {}).get(dtype, (measured or {}).get(dtype))


def measured_file(host: str) -> str:
    """Where the figures of the machine *host* are kept: in the user's cache folder, which machines may share."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "lightning_flops", f"peaks-{host}.json")


def read_measured(host: str) -> dict[str, dict[str, float]]:
    """FLOP/s by dtype, and bytes/s of a copy, by the name of each device of *host*; empty if nothing was measured."""
    try:
        with open(measured_file(host), encoding="utf-8") as file:
            found = json.load(file).items()
            return {str(name): {str(key): float(one) for key, one in of.items()} for name, of in found}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def measured_peaks(host: str, device_name: str) -> Mapping[str, float]:
    """Measured peaks of one device of *host*; none for a host without a name."""
    return read_measured(host).get(device_name, {}) if host else {}


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
    peaks, alone = dict(profile.peaks_flops_per_sec), [one.dtype for one in profile.dtypes]
    for dtype in {*peaks, *alone, *(flops_per_sec if isinstance(flops_per_sec, Mapping) else ())}:
        if (peak := peak_for("", dtype, flops_per_sec)) is not None:
            peaks[dtype] = peak
    settings = profile.settings if flops_per_sec is None else replace(profile.settings, peaks_from="given")
    bandwidth = memory_bytes_per_sec or profile.memory_bytes_per_sec
    held = replace(profile, peaks_flops_per_sec=peaks, memory_bytes_per_sec=bandwidth, settings=settings)
    dtype = alone[0] if len(alone) == 1 else "of several dtypes"
    flops: ModuleFlops = {}
    for module in profile.modules:
        flops[module.name, "forward"] = {dtype: module.total.forward}
        flops[module.name, "backward"] = {dtype: module.total.backward + module.total.recompute}
    return at_peaks(held, flops)


def at_peaks(profile: Profile, flops: ModuleFlops) -> Profile:
    """*profile* with all that follows from its ``peaks_flops_per_sec``; *flops* are its modules', of all steps."""
    peaks, timing, steps = profile.peaks_flops_per_sec, profile.timing, max(1, len(profile.counted_steps))
    peak_sec = [
        mean(total=peak_seconds({one.dtype: getattr(one, name) for one in profile.dtypes}, peaks), steps=steps)
        for name in ("model", "hardware", "executed_model", "executed")
    ]
    unknown = ", ".join(one.dtype for one in profile.dtypes if one.dtype not in peaks)
    device = profile.context.device_name or profile.context.device_type
    no_peak = f"no dense peak is known for {unknown} on {device}; {GIVE_PEAK}" if unknown else UNUSUAL
    step_sec = None if timing is None else timing.global_step_sec
    used = {"mfu": peak_sec[0], "hfu": peak_sec[1]}
    shares, impossible = utilization(used, step_sec, masked=profile.flops.skipped > 0)
    reasons = {name: NO_TIME if timing is None else no_peak for name, share in shares.items() if share is None}
    others = {name: why for name, why in profile.unavailable.items() if name not in shares}
    modules, notes = _at_peaks(profile, flops, steps)
    return replace(
        profile,
        rates=replace(profile.rates, **shares),
        unavailable=others | reasons | impossible,
        ranks=profile.ranks and _ranks_at(profile.ranks, profile, used),
        budget=build_budget(
            timing=timing,
            traced=profile.traced,
            peak_sec=(peak_sec[2], peak_sec[3]),
            lower_bound=profile.lower_bound,
        ),
        modules=modules,
        notes=(*(note for note in profile.notes if not note.startswith(_BEYOND)), *notes),
    )


def _at_peaks(profile: Profile, flops: ModuleFlops, steps: int) -> tuple[tuple[ModuleProfile, ...], list[str]]:
    """The modules with their FLOP/s and shares of the peak, and a sentence on those that cannot be."""
    modules, beyond = [], []
    for module in profile.modules:
        rates: dict[str, Any] = {}
        for phase in ("forward", "backward") if module.times else ():
            spent, sec = flops.get((module.name, phase), {}), getattr(module.times, f"{phase}_sec")
            amount = mean(total=sum(spent.values()) or None, steps=steps)
            peak_sec = mean(total=peak_seconds(spent, profile.peaks_flops_per_sec), steps=steps)
            share = ratio(part=peak_sec, whole=amount and sec)
            if share is not None and share > MOST_OF_PEAK:
                beyond.append(f"{module.name or 'the root'}'s {phase} ({share:,.1f} times)")
                share = amount = None
            rates[f"{phase}_flops_per_sec"] = per_second(amount=amount, seconds=sec)
            rates[f"{phase}_utilization"] = share
        modules.append(replace(module, times=module.times and replace(module.times, **rates)))
    more = f" and {len(beyond) - _NAMED} more" if len(beyond) > _NAMED else ""
    why = "Time is missing in the trace, or the peak is not the device's."
    return tuple(modules), [f"{_BEYOND} {', '.join(beyond[:_NAMED])}{more}. {why}"] if beyond else []


def _ranks_at(ranks: RanksProfile, profile: Profile, peak_sec: Mapping[str, float | None]) -> RanksProfile:
    """*ranks* with the job's MFU and HFU, where all have the device of *profile*, whose FLOPs take *peak_sec*."""
    sums, are_alike = [math.fsum(one.parts_sec.values()) for one in ranks.ranks], len(ranks.devices) == 1
    step_sec = math.fsum(sums) if all(sums) and are_alike else None
    own, job = profile.flops, ranks.flops
    more = {  # FLOPs of all ranks, which are in the dtypes of this rank's, by its own
        "mfu": ratio(part=job.model, whole=own.model),
        "hfu": ratio(part=job.hardware, whole=own.hardware),
    }
    seconds = {
        name: None if sec is None or (times := more[name]) is None else times * sec for name, sec in peak_sec.items()
    }
    used = {name: ratio(part=sec, whole=step_sec) for name, sec in seconds.items()}
    shares, impossible = utilization(used, 1.0, masked=job.skipped > 0)
    why = "the reporting rank has no FLOPs" if are_alike else "a peak was given, and ranks have other kinds of devices"
    unavailable = {name: reason for name, reason in ranks.unavailable.items() if shares.get(name) is None}
    unknown = [name for name, share in shares.items() if share is None]
    unavailable |= {name: why for name in unknown if name not in unavailable or not are_alike}
    of_device = per_second(amount=own.model, seconds=peak_sec["mfu"]) if are_alike else None
    peak = None if of_device is None else of_device * ranks.answered
    rates = replace(ranks.rates, **shares)
    return replace(ranks, rates=rates, unavailable=unavailable | impossible, peak_flops_per_sec=peak)


def why_no_flops(reports: Sequence[TraceReport]) -> str | None:
    """Why one of *reports* has no FLOPs, without a full stop; None if all have them."""
    notes = [note for report in reports if report.flops is None for note in report.notes]
    return next((note.removeprefix(NO_FLOPS).rstrip(".") for note in notes if note.startswith(NO_FLOPS)), None)


def why_no_mfu(reports: Sequence[TraceReport]) -> str | None:
    """Why the traces of one run do not give its MFU, without a full stop; None if they do, or if unknown."""
    flops = next((report.flops for report in reports if report.flops is not None), None)
    if flops is None:
        return why_no_flops(reports)
    if not flops.devices:
        return "no device is in the trace"
    for dtype in sorted({row.dtype for row in flops.operators} - set(flops.peaks)):
        return f"{why_no_peak(flops.device or '', dtype)}; its peak can be given: --peak {dtype}=FLOPS"
    return next((row.reason.removeprefix(NO_MFU) for row in flops.uncounted if row.reason.startswith(NO_MFU)), None)
