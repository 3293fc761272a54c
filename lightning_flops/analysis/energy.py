"""Energy of a step, and what held the clock of its GPU down."""

from __future__ import annotations

import math

from lightning_flops.analysis.rates import per_second, ratio
from lightning_flops.records import GpuRecord
from lightning_flops.schema.energy import Energy
from lightning_flops.schema.step import TimingProfile

_OUTSIDE_SHARE = 0.05
"""If validation, checkpoints and the like take this share of the time or more, the mean power is not that of steps."""


def build_energy(
    gpu: GpuRecord | None,
    *,
    timing: TimingProfile | None,
    hardware_flops: int,
    samples: float | None,
    tokens: float | None,
) -> Energy | None:
    """The energy of a step, from what the GPU's counters measured in all timed ones.

    The host runs ahead of the GPU, by about the same time at the first reading and at the last. So the readings say
    the mean power of these steps, and a step's energy is this power times its seconds.

    Args:
        gpu: what was read; None if nothing was.
        timing: means over the timed steps; None if none was timed.
        hardware_flops: of one step of this rank.
        samples: of one step of this rank; None if not known.
        tokens: in them.

    Returns:
        None if nothing was read.
    """
    if gpu is None:
        return None
    watts = per_second(amount=gpu.joules, seconds=gpu.seconds)
    missing = gpu.no_joules_because
    outside = 0.0 if timing is None else ratio(part=math.fsum(timing.excluded_sec.values()), whole=gpu.seconds) or 0.0
    per_step = None if timing is None or watts is None else watts * timing.global_step_sec
    if per_step is not None and outside > _OUTSIDE_SHARE:
        per_step = None
        missing = f"{', '.join(timing.excluded_sec) if timing else ''} took part of the time in which it was measured"
    figures = {
        "joules": gpu.joules,
        "watts": watts,
        "joules_per_step": per_step,
        "flops_per_joule": ratio(part=hardware_flops, whole=per_step),
        "joules_per_sample": ratio(part=per_step, whole=samples),
        "joules_per_token": ratio(part=per_step, whole=tokens),
    }
    reasons = {
        "joules_per_sample": "" if per_step is None else "the number of samples is not known",
        "joules_per_token": "" if per_step is None else "the number of tokens is not known",
    }
    unavailable = {
        name: why
        for name, value in figures.items()
        if value is None and (why := reasons.get(name) or missing or "no step was timed")
    }
    return Energy(
        measured_sec=gpu.seconds,
        **figures,
        clock_mhz=ratio(part=sum(gpu.clock_mhz), whole=len(gpu.clock_mhz)),
        clock_readings=len(gpu.clock_mhz),
        highest_clock_mhz=gpu.highest_clock_mhz,
        power_limited_share=_share(gpu.power_limited_sec, gpu.seconds),
        heat_limited_share=_share(gpu.heat_limited_sec, gpu.seconds),
        unavailable=unavailable,
    )


def _share(limited_sec: float | None, seconds: float) -> float | None:
    """At most 1: the driver's counter and the host's clock are not read at the same moment."""
    share = ratio(part=limited_sec, whole=seconds)
    return None if share is None else min(1.0, share)
