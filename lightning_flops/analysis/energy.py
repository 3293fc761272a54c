"""Energy of a step, and what held the clock of its GPU down."""

from __future__ import annotations

import math

from lightning_flops.analysis.rates import per_second, ratio
from lightning_flops.records import GpuRecord
from lightning_flops.schema.step import Energy, TimingProfile

_OUTSIDE_SHARE = 0.05
"""If validation, checkpoints and the like take this share of the time or more, the mean power is not that of steps."""


def build_energy(gpu: GpuRecord | None, timing: TimingProfile | None) -> Energy | None:
    """The energy of a step, from what the GPU's counters measured in all timed ones.

    The host runs ahead of the GPU, by about the same time at the first reading and at the last. So the readings say
    the mean power of these steps, and a step's energy is this power times its seconds.

    Args:
        gpu: what was read; None if nothing was.
        timing: means over the timed steps; None if none was timed.

    Returns:
        None if nothing was read.
    """
    if gpu is None:
        return None
    watts = per_second(amount=gpu.joules, seconds=gpu.seconds)
    per_step = None if timing is None or watts is None else watts * timing.global_step_sec
    missing = "" if per_step is not None else gpu.no_joules_because or "no step was timed"
    outside = {} if timing is None else timing.excluded_sec
    if per_step is not None and math.fsum(outside.values()) > _OUTSIDE_SHARE * gpu.seconds:
        per_step, missing = None, f"{', '.join(outside)} took part of the time in which it was measured"
    return Energy(
        measured_sec=gpu.seconds,
        watts=watts,
        joules_per_step=per_step,
        no_joules_because=missing,
        clock_mhz=ratio(part=sum(gpu.clock_mhz), whole=len(gpu.clock_mhz)),
        highest_clock_mhz=gpu.highest_clock_mhz,
        power_limited_share=_share(gpu.power_limited_sec, gpu.seconds),
        heat_limited_share=_share(gpu.heat_limited_sec, gpu.seconds),
    )


def _share(limited_sec: float | None, seconds: float) -> float | None:
    """At most 1: the driver's counter and the host's clock are not read at the same moment."""
    share = ratio(part=limited_sec, whole=seconds)
    return None if share is None else min(1.0, share)
