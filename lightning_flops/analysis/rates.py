"""Ratios of what was counted and what was timed: pure functions of numbers; None where a ratio would not be honest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

from lightning_flops.records import BatchTokens

_Number = TypeVar("_Number", int, float)

MOST_OF_PEAK = 2
"""Figures beyond so many times the peak are impossible, whatever the clocks and the shapes say."""


def per_second(*, amount: float | None, seconds: float | None) -> float | None:
    """Rate of *amount* over *seconds*.

    None when either is not known, negative or not finite, or when *seconds* is zero.
    """
    if amount is None or seconds is None or not (0 <= amount < math.inf and 0 < seconds < math.inf):
        return None
    try:
        rate = amount / seconds
    except OverflowError:  # an int that no float can hold
        return None
    return rate if math.isfinite(rate) else None


def ratio(*, part: float | None, whole: float | None) -> float | None:
    """Share of *part* in *whole*; None under the same conditions as ``per_second``."""
    return per_second(amount=part, seconds=whole)


def peak_seconds(flops: Mapping[str, float], peaks_flops_per_sec: Mapping[str, float]) -> float | None:
    """Seconds one device needs for *flops* at its dense peak: the sum over dtypes of FLOPs / peak of that dtype.

    Divided by the measured seconds this is MFU (of model FLOPs) or HFU (of executed FLOPs); it is how a run whose
    operators use several dtypes has one utilization.

    Args:
        flops: FLOPs by the dtype of the arithmetic.
        peaks_flops_per_sec: dense peak in FLOP/s by dtype, where it is known.

    Returns:
        None if a dtype with FLOPs has no known peak, or a float cannot hold it.
    """
    spending = {dtype: spent for dtype, spent in flops.items() if spent}
    if not all(peaks_flops_per_sec.get(dtype) for dtype in spending):
        return None
    try:
        return sum(spent / peaks_flops_per_sec[dtype] for dtype, spent in spending.items())
    except OverflowError:
        return None


def impossible(name: str, value: float | None) -> str:
    """Why *value*, a share of the peak, cannot be; empty if it can.

    Args:
        name: "MFU" or "HFU".
        value: MFU or HFU, 1 being the peak.
    """
    if value is None or value <= 1:
        return ""
    return (
        f"{name} would be {100 * value:.4g}%, which is impossible: the peak is too low (see peak_flops_per_sec), or "
        "the clock did not wait for the device"
    )


def padding_ratio(tokens: BatchTokens) -> float | None:
    """Share of *tokens* that are padding; None if the processed or the real ones are not known, or there are none."""
    processed, real = tokens.processed, tokens.real
    if processed is None or real is None or not 0 < real <= processed:
        return None
    return (processed - real) / processed


def mean(*, total: float | None, steps: int) -> float | None:
    """*total* over *steps* per step: the number itself, exact, for one step; None if *total* is or is too large."""
    if total is None or steps == 1:
        return total
    try:
        return total / steps
    except OverflowError:
        return None


def sum_if_all_known(values: Iterable[_Number | None]) -> _Number | None:
    """The sum of *values*; None if one of them is not known, or if there are none."""
    total: _Number | None = None
    for value in values:
        if value is None:
            return None
        total = value if total is None else total + value
    return total
