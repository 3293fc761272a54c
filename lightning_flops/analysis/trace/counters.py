"""Figures over a trace's own clock, which a viewer draws above its slices: memory, FLOP/s, share of the peak."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace.columns import MemoryEvents, Trace
from lightning_flops.analysis.trace.flops import CountedCalls, Formulas, count_trace
from lightning_flops.analysis.trace.intervals import Floats, Ints
from lightning_flops.analysis.trace.parts import pieces_of_steps
from lightning_flops.records import CounterTrack, OperatorCell

_NS_PER_SEC = 1e9
_PART_OF_PHASE = {"forward": "forward", "backward": "backward", "recompute": "backward", "optimizer": "optimizer"}

FlopsByPart = Mapping[str, Mapping[str, float]]
"""What the kernels execute in each part of one step, by dtype."""


@dataclass(frozen=True, slots=True, eq=False)
class _Slices:
    """Stretches of time in which FLOPs are spent, each evenly; they may overlap."""

    starts: Ints
    ends: Ints
    flops_per_sec: Floats
    share: Floats
    """Of the peak of one device; NaN where that is not known."""


def counter_tracks(
    trace: Trace, *, parts: FlopsByPart, formulas: Formulas | None, peaks: Mapping[str, float]
) -> tuple[CounterTrack, ...]:
    """All tracks of *trace*: what it has no figures for is left out.

    ``by part``: the counted FLOPs of a part of the step over the time of that part, as in the report's rates.
    ``by operator``: the FLOPs of each call, worked out from its shapes, over the time of its kernels; without a device
    over its own. At each moment the rates of all that runs are added up, so FLOP/s times time adds up to the FLOPs.

    Args:
        trace: whose clock the tracks have.
        parts: the FLOPs of one of its steps; empty if they are not known.
        formulas: what a recorded call spent; None where the work of the device is not in the trace.
        peaks: dense peak of one device in FLOP/s by dtype. Shares of the peak need that of every dtype in the slices.
    """
    found = _memory(trace)
    found += _rates("by part of the step", _slices_of_parts(trace, parts, peaks))
    if formulas is not None and (trace.inputs >= 0).any() and len(trace.links.operators):
        found += _rates("by operator", _slices_of_calls(trace, formulas, peaks))
    return tuple(found)


def flops_by_part(cells: Iterable[OperatorCell], *, steps: int) -> FlopsByPart:
    """What was counted over so many steps, for one of them; recomputation is in the backward."""
    found: dict[str, dict[str, float]] = {}
    for cell in cells:
        if executed := cell.flops - cell.causal_skipped:
            by_dtype = found.setdefault(_PART_OF_PHASE[cell.phase], {})
            by_dtype[cell.dtype] = by_dtype.get(cell.dtype, 0) + executed
    return {part: {dtype: flops / steps for dtype, flops in sums.items()} for part, sums in found.items()}


def _memory(trace: Trace) -> list[CounterTrack]:
    memory = trace.memory
    if memory is None:
        return []
    on_host = memory.device_type == 0
    device = np.where(on_host, -1, memory.device)
    found = []
    for index in np.unique(device).tolist():
        rows = np.flatnonzero(device == index)
        found += _memory_of(memory, rows[np.argsort(memory.time_ns[rows], kind="stable")], index)
    return found


def _memory_of(memory: MemoryEvents, rows: Ints, device: int) -> list[CounterTrack]:
    where = "host" if device < 0 else f"device {device}"
    times, allocated, reserved = memory.time_ns[rows], memory.total_allocated[rows], memory.total_reserved[rows]
    if (allocated >= 0).all():
        found = [_track(f"memory allocated, {where}", "bytes", times, allocated)]
    else:
        since = np.cumsum(memory.bytes[rows])
        found = [_track(f"memory allocated since the trace began, {where}", "bytes", times, since)]
    if (reserved >= 0).all() and reserved.any():  # an allocator of the host reserves nothing
        found.append(_track(f"memory reserved, {where}", "bytes", times, reserved))
    return found


def _slices_of_parts(trace: Trace, parts: FlopsByPart, peaks: Mapping[str, float]) -> _Slices:
    pieces = pieces_of_steps(trace)
    step = np.searchsorted(trace.steps.start_ns, pieces.starts, side="right") - 1
    lengths: dict[tuple[int, str], int] = {}
    for index, name, length in zip(step.tolist(), pieces.names, (pieces.ends - pieces.starts).tolist(), strict=True):
        lengths[index, name] = lengths.get((index, name), 0) + length
    rows, rates, shares = [], [], []
    devices = _devices(trace)
    for row, (index, name) in enumerate(zip(step.tolist(), pieces.names, strict=True)):
        seconds = lengths[index, name] / _NS_PER_SEC
        if not (flops := parts.get(name)) or not seconds:
            continue
        rows.append(row)
        rates.append(sum(flops.values()) / seconds)
        shares.append(sum(amount / peaks.get(dtype, np.nan) for dtype, amount in flops.items()) / seconds / devices)
    return _Slices(pieces.starts[rows], pieces.ends[rows], np.array(rates, float), np.array(shares, float))


def _slices_of_calls(trace: Trace, formulas: Formulas, peaks: Mapping[str, float]) -> _Slices:
    counted = count_trace(trace, formulas)
    calls = CountedCalls(trace, counted)
    if trace.has_device:
        rows = trace.device_rows
        launchers = trace.links.operator_of_launch[rows]
        owners = np.where(launchers >= 0, counted.owner[np.maximum(launchers, 0)], -1)
    else:
        rows = owners = calls.rows
    place = np.full(len(trace) + 1, -1, dtype=np.int64)
    place[calls.rows] = np.arange(len(calls.rows))
    call = place[owners]
    spends = (call >= 0) & (trace.duration_ns[rows] > 0)
    rows, call = rows[spends], call[spends]
    spent_ns = np.zeros(len(calls.rows), dtype=np.int64)
    np.add.at(spent_ns, call, trace.duration_ns[rows])
    rates = calls.executed[call] * _NS_PER_SEC / spent_ns[call]
    peak = np.array([peaks.get(dtype, np.nan) for dtype in calls.dtypes])[calls.dtype[call]]
    return _Slices(trace.start_ns[rows], trace.end_ns[rows], rates, rates / peak / _devices(trace))


def _devices(trace: Trace) -> int:
    return max(1, len(np.unique(trace.device[trace.on_device])))


def _rates(how: str, slices: _Slices) -> list[CounterTrack]:
    if not len(slices.starts):
        return []
    found = [_track(f"FLOP/s {how}", "FLOP/s", *_summed(slices.starts, slices.ends, slices.flops_per_sec))]
    if not np.isnan(slices.share).any():
        found.append(
            _track(f"share of peak {how}", "percent", *_summed(slices.starts, slices.ends, 100 * slices.share))
        )
    return found


def _summed(starts: Ints, ends: Ints, values: Floats) -> tuple[Ints, Floats]:
    """The borders of all slices, and from each on the sum of the values of the slices that then run."""
    borders, at = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    at = at.reshape(-1)
    change, running = np.zeros(len(borders)), np.zeros(len(borders), dtype=np.int64)
    np.add.at(change, at, np.concatenate([values, -values]))
    np.add.at(running, at, np.repeat([1, -1], len(starts)))
    # Sums of floats leave a rest; where nothing runs there is none.
    return borders, np.where(np.cumsum(running) > 0, np.cumsum(change), 0.0)


def _track(name: str, unit: str, times: Ints, values: npt.NDArray[np.int64] | Floats) -> CounterTrack:
    """The track of these values, each named once: when it begins to hold."""
    last = np.append(times[1:] != times[:-1], True)  # of several at one moment
    times, values = times[last], values[last]
    new = np.append(True, values[1:] != values[:-1])
    return CounterTrack(name=name, unit=unit, times_ns=tuple(times[new].tolist()), values=tuple(values[new].tolist()))
