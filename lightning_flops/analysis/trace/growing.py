"""Columns that grow by a batch at a time, and what becomes of them in the end."""

from __future__ import annotations

import math
import struct
from array import array
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace.decoding import ABSENT
from lightning_flops.analysis.trace.event_values import LARGEST_INTEGER
from lightning_flops.analysis.trace.intervals import Ints

_LONGEST_US = 2**62 / 1000
"""Sums of a time and a length stay below the largest integer of a column; 146 years."""

_Value = TypeVar("_Value", np.int8, np.int32, np.int64, np.float64)

Column = bytearray
"""The values of a column; it grows in place, and leaves no holes behind as many small arrays would."""


def whole_column(column: Column, dtype: type[_Value]) -> npt.NDArray[_Value]:
    """All of *column*, without a copy."""
    return np.frombuffer(column, dtype=dtype)


def spread(
    size: int,
    rows: Ints,
    column: Column,
    dtype: type[_Value],
    other_rows: Ints | None = None,
    other_column: Column | None = None,
    *,
    elsewhere: float = ABSENT,
) -> npt.NDArray[_Value]:
    """A column of all *size* rows: the values in *rows*, and *elsewhere* in the others; the columns are emptied."""
    spread = np.full(size, elsewhere, dtype=dtype)
    for where, values in ((rows, column), (other_rows, other_column)):
        if where is not None and values:
            spread[where] = whole_column(values, dtype)
            values.clear()
    return spread


def finite(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """*values* with NaN for what is infinite."""
    values[np.isinf(values)] = np.nan
    return values


def packed(code: str, values: list[Any]) -> bytes:
    """*values* as a column of *code*, as in ``struct``, which converts twice as fast as ``array``.

    Raises:
        struct.error: one of them does not fit.
    """
    return struct.pack(f"{len(values)}{code}", *values)


def times(*times_us: list[Any]) -> list[bytes]:
    """Columns of times as they are written, in microseconds, which are checked."""
    columns = [_times(values) for values in times_us]
    every = np.frombuffer(b"".join(columns), dtype=np.float64)
    if len(every):
        # A time that is no number makes both of them none.
        earliest, latest = float(np.minimum.reduce(every)), float(np.maximum.reduce(every))
        if math.isnan(latest):
            raise ValueError("it has no time")
        if max(latest, -earliest) >= _LONGEST_US:
            raise OverflowError("no time that a clock shows")
    return columns


def _times(values: list[Any]) -> bytes:
    try:
        return packed("d", values)
    except (struct.error, OverflowError):
        return array("d", values).tobytes()  # raises, and says what is wrong


def nanoseconds(times_us: Column) -> Ints:
    """Whole nanoseconds: files give microseconds with three decimals, so that sums are exact."""
    times = whole_column(times_us, np.float64)
    whole_us = np.floor(times)
    rest_ns = times - whole_us
    rest_ns *= 1000
    np.rint(rest_ns, out=rest_ns)
    found: Ints = whole_us.astype(np.int64)
    found *= 1000
    found += rest_ns.astype(np.int64)
    del times
    times_us.clear()
    return found


def integers(values: list[Any]) -> bytes:
    """Integer arguments; -1 for one that the event does not have, that reads "N/A", or that needs more than 64 bits."""
    try:
        return packed("q", values)
    except (struct.error, OverflowError):
        return packed("q", list(map(_integer, values)))


def small_integers(values: list[Any]) -> bytes:
    """The same of 32 bits.

    Raises:
        OverflowError: one of them needs more.
    """
    try:
        return packed("i", values)
    except (struct.error, OverflowError):
        return array("i", np.frombuffer(integers(values), dtype=np.int64).tolist()).tobytes()


def _integer(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return ABSENT
    return number if -LARGEST_INTEGER <= number <= LARGEST_INTEGER else ABSENT


def fractions(values: list[Any]) -> bytes:
    """Float arguments; NaN for one that the event does not have."""
    try:
        return packed("d", values)
    except (struct.error, OverflowError):
        return packed("d", list(map(_fraction, values)))


def _fraction(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan
