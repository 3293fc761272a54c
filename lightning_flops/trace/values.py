"""Values of events, which may be anything, as columns of numbers."""

from __future__ import annotations

import math
import struct
from decimal import Decimal
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_flops.trace.intervals import Floats, Ints

T = TypeVar("T")

ABSENT = -1
_LARGEST = 2**63 - 1
_LONGEST_US = 2**62 / 1000
_NOT_AS_EXPECTED = (struct.error, OverflowError)


def packed(code: str, values: list[Any]) -> npt.NDArray[Any]:
    """*values* as a column; ``struct`` converts faster than numpy, and refuses what is of another type."""
    return np.frombuffer(struct.pack(f"{len(values)}{code}", *values), dtype=code)


def nanoseconds(times_us: list[Any]) -> Ints:
    """Whole nanoseconds of times in microseconds: files give three decimals, so that sums are exact.

    Raises:
        ValueError: one of them is no time.
    """
    try:
        times = packed("d", times_us)
    except _NOT_AS_EXPECTED:  # some are text
        return np.array([round(Decimal(time or 0) * 1000) for time in times_us], dtype=np.int64)
    if len(times) and not max(float(times.max()), -float(times.min())) < _LONGEST_US:  # nor is one that is no number
        raise ValueError("an event has no time that a clock shows")
    whole_us = np.floor(times)
    rest_ns: Ints = np.rint((times - whole_us) * 1000).astype(np.int64)
    rest_ns += whole_us.astype(np.int64) * 1000
    return rest_ns


def integers(values: list[Any]) -> Ints:
    """Integer arguments; -1 for one that the event does not have, that reads "N/A", or that needs more than 64 bits."""
    try:
        return packed("q", values)
    except _NOT_AS_EXPECTED:
        return packed("q", list(map(_integer, values)))


def _integer(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return ABSENT
    return number if abs(number) <= _LARGEST else ABSENT


def fractions(values: list[Any]) -> Floats:
    """Float arguments; NaN for one that the event does not have."""
    try:
        found = packed("d", values)
    except _NOT_AS_EXPECTED:
        found = packed("d", [float(value) if isinstance(value, (int, float)) else math.nan for value in values])
    return np.where(np.isinf(found), np.nan, found)


def are_integers(values: Any) -> bool:
    """Whether *values* is a list of integers."""
    return isinstance(values, list) and all(type(one) is int for one in values)


def converted(value: Any, to: type[T]) -> T | None:
    """*value* as what it should be; None if it is something else."""
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError:
        return None
