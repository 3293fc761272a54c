"""Figures over a trace's own clock, which a viewer draws above its slices: how far the device was used, and memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_flops.trace.columns import Trace
from lightning_flops.trace.intervals import Floats, Ints
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
    """All tracks of *trace*: what it has no figures for is left out."""
    return (*_use(trace), *_memory(trace))


def _use(trace: Trace) -> list[CounterTrack]:
    """GPU utilization and estimated SM efficiency of each device, as in the table of devices, moment by moment."""
    found = []
    kernels = trace.kind == Kind.KERNEL
    for device in np.unique(trace.device[kernels]).tolist():
        rows = np.flatnonzero(kernels & (trace.device == device))
        ones = np.ones(len(rows))
        for name, weights in (("GPU utilization", ones), ("est. SM efficiency", trace.blocks_per_sm[rows])):
            if not np.isnan(weights).any():
                times, levels = _running(trace.start_ns[rows], trace.end_ns[rows], weights)
                found.append(_track(f"{name}, device {device}", "percent", times, 100 * np.clip(levels, 0, 1)))
    return found


def _running(starts: Ints, ends: Ints, weights: Floats) -> tuple[Ints, Floats]:
    """The borders of all events, and from each on the sum of the weights of those that then run."""
    borders, at = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    change = np.zeros(len(borders))
    np.add.at(change, at.reshape(-1), np.concatenate([weights, -weights]))
    levels: Floats = np.round(np.cumsum(change), 9).astype(np.float64)
    return borders, levels  # sums of floats leave a rest where nothing runs


def _memory(trace: Trace) -> list[CounterTrack]:
    memory, found = trace.memory, []
    if memory is None:
        return []
    for device in np.unique(memory.device).tolist():
        rows = np.flatnonzero(memory.device == device)
        rows = rows[np.argsort(memory.time_ns[rows], kind="stable")]
        where, times = "host" if device < 0 else f"device {device}", memory.time_ns[rows]
        allocated, reserved = memory.total_allocated[rows], memory.total_reserved[rows]
        if (allocated >= 0).all():
            found.append(_track(f"memory allocated, {where}", "bytes", times, allocated))
        else:
            name = f"memory allocated since the trace began, {where}"
            found.append(_track(name, "bytes", times, np.cumsum(memory.bytes[rows])))
        if (reserved >= 0).all() and reserved.any():  # an allocator of the host reserves nothing
            found.append(_track(f"memory reserved, {where}", "bytes", times, reserved))
    return found


def _track(name: str, unit: str, times: Ints, values: Ints | Floats) -> CounterTrack:
    """The track of these values, each named once: when it begins to hold."""
    last = np.append(times[1:] != times[:-1], True)  # of several at one moment
    times, values = times[last], values[last]
    new = np.append(True, values[1:] != values[:-1])
    return CounterTrack(name=name, unit=unit, times_ns=tuple(times[new].tolist()), values=tuple(values[new].tolist()))
