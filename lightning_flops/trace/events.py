"""Events of a trace into columns, a list at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_flops.trace.columns import CollectiveArguments, MemoryEvents, Trace, TraceFormatError
from lightning_flops.trace.mend import mended
from lightning_flops.trace.names import (
    ELEMENT_BYTES,
    KIND_OF_CATEGORY,
    Kind,
    host_collective,
    is_scope_written_as_operator,
)
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

HOST, _LAUNCH = (Kind.OPERATOR, Kind.ANNOTATION), (Kind.RUNTIME,)
_DEVICE = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
_COMMUNICATES = (Kind.ANNOTATION, *_DEVICE)
_MASKS: dict[tuple[int, ...], bytes] = {
    kinds: bytes(kind in kinds for kind in range(256)) for kinds in (HOST, _LAUNCH, _DEVICE, _COMMUNICATES, (FOREIGN,))
}
"""For ``bytes.translate``: 1 for each of some kinds, 0 for all others."""
_INTEGERS: dict[tuple[Kind, ...], tuple[str, ...]] = {
    HOST: ("sequence", "forward_thread"), _LAUNCH: ("correlation",), _DEVICE: ("stream", "correlation", "bytes")
}  # fmt: skip
"""Columns that only events of some kinds have, by these."""
_FRACTIONS = ("blocks_per_sm", "occupancy_percent")
_OF_MEMORY = ("allocated_bytes", "device_index", "device_type", "address", "total_allocated", "total_reserved")
_COLUMN = {name: attrgetter(name) for name in _ARGUMENTS}


class _Numbers(dict[Any, int]):
    """A number for each different key, in order of first appearance; or what *number* gives it."""

    def __init__(self, number: Callable[[Any], int] | None = None) -> None:
        super().__init__()
        self._number = number

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self) if self._number is None else self._number(key)
        return number


class Columns:
    """Columns that grow by one list of events after another."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.names: dict[str, int] = {}
        self.lanes: dict[tuple[str, str], int] = {}
        self._name_numbers = _Numbers(lambda name: self.names.setdefault(str(name), len(self.names)))
        self._lane_numbers = _Numbers(lambda key: self.lanes.setdefault((str(key[0]), str(key[1])), len(self.lanes)))
        self._inputs, self._stacks, self._shapes = _Numbers(), _Numbers(), _Numbers()
        self._kinds = _Numbers(lambda name: KIND_OF_CATEGORY.get((name or "").lower(), FOREIGN))
        self._parts: dict[Any, list[npt.NDArray[Any]]] = {}
        self._collectives: dict[int, CollectiveArguments] = {}
        self._foreign: Counter[str] = Counter()
        self._rows = self._seen = 0

    def keep(self, name: str, values: npt.NDArray[Any], kinds: tuple[Kind, ...] = ()) -> None:
        """Append to the column *name*; to that of events of these *kinds*, if there are any."""
        self._parts.setdefault((name, kinds), []).append(values)

    def add(self, events: Sequence[Event]) -> None:
        """Append what *events* say; those of another tool are counted and left out."""
        self._seen += len(events)
        spans = [event for event in events if event.ph == "X"]
        if len(spans) < len(events):
            self._add_memory([event for event in events if event.ph == "i" and event.name == "[memory]"])
        kinds = bytes([self._kinds[span.cat] for span in spans])
        if FOREIGN in kinds:
            self._foreign.update(span.cat or "" for span in compress(spans, kinds.translate(_MASKS[FOREIGN,])))
            spans = [span for span, kind in zip(spans, kinds, strict=True) if kind != FOREIGN]
            kinds = kinds.translate(None, bytes([FOREIGN]))
        self.keep("kind", np.frombuffer(kinds, dtype=np.int8))
        self.keep("name", packed("i", list(map(self._name_numbers.__getitem__, [span.name for span in spans]))))
        lanes = zip([span.pid for span in spans], [span.tid for span in spans], strict=True)
        self.keep("lane", packed("i", list(map(self._lane_numbers.__getitem__, lanes))))
        self.keep("start_ns", times([span.ts for span in spans]))
        self.keep("duration_ns", times([span.dur for span in spans]))
        for of_kinds, names in _INTEGERS.items():
            if chosen := list(compress(spans, kinds.translate(_MASKS[of_kinds]))):
                arguments = [span.args for span in chosen]
                for name in names:
                    self.keep(name, integers(list(map(_COLUMN[name], arguments))), of_kinds)
                for name, values in self._more(chosen, arguments, of_kinds):
                    self.keep(name, values, of_kinds)
        for place in compress(range(len(spans)), kinds.translate(_MASKS[_COMMUNICATES])):
            if spans[place].args.collective is not None:
                self._collectives[self._rows + place] = _collective(spans[place].args)
        self._rows += len(spans)

    def _more(
        self, spans: list[Event], arguments: list[Any], kinds: tuple[Kind, ...]
    ) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """What events of the host and of the device have beside their integers."""
        if kinds == _LAUNCH:
            return
        ids = [one.old_external_id if one.external_id == ABSENT else one.external_id for one in arguments]
        yield "external_id", integers(ids)
        if kinds == _DEVICE:
            yield "device", integers([span.pid if span.args.device is None else span.args.device for span in spans])
            for name in _FRACTIONS:
                yield name, fractions(list(map(_COLUMN[name], arguments)))
            shapes = [(bytes(one.grid), bytes(one.block), one.registers, one.shared_memory) for one in arguments]
            yield "launch_shape", packed("i", [self._shapes[shape] for shape in shapes])
            return
        dims, stacks = [one.dims or one.old_dims for one in arguments], [one.stack for one in arguments]
        absent = np.full(len(arguments), ABSENT, dtype=np.int32)
        if any(dims):
            columns = (dims, *(list(map(_COLUMN[name], arguments)) for name in ("types", "concrete", "strides")))
            keys = zip(*(map(bytes, column) for column in columns), strict=True)
            yield "inputs", packed("i", [self._inputs[key] if key[0] else ABSENT for key in keys])
        else:
            yield "inputs", absent
        numbers = [self._stacks[one] if one else ABSENT for one in map(bytes, stacks)] if any(stacks) else []
        yield "stack", packed("i", numbers) if numbers else absent

    def _add_memory(self, events: list[Event]) -> None:
        arguments = [event.args for event in events]
        self.keep("memory_lane", packed("i", [self._lane_numbers[event.pid, event.tid] for event in events]))
        self.keep("time_ns", times([event.ts for event in events]))
        for name in _OF_MEMORY:
            self.keep(name, integers(list(map(_COLUMN[name], arguments))))

    def _whole(self, name: str, dtype: type[np.generic], kinds: tuple[Kind, ...] = ()) -> npt.NDArray[Any]:
        parts = self._parts.pop((name, kinds), [])
        if name.endswith("_ns"):
            if len({part.dtype for part in parts}) > 1:  # some times are text
                parts = [nanoseconds(part) for part in parts]
            return nanoseconds(np.concatenate(parts)) if parts else np.zeros(0, dtype=dtype)
        return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype=dtype)

    def _spread(self, kind: npt.NDArray[np.int8], name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
        """A column of all rows, of which only events of some kinds have the values that were kept."""
        column = np.full(len(kind), np.nan if dtype is np.float64 else ABSENT, dtype=dtype)
        for kinds in (HOST, _LAUNCH, _DEVICE):
            if len(values := self._whole(name, dtype, kinds)):
                column[np.flatnonzero(np.isin(np.arange(len(Kind)), kinds)[kind])] = values
        return column

    def trace(self, metadata: Mapping[str, Any]) -> Trace:
        """The finished trace; the columns are used up."""
        names = tuple(self.names)
        name_of, kind = self._whole("name", np.int32), self._whole("kind", np.int8)
        if not (kind > Kind.PYTHON).any():
            raise TraceFormatError(f"{self.source}: {self._why_nothing()}")
        integers_of = ("sequence", "forward_thread", "external_id", "device", "stream", "correlation", "bytes")
        columns: dict[str, Any] = {name: self._spread(kind, name, np.int64) for name in integers_of}
        columns |= {name: self._spread(kind, name, np.int32) for name in ("inputs", "stack", "launch_shape")}
        columns |= {name: self._spread(kind, name, np.float64) for name in _FRACTIONS}
        for name in _FRACTIONS:
            columns[name][np.isinf(columns[name])] = np.nan
        scopes = np.array([is_scope_written_as_operator(text) for text in names], dtype=bool)
        kind = np.where((kind == Kind.OPERATOR) & scopes[name_of], np.int8(Kind.ANNOTATION), kind)
        duration_ns, recorded = self._whole("duration_ns", np.int64), tuple(map(recorded_inputs, self._inputs))
        # Scopes on the host that communicate say what they send as any operator does.
        communicates = np.array([host_collective(text) is not None for text in names], dtype=bool)
        host = np.flatnonzero((kind == Kind.ANNOTATION) & communicates[name_of] & (columns["inputs"] >= 0)).tolist()
        sent = {row: CollectiveArguments(bytes=bytes_of(recorded[columns["inputs"][row]])) for row in host}
        return mended(
            Trace(
                source=self.source,
                names=names,
                lanes=tuple(self.lanes),
                name=name_of,
                kind=kind,
                lane=self._whole("lane", np.int32),
                start_ns=self._whole("start_ns", np.int64),
                duration_ns=np.maximum(duration_ns, 0),
                recorded_inputs=recorded,
                stacks=tuple(text if isinstance(text := value_of(stack), str) else "" for stack in self._stacks),
                launch_shapes=tuple(launch_shape(*texts) for texts in self._shapes),
                collectives=sent | self._collectives,
                memory=self._memory_events(),
                devices=devices_of(metadata.get("deviceProperties")),
                metadata=metadata,
                notes=self._notes(int((duration_ns < 0).sum())),
                **columns,
                **place_in_run(metadata),
            )
        )

    def _memory_events(self) -> MemoryEvents | None:
        found = {name: self._whole(name, np.int64) for name in ("memory_lane", "time_ns", *_OF_MEMORY)}
        on_host, index = found.pop("device_type") == 0, found.pop("device_index")
        lane, sizes = found.pop("memory_lane"), found.pop("allocated_bytes")
        return MemoryEvents(lane=lane, bytes=sizes, device=np.where(on_host, -1, index), **found) if len(lane) else None

    def _why_nothing(self) -> str:
        if not self._seen:
            return "the trace holds no events"
        found = _categories([name for name, _ in self._foreign.most_common()])
        words = f"none of its {self._seen} events is an operator, a scope, a runtime call or a kernel of torch.profiler"
        return words + (f"; its categories are {found}" if found else "")

    def _notes(self, negative: int) -> tuple[str, ...]:
        notes = []
        self._foreign.pop("Trace", None)  # around the whole of old traces
        if self._foreign:
            names = _categories(sorted(self._foreign))
            notes.append(
                f"Left out: events of categories that are not torch.profiler's ({names}): {self._foreign.total()}."
            )
        if any(types == b"[]" and dims.strip(b"[], ") for dims, types, *_ in self._inputs):
            notes.append("Dtypes are not in the file, as in those of torch 1.8: every tensor is taken for float32.")
        if negative:
            notes.append(f"Taken as of no length: events of negative length: {negative}.")
        return tuple(notes)


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
