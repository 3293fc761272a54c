"""Events of a trace into columns, a list at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_flops.trace.columns import CollectiveArguments, Lane, MemoryEvents, Trace, TraceFormatError
from lightning_flops.trace.intervals import Ints
from lightning_flops.trace.mend import mended
from lightning_flops.trace.names import (
    ELEMENT_BYTES,
    KIND_OF_CATEGORY,
    Kind,
    host_collective,
    is_scope_written_as_operator,
)
from lightning_flops.trace.recorded import RecordedInputs
from lightning_flops.trace.values import (
    ABSENT,
    bytes_of,
    devices_of,
    fractions,
    integers,
    launch_shape,
    nanoseconds,
    packed,
    place_in_run,
    recorded_inputs,
    times,
    value_of,
    whole,
)

FOREIGN = 255
_CATEGORIES_NAMED = 5
_RAW = msgspec.Raw(b"")


def _mask(*kinds: int) -> bytes:
    """For ``bytes.translate``: 1 for each of *kinds*, 0 for all others."""
    return bytes(kind in kinds for kind in range(256))


_ON_HOST = _mask(Kind.OPERATOR, Kind.ANNOTATION)
_RUNTIME = _mask(Kind.RUNTIME)
_ON_DEVICE = _mask(*(kind for kind in Kind if kind >= Kind.KERNEL))
_COMMUNICATES = _mask(Kind.ANNOTATION, *(kind for kind in Kind if kind >= Kind.KERNEL))
_OF_HOST = {name: attrgetter(name) for name in ("sequence", "forward_thread")}
_OF_DEVICE = {name: attrgetter(name) for name in ("stream", "correlation", "bytes")}
_FRACTIONS = {name: attrgetter(name) for name in ("blocks_per_sm", "occupancy_percent")}
_OF_MEMORY = {
    name: attrgetter(name)
    for name in ("allocated_bytes", "device_index", "device_type", "address", "total_allocated", "total_reserved")
}
_ARGUMENTS: dict[str, tuple[str, Any]] = {
    "external_id": ("External id", ABSENT), "old_external_id": ("external id", ABSENT),
    "sequence": ("Sequence number", ABSENT), "forward_thread": ("Fwd thread id", ABSENT),
    "concrete": ("Concrete Inputs", _RAW), "types": ("Input type", _RAW), "strides": ("Input Strides", _RAW),
    "dims": ("Input Dims", _RAW), "old_dims": ("Input dims", _RAW), "stack": ("Call stack", _RAW),
    "device": ("device", None), "stream": ("stream", ABSENT), "correlation": ("correlation", ABSENT),
    "bytes": ("bytes", ABSENT), "registers": ("registers per thread", ABSENT),
    "shared_memory": ("shared memory", ABSENT), "blocks_per_sm": ("blocks per SM", math.nan), "grid": ("grid", _RAW),
    "block": ("block", _RAW), "occupancy_percent": ("est. achieved occupancy %", math.nan),
    "collective": ("Collective name", None), "in_elements": ("In msg nelems", None),
    "out_elements": ("Out msg nelems", None), "group_size": ("Group size", None), "dtype": ("dtype", None),
    "group_name": ("Process Group Name", None), "group_ranks": ("Process Group Ranks", None),
    "source": ("Src Rank", None), "destination": ("Dst Rank", None), "total_reserved": ("Total Reserved", ABSENT),
    "total_allocated": ("Total Allocated", ABSENT), "allocated_bytes": ("Bytes", 0), "address": ("Addr", ABSENT),
    "device_index": ("Device Id", ABSENT), "device_type": ("Device Type", 0),
}  # fmt: skip
"""Of an event's ``args`` those that are read, and what stands for one that is not there; in the order of torch's files.

