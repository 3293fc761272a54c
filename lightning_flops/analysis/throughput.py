"""Throughput of a whole run, in the terms of Paddle's profiler: reader cost, batch cost, items per second."""

from __future__ import annotations

from typing import Literal

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
    unit: Literal["samples/s", "batches/s"] = "batches/s"
    items: int = totals.batches
    slowest, fastest = (per_second(amount=1, seconds=each) for each in (seconds.greatest, seconds.least))
    if totals.samples is not None and totals.samples_per_sec is not None:
        unit, items = "samples/s", totals.samples
        slowest, fastest = totals.samples_per_sec.least, totals.samples_per_sec.greatest
    rate = per_second(amount=items, seconds=seconds.total)
    ips = None
    if rate is not None and slowest is not None and fastest is not None:
        ips = Spread(average=rate * dp_size, maximum=fastest * dp_size, minimum=slowest * dp_size)
    unavailable = {}
    if flops is not None and model_flops_peak_sec is None:
        unavailable["mfu"] = _NO_PEAK
    if flops is not None and tokens.real is not None and useful_flops_peak_sec is None:
        unavailable["useful_mfu"] = _NO_FORMULA if flops.unprofiled.useful_by_dtype is None else _NO_PEAK
    peak_sec = {"mfu": model_flops_peak_sec, "useful_mfu": useful_flops_peak_sec}
    shares, impossible = utilization(peak_sec, seconds.total)
    counts = {} if flops is None else {name: getattr(flops, name) for name in _OF_FLOPS} | {"checks_seed": flops.seed}
    if flops is not None and (flops.error or 0.0) > 1.0:
        counts |= dict.fromkeys(("model_flops", "hardware_flops"))
        shares = dict.fromkeys(shares)
        impossible = dict.fromkeys(shares, _TOO_WIDE.format(checks=flops.checks))
    return ThroughputSummary(
        batches=totals.batches,
        reader_ratio=None if reader is None else ratio(part=reader.total, whole=seconds.total),
        reader_cost_sec=None if reader is None else _mean(reader),
        batch_cost_sec=_mean(seconds),
        ips=ips,
        ips_unit=unit,
        flops_error=None if flops is None else flops.error,
        **counts,
        notes=notes,
        mfu=shares["mfu"],
        useful_mfu=shares["useful_mfu"],
        tokens=tokens.processed,
        real_tokens=tokens.real,
        padding_ratio=padding_ratio(tokens),
        tokens_per_sec=per_second(amount=timed_tokens and timed_tokens * dp_size, seconds=seconds.total),
        unavailable=unavailable | impossible,
        batch_stretches_sec=tuple(one for one, _ in totals.stretches_sec),
        reader_stretches_sec=() if reader is None else tuple(wait for _, wait in totals.stretches_sec),
    )


def _mean(values: Extremes) -> Spread:
    return Spread(average=values.total / values.number, maximum=values.greatest, minimum=values.least)
