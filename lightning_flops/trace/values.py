"""Single values of a trace, which may be anything, columns of them, and what stands at the top of a file."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_flops.records import METADATA_KEY
from lightning_flops.trace.columns import DeviceProperties, LaunchShape
from lightning_flops.trace.intervals import Ints
from lightning_flops.trace.names import ELEMENT_BYTES
from lightning_flops.trace.recorded import RecordedInputs

ABSENT = -1
_LARGEST = 2**63 - 1
_LONGEST_US = 2**62 / 1000
_MOST_RANKS = 1 << 20


def packed(code: str, values: list[Any]) -> npt.NDArray[Any]:
    """*values* as a column; ``struct`` converts faster than numpy, and refuses what is of another type."""
    return np.frombuffer(struct.pack(f"{len(values)}{code}", *values), dtype=code)


def times(times_us: list[Any]) -> npt.NDArray[Any]:
    """Times as a file has them, in microseconds; those that it has as text as whole nanoseconds."""
    try:
        return packed("d", times_us)
    except (struct.error, OverflowError):
        if any(isinstance(time, str) for time in times_us):
            return np.array([_nanoseconds_of_text(str(time)) for time in times_us], dtype=np.int64)
        return packed("d", [float(time or 0.0) for time in times_us])


def nanoseconds(times: npt.NDArray[Any]) -> Ints:
    """Whole nanoseconds of a column of ``times``: files give three decimals, so that sums are exact.

    Raises:
        ValueError: one of them is no time.
    """
    if times.dtype == np.int64:
        return times
    if len(times) and not max(float(times.max()), -float(times.min())) < _LONGEST_US:  # nor is one that is no number
        raise ValueError("an event has no time that a clock shows")
    whole_us = np.floor(times)
    rest_ns: Ints = np.rint((times - whole_us) * 1000).astype(np.int64)
    rest_ns += whole_us.astype(np.int64) * 1000
    return rest_ns


def _nanoseconds_of_text(time: str) -> int:
    whole, _, rest = time.strip().partition(".")
    if not whole.lstrip("-").isdecimal() or not (rest or "0").isdecimal():
        return round(float(time) * 1000)
    sign = -1 if whole.startswith("-") else 1
    return int(whole) * 1000 + sign * int(rest[:3].ljust(3, "0"))


def integers(values: list[Any]) -> Ints:
    """Integer arguments; -1 for one that the event does not have, that reads "N/A", or that needs more than 64 bits."""
    try:
        return packed("q", values)
    except (struct.error, OverflowError):
        return packed("q", list(map(_integer, values)))


def _integer(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return ABSENT
    return number if abs(number) <= _LARGEST else ABSENT


def fractions(values: list[Any]) -> npt.NDArray[np.float64]:
    """Float arguments; NaN for one that the event does not have."""
    try:
        return packed("d", values)
    except (struct.error, OverflowError):
        return packed("d", [float(value) if isinstance(value, (int, float)) else math.nan for value in values])


def value_of(text: bytes) -> Any:
    """The JSON value of *text*; None for no text, and for what Python cannot hold."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None


def whole(value: Any) -> int | None:
    """*value* if it is an integer of 64 bits."""
    return value if type(value) is int and abs(value) <= _LARGEST else None


def are_integers(values: Any) -> bool:
    """Whether *values* is a list of integers."""
    return isinstance(values, list) and all(type(one) is int for one in values)


def recorded_inputs(texts: tuple[bytes, ...]) -> RecordedInputs:
    """What the texts of sizes, types, values and strides say; torch 1.8 has no types: what has sizes is float32."""
    dims, types, concrete, strides = map(value_of, texts)
    dims = dims if isinstance(dims, list) else []
    if types == []:
        types = ["float" if one else "" for one in dims]
    return RecordedInputs(dims=dims, types=types if isinstance(types, list) else (), concrete=concrete, strides=strides)


def bytes_of(inputs: RecordedInputs) -> int | None:
    """Bytes of all inputs; None if one of them is not known."""
    total = 0
    for shape, dtype in zip(inputs.dims, inputs.types, strict=False):
        element_bytes = ELEMENT_BYTES.get(str(dtype).lower())
        if element_bytes is None or not are_integers(shape):
            return None
        total += math.prod(shape) * element_bytes
    return total if 0 < total <= _LARGEST else None


def launch_shape(grid: bytes, block: bytes, registers: Any, shared_memory: Any) -> LaunchShape:
    """How a kernel was launched, as the file writes it."""
    found = map(value_of, (grid, block))
    axes = [math.prod(value) if are_integers(value) and len(value) == 3 else None for value in found]
    sizes = [None if (one := whole(value)) is None or one < 0 else one for value in (registers, shared_memory)]
    return LaunchShape(*axes, *sizes)


def devices_of(properties: Any) -> tuple[DeviceProperties, ...]:
    """The devices that the head of a trace lists; what is no list of devices has none."""
    listed = [one for one in properties if isinstance(one, dict)] if isinstance(properties, list) else []
    return tuple(
        DeviceProperties(
            index=one["id"],
            name=str(one.get("name", "")),
            sm_count=whole(one.get("numSms")),
            compute_capability=None if major is None or minor is None else (major, minor),
            max_threads=whole(one.get("maxThreadsPerMultiprocessor")),
            registers=whole(one.get("regsPerMultiprocessor")),
            shared_memory=whole(one.get("sharedMemPerMultiprocessor")),
        )
        for one in listed
        if type(one.get("id")) is int
        for major, minor in [(whole(one.get("computeMajor")), whole(one.get("computeMinor")))]
    )


def place_in_run(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the head of a trace says of its rank's place in the run, by the fields of ``Trace``."""
    distributed, own = (
        found if isinstance(found := metadata.get(key), dict) else {} for key in ("distributedInfo", METADATA_KEY)
    )
    backend, world_size = distributed.get("backend"), whole(distributed.get("world_size"))
    if world_size is not None and not 0 < world_size <= _MOST_RANKS:
        world_size = None  # no job has as many, and its ranks are listed
    listed, everyone = distributed.get("pg_config"), tuple(range(world_size or 0))
    members = (
        [one.get("ranks") if isinstance(one, dict) else None for one in listed] if type(listed) is list else [None]
    )
    return {
        # torch names no rank in a run of one process, this package always does
        "rank": whole(distributed.get("rank", own.get("rank"))),
        "world_size": world_size,
        "backend": backend if isinstance(backend, str) else None,
        # a group of all may be written as none
        "groups": tuple(tuple(sorted(ranks or ())) or everyone for ranks in members)
        if all(map(are_integers, members))
        else None,
    }
