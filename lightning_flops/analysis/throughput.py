"""Throughput of a whole run, in the terms of Paddle's profiler: reader cost, batch cost, items per second."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lightning_flops.analysis.rates import GIVE_PEAK, padding_ratio, per_second, ratio, utilization
from lightning_flops.records import UNKNOWN_TOKENS, BatchTokens, BatchTotals, Extremes, StepSums
from lightning_flops.schema.throughput import Spread, ThroughputSummary

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
        unavailable = _why_unknown(flops, peak_sec, has_padding=tokens.real is not None) | unavailable
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
    if totals.samples is not None and totals.samples_per_sec is not None:
        slowest, fastest = totals.samples_per_sec.least, totals.samples_per_sec.greatest
        return "samples/s", _of_ranks(
            dp_size, per_second(amount=totals.samples, seconds=seconds.total), fastest, slowest
        )
    amounts = ((totals.batches, seconds.total), (1, seconds.least), (1, seconds.greatest))
    return "batches/s", _of_ranks(dp_size, *(per_second(amount=number, seconds=sec) for number, sec in amounts))


def _of_ranks(dp_size: int, average: float | None, maximum: float | None, minimum: float | None) -> Spread | None:
    if average is None or maximum is None or minimum is None:
        return None
    return Spread(average=average * dp_size, maximum=maximum * dp_size, minimum=minimum * dp_size)


def _why_unknown(flops: StepSums, peak_sec: Mapping[str, float | None], *, has_padding: bool) -> dict[str, str]:
    """Why a share of the peak is None, though there are FLOPs."""
    reasons = {"mfu": _NO_PEAK}
    if has_padding:
        reasons["useful_mfu"] = _NO_FORMULA if flops.unprofiled.useful_by_dtype is None else _NO_PEAK
    return {name: why for name, why in reasons.items() if peak_sec[name] is None}


def _mean(values: Extremes) -> Spread:
    return Spread(average=values.total / values.number, maximum=values.greatest, minimum=values.least)
