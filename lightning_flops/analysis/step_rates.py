"""Every ratio of a profile, and the reason for each one that is not known."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

from lightning_flops.analysis.rates import impossible, mean, over_ranks, peak_seconds, per_second, ratio
from lightning_flops.records import RunContext
from lightning_flops.schema.step import DtypeFlops, Rates, StepFlops, TimingProfile

NO_SAMPLES = "the batch size is not known; set batch_size"
GIVE_PEAK = "run lightning-flops peak, or set peak_flops_per_sec"
"""What to do where no peak is known."""
NO_TOKENS = "how to count tokens was not said; set tokens_per_sample"
_NO_TIME = "no step was timed"
_MIXED = "the times of these phases cannot be separated"

RATES_OF_TRAINING = (
    "backward_flops_per_sec",
    "backward_flops_per_sec_estimated",
    "forward_backward_flops_per_sec",
    "forward_backward_flops_per_sec_estimated",
    "iter_flops_per_sec",
    "iter_flops_per_sec_estimated",
)
"""Rates that are of a backward or an optimizer, too; in a run without either they would only repeat the forward's."""

_TIMES = {
    "forward_flops_per_sec": "forward_sec",
    "backward_flops_per_sec": "backward_sec",
    "backward_flops_per_sec_estimated": "backward_sec",
    "forward_backward_flops_per_sec": "forward_backward_sec",
    "forward_backward_flops_per_sec_estimated": "forward_backward_sec",
    "iter_flops_per_sec": "iter_sec",
    "iter_flops_per_sec_estimated": "iter_sec",
    "samples_per_sec": "global_step_sec",
    "iter_samples_per_sec": "iter_sec",
    "tokens_per_sec": "global_step_sec",
    "tokens_per_sec_per_device": "global_step_sec",
    "mfu": "global_step_sec",
    "hfu": "global_step_sec",
    "data_wait_ratio": "global_step_sec",
}
"""The denominator of each rate."""

assert tuple(_TIMES) == tuple(field.name for field in fields(Rates)), "every rate has a denominator"


def build_rates(
    *,
    flops: StepFlops,
    counted_steps: int,
    dtypes: tuple[DtypeFlops, ...],
    timing: TimingProfile | None,
    samples: float | None,
    tokens: float | None,
    context: RunContext,
) -> tuple[Rates, dict[str, str]]:
    """Every ratio, and the reason for each one that is None.

    Args:
        flops: FLOPs of all counted steps together.
        counted_steps: their number.
        dtypes: the same by dtype, with peaks.
        timing: means over the timed steps; None if none was timed.
        samples: samples of this rank in a timed step; None if not known.
        tokens: tokens of this rank in a timed step; None if not known.
        context: how many ranks there are, and the device.
    """
    all_samples = over_ranks(amount=samples, ranks=context.dp_size)
    all_tokens = over_ranks(amount=tokens, ranks=context.dp_size)
    estimated = flops.forward + flops.backward_estimated
    totals: dict[str, float | None] = {
        "forward_flops_per_sec": flops.forward,
        "backward_flops_per_sec": flops.backward + flops.recompute,
        "backward_flops_per_sec_estimated": flops.backward_estimated,
        "forward_backward_flops_per_sec": flops.forward + flops.backward + flops.recompute,
        "forward_backward_flops_per_sec_estimated": estimated,
        "iter_flops_per_sec": flops.hardware,
        "iter_flops_per_sec_estimated": estimated,
    }
    per_step = {name: mean(total=total, steps=counted_steps) for name, total in totals.items()}
    per_step |= {
        "samples_per_sec": all_samples,
        "iter_samples_per_sec": all_samples,
        "tokens_per_sec": all_tokens,
        "tokens_per_sec_per_device": ratio(part=all_tokens, whole=context.world_size),
        "mfu": mean(total=seconds_at_peak(dtypes, "model"), steps=counted_steps),
        "hfu": mean(total=seconds_at_peak(dtypes, "hardware"), steps=counted_steps),
        "data_wait_ratio": None if timing is None else timing.data_wait_sec,
    }
    values: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for name, denominator in _TIMES.items():
        seconds: float | None = None if timing is None else getattr(timing, denominator)
        if (
            name in RATES_OF_TRAINING
            and not context.trains
            and not (flops.backward + flops.recompute + flops.optimizer)
        ):
            values[name], reasons[name] = None, f"a {context.run_word} has no backward and no optimizer"
            continue
        values[name] = per_second(amount=per_step[name], seconds=seconds)
        if name in ("mfu", "hfu") and (reason := impossible(name.upper(), values[name])):
            values[name], reasons[name] = None, reason
        elif values[name] is None:
            if timing is None:
                reasons[name] = _NO_TIME
            elif seconds is None:
                reasons[name] = _MIXED
            elif seconds == 0:
                reasons[name] = "its time is zero"
            else:
                reasons[name] = _missing(name, dtypes=dtypes, samples=samples, tokens=tokens, context=context)
    return Rates(**values), reasons


def seconds_at_peak(dtypes: tuple[DtypeFlops, ...], which: Literal["model", "hardware"]) -> float | None:
    """Seconds that these FLOPs of *dtypes* take at their peaks; None if a peak is not known."""
    return peak_seconds(
        flops={one.dtype: one.model if which == "model" else one.hardware for one in dtypes},
        peaks_flops_per_sec={one.dtype: one.peak_flops_per_sec for one in dtypes},
    )


def _missing(
    name: str,
    *,
    dtypes: tuple[DtypeFlops, ...],
    samples: float | None,
    tokens: float | None,
    context: RunContext,
) -> str:
    """Why the numerator of *name* is not known."""
    if name in ("mfu", "hfu"):
        unknown = [one.dtype for one in dtypes if one.peak_flops_per_sec is None and (one.model or name == "hfu")]
        if unknown:
            device = context.device_name or context.device_type
            return f"no dense peak is known for {', '.join(unknown)} on {device}; {GIVE_PEAK}"
    if name in ("samples_per_sec", "iter_samples_per_sec") and samples is None:
        return NO_SAMPLES
    if name in ("tokens_per_sec", "tokens_per_sec_per_device") and tokens is None:
        return NO_TOKENS
    if name == "data_wait_ratio":
        return _MIXED
    return "what was counted cannot be right"
