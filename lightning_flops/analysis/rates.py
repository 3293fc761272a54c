"""Ratios of what was counted and what was timed, and the reason for each one that is not known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeVar

from lightning_flops.records import UNKNOWN_TOKENS, BatchTokens, BatchTotals, Extremes, RunContext, StepSums
from lightning_flops.schema.step import Rates, StepFlops, TimingProfile
from lightning_flops.schema.throughput import Spread, ThroughputSummary

_Number = TypeVar("_Number", int, float)

MOST_OF_PEAK = 2  # figures beyond so many times the peak are impossible, whatever the clocks and the shapes say
GIVE_PEAK = "run lightning-flops peak, or set peak_flops_per_sec"  # what to do where no peak is known
_MIXED = "the times of these phases cannot be separated"
UNUSUAL, NO_TIME = "what was counted cannot be right", "no step was timed"

RATES_OF_TRAINING = (
    "backward_flops_per_sec",
    "backward_flops_per_sec_estimated",
    "forward_backward_flops_per_sec",
    "iter_flops_per_sec",
)
"""Rates that are of a backward or an optimizer, too; in a run without either they would only repeat the forward's."""


def per_second(*, amount: float | None, seconds: float | None) -> float | None:
    """Rate of *amount* over *seconds*; None when either is not known, negative or not finite, or *seconds* is zero."""
    if amount is None or seconds is None or not (0 <= amount < math.inf and 0 < seconds < math.inf):
        return None
    rate = amount / seconds
    return rate if math.isfinite(rate) else None


def ratio(*, part: float | None, whole: float | None) -> float | None:
    """Share of *part* in *whole*; None under the same conditions as ``per_second``."""
    return per_second(amount=part, seconds=whole)


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


def padding_ratio(tokens: BatchTokens) -> float | None:
    """Share of *tokens* that are padding; None if the processed or the real ones are not known, or there are none."""
    processed, real = tokens.processed, tokens.real
    if processed is None or real is None or not 0 < real <= processed:
        return None
    return (processed - real) / processed


def mean(*, total: float | None, steps: int) -> float | None:
    """*total* over *steps* per step: the number itself, exact, for one step; None if *total* is."""
    return total if total is None or steps == 1 else total / steps


def share_of_flops(flops: StepFlops, *, parts: int = 1, of: int) -> StepFlops:
    """So many *parts* *of* *flops*, each figure to the nearest whole FLOP."""
    return StepFlops(**{name: (2 * parts * one + of) // (2 * of) for name, one in asdict(flops).items()})


def sum_if_all_known(values: Iterable[_Number | None]) -> _Number | None:
    """The sum of *values*; None if one of them is not known, or if there are none."""
    known = list(values)
    return sum(one for one in known if one is not None) if known and None not in known else None


def build_rates(
    *,
    flops: StepFlops,
    counted_steps: int,
    timing: TimingProfile | None,
    samples: float | None,
    tokens: float | None,
    context: RunContext,
) -> tuple[Rates, dict[str, str]]:
    """Every ratio that needs no peak, and the reason for each one that is None.

    *flops* are of all *counted_steps* together, *samples* and *tokens* of this rank in a timed step.
    """
    trained = flops.backward + flops.recompute
    no_samples = "the batch size is not known; set batch_size"
    no_tokens = "how to count tokens was not said; set tokens_per_sample"
    spent = {
        "forward_flops_per_sec": (flops.forward, "forward_sec"),
        "backward_flops_per_sec": (trained, "backward_sec"),
        "backward_flops_per_sec_estimated": (flops.backward_estimated, "backward_sec"),
        "forward_backward_flops_per_sec": (flops.forward + trained, "forward_backward_sec"),
        "iter_flops_per_sec": (flops.hardware, "iter_sec"),
    }
    # What each rate is of, over which time, and why that may not be known.
    ratios: dict[str, tuple[float | None, str, str]] = {
        **{name: (mean(total=of, steps=counted_steps), time, UNUSUAL) for name, (of, time) in spent.items()},
        "samples_per_sec": (samples and samples * context.dp_size, "global_step_sec", no_samples),
        "iter_samples_per_sec": (samples and samples * context.dp_size, "iter_sec", no_samples),
        "tokens_per_sec": (tokens and tokens * context.dp_size, "global_step_sec", no_tokens),
        "data_wait_ratio": (None if timing is None else timing.data_wait_sec, "global_step_sec", _MIXED),
    }
    values, reasons = dict[str, float | None](), dict[str, str]()
    for name, (amount, time, why) in ratios.items():
        seconds: float | None = None if timing is None else getattr(timing, time)
        values[name] = per_second(amount=amount, seconds=seconds)
        if values[name] is None:
            no_time = NO_TIME if timing is None else _MIXED if seconds is None else "its time is zero"
            reasons[name] = why if seconds else no_time
    if not context.trains and not trained + flops.optimizer:
        values |= dict.fromkeys(RATES_OF_TRAINING)
        reasons |= dict.fromkeys(RATES_OF_TRAINING, f"a {context.run_word} has no backward and no optimizer")
    return Rates(**values, mfu=None, hfu=None), reasons


def apportioned(total_ns: int, weights: Sequence[int]) -> list[int]:
    """*total_ns* in proportion to *weights*, as whole nanoseconds that add up to it; to the last if none is above 0."""
    whole = sum(weights)
    if whole <= 0:
        return [0] * (len(weights) - 1) + [total_ns]
    pieces, before, running = [], 0, 0
    for weight in weights:
        running += weight
        until = (2 * total_ns * running + whole) // (2 * whole)
        pieces.append(until - before)
        before = until
    return pieces


_NO_PEAK = f"no dense peak of this device is known for every dtype of the run; {GIVE_PEAK}"
_NO_FORMULA = "no formula gives the cost of its steps without padding"

_TOO_WIDE = "{checks} steps that were counted at random differ so much that the 95% interval is wider than ±100%"
_OF_FLOPS = "model_flops hardware_flops lower_bound steps_counted steps_by_formula steps_estimated checks".split()


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
        counts = {name: getattr(flops, name) for name in _OF_FLOPS}
        counts |= {"checks_seed": flops.seed, "flops_error": flops.error}
        no_useful = _NO_FORMULA if flops.unprofiled.useful_by_dtype is None else _NO_PEAK
        why = {"mfu": _NO_PEAK} | ({} if tokens.real is None else {"useful_mfu": no_useful})
        unavailable = {name: words for name, words in why.items() if peak_sec[name] is None} | unavailable
        if (flops.error or 0.0) > 1.0:
            counts |= dict.fromkeys(("model_flops", "hardware_flops"))
            shares = dict.fromkeys(shares)
            unavailable |= dict.fromkeys(shares, _TOO_WIDE.format(checks=flops.checks))
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
        tokens_per_sec=per_second(amount=timed_tokens and timed_tokens * dp_size, seconds=seconds.total),
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
        rates, unit = [per_second(amount=number, seconds=sec) for number, sec in amounts], "batches/s"
    else:
        rates = [per_second(amount=totals.samples, seconds=seconds.total), of_samples.greatest, of_samples.least]
    known = [rate * dp_size for rate in rates if rate is not None]
    return unit, Spread(average=known[0], maximum=known[1], minimum=known[2]) if len(known) == 3 else None


def _mean(values: Extremes) -> Spread:
    return Spread(average=values.total / values.number, maximum=values.greatest, minimum=values.least)
