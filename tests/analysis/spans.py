"""Spans of time as the arithmetic on traces takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_flops.trace.intervals import Ints

Span = tuple[int, int]


def columns(spans: Sequence[Span]) -> tuple[Ints, Ints]:
    """Starts and ends of *spans*."""
    table = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()
