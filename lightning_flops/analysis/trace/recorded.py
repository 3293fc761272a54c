"""The trace of events that the profiler left in memory as columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_flops.analysis.trace.columns import Lane, Trace, TraceFormatError
from lightning_flops.analysis.trace.event_names import KIND_OF_CATEGORY, Kind, is_scope_written_as_operator
from lightning_flops.analysis.trace.event_values import int32, int64
from lightning_flops.analysis.trace.head import place_in_run
from lightning_flops.records import TraceColumns

_SOURCE = "(profiler)"
"""What messages call these events."""


def trace_from_columns(columns: TraceColumns, *, process: int, metadata: Mapping[str, Any] | None = None) -> Trace:
    """The trace of host events that are already in memory as columns. No event is handled by itself.

    Args:
        columns: the events.
        process: number of the process they ran in.
        metadata: what stands at the top of a file, beside the events.

    Raises:
        TraceFormatError: none of the events is torch.profiler's.
    """
    metadata = metadata or {}
    kinds = np.array([KIND_OF_CATEGORY.get(category.lower(), -1) for category in columns.categories], dtype=np.int8)
    kind = kinds[int32(columns.category)] if columns.category else np.zeros(0, dtype=np.int8)
    kept = np.flatnonzero(kind >= 0)
    kind, name = kind[kept], int32(columns.name)[kept]
    scopes = np.array([is_scope_written_as_operator(text) for text in columns.names], dtype=bool)
    kind = np.where((kind == Kind.OPERATOR) & scopes[name], np.int8(Kind.ANNOTATION), kind)
    if not (kind > Kind.PYTHON).any():
        raise TraceFormatError(f"{_SOURCE}: the trace holds no events of torch.profiler")
    nowhere = np.full(len(kept), -1, dtype=np.int64)
    unknown = np.full(len(kept), np.nan)
    return Trace(
        source=_SOURCE,
        names=columns.names,
        lanes=tuple(Lane(process=str(process), thread=str(thread)) for thread in columns.threads),
        name=name,
        kind=kind,
        lane=int32(columns.thread)[kept],
        start_ns=int64(columns.start_ns)[kept],
        duration_ns=int64(columns.duration_ns)[kept],
        correlation=nowhere,
        external_id=nowhere,
        sequence=int64(columns.sequence)[kept],
        forward_thread=int64(columns.forward_thread)[kept],
        device=nowhere.astype(np.int32),
        stream=nowhere,
        blocks_per_sm=unknown,
        occupancy_percent=unknown,
        bytes=nowhere,
        inputs=nowhere.astype(np.int32),
        recorded_inputs=(),
        stack=nowhere.astype(np.int32),
        stacks=(),
        launch_shape=nowhere.astype(np.int32),
        launch_shapes=(),
        collectives={},
        memory=None,
        devices=(),
        **place_in_run(metadata),
        metadata=metadata,
    )
