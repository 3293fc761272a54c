"""Events of a trace as objects that hold only what tables need, decoded straight from text.

``msgspec`` decodes them where it is installed: what no table needs is checked and passed over, and no dict is made.
Without it ``json`` of the standard library does, which gives the same events. A field keeps the value as it is written,
whatever that is; only text, times and the object of arguments must be what they are.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import make_dataclass
from functools import lru_cache
from typing import Any

ABSENT = -1
"""What a number is where the event does not have it."""

_EVENT: dict[str, Any] = {
    "ph": "",
    "cat": "",
    "name": None,
    "pid": None,
    "tid": None,
    "ts": math.nan,
    "dur": 0.0,
    "args": None,
}
"""Keys of an event that are read, and what stands for one that is not there."""

_TEXT = b""
"""Stands for an argument of which the JSON text is kept, as bytes: values that are long, few, and often repeated."""

_ARGUMENTS: dict[str, tuple[str, Any]] = {
    "external_id": ("External id", ABSENT),
    "old_external_id": ("external id", ABSENT),
    "sequence": ("Sequence number", ABSENT),
    "forward_thread": ("Fwd thread id", ABSENT),
    "concrete_inputs": ("Concrete Inputs", _TEXT),
    "input_types": ("Input type", _TEXT),
    "input_strides": ("Input Strides", _TEXT),
    "input_sizes": ("Input Dims", _TEXT),
    "call_stack": ("Call stack", _TEXT),
    "device": ("device", None),
    "stream": ("stream", ABSENT),
    "correlation": ("correlation", ABSENT),
    "copied_bytes": ("bytes", ABSENT),
    "registers": ("registers per thread", ABSENT),
    "shared_memory": ("shared memory", ABSENT),
    "blocks_per_sm": ("blocks per SM", math.nan),
    "grid": ("grid", _TEXT),
    "block": ("block", _TEXT),
    "occupancy_percent": ("est. achieved occupancy %", math.nan),
    "collective": ("Collective name", None),
    "in_elements": ("In msg nelems", None),
    "out_elements": ("Out msg nelems", None),
    "group_size": ("Group size", None),
    "dtype": ("dtype", None),
    "group_name": ("Process Group Name", None),
    "group_ranks": ("Process Group Ranks", None),
    "source": ("Src Rank", None),
    "destination": ("Dst Rank", None),
    "total_reserved": ("Total Reserved", ABSENT),
    "total_allocated": ("Total Allocated", ABSENT),
    "allocated_bytes": ("Bytes", None),
    "address": ("Addr", ABSENT),
    "device_index": ("Device Id", ABSENT),
    "device_type": ("Device Type", 0),
}
"""Of an event's ``args`` those that are read, by the names they have here, and what stands for one that is not there.

They come in the order in which files have them, which makes msgspec faster.
"""

_Event = make_dataclass("_Event", [(name, Any, default) for name, default in _EVENT.items()], slots=True)
_Arguments = make_dataclass(
    "_Arguments", [(name, Any, default) for name, (_, default) in _ARGUMENTS.items()], slots=True
)
_NO_ARGUMENTS = _Arguments()


@lru_cache(maxsize=1)
def fast_decoder() -> Callable[[str], list[Any]] | None:
    """Makes events of the text of a JSON list where msgspec is installed.

    The function raises a ValueError or a RecursionError for a text that is no JSON or holds something else than events.
    """
    try:
        msgspec = importlib.import_module("msgspec")
    except ImportError:
        return None
    no_text = msgspec.Raw(_TEXT)  # one object, which columns look for
    arguments = msgspec.defstruct(
        "Arguments",
        [
            (name, msgspec.Raw, msgspec.field(name=key, default=no_text))
            if default is _TEXT
            else (name, Any, msgspec.field(name=key, default=default))
            for name, (key, default) in _ARGUMENTS.items()
        ],
        frozen=True,
        gc=False,
    )
    types = {"ph": str, "cat": str, "name": str | None, "ts": float, "dur": float, "args": arguments}
    event = msgspec.defstruct(
        "Event",
        [(name, types.get(name, Any), arguments() if name == "args" else default) for name, default in _EVENT.items()],
        gc=False,
    )
    decode: Callable[[str], list[Any]] = msgspec.json.Decoder(list[event]).decode  # type: ignore[valid-type]
    return decode


def event_of(values: Mapping[str, Any]) -> Any:
    """The event of these JSON values, with the fields of ``_EVENT``, and in its ``args`` those of ``_ARGUMENTS``.

    Raises:
        AttributeError: its arguments are no object.
        RecursionError: a value is nested too deeply.
    """
    event = _Event(**{name: values[name] for name in _EVENT if name in values})
    event.args = _arguments_of(event.args) if event.args else _NO_ARGUMENTS
    return event


def _arguments_of(values: Mapping[str, Any]) -> Any:
    found = {}
    for name, (key, default) in _ARGUMENTS.items():
        if default is _TEXT and key in values:
            found[name] = json.dumps(values[key]).encode()
        elif (value := values.get(key)) is not None:
            found[name] = value
    return _Arguments(**found)
