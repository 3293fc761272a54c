"""Single values of a trace, which may be anything, and columns of them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace.columns import LaunchShape
from lightning_flops.analysis.trace.event_names import ELEMENT_BYTES

LARGEST_INTEGER = 2**63 - 1


def whole(value: Any) -> int | None:
    """*value* if it is an integer of 64 bits, else None."""
    return value if type(value) is int and abs(value) <= LARGEST_INTEGER else None


def bytes_of(shapes: Any, dtypes: Any) -> int | None:
    """Bytes of inputs of these shapes and dtypes, which may be anything; None if one of them is not known."""
    if not isinstance(shapes, Sequence) or not isinstance(dtypes, Sequence):
        return None
    total = 0
    for shape, dtype in zip(shapes, dtypes, strict=False):
        element_bytes = ELEMENT_BYTES.get(str(dtype).lower())
        if element_bytes is None or not isinstance(shape, Sequence) or not all(type(size) is int for size in shape):
            return None
        elements = 1
        for size in shape:
            elements *= size
            if not 0 <= elements <= LARGEST_INTEGER:
                return None
        total += elements * element_bytes
    return total or None


def int64(column: array[int]) -> npt.NDArray[np.int64]:
    """*column* without a copy."""
    return np.frombuffer(column, dtype=np.int64) if column else np.zeros(0, dtype=np.int64)


def int32(column: array[int]) -> npt.NDArray[np.int32]:
    """*column* without a copy."""
    return np.frombuffer(column, dtype=np.int32) if column else np.zeros(0, dtype=np.int32)


def value_of(text: bytes) -> Any:
    """The JSON value of *text*; None for no text, and for what Python cannot hold."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None


def text_of(text: bytes) -> str:
    """The JSON text in *text*; empty for any other value."""
    value = value_of(text)
    return value if isinstance(value, str) else ""


def launch_shape(grid: bytes, block: bytes, registers: Any, shared_memory: Any) -> LaunchShape:
    """How a kernel was launched, as the file writes it."""
    return LaunchShape(
        grid=_triple(value_of(grid)),
        block=_triple(value_of(block)),
        registers=_natural(registers),
        shared_memory=_natural(shared_memory),
    )


def _triple(value: Any) -> tuple[int, int, int] | None:
    """Three integers; None for anything else."""
    if not isinstance(value, list) or len(value) != 3 or not all(type(one) is int for one in value):
        return None
    return value[0], value[1], value[2]


def _natural(value: Any) -> int | None:
    number = whole(value)
    return None if number is None or number < 0 else number
