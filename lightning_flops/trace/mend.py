"""What profilers are known to write wrongly, mended: kernels that never seem to end, and occupancy of zero."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from lightning_flops.trace.columns import DeviceProperties, LaunchShape, Trace
from lightning_flops.trace.intervals import NS_PER_US
from lightning_flops.trace.names import Kind

_FEW, _LONGER = 3, 10
"""A kernel that runs over so many others of its stream, each of them so many times shorter, has a wrong end."""
_MUCH_SHARED_BYTES = 48 << 10
_LIMITS = {
    (7, 0): (96, 32), (7, 5): (64, 16), (8, 0): (164, 32), (8, 6): (100, 16), (8, 7): (164, 16), (8, 9): (100, 24),
    (9, 0): (228, 32), (10, 0): (228, 32), (10, 3): (228, 32), (12, 0): (100, 24), (12, 1): (100, 24),
}  # fmt: skip
"""By compute capability: KB of shared memory and blocks of one multiprocessor, from the CUDA programming guide."""


def mended(trace: Trace) -> Trace:
    """*trace* with what is known to be wrong put right, and notes that say so."""
    return _with_occupancy(_without_overlong(trace)) if trace.has_device else trace


def _without_overlong(trace: Trace) -> Trace:
    """A kernel that runs over its successors on the same stream ends where the next one begins."""
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


def _with_occupancy(trace: Trace) -> Trace:
    """Kineto writes 0 for kernels with much shared memory: what follows from their launch stands there, or NaN."""
    much = np.array([(one.shared_memory or 0) > _MUCH_SHARED_BYTES for one in trace.launch_shapes] + [False])
    rows = np.flatnonzero((trace.kind == Kind.KERNEL) & (trace.occupancy_percent == 0) & much[trace.launch_shape])
    if not len(rows):
        return trace

    @cache
    def of(shape: int, device: int) -> float:
        return _occupancy(trace.launch_shapes[shape], trace.described(device))

    occupancy = trace.occupancy_percent.copy()
    occupancy[rows] = [*map(of, trace.launch_shape[rows].tolist(), trace.device[rows].tolist())]
    known = int((~np.isnan(occupancy[rows])).sum())
    words = f"Occupancy written as 0 of kernels with much shared memory: worked out of {known}, left out of "
    return replace(trace, occupancy_percent=occupancy, notes=(*trace.notes, f"{words}{len(rows) - known}."))


def _occupancy(shape: LaunchShape, device: DeviceProperties | None) -> float:
    """Percent of a multiprocessor's warps that a kernel of this shape can fill; NaN where that is not known.

    Registers are given to a warp 256 at a time; a block takes 1 KB of shared memory for the system since compute
    capability 8. A grid with fewer blocks than would fit fills no more.
    """
    if device is None or device.compute_capability not in _LIMITS or shape.threads is None or not device.max_threads:
        return float("nan")
    kilobytes, most_blocks = _LIMITS[device.compute_capability]
    warps = max(1, -(-shape.threads // 32))
    most_warps = device.max_threads // 32
    limits = [most_blocks, most_warps // warps]
    if shape.registers:
        limits.append((device.registers or 65536) // (-(-shape.registers * 32 // 256) * 256) // warps)
    if shape.shared_memory:
        of_block = shape.shared_memory + (1024 if device.compute_capability >= (8, 0) else 0)
        limits.append((device.shared_memory or kilobytes * 1024) // of_block)
    blocks: float = min(limits)
    if shape.blocks is not None and device.sm_count:
        blocks = min(blocks, shape.blocks / device.sm_count)
    return 100.0 * blocks * warps / most_warps if blocks > 0 else float("nan")