Anything may stand there; of shapes and stacks, which are long and often the same, the text is kept.
"""
_Arguments: Any = msgspec.defstruct(
    "_Arguments",
    [
        (name, msgspec.Raw if default is _RAW else Any, msgspec.field(name=key, default=default))
        for name, (key, default) in _ARGUMENTS.items()
    ],
    gc=False,
    frozen=True,
)


class Event(msgspec.Struct, gc=False):
    """One event of the list, as far as it is read."""

    ph: Any = ""
    cat: str | None = ""
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: float | str = math.nan
    dur: float | str | None = 0.0
    args: _Arguments = _Arguments()


DECODER = msgspec.json.Decoder(list[Event])
"""Makes events of the text of a JSON list; what no table needs is checked and passed over."""


class Columns:
    """Columns that grow by one list of events after another."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.names: dict[str, int] = {}
        self.lanes: dict[Lane, int] = {}
        self._name_numbers = _Numbers(lambda name: self.names.setdefault(str(name), len(self.names)))
        self._lane_numbers = _Numbers(
            lambda key: self.lanes.setdefault(Lane(str(key[0]), str(key[1])), len(self.lanes))
        )
        self._inputs, self._stacks, self._shapes = _Numbers(), _Numbers(), _Numbers()
        self._kinds = _Numbers(lambda name: KIND_OF_CATEGORY.get((name or "").lower(), FOREIGN))
        self._parts: dict[str, list[npt.NDArray[Any]]] = {}
        self._collectives: dict[int, CollectiveArguments] = {}
        self._foreign: dict[str, int] = {}
        self._rows = self._seen = 0

    def keep(self, name: str, values: npt.NDArray[Any]) -> None:
        """Append to the column *name*."""
        self._parts.setdefault(name, []).append(values)

    def add(self, events: Sequence[Event]) -> None:
        """Append what *events* say; those of another tool are counted and left out."""
        self._seen += len(events)
        spans = [event for event in events if event.ph == "X"]
        if len(spans) < len(events):
            self._add_memory([event for event in events if event.ph == "i" and event.name == "[memory]"])
        kinds = bytes([self._kinds[span.cat] for span in spans])
        if FOREIGN in kinds:
            for span, kind in zip(spans, kinds, strict=True):
                if kind == FOREIGN and span.cat != "Trace":  # around the whole of old traces
                    self._foreign[span.cat or ""] = self._foreign.get(span.cat or "", 0) + 1
            spans = [span for span, kind in zip(spans, kinds, strict=True) if kind != FOREIGN]
            kinds = kinds.translate(None, bytes([FOREIGN]))
        self.keep("kind", np.frombuffer(kinds, dtype=np.int8))
        self.keep("name", packed("i", list(map(self._name_numbers.__getitem__, [span.name for span in spans]))))
        lanes = zip([span.pid for span in spans], [span.tid for span in spans], strict=True)
        self.keep("lane", packed("i", list(map(self._lane_numbers.__getitem__, lanes))))
        self.keep("start_ns", times([span.ts for span in spans]))
        self.keep("duration_ns", times([span.dur for span in spans]))
        arguments = [span.args for span in spans]
        self._add_host(list(compress(arguments, kinds.translate(_ON_HOST))))
        calls = compress(arguments, kinds.translate(_RUNTIME))
        self.keep("launch_correlation", integers([one.correlation for one in calls]))
        on_device = kinds.translate(_ON_DEVICE)
        if 1 in on_device:
            self._add_device(list(compress(arguments, on_device)), [span.pid for span in compress(spans, on_device)])
        for place in compress(range(len(spans)), kinds.translate(_COMMUNICATES)):
            if arguments[place].collective is not None:
                self._collectives[self._rows + place] = _collective(arguments[place])
        self._rows += len(spans)

    def _add_host(self, arguments: list[Any]) -> None:
        self.keep("external_id", _external_ids(arguments))
        for name, of in _OF_HOST.items():
            self.keep(name, integers(list(map(of, arguments))))
        dims = [one.dims for one in arguments]
        dims = dims if any(dims) else [one.old_dims for one in arguments]
        if any(dims):
            columns = (dims, [one.types for one in arguments], [one.concrete for one in arguments])
            keys = zip(*(map(bytes, one) for one in (*columns, [one.strides for one in arguments])), strict=True)
            self.keep("inputs", packed("i", [self._inputs[key] if key[0] else ABSENT for key in keys]))
        else:
            self.keep("inputs", np.full(len(arguments), ABSENT, dtype=np.int32))
        stacks = [one.stack for one in arguments]
        if any(stacks):
            self.keep("stack", packed("i", [self._stacks[one] if one else ABSENT for one in map(bytes, stacks)]))
        else:
            self.keep("stack", np.full(len(arguments), ABSENT, dtype=np.int32))

    def _add_device(self, arguments: list[Any], processes: list[Any]) -> None:
        devices = [pid if one.device is None else one.device for one, pid in zip(arguments, processes, strict=True)]
        self.keep("device", integers(devices))
        self.keep("device_external_id", _external_ids(arguments))
        for name, of in _OF_DEVICE.items():
            self.keep(name, integers(list(map(of, arguments))))
        for name, of in _FRACTIONS.items():
            self.keep(name, fractions(list(map(of, arguments))))
        shapes = [(bytes(one.grid), bytes(one.block), one.registers, one.shared_memory) for one in arguments]
        self.keep("launch_shape", packed("i", [self._shapes[shape] for shape in shapes]))

    def _add_memory(self, events: list[Event]) -> None:
        arguments = [event.args for event in events]
        self.keep("memory_lane", packed("i", [self._lane_numbers[event.pid, event.tid] for event in events]))
        self.keep("time_ns", times([event.ts for event in events]))
        for name, of in _OF_MEMORY.items():
            self.keep(name, integers(list(map(of, arguments))))

    def _whole(self, name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
        parts = self._parts.pop(name, [])
        return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype=dtype)

    def _whole_ns(self, name: str) -> Ints:
        parts = self._parts.pop(name, [])
        if len({part.dtype for part in parts}) > 1:  # some of them are text
            parts = [nanoseconds(part) for part in parts]
        return nanoseconds(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.int64)

    def _spread(
        self, size: int, rows: Ints, name: str, dtype: type[np.generic] = np.int64, *, elsewhere: float = ABSENT
    ) -> npt.NDArray[Any]:
        """A column of all *size* rows: the values in *rows*, and *elsewhere* in the others."""
        column = np.full(size, elsewhere, dtype=dtype)
        values = self._whole(name, dtype)
        column[rows[: len(values)]] = values
        return column

    def trace(self, metadata: Mapping[str, Any]) -> Trace:
        """The finished trace; the columns are used up."""
        names, lanes = tuple(self.names), tuple(self.lanes)
        name_of, kind = self._whole("name", np.int32), self._whole("kind", np.int8)
        if not (kind > Kind.PYTHON).any():
            raise TraceFormatError(f"{self.source}: {self._why_nothing()}")
        size = len(kind)
        host = np.flatnonzero((kind == Kind.OPERATOR) | (kind == Kind.ANNOTATION))
        runtime, device = np.flatnonzero(kind == Kind.RUNTIME), np.flatnonzero(kind >= Kind.KERNEL)
        scopes = np.array([is_scope_written_as_operator(text) for text in names], dtype=bool)
        kind = np.where((kind == Kind.OPERATOR) & scopes[name_of], np.int8(Kind.ANNOTATION), kind)
        duration_ns = self._whole_ns("duration_ns")
        notes = self._notes(int((duration_ns < 0).sum()))
        recorded = tuple(recorded_inputs(texts) for texts in self._inputs)
        columns: dict[str, Any] = {name: self._spread(size, host, name) for name in (*_OF_HOST, "external_id")}
        columns |= {name: self._spread(size, host, name, np.int32) for name in ("inputs", "stack")}
        columns |= {name: self._spread(size, device, name) for name in ("device", *_OF_DEVICE)}
        columns |= {name: self._spread(size, device, name, np.float64, elsewhere=np.nan) for name in _FRACTIONS}
        for name in _FRACTIONS:
            columns[name][np.isinf(columns[name])] = np.nan
        for name, other, rows in (
            ("correlation", "launch_correlation", runtime),
            ("external_id", "device_external_id", device),
        ):
            values = self._whole(other, np.int64)
            columns[name][rows[: len(values)]] = values
        return mended(
            Trace(
                source=self.source,
                names=names,
                lanes=lanes,
                name=name_of,
                kind=kind,
                lane=self._whole("lane", np.int32),
                start_ns=self._whole_ns("start_ns"),
                duration_ns=np.maximum(duration_ns, 0),
                recorded_inputs=recorded,
                stacks=tuple(text if isinstance(text := value_of(stack), str) else "" for stack in self._stacks),
                launch_shape=self._spread(size, device, "launch_shape", np.int32),
                launch_shapes=tuple(launch_shape(*texts) for texts in self._shapes),
                collectives=self._collectives | self._host_collectives(kind, name_of, columns["inputs"], recorded),
                memory=self._memory_events(),
                devices=devices_of(metadata.get("deviceProperties")),
                metadata=metadata,
                notes=notes,
                **columns,
                **place_in_run(metadata),
            )
        )

    def _host_collectives(
        self,
        kind: npt.NDArray[np.int8],
        name: npt.NDArray[np.int32],
        inputs: npt.NDArray[np.int32],
        recorded: Sequence[RecordedInputs],
    ) -> dict[int, CollectiveArguments]:
        """What scopes on the host that communicate send: they say it as any operator does."""
        communicates = np.array([host_collective(text) is not None for text in self.names], dtype=bool)
        rows = np.flatnonzero((kind == Kind.ANNOTATION) & communicates[name] & (inputs >= 0)).tolist()
        sizes = {number: bytes_of(recorded[number]) for number in set(inputs[rows].tolist())}
        return {row: CollectiveArguments(bytes=sizes[int(inputs[row])]) for row in rows if row not in self._collectives}

    def _memory_events(self) -> MemoryEvents | None:
        lane = self._whole("memory_lane", np.int64)
        if not len(lane):
            return None
        found = {name: self._whole(name, np.int64) for name in _OF_MEMORY} | {"time_ns": self._whole_ns("time_ns")}
        on_host, index = found.pop("device_type") == 0, found.pop("device_index")
        sizes = found.pop("allocated_bytes")
        return MemoryEvents(lane=lane, bytes=sizes, device=np.where(on_host, -1, index), **found)

    def _why_nothing(self) -> str:
        if not self._seen:
            return "the trace holds no events"
        found = _categories(sorted(self._foreign, key=lambda name: -self._foreign[name]))
        return (
            f"none of its {self._seen} events is an operator, a scope, a runtime call or a kernel of torch.profiler"
            + (f"; its categories are {found}" if found else "")
        )

    def _notes(self, negative: int) -> tuple[str, ...]:
        notes = []
        if self._foreign:
            names, count = _categories(sorted(self._foreign)), sum(self._foreign.values())
            notes.append(f"Left out: events of categories that are not torch.profiler's ({names}): {count}.")
        if any(types == b"[]" and dims.strip(b"[], ") for dims, types, *_ in self._inputs):
            notes.append("Dtypes are not in the file, as in those of torch 1.8: every tensor is taken for float32.")
        if negative:
            notes.append(f"Taken as of no length: events of negative length: {negative}.")
        return tuple(notes)


