"""Ratios of what was counted and what was timed, the peaks they are held against, and why one is not known.

A peak is the user's figure, the vendor's (``devices.py``), or a measured one.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar

from lightning_flops.analysis.devices import device_named, why_no_peak
from lightning_flops.analysis.step_flops import StepSums
from lightning_flops.analysis.timing import build_budget
from lightning_flops.records import (
    ROLLOUT,
    SCORING,
    TRAINING,
    UNKNOWN_TOKENS,
    BatchTokens,
    BatchTotals,
    Extremes,
    PhaseFlops,
    RunContext,
    RunFlops,
)
from lightning_flops.schema.profile import Profile, Spread, ThroughputSummary
from lightning_flops.schema.step import ModuleProfile, PhaseProfile, Rates, StepFlops, TimingProfile
from lightning_flops.schema.trace import RanksProfile, TraceReport

_Number = TypeVar("_Number", int, float)

FLOPS_PER_BYTE = 10.0  # where a device's own are not known: an A100's in float32, 19.5 TFLOP/s on 2.0 TB/s
MOST_OF_PEAK = 2  # figures beyond so many times the peak are impossible, whatever the clocks and the shapes say
GIVE_PEAK = "run lightning-flops peak, or set peak_flops_per_sec"  # what to do where no peak is known
_SHARES = {"hfu": "hardware", "mfu": "model"}  # what is held against peaks, and whose FLOPs they are
_MIXED = "the times of these phases cannot be separated"
UNUSUAL, NO_TIME = "what was counted cannot be right", "no step was timed"

# Rates that are of a backward or an optimizer, too; in a run without either they would only repeat the forward's.
RATES_OF_TRAINING = (
    "backward_flops_per_sec",
    "backward_flops_per_sec_estimated",
    "forward_backward_flops_per_sec",
    "iter_flops_per_sec",
)


def ratio(*, part: float | None, whole: float | None) -> float | None:
    """Share of *part* in *whole*, or the rate of *part* over seconds.

    None when either is not known, negative or not finite, or *whole* is zero.
    """
    if part is None or whole is None or not (0 <= part < math.inf and 0 < whole < math.inf):
        return None
    found = part / whole
    return found if math.isfinite(found) else None


def peak_seconds(flops: Mapping[str, float], peaks_flops_per_sec: Mapping[str, float]) -> float | None:
    """Seconds one device needs for *flops* at its dense peak: the sum over dtypes of FLOPs / peak of that dtype.

    Divided by the measured seconds this is MFU (of model FLOPs) or HFU (of hardware FLOPs). None if a dtype with FLOPs
    has no known peak.
    """
    spending = {dtype: spent for dtype, spent in flops.items() if spent}
    if not all(peaks_flops_per_sec.get(dtype) for dtype in spending):
        return None
    return sum(spent / peaks_flops_per_sec[dtype] for dtype, spent in spending.items())


def utilization(
    peak_sec: Mapping[str, float | None], seconds: float | None, *, masked: bool = False
) -> tuple[dict[str, float | None], dict[str, str]]:
    """*peak_sec* ÷ *seconds* by name, such as "mfu", and why those are None that are above 1, which cannot be.

    *masked*: whether some of the FLOPs are skipped, as masks let kernels do.
    """
    first = "masked attention that kernels skip is counted (see causal_attention), or " if masked else ""
    shares = {name: ratio(part=part, whole=seconds) for name, part in peak_sec.items()}
    reasons = {
        name: f"{name[-3:].upper()} would be {100 * share:.4g}%, which is impossible: {first}the peak "
        "(--peak, peak_flops_per_sec) is too low, or the clock did not wait for the device"
        for name, share in shares.items()
        if share is not None and share > 1
    }
    return shares | dict.fromkeys(reasons), reasons


def rate(name: str, phases: Mapping[str, PhaseProfile]) -> float | None:
    """FLOP/s of the phase of this *name*, if it ran here."""
    one = phases.get(name)
    return None if one is None or one.estimated else ratio(part=one.flops, whole=one.seconds)


def rate_of_rollout(phases: Mapping[str, PhaseProfile]) -> float:
    """What a rollout's FLOP/s are of the training's; 1 where they are not known."""
    return ratio(part=rate(ROLLOUT, phases), whole=rate(TRAINING, phases)) or 1.0


def scoring_gain(phases: Mapping[str, PhaseProfile], peaks: Mapping[str, float]) -> float:
    """The share of its time that a model which is only asked saves in bfloat16; 0 where that is not known."""
    dtype = phases[SCORING].dtype if SCORING in phases else None
    left = ratio(part=peaks.get(dtype or ""), whole=peaks.get("bfloat16"))
    return 0.0 if left is None else max(0.0, 1.0 - left)


def padding_ratio(tokens: BatchTokens) -> float | None:
    """Share of *tokens* that are padding; None if the processed or the real ones are not known, or there are none."""
    processed, real = tokens.processed, tokens.real
    if processed is None or real is None or not 0 < real <= processed:
        return None
    return (processed - real) / processed


def whole(part: int, *, of: int) -> int:
    """*part* divided by *of*, to the nearest whole number."""
    return (2 * part + of) // (2 * of)


def flops_per_byte(profiles: Sequence[Profile]) -> float:
    """FLOPs that these runs' devices do in the dtypes that ran while they move a byte; of other devices their mean."""
    known = []
    for one in profiles:
        spent = {dtype.dtype: float(dtype.hardware) for dtype in one.dtypes}
        peak = ratio(part=sum(spent.values()), whole=peak_seconds(spent, one.peaks_flops_per_sec))
        known.append(ratio(part=peak, whole=one.memory_bytes_per_sec))
    return statistics.geometric_mean([one or FLOPS_PER_BYTE for one in known])


