"""What profilers are known to write wrongly, mended: kernels that never seem to end, and occupancy of zero."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import numpy as np

from lightning_flops.trace.columns import DeviceProperties, Trace
from lightning_flops.trace.intervals import NS_PER_US, Floats, Ints
from lightning_flops.trace.names import Kind
from lightning_flops.trace.values import converted

_FEW, _LONGER = 3, 10
"""A kernel that runs over so many others of its stream, each of them so many times shorter, has a wrong end."""
MUCH_SHARED_BYTES = 48 << 10
"""Kineto writes an occupancy of 0 for kernels with more shared memory."""
_REGISTERS = 65536
"""Of a multiprocessor since compute capability 5."""
Launched = tuple[bytes, bytes, Any, int]
"""Grid, block, registers of a thread and shared memory of a block, as the file has them."""


def without_overlong(trace: Trace) -> Trace:
    """*trace* with a kernel that runs over its successors on the same stream ended where the next one begins."""
    rows = trace.of(Kind.KERNEL)
    rows = rows[np.lexsort((trace.start_ns[rows], trace.stream[rows], trace.device[rows]))]
    first = rows[: max(0, len(rows) - _FEW)]
    wrong = np.ones(len(first), dtype=bool)
    for ahead in range(1, _FEW + 1):
        other = rows[ahead : ahead + len(first)]
        wrong &= (trace.stream[other] == trace.stream[first]) & (trace.device[other] == trace.device[first])
        wrong &= trace.end_ns[first] >= trace.end_ns[other]
        wrong &= trace.duration_ns[first] > _LONGER * trace.duration_ns[other]
        # One call launches all kernels of a graph, and these may well run beside one another.
        wrong &= trace.correlation[other] != trace.correlation[first]
    found = np.flatnonzero(wrong)
    if not len(found):
        return trace
    duration_ns = trace.duration_ns.copy()
    duration_ns[rows[found]] = trace.start_ns[rows[found + 1]] - trace.start_ns[rows[found]]
    cut_us = int((trace.duration_ns - duration_ns).sum()) / NS_PER_US
    words = "Cut at the start of the next one: kernels that seem to run over their successors on the same stream: "
    return replace(trace, duration_ns=duration_ns, notes=(*trace.notes, f"{words}{len(found)}, by {cut_us:,.0f} us."))


def occupancy_of(launched: Iterable[Launched], devices: Ints, described: Sequence[DeviceProperties]) -> Floats:
    """Percent of a multiprocessor's warps that each of some kernels can fill, on the device of this number."""
    by_index = {one.index: one for one in described}

    @cache
    def of(shape: Launched, device: int) -> float:
        grid, block = (converted(msgspec.json.decode(text or b"0"), list[int]) for text in shape[:2])
        threads, blocks = math.prod(block or [0]), math.prod(grid or [0])
        return _occupancy(threads, blocks, *shape[2:], by_index.get(device))

    return np.array([*map(of, launched, devices.tolist())])


def _occupancy(threads: int, blocks: int, registers: Any, shared_bytes: int, device: DeviceProperties | None) -> float:
    """NaN where it is not known. Registers are given to a warp 256 at a time."""
    if device is None or threads <= 0 or not device.max_threads or not device.sm_count:
        return math.nan
    warps, most_warps = -(-threads // 32), device.max_threads // 32
    limits = [most_warps // warps]
    if type(registers) is int and registers > 0:
        limits.append((device.registers or _REGISTERS) // (-(-registers * 32 // 256) * 256) // warps)
    if device.shared_memory:
        limits.append(device.shared_memory // shared_bytes)
    fitting = min(max(1, min(limits)), blocks / device.sm_count if blocks > 0 else math.inf)
    return 100.0 * min(1.0, fitting * warps / most_warps)
