"""Figures over a trace's own clock, which a viewer draws above its slices: how far the device was used, and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_flops.trace.columns import Trace
from lightning_flops.trace.intervals import Ints, distinct, levels
from lightning_flops.trace.memory import allocated_after, by_device
from lightning_flops.trace.names import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterTrack:
    """A figure over the time of a trace, for viewers to draw; each value holds until the next one."""

    name: str
    """What it is of."""
    unit: str
    """``bytes``, ``FLOP/s`` or ``percent``."""
    times_ns: tuple[int, ...]
    """On the trace's clock, rising."""
    values: tuple[float, ...]
    """One for each time."""


def counter_tracks(trace: Trace) -> tuple[CounterTrack, ...]:
    """GPU utilization and estimated SM efficiency of each device, moment by moment, and memory; what there is of it."""
    return (*_use(trace), *_memory(trace))


def _use(trace: Trace) -> Iterator[CounterTrack]:
    kernels = trace.kind == Kind.KERNEL
    for device in distinct(trace.device[kernels]).tolist():
        rows = np.flatnonzero(kernels & (trace.device == device))
        blocks = trace.blocks_per_sm[rows]
        for name, weights in (("GPU utilization", np.ones(len(rows))), ("est. SM efficiency", blocks)):
            if not np.isnan(weights).any():
                moments, level = levels(trace.start_ns[rows], trace.end_ns[rows], weights)
                yield _track(f"{name}, device {device}", "percent", moments, 100 * level)


def _memory(trace: Trace) -> Iterator[CounterTrack]:
    if (memory := trace.memory) is None:
        return
    for device, rows in by_device(memory):
        where, times = "host" if device < 0 else f"device {device}", memory.time_ns[rows]
        (allocated, absolute), reserved = allocated_after(memory, rows), memory.total_reserved[rows]
        what = "memory allocated" if absolute else "memory allocated since the trace began"
        yield _track(f"{what}, {where}", "bytes", times, allocated)
        if (reserved >= 0).all() and reserved.any():  # an allocator of the host reserves nothing
            yield _track(f"memory reserved, {where}", "bytes", times, reserved)


def _track(name: str, unit: str, times: Ints, values: npt.NDArray[Any]) -> CounterTrack:
    """The track of these values, each named once: when it begins to hold."""
    last = np.append(times[1:] != times[:-1], True)  # of several at one moment
    times, values = times[last], values[last]
    new = np.append(True, values[1:] != values[:-1])
    return CounterTrack(name=name, unit=unit, times_ns=tuple(times[new].tolist()), values=tuple(values[new].tolist()))