def sum_if_all_known(values: Iterable[_Number | None]) -> _Number | None:
    """The sum of *values*; None if one of them is not known, or if there are none."""
    known = list(values)
    return sum(one for one in known if one is not None) if known and None not in known else None


def build_rates(
    *,
    flops: StepFlops,
    timing: TimingProfile | None,
    samples: float | None,
    tokens: float | None,
    context: RunContext,
) -> tuple[Rates, dict[str, str]]:
    """Every ratio that needs no peak, and the reason for each one that is None.

    *flops*, *samples* and *tokens* are of this rank in a step.
    """
    trained = flops.backward + flops.recompute
    all_samples, all_tokens = (amount and amount * context.dp_size for amount in (samples, tokens))
    no_samples = "the batch size is not known; set batch_size"
    # What each rate is of, over which time, and why that may not be known.
    ratios: dict[str, tuple[float | None, str, str]] = {
        "forward_flops_per_sec": (flops.forward, "forward_sec", UNUSUAL),
        "backward_flops_per_sec": (trained, "backward_sec", UNUSUAL),
        "backward_flops_per_sec_estimated": (flops.backward_estimated, "backward_sec", UNUSUAL),
        "forward_backward_flops_per_sec": (flops.forward + trained, "forward_backward_sec", UNUSUAL),
        "iter_flops_per_sec": (flops.hardware, "iter_sec", UNUSUAL),
        "samples_per_sec": (all_samples, "global_step_sec", no_samples),
        "iter_samples_per_sec": (all_samples, "iter_sec", no_samples),
        "tokens_per_sec": (all_tokens, "global_step_sec", "how to count tokens was not said; set tokens_per_sample"),
        "data_wait_ratio": (None if timing is None else timing.data_wait_sec, "global_step_sec", _MIXED),
    }
    values, reasons = dict[str, float | None](), dict[str, str]()
    for name, (amount, time, why) in ratios.items():
        seconds: float | None = None if timing is None else getattr(timing, time)
        values[name] = ratio(part=amount, whole=seconds)
        if values[name] is None:
            no_time = NO_TIME if timing is None else _MIXED if seconds is None else "its time is zero"
            reasons[name] = why if seconds else no_time
    if not context.trains and not trained + flops.optimizer:
        values |= dict.fromkeys(RATES_OF_TRAINING)
        reasons |= dict.fromkeys(RATES_OF_TRAINING, f"a {context.run_word} has no backward and no optimizer")
    return Rates(**values, mfu=None, hfu=None), reasons


