"""How much arithmetic there is to the bytes that are moved, and what the device could reach with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """One module or operator in the roofline model: forward, backward and recomputation together."""

    flops_per_byte: float | None
    """Arithmetic intensity: FLOPs / bytes that its operators read and write, each counted by itself. None where no
    bytes were seen."""
    achieved_flops_per_sec: float | None
    """FLOPs of the counted step / seconds of the traced step; None where the two differ, or without a trace."""
    attainable_flops_per_sec: float | None
    """The least of the peak of its dtypes and flops_per_byte x the memory's bandwidth; None where one of them is not
    known. What stays in a cache or is fused moves fewer bytes, so more than this can be achieved."""
