"""What profilers are known to write wrongly, mended: kernels that never seem to end, and occupancy of zero."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lightning_flops.trace.columns import DeviceProperties, LaunchShape, Trace
from lightning_flops.trace.intervals import NS_PER_US
from lightning_flops.trace.names import Kind

_FEW = 3
_LONGER = 10
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
    rows = np.flatnonzero(trace.kind == Kind.KERNEL)
    rows = rows[np.lexsort((trace.start_ns[rows], trace.stream[rows], trace.device[rows]))]
    if len(rows) <= _FEW:
        return trace
    start, end, length = trace.start_ns[rows], trace.end_ns[rows], trace.duration_ns[rows]
    wrong = np.ones(len(rows) - _FEW, dtype=bool)
    for ahead in range(1, _FEW + 1):
        other = slice(ahead, len(rows) - _FEW + ahead)
        same = (trace.stream[rows[other]] == trace.stream[rows[:-_FEW]]) & (
            trace.device[rows[other]] == trace.device[rows[:-_FEW]]
        )
        wrong &= same & (end[:-_FEW] >= end[other]) & (length[:-_FEW] > _LONGER * length[other])
        # One call launches all kernels of a graph, and these may well run beside one another.
        wrong &= trace.correlation[rows[other]] != trace.correlation[rows[:-_FEW]]
    found = np.flatnonzero(wrong)
    if not len(found):
        return trace
    duration_ns = trace.duration_ns.copy()
    duration_ns[rows[found]] = start[found + 1] - start[found]
    cut_ns = int((trace.duration_ns - duration_ns).sum())
    words = (
        f"Cut at the start of the next one: kernels that seem to run over their successors on the same stream: "
        f"{len(found)}, by {cut_ns / NS_PER_US:,.0f} us."
    )
    return replace(trace, duration_ns=duration_ns, notes=(*trace.notes, words))


def _with_occupancy(trace: Trace) -> Trace:
    """Kineto writes 0 for kernels with much shared memory: what follows from their launch stands there, or NaN."""
    much = np.array([(one.shared_memory or 0) > _MUCH_SHARED_BYTES for one in trace.launch_shapes] + [False])
    rows = np.flatnonzero((trace.kind == Kind.KERNEL) & (trace.occupancy_percent == 0) & much[trace.launch_shape])
    if not len(rows):
        return trace
    occupancy = trace.occupancy_percent.copy()
    found: dict[tuple[int, int], float] = {}
    for row, shape, device in zip(
        rows.tolist(), trace.launch_shape[rows].tolist(), trace.device[rows].tolist(), strict=True
    ):
        if (shape, device) not in found:
            found[shape, device] = _occupancy(trace.launch_shapes[shape], trace.described(device))
        occupancy[row] = found[shape, device]
    known = int((~np.isnan(occupancy[rows])).sum())
    words = f"Occupancy written as 0 of kernels with much shared memory: worked out of {known}, left out of "
    words += f"{len(rows) - known}."
    return replace(trace, occupancy_percent=occupancy, notes=(*trace.notes, words))


def _occupancy(shape: LaunchShape, device: DeviceProperties | None) -> float:
    """Percent of a multiprocessor's warps that a kernel of this shape can fill; NaN where that is not known.

    Registers are given to a warp 256 at a time; a block takes 1 KB of shared memory for the system since compute
    capability 8. A grid with fewer blocks than would fit fills no more.
    """
    if device is None or device.compute_capability not in _LIMITS or shape.block is None or not device.max_threads:
        return float("nan")
    kilobytes, most_blocks = _LIMITS[device.compute_capability]
    warps = -(-int(np.prod(shape.block)) // 32)
    most_warps = device.max_threads // 32
    limits = [most_blocks, most_warps // max(warps, 1)]
    if shape.registers:
        of_warp = -(-shape.registers * 32 // 256) * 256
        limits.append((device.registers or 65536) // of_warp // max(warps, 1))
    if shape.shared_memory:
        of_block = shape.shared_memory + (1024 if device.compute_capability >= (8, 0) else 0)
        limits.append((device.shared_memory or kilobytes * 1024) // of_block)
    blocks: float = min(limits)
    if shape.grid is not None and device.sm_count:
        blocks = min(blocks, int(np.prod(shape.grid)) / device.sm_count)
    return 100.0 * blocks * warps / most_warps if blocks > 0 else float("nan")
