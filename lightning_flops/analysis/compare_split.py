"""The mathematics of a difference: what of the time between two runs is other work, and what is another rate.

The time of a piece of work is ``t = W s``: an amount of work ``W = FLOPs + R x bytes``, by the seconds *s* that one
unit of it takes. *R* is how many FLOPs the device does while it moves a byte. The logarithms of their changes add up,
and apportion the difference ``t_B - t_A``:

    work        L(t_A, t_B) ln(W_B / W_A)
    efficiency  L(t_A, t_B) ln(s_B / s_A)          L(x, y) = (y - x) / ln(y / x), the logarithmic mean; L(x, x) = x

J. K. Montgomery (1937) and Y. Vartia (Scand. J. Statist. 3, 1976), known as LMDI (B. W. Ang, Energy Policy 33, 2005).
What only one run has, or where only one counted any work, is work; where neither counted any, it is efficiency. No
work explains more than the time that it is in, all of ``t_B`` or all of ``t_A``: counts that would were not seen in one
of the runs. Work is rounded to whole nanoseconds, and efficiency is the rest, so sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lightning_flops.schema.comparison import Cause

FLOPS_PER_BYTE = 10.0  # where a device's own are not known: an A100's in float32, 19.5 TFLOP/s on 2.0 TB/s


class Work(NamedTuple):
    """Counts of a piece of work in one step; whole numbers where one step was counted."""

    flops: float = 0
    bytes: float = 0


def split(
    *, a_ns: int, b_ns: int, a: Work | None, b: Work | None, flops_per_byte: float = FLOPS_PER_BYTE
) -> dict[Cause, int]:
    """The difference ``b_ns - a_ns`` of one piece of work by cause; *a* or *b* is None in a run that has no such."""
    difference = b_ns - a_ns
    if a is None or b is None:
        return {"modules": difference}
    flops, moved = b.flops - a.flops, flops_per_byte * (b.bytes - a.bytes)
    if not flops and not moved:
        return {"efficiency": difference}
    units_a, units_b = (one.flops + flops_per_byte * one.bytes for one in (a, b))
    if not units_a or not units_b:
        flops_ns = round(difference * (flops / (flops + moved)))
        return {"flops": flops_ns, "bytes": difference - flops_ns}
    per_unit = _logarithmic_mean(a_ns, b_ns) / _logarithmic_mean(units_a, units_b)
    more = (flops + moved) * per_unit
    if more and not -a_ns <= more <= b_ns:
        per_unit *= (b_ns if more > 0 else -a_ns) / more
    flops_ns, bytes_ns = round(flops * per_unit), round(moved * per_unit)
    return {"flops": flops_ns, "bytes": bytes_ns, "efficiency": difference - flops_ns - bytes_ns}


def _logarithmic_mean(x: float, y: float) -> float:
    """``(y - x) / ln(y / x)`` of two numbers that are not below zero: between them; 0 if one of them is 0."""
    low, high = sorted((x, y))
    if low <= 0 or low == high:
        return max(0.0, low)
    return (high - low) / math.log1p((high - low) / low)


def apportioned(total_ns: int, weights: Sequence[int]) -> list[int]:
    """*total_ns* in proportion to *weights*, as whole nanoseconds that add up to it; to the last if none is above 0."""
    whole = sum(weights)
    if whole <= 0:
        return [0] * (len(weights) - 1) + [total_ns]
    pieces, before, running = [], 0, 0
    for weight in weights:
        running += weight
        until = (2 * total_ns * running + whole) // (2 * whole)
        pieces.append(until - before)
        before = until
    return pieces
