"""The scalars a run's loggers get; every tag is written here, and nowhere else."""

from __future__ import annotations

import math

from lightning_flops.report.document import LARGEST, at
from lightning_flops.schema.profile import Profile

MONITOR_PREFIX = "flops_monitor"

# Tags that a loop without training does not have; its rates of a backward are n/a.
_OF_TRAINING = (
    *("bwd_flops", "bwd_flops_estimated", "recompute_flops", "iter_flops"),
    *("bwd_latency_sec", "step_latency_sec", "iter_latency_sec"),
)

# Where a profile has what is logged under each tag.
PATHS = {
    "fwd_flops": "flops.forward",
    "bwd_flops": "flops.backward",
    "bwd_flops_estimated": "flops.backward_estimated",
    "recompute_flops": "flops.recompute",
    "iter_flops": "flops.hardware",
    "fwd_flops_per_sec": "rates.forward_flops_per_sec",
    "bwd_flops_per_sec": "rates.backward_flops_per_sec",
    "bwd_flops_per_sec_estimated": "rates.backward_flops_per_sec_estimated",
    "fwd_bwd_flops_per_sec": "rates.forward_backward_flops_per_sec",
    "iter_flops_per_sec": "rates.iter_flops_per_sec",
    "fwd_latency_sec": "timing.forward_sec",
    "bwd_latency_sec": "timing.backward_sec",
    "step_latency_sec": "timing.optimizer_sec",
    "iter_latency_sec": "timing.iter_sec",
    "data_wait_sec": "timing.data_wait_sec",
    "global_step_sec": "timing.global_step_sec",
    "samples_per_sec": "job_rates.samples_per_sec",
    "iter_samples_per_sec": "job_rates.iter_samples_per_sec",
    "tokens_per_sec": "job_rates.tokens_per_sec",
    "mfu": "job_rates.mfu",
    "hfu": "job_rates.hfu",
    "heat_limited_ratio": "timing.heat_limited_share",
    "params": "job_params",
}


def profile_scalars(
    profile: Profile, *, prefix: str = "flops_profiler", monitor_prefix: str = MONITOR_PREFIX
) -> dict[str, float]:
    """One value for each tag, of one global step and one device unless the tag says more; what is n/a is left out.

    Where other ranks answered, mfu, hfu, samples, tokens and params are those of the job. Units: FLOPs, FLOP/s,
    seconds, samples or tokens per second, fractions of one (mfu, hfu, …_ratio), parameters.
    """
    values = {tag: at(path)(profile) for tag, path in PATHS.items()}
    # This tag exists only when FLOPs, and so MFU, HFU and FLOP/s, are lower bounds.
    values["heavy_operators_uncounted"] = sum(one.may_have_flops for one in profile.uncounted.values()) or None
    without = () if profile.context.trains else _OF_TRAINING
    scalars = {f"{prefix}/{tag}": value for tag, value in values.items() if tag not in without}
    for name, phase in profile.phases.items():
        of_phase = {"mfu": phase.mfu, "ratio": phase.ratio, "tokens_per_sec": phase.tokens_per_sec}
        scalars |= {f"{monitor_prefix}/{name}_{tag}": value for tag, value in of_phase.items()}
    return {tag: float(value) for tag, value in scalars.items() if value is not None and value < LARGEST}


def monitor_scalars(
    *,
    seconds: float,
    data_wait_sec: float | None,
    batches: int,
    samples: int | None,
    dp_size: int,
    tokens: int | None,
    padding_ratio: float | None,
    model_flops: float | None,
    model_flops_peak_sec: float | None,
    useful_flops_peak_sec: float | None = None,
    estimated_ratio: float | None = None,
    prefix: str = MONITOR_PREFIX,
) -> dict[str, float]:
    """What went by in so many *seconds* since the last reading, by the tags below *prefix*; what is n/a is left out.

    Batches, samples, tokens without padding and FLOPs are of this rank; samples and tokens of *dp_size* ranks, which
    see different data, count together. ``…_peak_sec`` are seconds that FLOPs take at the device's peaks.
    """
    if not 0 < seconds < math.inf:
        return {}
    amounts = {
        "samples_per_sec": None if samples is None else samples * dp_size,
        "batches_per_sec": batches,
        "data_wait_ratio": data_wait_sec,
        "tokens_per_sec": None if tokens is None else tokens * dp_size,
        "mfu": model_flops_peak_sec,
        "useful_mfu": useful_flops_peak_sec,
        "model_flops_per_sec": model_flops,
    }
    values = {tag: amount / seconds for tag, amount in amounts.items() if amount is not None and 0 <= amount < LARGEST}
    highest = {"mfu": 1.0, "useful_mfu": 1.0}  # shares of the peak: more is impossible
    values = {tag: value for tag, value in values.items() if value <= highest.get(tag, LARGEST)}
    shares = {"padding_ratio": padding_ratio, "estimated_ratio": estimated_ratio}
    values |= {tag: float(share) for tag, share in shares.items() if share is not None}
    return {f"{prefix}/{tag}": value for tag, value in values.items()}
