"""The mathematics of a difference: what of the time between two runs is other work, and what is another rate.

**Two factors.** The time of a piece of work is ``t = W s``: an amount of work *W*, by the seconds *s* that one unit of
it takes. Between run A and run B both can change, and the logarithms of their changes add up:
``ln(t_B / t_A) = ln(W_B / W_A) + ln(s_B / s_A)``. The difference is shared out between the two in this proportion:

    work        L(t_A, t_B) ln(W_B / W_A)
    efficiency  L(t_A, t_B) ln(s_B / s_A)          L(x, y) = (y - x) / ln(y / x), the logarithmic mean; L(x, x) = x

This is the split of J. K. Montgomery ("The Mathematical Problem of the Price Index", 1937) and Y. Vartia ("Ideal
Log-Change Index Numbers", Scand. J. Statist. 3, 1976), known as LMDI where changes in the use of energy are explained
(B. W. Ang, "The LMDI approach to decomposition analysis: a practical guide", Energy Policy 33, 2005). The two add up to
``t_B - t_A`` identically, with no rest. Neither run is preferred: with A and B swapped both change their sign. Where
the rate stays, all is work; where the work stays, all is efficiency. That a wide layer is quicker by the FLOP than a
narrow one does not blow up its work, as with the arithmetic mean of both rates.

``L`` grows with its arguments as they grow together, so ``work = u t_A + v t_B`` where *u* and *v* are its derivatives
by the two times. Noise of the times is carried over by these.

**One measure of work.** FLOPs and bytes are both work. Operators run one after another, some bound by arithmetic and
some by memory, so their times add up, and ``W = FLOPs + flops_per_byte x bytes`` weighs a byte by the FLOPs that take
as long as moving it: the ridge point of the roofline (S. Williams, A. Waterman and D. Patterson, "Roofline", Comm. ACM
52, 2009). W is linear, and ``ln(W_B / W_A) = (W_B - W_A) / L(W_A, W_B)``: so the work part has a part of the FLOPs and
a part of the bytes, in proportion to what each adds to W, and these add up, too. A module that computes only products,
or none, is hardly touched by the weight: it matters only where both kinds change differently.

**Where a factor is missing.** What only one run has is work, all of it. If only one of the runs counted any work, the
difference is work, all of it. If neither counted any, the work did not change as far as anybody knows: efficiency.

**Whole nanoseconds.** All times are integers. A mean time is cut into the pieces that a traced step shows by rounding
the running sum, so that the pieces add up to it; of each difference the work is rounded, and efficiency is the rest.
Sums over modules and phases are therefore exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_flops.schema.comparison import Causes

FLOPS_PER_BYTE = 10
"""FLOPs that take as long as moving a byte, where nobody knows better.

