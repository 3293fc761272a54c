"""Part 4: times by module add up to what the device was busy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from lightning_flops.schema.trace import TraceReport

from . import nets
from .checks import Check, Here, Row, at_least, at_most, exactly, holds, reported, unjudged, within
from .nets import forget, profiler

_STEPS = nets.FIRST_STEP + 1 + nets.SETTLES + 2 + 2 + 1
LOST_FORWARD, LOST_BACKWARD = 0.02, 0.03
_BUSY_SHARE = 0.02
_at_most_share = partial(at_most, unit="%", scale=100)
_sum = partial(within, share=1e-3, unit="µs")


def _by_module(here: Here) -> Iterator[Row]:
    """Nothing of forward and backward is lost between modules, and they add up."""
    torch.manual_seed(0)
    one_step = {"wait": 0, "warmup": 1, "active": 1, "repeat": 1}  # medians over several steps do not add up
    callback = profiler(here, timing_steps=2, trace=True, trace_schedule=one_step)
    found = nets.gpt_fit(here, nets.size_for(here), _STEPS, callback).profile
    forget(here)
    if found.traced is None or found.traced.tables is None:
        raise RuntimeError(f"no step was traced: {found.notes}")
    tables = found.traced.tables
    modules = tables.modules
    if modules is None:
        raise RuntimeError(f"the trace has no times of modules: {tables.notes}")
    clock = "device" if here.on_gpu else "host"
    yield holds("the clock of the modules' times", modules.clock == clock, modules.clock)
    lost_forward, lost_backward = modules.unattributed_forward_us, modules.unattributed_backward_us
    yield from unjudged(
        here,
        _at_most_share("forward that no module has", lost_forward / modules.forward_us, LOST_FORWARD),
        _at_most_share("backward that no module has", lost_backward / modules.backward_us, LOST_BACKWARD),
    )
    forward = sum(row.own_forward_us for row in modules.rows) + lost_forward
    claim = "modules' own forwards, added up, beside the forward"
    yield _sum(claim, forward, modules.forward_us)
    backward = sum(row.own_backward_us for row in modules.rows) + lost_backward
    backward += modules.gradient_accumulation_us
    yield _sum("the same of the backward", backward, modules.backward_us)
    budget = found.budget
    if budget is None:
        raise RuntimeError("there is no step time breakdown")
    summed = sum(time_ns or 0 for time_ns in budget.rows_ns.values())
    yield exactly("rows of the step time breakdown, added up, in ns", summed, budget.wall_ns)
    for key, time_ns in budget.rows_ns.items():
        seen = "n/a" if time_ns is None else f"{time_ns / 1e6:.3f} ms, {time_ns / budget.wall_ns:.1%}"
        yield reported(f"step time breakdown: {key}", seen)
    if here.on_gpu:
        yield from _on_device(tables, modules.forward_us + modules.backward_us + modules.optimizer_us)


def _on_device(tables: TraceReport, phases_us: float) -> Iterator[Row]:
    mean, summary = tables.step_times.mean, tables.kernel_summary
    parts = (mean.kernel_us, mean.memcpy_us, mean.memset_us)
    busy_us = len(tables.step_times.steps) * sum(part or 0.0 for part in parts)
    claim = "forward, backward and optimizer beside all that kept the device busy"
    yield within(claim, phases_us, busy_us, share=_BUSY_SHARE, unit="µs")
    if summary is None or not tables.device_metrics:
        raise RuntimeError("the trace has no kernels")
    yield reported("kernels of the step", summary.calls)
    claim = "time in kernels on tensor cores, of all kernels"
    yield at_least(claim, summary.tensor_core_ratio, 0.3, unit="%", scale=100)
    (device, *_) = tables.device_metrics
    occupancy = device.occupancy_percent
    known = occupancy is not None and 0 < occupancy <= 100
    seen = "n/a" if occupancy is None else f"{occupancy:.1f}%"
    yield holds("estimated achieved occupancy is known, and a share", known, seen)
    yield reported("the device was busy with kernels", f"{device.utilization:.1%} of the step")


CHECKS = (Check("times by module", _by_module),)
