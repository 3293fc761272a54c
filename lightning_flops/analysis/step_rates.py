"""Every ratio of a profile, and the reason for each one that is not known."""

from __future__ import annotations

from lightning_flops.analysis.rates import impossible, mean, per_second
from lightning_flops.records import RunContext
from lightning_flops.schema.step import Rates, StepFlops, TimingProfile

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
    "iter_flops_per_sec",
)
"""Rates that are of a backward or an optimizer, too; in a run without either they would only repeat the forward's."""


def build_rates(
    *,
    flops: StepFlops,
    counted_steps: int,
    peak_sec: tuple[float | None, float | None],
    no_peak_of: tuple[str, ...],
    timing: TimingProfile | None,
    samples: float | None,
    tokens: float | None,
    context: RunContext,
) -> tuple[Rates, dict[str, str]]:
    """Every ratio, and the reason for each one that is None.

    Args:
        flops: of all counted steps together.
        counted_steps: their number.
        peak_sec: seconds that the step's model FLOPs, and its hardware FLOPs, take at the device's peaks.
        no_peak_of: dtypes with FLOPs whose peak is not known.
        timing: means over the timed steps; None if none was timed.
        samples: samples of this rank in a timed step; None if not known.
        tokens: tokens of this rank in a timed step; None if not known.
        context: how many ranks there are, and the device.
    """
    all_samples, all_tokens = (None if amount is None else amount * context.dp_size for amount in (samples, tokens))
    no_peak = f"no dense peak is known for {', '.join(no_peak_of)} on {context.device_name or context.device_type}; "
    no_peak += GIVE_PEAK
    unusual, step = "what was counted cannot be right", "global_step_sec"
    # What each rate is of, over which time, and why that may not be known.
    ratios: dict[str, tuple[float | None, str, str]] = {
        "forward_flops_per_sec": (flops.forward, "forward_sec", unusual),
        "backward_flops_per_sec": (flops.backward + flops.recompute, "backward_sec", unusual),
        "backward_flops_per_sec_estimated": (flops.backward_estimated, "backward_sec", unusual),
        "forward_backward_flops_per_sec": (
            flops.forward + flops.backward + flops.recompute,
            "forward_backward_sec",
            unusual,
        ),
        "iter_flops_per_sec": (flops.hardware, "iter_sec", unusual),
        "samples_per_sec": (all_samples, step, NO_SAMPLES),
        "iter_samples_per_sec": (all_samples, "iter_sec", NO_SAMPLES),
        "tokens_per_sec": (all_tokens, step, NO_TOKENS),
        "mfu": (peak_sec[0], step, no_peak if no_peak_of else unusual),
        "hfu": (peak_sec[1], step, no_peak if no_peak_of else unusual),
        "data_wait_ratio": (None if timing is None else timing.data_wait_sec, step, _MIXED),
    }
    values: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    forward_alone = not context.trains and not (flops.backward + flops.recompute + flops.optimizer)
    for name, (amount, time, why) in ratios.items():
        if name.endswith("flops_per_sec") or name.endswith("_estimated"):
            amount = mean(total=amount, steps=counted_steps)
        seconds: float | None = None if timing is None else getattr(timing, time)
        values[name] = per_second(amount=amount, seconds=seconds)
        if name in RATES_OF_TRAINING and forward_alone:
            values[name], reasons[name] = None, f"a {context.run_word} has no backward and no optimizer"
        elif name in ("mfu", "hfu") and (reason := impossible(name.upper(), values[name])):
            values[name], reasons[name] = None, reason
        elif values[name] is None:
            no_time = _NO_TIME if timing is None else _MIXED if seconds is None else "its time is zero"
            reasons[name] = why if seconds else no_time
    return Rates(**values), reasons
