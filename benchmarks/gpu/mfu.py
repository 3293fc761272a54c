"""Part 5: MFU by hand beside ours, what of its peak the device reaches, and its energy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lightning_flops.analysis.peak_flops import peak_flops_per_sec

from ..phase_times import Stopwatch
from .checks import Check, Here, Row, at_least, at_most, holds, not_here, reported, unjudged, within
from .nets import FIRST_STEP, SETTLES, Net, batches_of, fit, forget, gpt_on, next_token_loss, profiler, size_for

_GIVEN_PEAK = 1e12
"""A CPU's, which no table has."""
_EDGE = 8192


class _Ends(Net):
    """Stamps where its steps end."""

    watch: Stopwatch
    ends: list[Any]

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(self.watch.stamp())


def _mfu(here: Here) -> Iterator[Row]:
    """The formula's FLOPs ÷ events around steps that nobody times ÷ the peak, in the fit of which ours is."""
    size, watch, timed = size_for(here), Stopwatch(on_gpu=here.on_gpu), here.pick(50, 3)
    peak = peak_flops_per_sec(torch.cuda.get_device_name(here.device), "bfloat16") if here.on_gpu else _GIVEN_PEAK
    if peak is None:
        yield not_here("MFU by hand", "the table has no peak for this device")
        return
    torch.manual_seed(0)
    net = _Ends(gpt_on(here, size), next_token_loss)
    net.watch, net.ends = watch, []
    first_plain = FIRST_STEP + 1 + SETTLES + timed + 1
    callback = profiler(here, timing_steps=timed, peak_flops_per_sec=None if here.on_gpu else peak)
    done = fit(here, net, batches_of(size, here, first_plain + timed), callback, precision="bf16-mixed")
    plain_sec = watch.seconds(net.ends[first_plain - 1], net.ends[-1]) / (len(net.ends) - first_plain)
    by_hand, found = size.model_flops / plain_sec / peak, done.profile
    claim = "MFU of the GPT in bf16, ours beside by hand"
    yield from unjudged(here, within(claim, found.rates.mfu, by_hand, share=0.01, unit="%", scale=100))
    timing = found.timing
    yield reported("a step of the GPT", "n/a" if timing is None else f"{1e3 * timing.global_step_sec:.2f} ms")
    yield reported("HFU", "n/a" if found.rates.hfu is None else f"{found.rates.hfu:.2%}")
    if here.on_gpu:
        yield from _energy(here, found.energy)
    forget(here)


def _energy(here: Here, energy: Any) -> Iterator[Row]:
    """By NVML: the mean power is below the limit, and the clock below the highest."""
    if energy is None:
        yield not_here("energy", "NVML, or nvidia-ml-py, is not there")
        return
    if energy.watts is None:
        yield not_here("energy", energy.unavailable.get("watts", "not known"))
    else:
        yield reported("energy of a step", f"{energy.joules_per_step:.1f} J at {energy.watts:.0f} W")
        yield reported("FLOPs per joule", f"{energy.flops_per_joule:.4g}")
        yield at_most("mean power beside the limit that is set", energy.watts, 1.05 * _power_limit(here), unit="W")
    clocks = f"{energy.clock_mhz} of at most {energy.highest_clock_mhz} MHz, {energy.clock_readings} readings"
    yield reported("clock", clocks)
    limited = f"{energy.power_limited_share}, {energy.heat_limited_share} of the time"
    yield reported("held down by power, by heat", limited)
    yield reported("reasons for lower clocks", dict(energy.reasons))


def _power_limit(here: Here) -> float:
    import pynvml

    pynvml.nvmlInit()
    try:
        uuid = str(torch.cuda.get_device_properties(here.device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        return float(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)) / 1e3  # in milliwatts
    finally:
        pynvml.nvmlShutdown()


def _product(here: Here) -> Iterator[Row]:
    """A matrix product of 8192³ in bf16: no more than the peak, and not far below it."""
    name = torch.cuda.get_device_name(here.device)
    peak = peak_flops_per_sec(name, "bfloat16")
    yield holds("the device's name is in the table", peak is not None, name)
    if peak is None:
        return
    watch, rounds = Stopwatch(on_gpu=True), 20
    a, b = (torch.randn(_EDGE, _EDGE, device=here.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    for _ in range(5):
        torch.mm(a, b, out=out)
    begin = watch.stamp()
    for _ in range(rounds):
        torch.mm(a, b, out=out)
    end = watch.stamp()
    here.settle()
    reached = rounds * 2 * _EDGE**3 / watch.seconds(begin, end) / peak
    yield at_most("an 8192³ bf16 product, of the table's peak", reached, 1.0, unit="%", scale=100)
    yield at_least("the same: the peak is this device's", reached, 0.5, unit="%", scale=100)


CHECKS = (Check("matrix product", _product, "the table has no CPU"), Check("MFU", _mfu))