class _Numbers(dict[Any, int]):
    """A number for each different key, in order of first appearance; or what *number* gives it."""

    def __init__(self, number: Callable[[Any], int] | None = None) -> None:
        super().__init__()
        self._number = number

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self) if self._number is None else self._number(key)
        return number


def _external_ids(arguments: list[Any]) -> Ints:
    numbers = integers([one.external_id for one in arguments])
    if (numbers == ABSENT).any():  # as older traces write it
        numbers = np.where(numbers == ABSENT, integers([one.old_external_id for one in arguments]), numbers)
    return numbers


def _collective(arguments: Any) -> CollectiveArguments:
    element_bytes = ELEMENT_BYTES.get(str(arguments.dtype).lower())
    known = [count for count in map(whole, (arguments.in_elements, arguments.out_elements)) if count is not None]
    # Groups of one name may have other members on other ranks, and groups of the same members another name.
    group = [str(part) for part in (arguments.group_name, arguments.group_ranks) if part]
    return CollectiveArguments(
        name=str(arguments.collective),
        # The larger side, as communication benchmarks give it: what all_gather yields and reduce_scatter takes.
        bytes=max(known) * element_bytes if known and element_bytes is not None else None,
        group=" ".join(group) if group else None,
        group_size=whole(arguments.group_size),
        source=whole(arguments.source),
        destination=whole(arguments.destination),
    )


def _categories(names: Sequence[str]) -> str:
    shown = [repr(name)[:80] if name else "none" for name in names[:_CATEGORIES_NAMED]]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
