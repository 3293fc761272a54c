"""Reads the raw events of torch.profiler as columns, without writing them to a trace file."""

from __future__ import annotations

from array import array
from typing import Any

from lightning_flops.records import TraceColumns

_READERS = (
    "activity_type",
    "device_resource_id",
    "duration_ns",
    "fwd_thread_id",
    "name",
    "sequence_nr",
    "start_ns",
)
"""The methods of raw events that we call. If this torch's events lack one, we read the trace from a file."""

_HOST_CATEGORIES = frozenset(("cpu_op", "user_annotation", "cpu_instant_event", "python_function"))
"""For these categories raw events contain all that a file does. A trace with any other is read from its file."""


def columns_of(events: list[Any]) -> TraceColumns | None:
    """The events as columns; None if a device took part, or if this torch's events do not contain enough.

    Shapes and memory are not among the columns: a trace that has them is read from its file.
    """
    if not events or not all(hasattr(events[0], name) for name in _READERS):
        return None
    categories: dict[str, int] = {}
    category = array("i", [categories.setdefault(event.activity_type(), len(categories)) for event in events])
    if not categories.keys() <= _HOST_CATEGORIES:
        return None
    names: dict[str, int] = {}
    threads: dict[int, int] = {}
    name = array("i", [names.setdefault(event.name(), len(names)) for event in events])
    thread = array("i", [threads.setdefault(event.device_resource_id(), len(threads)) for event in events])
    sequence = array("q", [event.sequence_nr() for event in events])
    return TraceColumns(
        names=tuple(names),
        categories=tuple(categories),
        threads=tuple(threads),
        name=name,
        category=category,
        thread=thread,
        start_ns=array("q", [event.start_ns() for event in events]),
        duration_ns=array("q", [event.duration_ns() for event in events]),
        sequence=sequence,
        forward_thread=array(
            "q",
            # Only a node has a sequence number and a forward thread; most operators have neither.
            [event.fwd_thread_id() if one >= 0 else -1 for event, one in zip(events, sequence, strict=True)],
        ),
    )