def build_throughput(
    totals: BatchTotals,
    *,
    dp_size: int,
    flops: StepSums | None = None,
    model_flops_peak_sec: float | None = None,
    useful_flops_peak_sec: float | None = None,
    notes: tuple[str, ...] = (),
    tokens: BatchTokens = UNKNOWN_TOKENS,
    timed_tokens: int | None = None,
) -> ThroughputSummary | None:
    """Averages and extremes of *totals*, what the batches of this rank took; None without batches.

    *flops* are of all steps of this rank; those of the unprofiled ones, and what these would have without padding, take
    *model_flops_peak_sec* and *useful_flops_peak_sec* at the device's peaks. *tokens* are of all batches, and
    *timed_tokens* of those in *totals*, as the user has said, or without padding. Items of *dp_size* ranks add up.
    """
    seconds, reader = totals.seconds, totals.reader_sec
    if seconds is None:
        return None
    unit, ips = _items_per_sec(totals, seconds, dp_size)
    peak_sec = {"mfu": model_flops_peak_sec, "useful_mfu": useful_flops_peak_sec}
    shares, unavailable = utilization(peak_sec, seconds.total)
    counts: dict[str, Any] = {}
    if flops is not None:
        counts = {one.name: getattr(flops, one.name) for one in fields(RunFlops)}
        no_peak = f"no dense peak of this device is known for every dtype of the run; {GIVE_PEAK}"
        no_useful = (
            "no formula gives the cost of its steps without padding"
            if flops.unprofiled.useful_by_dtype is None
            else no_peak
        )
        why = {"mfu": no_peak} | ({} if tokens.real is None else {"useful_mfu": no_useful})
        unavailable = {name: words for name, words in why.items() if peak_sec[name] is None} | unavailable
        if (flops.flops_error or 0.0) > 1.0:
            counts |= dict.fromkeys(("model_flops", "hardware_flops"))
            shares = dict.fromkeys(shares)
            unavailable |= dict.fromkeys(
                shares,
                f"{flops.checks} steps that were counted at random differ so much that the 95% interval is wider than "
                "±100%",
            )
    return ThroughputSummary(
        batches=totals.batches,
        reader_ratio=None if reader is None else ratio(part=reader.total, whole=seconds.total),
        reader_cost_sec=None if reader is None else _mean(reader),
        batch_cost_sec=_mean(seconds),
        ips=ips,
        ips_unit=unit,
        **counts,
        notes=notes,
        mfu=shares["mfu"],
        useful_mfu=shares["useful_mfu"],
        tokens=tokens.processed,
        real_tokens=tokens.real,
        padding_ratio=padding_ratio(tokens),
        tokens_per_sec=ratio(part=timed_tokens and timed_tokens * dp_size, whole=seconds.total),
        unavailable=unavailable,
        batch_stretches_sec=tuple(one for one, _ in totals.stretches_sec),
        reader_stretches_sec=() if reader is None else tuple(wait for _, wait in totals.stretches_sec),
    )


def _items_per_sec(
    totals: BatchTotals, seconds: Extremes, dp_size: int
) -> tuple[Literal["samples/s", "batches/s"], Spread | None]:
    """Samples a second of *dp_size* ranks, or batches where samples are not known; a rate that is none is None."""
    of_samples = totals.samples_per_sec
    unit: Literal["samples/s", "batches/s"] = "samples/s"
    if totals.samples is None or of_samples is None:
        amounts = ((totals.batches, seconds.total), (1, seconds.least), (1, seconds.greatest))
        rates, unit = [ratio(part=number, whole=sec) for number, sec in amounts], "batches/s"
    else:
        rates = [ratio(part=totals.samples, whole=seconds.total), of_samples.greatest, of_samples.least]
    known = [rate * dp_size for rate in rates if rate is not None]
    return unit, Spread(average=known[0], maximum=known[1], minimum=known[2]) if len(known) == 3 else None


def _mean(values: Extremes) -> Spread:
    return Spread(average=values.total / values.number, maximum=values.greatest, minimum=values.least)


