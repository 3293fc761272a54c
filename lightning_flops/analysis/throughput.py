"""Throughput of a whole run, in the terms of Paddle's profiler: reader cost, batch cost, items per second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from lightning_flops.analysis.flops_law import step_law
from lightning_flops.analysis.rates import over_ranks, padding_ratio, per_second, ratio
from lightning_flops.analysis.run_books import NOTHING_BOOKED, RunTotals
from lightning_flops.analysis.step_laws import RunLaw
from lightning_flops.records import UNKNOWN_TOKENS, BatchTokens, BatchTotals, Extremes
from lightning_flops.schema.throughput import SCHEMA_VERSION, Spread, ThroughputSummary
from lightning_flops.units import plural

_BESIDE_MODEL = (
    "steps of the same shapes spent the same in forward and backward, and something else beside them, in the optimizer "
    "for one"
)
_PADDING = (
    "steps with padding, or those without, were not counted in these sizes, and a mask may decide what kernels skip"
)


def build_throughput(
    totals: BatchTotals,
    *,
    dp_size: int,
    flops: RunTotals = NOTHING_BOOKED,
    model_flops_peak_sec: float | str | None = None,
    useful_flops_peak_sec: float | str | None = None,
    lower_bound: bool = False,
    notes: tuple[str, ...] = (),
    tokens: BatchTokens = UNKNOWN_TOKENS,
    timed_tokens: int | None = None,
    law: RunLaw | str | None = None,
    peak_sec: Callable[[Mapping[str, int]], float | None] = lambda flops: None,
) -> ThroughputSummary | None:
    """Averages and extremes of *totals*.

    Args:
        totals: what the batches of this rank took.
        dp_size: ranks that see different data, whose items count together.
        flops: what the steps of this rank spent.
        model_flops_peak_sec: seconds that those of the undisturbed ones take at the device's peaks; in words, why that
            is not known.
        useful_flops_peak_sec: the same of what they would have spent without padding; in words, why it is not known.
        lower_bound: FLOPs are missing.
        notes: about the FLOPs, as in ``ThroughputSummary``.
        tokens: those of all batches of this rank, counted and traced ones as well.
        timed_tokens: those of the batches in *totals*, as the user has said, or without padding; None if not known.
        law: what a step spends as a function of its sizes; in words, why there is none; None if nobody asked.
        peak_sec: seconds that FLOPs by dtype take at the device's peaks; None if one is not known.

    Returns:
        None without batches.
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
        ips = _spread(rate * dp_size, minimum=slowest * dp_size, maximum=fastest * dp_size)
    return ThroughputSummary(
        schema_version=SCHEMA_VERSION,
        batches=totals.batches,
        reader_ratio=None if reader is None else ratio(part=reader.total, whole=seconds.total),
        reader_cost_sec=None if reader is None else _mean(reader),
        batch_cost_sec=_mean(seconds),
        ips=ips,
        ips_unit=unit,
        model_flops=flops.model_flops,
        hardware_flops=flops.hardware_flops,
        lower_bound=lower_bound,
        notes=notes,
        steps_counted=flops.steps_counted,
        steps_predicted=flops.steps_predicted,
        steps_checked=flops.steps_checked,
        steps_unknown=flops.steps_unknown,
        model_flops_per_sec=per_second(
            amount=None if flops.undisturbed is None else flops.undisturbed.model, seconds=seconds.total
        ),
        law=step_law(law, peak_sec=peak_sec) if isinstance(law, RunLaw) else None,
        unavailable={
            name: reason
            for name, reason in (
                ("model_flops", _why_unknown(flops)),
                ("hardware_flops", _why_no_hardware_flops(flops)),
                ("law", law),
                ("mfu", model_flops_peak_sec),
                ("useful_mfu", useful_flops_peak_sec),
            )
            if isinstance(reason, str)
        },
        tokens=tokens.processed,
        real_tokens=tokens.real,
        trained_tokens=tokens.trained,
        padding_ratio=padding_ratio(tokens),
        tokens_per_sec=per_second(amount=over_ranks(amount=timed_tokens, ranks=dp_size), seconds=seconds.total),
        mfu=per_second(amount=_known(model_flops_peak_sec), seconds=seconds.total),
        useful_mfu=per_second(amount=_known(useful_flops_peak_sec), seconds=seconds.total),
    )


def _why_unknown(flops: RunTotals) -> str | None:
    """Why the FLOPs of some steps are not known, of steps of which others are; in words without a full stop."""
    unseen = flops.steps_unseen
    unknown = flops.steps_unknown - unseen
    reasons = []
    if unseen:
        reasons.append(f"{unseen} {plural('step', unseen)} ran before the loop was recognized")
    if unknown:
        reasons.append(f"nothing that was counted tells what {unknown} {plural('step', unknown)} spent")
    known = flops.steps_counted + flops.steps_predicted
    return "; ".join(reasons) if reasons and known else None


def _why_no_hardware_flops(flops: RunTotals) -> str | None:
    """Why model FLOPs alone are known, if so; in words without a full stop."""
    if flops.model_flops is None or flops.hardware_flops is not None:
        return None
    return _BESIDE_MODEL if flops.depends_beside_model else _PADDING


def _known(peak_sec: float | str | None) -> float | None:
    return None if isinstance(peak_sec, str) else peak_sec


def _mean(values: Extremes) -> Spread:
    return _spread(values.total / values.number, minimum=values.least, maximum=values.greatest)


def _spread(average: float, *, minimum: float, maximum: float) -> Spread:
    # A mean of equal values may miss them by a rounding.
    return Spread(average=min(max(average, minimum), maximum), maximum=maximum, minimum=minimum)