A ridge point of today's processors in float32: an A100 does 19.5 TFLOP/s on 2.0 TB/s, a desktop's CPU 0.5 on 0.05.
"""


@dataclass(frozen=True, slots=True)
class Work:
    """What was counted of a piece of work in one step; whole numbers where one step was counted."""

    flops: float = 0
    bytes: float = 0

    def units(self, flops_per_byte: int) -> float:
        """FLOPs and bytes as one amount."""
        return self.flops + flops_per_byte * self.bytes

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def __sub__(self, other: Work) -> Work:
        """What is left; never below zero."""
        return Work(max(0, self.flops - other.flops), max(0, self.bytes - other.bytes))


NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Split:
    """A difference by cause, and how its work follows from the times: ``work = u t_A + v t_B`` around these times."""

    flops_ns: int
    bytes_ns: int
    modules_ns: int
    efficiency_ns: int
    u: float
    v: float


def split(*, a_ns: int, b_ns: int, a: Work | None, b: Work | None, flops_per_byte: int = FLOPS_PER_BYTE) -> Split:
    """The difference ``b_ns - a_ns`` of one piece of work by cause.

    Args:
        a_ns: its time in run A.
        b_ns: its time in run B.
        a: its work in run A; None if A has no such piece.
        b: its work in run B; None if B has none.
        flops_per_byte: FLOPs that a byte weighs.
    """
    difference = b_ns - a_ns
    if a is None or b is None:
        return Split(0, 0, difference, 0, -1.0, 1.0)
    flops, moved = b.flops - a.flops, flops_per_byte * (b.bytes - a.bytes)
    if not flops and not moved:
        return Split(0, 0, 0, difference, 0.0, 0.0)
    units_a, units_b = a.units(flops_per_byte), b.units(flops_per_byte)
    if not units_a or not units_b:
        flops_ns = round(difference * (flops / (flops + moved)))
        return Split(flops_ns, difference - flops_ns, 0, 0, -1.0, 1.0)
    per_unit = logarithmic_mean(a_ns, b_ns) / logarithmic_mean(units_a, units_b)
    flops_ns, bytes_ns = round(flops * per_unit), round(moved * per_unit)
    change = (flops + moved) / logarithmic_mean(units_a, units_b)
    by_a, by_b = _derivatives(a_ns, b_ns)
    return Split(flops_ns, bytes_ns, 0, difference - flops_ns - bytes_ns, change * by_a, change * by_b)


def logarithmic_mean(x: float, y: float) -> float:
    """``(y - x) / ln(y / x)`` of two numbers that are not below zero: between them; 0 if one of them is 0."""
    if x <= 0 or y <= 0:
        return 0.0
    off = (y - x) / (x + y)
    if abs(off) > _FAR:
        return (y - x) / (math.log(y) - math.log(x))
    return (x + y) / 2 * (off / math.atanh(off) if abs(off) > _NEAR else 1 - off * off / 3)


def _derivatives(x: float, y: float) -> tuple[float, float]:
    """Of the logarithmic mean, by *x* and by *y*; both 0 if one of them is 0."""
    if x <= 0 or y <= 0:
        return 0.0, 0.0
    off = (y - x) / (x + y)
    if abs(off) <= _NEAR:
        return 0.5 + off / 3, 0.5 - off / 3  # to the first power of off, the next being 1e-8
    mean, logarithm = logarithmic_mean(x, y), 2 * math.atanh(off) if abs(off) <= _FAR else math.log(y / x)
    return (mean / x - 1) / logarithm, (1 - mean / y) / logarithm


_NEAR, _FAR = 1e-4, 0.5
"""How far two numbers are from their middle, as a share of it, for a series of two terms, and for a plain logarithm."""


def shared_out(total_ns: int, weights: Sequence[int]) -> list[int]:
    """*total_ns* cut in proportion to *weights*, to whole nanoseconds that add up to it.

    All of it goes to the last piece if no weight is above zero.
    """
    whole = sum(weights)
    if whole <= 0:
        return [0] * (len(weights) - 1) + [total_ns] if weights else []
    pieces, before, running = [], 0, 0
    for weight in weights:
        running += weight
        until = (2 * total_ns * running + whole) // (2 * whole)
        pieces.append(until - before)
        before = until
    return pieces


class CauseSums:
    """Adds up differences by cause."""

    __slots__ = (
        "a_ns",
        "b_ns",
        "bytes_ns",
        "communication_ns",
        "data_ns",
        "efficiency_ns",
        "flops_ns",
        "idle_ns",
        "loop_ns",
        "modules_ns",
    )

    def __init__(self) -> None:
        self.a_ns = self.b_ns = 0
        self.flops_ns = self.bytes_ns = self.modules_ns = self.efficiency_ns = 0
        self.data_ns = self.communication_ns = self.idle_ns = self.loop_ns = 0

    def add(self, other: CauseSums) -> None:
        """Add all of *other*."""
        self.a_ns += other.a_ns  # one by one, for tens of thousands of modules
        self.b_ns += other.b_ns
        self.flops_ns += other.flops_ns
        self.bytes_ns += other.bytes_ns
        self.modules_ns += other.modules_ns
        self.efficiency_ns += other.efficiency_ns
        self.data_ns += other.data_ns
        self.communication_ns += other.communication_ns
        self.idle_ns += other.idle_ns
        self.loop_ns += other.loop_ns

    def add_work(self, a_ns: int, b_ns: int, one: Split) -> None:
        """Add a piece of work that took *a_ns* and *b_ns*."""
        self.a_ns += a_ns
        self.b_ns += b_ns
        self.flops_ns += one.flops_ns
        self.bytes_ns += one.bytes_ns
        self.modules_ns += one.modules_ns
        self.efficiency_ns += one.efficiency_ns

    def add_waiting(self, kind: str, a_ns: int, b_ns: int) -> None:
        """Add a wait of *kind*: ``data``, ``communication``, ``idle`` or ``loop``."""
        self.a_ns += a_ns
        self.b_ns += b_ns
        name = f"{kind}_ns"
        setattr(self, name, getattr(self, name) + b_ns - a_ns)

    def causes(self) -> Causes:
        """The sums."""
        return Causes(
            a_ns=self.a_ns,
            b_ns=self.b_ns,
            difference_ns=self.b_ns - self.a_ns,
            work_ns=self.flops_ns + self.bytes_ns + self.modules_ns,
            efficiency_ns=self.efficiency_ns,
            waiting_ns=self.data_ns + self.communication_ns + self.idle_ns + self.loop_ns,
            work_flops_ns=self.flops_ns,
            work_bytes_ns=self.bytes_ns,
            work_modules_ns=self.modules_ns,
            waiting_data_ns=self.data_ns,
            waiting_communication_ns=self.communication_ns,
            waiting_idle_ns=self.idle_ns,
            waiting_loop_ns=self.loop_ns,
        )