COPY = "copy"  # the name of the bandwidth of a copy, in bytes/s, among the FLOP/s of dtypes
_BEYOND, _NAMED = "Left out, as they would be beyond the device's peak:", 4
_OF_A_CALL = {"forward": ("forward",), "backward": ("backward", "recompute")}  # whose FLOPs a module's times are
NO_MFU = "no MFU: "  # what a row of ``TraceFlops.uncounted`` begins with that says why there is none

# FLOPs of each module and those below it, over all counted steps, by dtype.
ModuleFlops = Mapping[str, Mapping[str, PhaseFlops]]


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


def with_given_peaks(
    profile: Profile,
    *,
    flops_per_sec: float | Mapping[str, float] | None,
    memory_bytes_per_sec: float | None,
) -> Profile:
    """*profile* with MFU, HFU, breakdown, shares of the peak and rooflines of these figures; advice is still the run's.

    None stands for the profile's own. Shares of modules are n/a where several dtypes have FLOPs.
    """
    alone = [one.dtype for one in profile.dtypes]
    of_all = {
        dtype: flops_per_sec
        for dtype in (*profile.peaks_flops_per_sec, *alone)
        if isinstance(flops_per_sec, (int, float))
    }
    peaks = {**profile.peaks_flops_per_sec, **(flops_per_sec if isinstance(flops_per_sec, Mapping) else of_all)}
    held = replace(
        profile,
        peaks_flops_per_sec=peaks,
        memory_bytes_per_sec=memory_bytes_per_sec or profile.memory_bytes_per_sec,
        settings=profile.settings if flops_per_sec is None else replace(profile.settings, peaks_from="given"),
    )
    dtype = alone[0] if len(alone) == 1 else "of several dtypes"
    flops = {dtype: {module.name: module.total for module in profile.modules}}
    ranks = held.ranks
    if ranks is not None and flops_per_sec is not None:
        is_alike = len(ranks.devices) == 1
        why = {} if is_alike else dict.fromkeys(_SHARES, "a peak was given, and ranks have other kinds of devices")
        unknown = replace(ranks, unavailable={**ranks.unavailable, **why})
        ranks = job_at_peaks(unknown, [peaks if is_alike else {}] * ranks.answered)
    return replace(at_peaks(held, flops), ranks=ranks)


def at_peaks(profile: Profile, flops: ModuleFlops) -> Profile:
    """*profile* with all that follows from its ``peaks_flops_per_sec``; *flops* are its modules'."""
    peaks, timing, typical = profile.peaks_flops_per_sec, profile.timing, profile.typical_flops_ratio
    peak_sec = [
        peak_seconds({one.dtype: getattr(one, name) for one in profile.dtypes}, peaks)
        for name in ("model", "hardware", "executed_model", "executed")
    ]
    unknown = ", ".join(one.dtype for one in profile.dtypes if one.dtype not in peaks)
    device = profile.context.device_name or profile.context.device_type
    no_peak = f"no dense peak is known for {unknown} on {device}; {GIVE_PEAK}" if unknown else UNUSUAL
    shares, impossible = utilization(
        {"mfu": peak_sec[0], "hfu": peak_sec[1]},
        None if timing is None else timing.global_step_sec,
        masked=profile.flops.skipped > 0,
    )
    reasons = {name: NO_TIME if timing is None else no_peak for name, share in shares.items() if share is None}
    others = {name: why for name, why in profile.unavailable.items() if name not in shares}
    modules, notes = _at_peaks(profile, flops)
    return replace(
        profile,
        rates=replace(profile.rates, **shares),
        unavailable=others | reasons | impossible,
        budget=build_budget(
            timing=timing,
            traced=profile.traced,
            peak_sec=[None if sec is None else typical * sec for sec in peak_sec[2:]],
            lower_bound=profile.lower_bound,
        ),
        modules=modules,
        notes=(*(note for note in profile.notes if not note.startswith(_BEYOND)), *notes),
    )


def _at_peaks(profile: Profile, flops: ModuleFlops) -> tuple[tuple[ModuleProfile, ...], list[str]]:
    """The modules with their FLOP/s and shares of the peak, and a sentence on those that cannot be."""
    modules, beyond = [], []
    for module in profile.modules:
        rates: dict[str, Any] = {}
        own = {dtype: of.get(module.name, PhaseFlops()) for dtype, of in flops.items()}
        for phase, parts in _OF_A_CALL.items():
            spent = {dtype: profile.per_step(sum(getattr(one, part) for part in parts)) for dtype, one in own.items()}
            sec = getattr(module.times, f"{phase}_sec", None)
            amount, peak_sec = sum(spent.values()) or None, peak_seconds(spent, profile.peaks_flops_per_sec)
            share = ratio(part=peak_sec, whole=amount and sec)
            if share is not None and share > 1:  # as for MFU
                beyond.append(f"{module.name or 'the root'}'s {phase} ({share:,.2f} times)")
                amount = None if share > MOST_OF_PEAK else amount
                share = None
            rates[f"{phase}_flops_per_sec"] = ratio(part=amount, whole=sec)
            rates[f"{phase}_utilization"] = share
        modules.append(replace(module, times=module.times and replace(module.times, **rates)))
    more = f" and {len(beyond) - _NAMED} more" if len(beyond) > _NAMED else ""
    why = (
        "Convolutions may multiply less than is counted (Winograd), time may be missing in the trace, or the peak is "
        "not the device's. Beyond twice the peak FLOP/s are left out, too."
    )
    return tuple(modules), [f"{_BEYOND} shares of {', '.join(beyond[:_NAMED])}{more}. {why}"] if beyond else []


def job_at_peaks(ranks: RanksProfile, peaks: Sequence[Mapping[str, float]]) -> RanksProfile:
    """*ranks* with the job's MFU and HFU at these *peaks* of each rank's device, and why those are None that were so.

    A device's peak is weighted by the job's dtypes: all its FLOPs / the seconds that they take there.
    """
    steps_sec = [math.fsum(one.parts_sec.values()) or None for one in ranks.ranks]
    shares, of_devices = dict[str, float | None](), list[float | None]()
    for name, which in _SHARES.items():
        flops = {one.dtype: getattr(one, which) for one in ranks.dtypes}
        of_devices = [ratio(part=sum(flops.values()), whole=peak_seconds(flops, one)) for one in peaks]
        possible = [
            None if peak is None or sec is None else peak * sec for peak, sec in zip(of_devices, steps_sec, strict=True)
        ]
        shares[name] = ratio(part=sum(flops.values()), whole=sum_if_all_known(possible))
    shares, impossible = utilization(shares, 1.0, masked=ranks.flops.skipped > 0)
    why = dict.fromkeys(shares, "no dense peak of some rank's device is known for all dtypes of the job")
    unknown = {name: reason for name, reason in {**why, **ranks.unavailable}.items() if shares.get(name) is None}
    return replace(
        ranks,
        rates=replace(ranks.rates, **shares),
        unavailable=unknown | impossible,
        peak_flops_per_sec=sum_if_all_known(of_devices),
    )


def why_no_flops(report: TraceReport) -> str | None:
    """Why the *report* of a trace file has no FLOPs, without a full stop; None if it has them."""
    if report.operators_by_shape is None:
        return "the trace was taken without record_shapes=True"
    return "working them out from shapes needs torch, which is not installed" if report.flops is None else None


def why_no_mfu(reports: Sequence[TraceReport]) -> str | None:
    """Why the traces of one run do not give its MFU, without a full stop; None if they do, or if unknown."""
    flops = next((report.flops for report in reports if report.flops is not None), None)
    if flops is None:
        return why_no_flops(reports[0])
    if not flops.devices:
        return "no device is in the trace"
    for dtype in sorted({row.dtype for row in flops.operators} - set(flops.peaks)):
        return f"{why_no_peak(flops.device or '', dtype)}; its peak can be given: --peak {dtype}=FLOPS"
    return next((row.reason.removeprefix(NO_MFU) for row in flops.uncounted if row.reason.startswith(NO_MFU)), None)
