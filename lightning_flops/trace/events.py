"""Events of a trace into columns, a list at a time, and what profilers are known to write wrongly put right."""

from __future__ import annotations

import math
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from itertools import compress
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_flops.records import METADATA_KEY
from lightning_flops.trace.columns import CollectiveArguments, DeviceProperties, MemoryEvents, Trace
from lightning_flops.trace.intervals import NS_PER_US, Floats, Ints
from lightning_flops.trace.names import (
    ELEMENT_BYTES,
    KIND_OF_CATEGORY,
    Kind,
    host_collective,
    is_users_scope,
)
from lightning_flops.trace.recorded import RecordedInputs

T = TypeVar("T")

_ABSENT = -1
_LARGEST = 2**63 - 1
_LONGEST_US = 2**62 / 1000
_NOT_AS_EXPECTED = (struct.error, OverflowError)
_FOREIGN = 255
_CATEGORIES_NAMED = 5
_FEW, _LONGER = 3, 10
"""A kernel that runs over so many others of its stream, each of them so many times shorter, has a wrong end."""
_MUCH_SHARED_BYTES = 48 << 10
"""Kineto writes an occupancy of 0 for kernels with more shared memory."""
_REGISTERS = 65536
"""Of a multiprocessor since compute capability 5."""
_MOST_RANKS = 1 << 20
"""No job has as many, and its ranks are listed."""
_RAW = msgspec.Raw(b"")
_ARGUMENTS: dict[str, tuple[str, Any]] = {
    "external_id": ("External id", _ABSENT), "old_external_id": ("external id", _ABSENT),
    "sequence": ("Sequence number", _ABSENT), "forward_thread": ("Fwd thread id", _ABSENT),
    "concrete": ("Concrete Inputs", _RAW), "types": ("Input type", _RAW), "strides": ("Input Strides", _RAW),
    "dims": ("Input Dims", _RAW), "old_dims": ("Input dims", _RAW), "stack": ("Call stack", _RAW),
    "device": ("device", None), "stream": ("stream", _ABSENT), "correlation": ("correlation", _ABSENT),
    "bytes": ("bytes", _ABSENT), "registers": ("registers per thread", _ABSENT),
    "shared_memory": ("shared memory", _ABSENT), "blocks_per_sm": ("blocks per SM", math.nan), "grid": ("grid", _RAW),
    "block": ("block", _RAW), "occupancy_percent": ("est. achieved occupancy %", math.nan),
    "collective": ("Collective name", None), "in_elements": ("In msg nelems", None),
    "out_elements": ("Out msg nelems", None), "group_size": ("Group size", None), "dtype": ("dtype", None),
    "group_name": ("Process Group Name", None), "group_ranks": ("Process Group Ranks", None),
    "total_reserved": ("Total Reserved", _ABSENT), "total_allocated": ("Total Allocated", _ABSENT),
    "allocated_bytes": ("Bytes", 0), "address": ("Addr", _ABSENT), "device_index": ("Device Id", _ABSENT),
    "device_type": ("Device Type", 0),
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


class _Group(msgspec.Struct):
    ranks: list[int] | None = None


class _Distributed(msgspec.Struct):
    """What the head of a trace says of its rank's place in the run."""

    rank: int | None = None
    world_size: int | None = None
    pg_config: Any = None


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

_COLUMNS: dict[str, type[np.generic]] = {
    **dict.fromkeys(
        ("sequence", "forward_thread", "external_id", "device", "stream", "correlation", "bytes"), np.int64
    ),
    **dict.fromkeys(("inputs", "stack"), np.int32),
    **dict.fromkeys(("blocks_per_sm", "occupancy_percent"), np.float64),
}
_OF_MEMORY = ("allocated_bytes", "device_index", "device_type", "address", "total_allocated", "total_reserved")


@lru_cache(maxsize=1024)
def _kind(category: str | None) -> int:
    return KIND_OF_CATEGORY.get((category or "").lower(), _FOREIGN)


def _numbers() -> defaultdict[Any, int]:
    """A number for each different key, in order of first appearance."""
    found: defaultdict[Any, int] = defaultdict()
    found.default_factory = found.__len__
    return found


def _packed(code: str, values: list[Any]) -> npt.NDArray[Any]:
    """*values* as a column; ``struct`` converts faster than numpy, and refuses what is of another type."""
    return np.frombuffer(struct.pack(f"{len(values)}{code}", *values), dtype=code)


def _nanoseconds(times_us: list[Any]) -> Ints:
    """Whole nanoseconds of times in microseconds: files give three decimals, so that sums are exact.

    Raises:
        ValueError: one of them is no time.
    """
    try:
        times = _packed("d", times_us)
    except _NOT_AS_EXPECTED:  # some are text
        return np.array([round(Decimal(time or 0) * 1000) for time in times_us], dtype=np.int64)
    if len(times) and not max(float(times.max()), -float(times.min())) < _LONGEST_US:  # nor is one that is no number
        raise ValueError("an event has no time that a clock shows")
    whole_us = np.floor(times)
    rest_ns: Ints = np.rint((times - whole_us) * 1000).astype(np.int64)
    rest_ns += whole_us.astype(np.int64) * 1000
    return rest_ns


def _integers(values: list[Any]) -> Ints:
    """Integer arguments; -1 for one that the event does not have, that reads "N/A", or that needs more than 64 bits."""
    try:
        return _packed("q", values)
    except _NOT_AS_EXPECTED:
        return _packed("q", list(map(_integer, values)))


def _integer(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return _ABSENT
    return number if abs(number) <= _LARGEST else _ABSENT


def _fractions(values: list[Any]) -> Floats:
    """Float arguments; NaN for one that the event does not have."""
    try:
        found = _packed("d", values)
    except _NOT_AS_EXPECTED:
        found = _packed("d", [float(value) if isinstance(value, (int, float)) else math.nan for value in values])
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


class Columns:
    """Columns that grow by one list of events after another."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._names, self._lanes, self._inputs, self._stacks = _numbers(), _numbers(), _numbers(), _numbers()
        self._parts: defaultdict[str, list[npt.NDArray[Any]]] = defaultdict(list)
        self._spread: defaultdict[str, list[tuple[Ints, npt.NDArray[Any]]]] = defaultdict(list)
        self._collectives: dict[int, CollectiveArguments] = {}
        self._without_occupancy: dict[int, tuple[int, int, Any, int]] = {}
        """By row blocks, threads of one, registers of a thread and shared memory of a block."""
        self._foreign: Counter[str] = Counter()
        self._rows = self._seen = 0

    def add(self, events: Sequence[Event]) -> None:
        """Append what *events* say; those of another tool are counted and left out."""
        self._seen += len(events)
        spans = [event for event in events if event.ph == "X"]
        if len(spans) < len(events):
            self._add_memory([event for event in events if event.ph == "i" and event.name == "[memory]"])
        kind = np.frombuffer(bytes(map(_kind, [span.cat for span in spans])), dtype=np.uint8)
        if (foreign := kind == _FOREIGN).any():
            self._foreign.update(span.cat or "" for span in compress(spans, foreign.tobytes()))
            spans, kind = [*compress(spans, (~foreign).tobytes())], kind[~foreign]
        self._parts["kind"].append(kind)
        self._parts["name"].append(_packed("i", [self._names[span.name] for span in spans]))
        self._parts["lane"].append(_packed("i", [self._lanes[span.pid, span.tid] for span in spans]))
        times = _nanoseconds([*[span.ts for span in spans], *[span.dur for span in spans]])
        self._parts["start_ns"].append(times[: len(spans)])
        self._parts["duration_ns"].append(times[len(spans) :])
        on_host = (kind == Kind.OPERATOR) | (kind == Kind.ANNOTATION)
        readers = ((on_host, self._of_host), (kind == Kind.RUNTIME, _launches), (kind >= Kind.KERNEL, self._of_device))
        for chosen, reader in readers:
            rows = np.flatnonzero(chosen) + self._rows
            if len(rows):
                for name, values in reader([*compress(spans, chosen.tobytes())], rows):
                    self._spread[name].append((rows, values))
        self._rows += len(spans)

    def _of_host(self, spans: list[Event], rows: Ints) -> Iterator[tuple[str, Any]]:
        arguments = [span.args for span in spans]
        self._find_collectives(arguments, rows)
        for name in ("sequence", "forward_thread"):
            yield name, _integers([*map(attrgetter(name), arguments)])
        yield "external_id", _external_ids(arguments)
        if any(dims := [one.dims or one.old_dims for one in arguments]):
            others = ([getattr(one, name) for one in arguments] for name in ("types", "concrete", "strides"))
            keys = zip(*(map(bytes, column) for column in (dims, *others)), strict=True)
            yield "inputs", _packed("i", [self._inputs[key] if key[0] else _ABSENT for key in keys])
        if any(stacks := [one.stack for one in arguments]):
            yield "stack", _packed("i", [self._stacks[one] if one else _ABSENT for one in map(bytes, stacks)])

    def _of_device(self, spans: list[Event], rows: Ints) -> Iterator[tuple[str, Any]]:
        arguments = [span.args for span in spans]
        self._find_collectives(arguments, rows)
        for row, one in zip(rows.tolist(), arguments, strict=True):
            if one.occupancy_percent == 0 and type(one.shared_memory) is int and one.shared_memory > _MUCH_SHARED_BYTES:
                sizes = _product(bytes(one.grid)), _product(bytes(one.block))
                self._without_occupancy[row] = (*sizes, one.registers, one.shared_memory)
        for name in ("stream", "correlation", "bytes"):
            yield name, _integers([*map(attrgetter(name), arguments)])
        for name in ("blocks_per_sm", "occupancy_percent"):
            yield name, _fractions([*map(attrgetter(name), arguments)])
        yield "external_id", _external_ids(arguments)
        yield "device", _integers([span.pid if span.args.device is None else span.args.device for span in spans])

    def _find_collectives(self, arguments: list[Any], rows: Ints) -> None:
        for row, one in zip(rows.tolist(), arguments, strict=True):
            if one.collective is not None:
                self._collectives[row] = _collective(one)

    def _add_memory(self, events: list[Event]) -> None:
        arguments = [event.args for event in events]
        self._parts["memory_lane"].append(_packed("i", [self._lanes[event.pid, event.tid] for event in events]))
        self._parts["time_ns"].append(_nanoseconds([event.ts for event in events]))
        for name in _OF_MEMORY:
            self._parts[name].append(_integers([*map(attrgetter(name), arguments)]))

    def _whole(self, name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
        parts = self._parts.pop(name, [])
        return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype=dtype)

    def _column(self, name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
        """A column of all rows, of which only some events have the values that were kept."""
        column = np.full(self._rows, np.nan if dtype is np.float64 else _ABSENT, dtype=dtype)
        if name in self._spread:
            rows, values = zip(*self._spread.pop(name), strict=True)
            column[np.concatenate(rows)] = np.concatenate(values)
        return column

    def trace(self, metadata: Mapping[str, Any]) -> Trace:
        """The finished trace; the columns are used up.

        Raises:
            ValueError: none of the events is one that a table needs.
        """
        names = tuple(map(str, self._names))
        name_of, kind = self._whole("name", np.int32), self._whole("kind", np.int8)
        if not (kind > Kind.PYTHON).any():
            words = "is an operator, a scope, a runtime call or a kernel of torch.profiler; others are"
            raise ValueError(f"none of its {self._seen} events {words} {self._categories() or 'none'}")
        columns: dict[str, Any] = {name: self._column(name, dtype) for name, dtype in _COLUMNS.items()}
        scopes = np.array([not is_users_scope(text) for text in names], dtype=bool)
        kind = np.where((kind == Kind.OPERATOR) & scopes[name_of], np.int8(Kind.ANNOTATION), kind)
        duration_ns, recorded = self._whole("duration_ns", np.int64), tuple(map(_recorded_inputs, self._inputs))
        # Scopes on the host that communicate say what they send as any operator does.
        communicates = np.array([host_collective(text) is not None for text in names], dtype=bool)
        host = np.flatnonzero((kind == Kind.ANNOTATION) & communicates[name_of] & (columns["inputs"] >= 0)).tolist()
        sent = {row: CollectiveArguments(bytes=_bytes_of(recorded[columns["inputs"][row]])) for row in host}
        devices = tuple(converted(metadata.get("deviceProperties"), list[DeviceProperties]) or ())
        notes = self._notes()
        if shapes := self._without_occupancy:
            by_index, on = {one.index: one for one in devices}, columns["device"]
            found = [_occupancy(*shape, by_index.get(on[row])) for row, shape in shapes.items()]
            columns["occupancy_percent"][[*shapes]] = found
            known = len(found) - sum(map(math.isnan, found))
            words = "kernels with much shared memory: worked out of"
            notes.append(f"Occupancy is written as 0 of {len(found)} {words} {known}.")
        # A process or thread may be written as a number here and as text there.
        lanes = _numbers()
        lane_of = np.array([lanes[str(process), str(thread)] for process, thread in self._lanes], dtype=np.int32)
        return _without_overlong(
            Trace(
                source=self._source,
                names=names,
                lanes=tuple(lanes),
                name=name_of,
                kind=kind,
                lane=lane_of[self._whole("lane", np.int32)],
                start_ns=self._whole("start_ns", np.int64),
                duration_ns=np.maximum(duration_ns, 0),
                recorded_inputs=recorded,
                stacks=tuple(text if isinstance(text := _value(stack), str) else "" for stack in self._stacks),
                collectives=sent | self._collectives,
                memory=self._memory_events(lane_of),
                devices=devices,
                metadata=metadata,
                notes=tuple(notes),
                **columns,
                **_place_in_run(metadata),
            )
        )

    def _memory_events(self, lane_of: npt.NDArray[np.int32]) -> MemoryEvents | None:
        found = {name: self._whole(name, np.int64) for name in ("memory_lane", "time_ns", *_OF_MEMORY)}
        on_host, index = found.pop("device_type") == 0, found.pop("device_index")
        lane, sizes = lane_of[found.pop("memory_lane")], found.pop("allocated_bytes")
        return MemoryEvents(lane=lane, bytes=sizes, device=np.where(on_host, -1, index), **found) if len(lane) else None

    def _categories(self) -> str:
        return ", ".join(repr(name or "none")[:80] for name in sorted(self._foreign)[:_CATEGORIES_NAMED])

    def _notes(self) -> list[str]:
        notes = []
        del self._foreign["Trace"]  # around the whole of old traces
        if self._foreign:
            left_out = f"({self._categories()}): {self._foreign.total()}."
            notes.append(f"Left out: events of categories that are not torch.profiler's {left_out}")
        if any(types == b"[]" and dims.strip(b"[], ") for dims, types, *_ in self._inputs):
            notes.append("Dtypes are not in the file, as in those of torch 1.8: every tensor is taken for float32.")
        return notes


def _place_in_run(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The rank's place, by the fields of ``Trace``."""
    found = converted(metadata.get("distributedInfo"), _Distributed) or _Distributed()
    own = converted(metadata.get(METADATA_KEY), _Distributed) or _Distributed()
    world_size = found.world_size if 0 < (found.world_size or 0) <= _MOST_RANKS else None
    # A group of all may be written as none, and frameworks make several of the same members, and of one rank alone.
    listed, everyone = converted(found.pg_config, list[_Group]) or [_Group()], range(world_size or 0)
    groups = {ranks for one in listed if len(ranks := tuple(sorted(one.ranks or everyone))) > 1}
    return {
        # torch names no rank in a run of one process, this package always does
        "rank": own.rank if found.rank is None else found.rank,
        "only_group": groups.pop() if len(groups) == 1 else None,
    }


def _launches(spans: list[Event], rows: Ints) -> Iterator[tuple[str, Any]]:
    yield "correlation", _integers([span.args.correlation for span in spans])


def _external_ids(arguments: list[Any]) -> Ints:
    return _integers([one.old_external_id if one.external_id == _ABSENT else one.external_id for one in arguments])


def _value(text: bytes) -> Any:
    return msgspec.json.decode(text) if text else None


def _recorded_inputs(texts: tuple[bytes, ...]) -> RecordedInputs:
    """What the texts of sizes, types, values and strides say; torch 1.8 has no types: what has sizes is float32."""
    dims, types, concrete, strides = map(_value, texts)
    dims = dims if isinstance(dims, list) else []
    if types == []:
        types = ["float" if one else "" for one in dims]
    return RecordedInputs(dims=dims, types=types if isinstance(types, list) else (), concrete=concrete, strides=strides)


def _bytes_of(inputs: RecordedInputs) -> int | None:
    """Bytes of all inputs; None if one of them is not known."""
    sizes = [
        math.prod(shape) * ELEMENT_BYTES.get(str(dtype).lower(), 0) if are_integers(shape) else 0
        for shape, dtype in zip(inputs.dims, inputs.types, strict=False)
    ]
    return sum(sizes) if sizes and all(sizes) else None


def _collective(arguments: Any) -> CollectiveArguments:
    element_bytes = ELEMENT_BYTES.get(str(arguments.dtype).lower())
    known = [count for count in (arguments.in_elements, arguments.out_elements) if type(count) is int]
    # Groups of one name may have other members on other ranks, and groups of the same members another name.
    group = [str(part) for part in (arguments.group_name, arguments.group_ranks) if part]
    return CollectiveArguments(
        name=str(arguments.collective),
        # The larger side, as communication benchmarks give it: what all_gather yields and reduce_scatter takes.
        bytes=max(known) * element_bytes if known and element_bytes is not None else None,
        group=" ".join(group) if group else None,
        group_size=converted(arguments.group_size, int),
    )


def _without_overlong(trace: Trace) -> Trace:
    """*trace* with a kernel that runs over its successors on the same stream ended where the next one begins."""
    rows = trace.of(Kind.KERNEL)
    rows = rows[np.lexsort((trace.start_ns[rows], trace.stream[rows], trace.device[rows]))]
    first = rows[: max(0, len(rows) - _FEW)]
    wrong = np.ones(len(first), dtype=bool)
    for ahead in range(1, _FEW + 1):
        other = rows[ahead : ahead + len(first)]
        wrong &= (trace.stream[other] == trace.stream[first]) & (trace.device[other] == trace.device[first])
        wrong &= trace.end_ns[first] >= trace.end_ns[other]
        wrong &= trace.duration_ns[first] > _LONGER * trace.duration_ns[other]
        # One call launches all kernels of a graph, and these may well run beside one another.
        wrong &= trace.correlation[other] != trace.correlation[first]
    found = np.flatnonzero(wrong)
    if not len(found):
        return trace
    duration_ns = trace.duration_ns.copy()
    duration_ns[rows[found]] = trace.start_ns[rows[found + 1]] - trace.start_ns[rows[found]]
    cut_us = int((trace.duration_ns - duration_ns).sum()) / NS_PER_US
    words = "Cut at the start of the next one: kernels that seem to run over their successors on the same stream: "
    return replace(trace, duration_ns=duration_ns, notes=(*trace.notes, f"{words}{len(found)}, by {cut_us:,.0f} us."))


@lru_cache(maxsize=1024)
def _product(sizes: bytes) -> int:
    """Of a grid's or a block's sizes; 0 where they are not known."""
    return math.prod(converted(_value(sizes), list[int]) or [0])


def _occupancy(blocks: int, threads: int, registers: Any, shared_bytes: int, device: DeviceProperties | None) -> float:
    """Percent of a multiprocessor's warps that a kernel can fill; NaN where it is not known.

    Registers are given to a warp 256 at a time.
    """
    if device is None or threads <= 0 or not device.max_threads or not device.sm_count:
        return math.nan
    warps, most_warps = -(-threads // 32), device.max_threads // 32
    limits = [most_warps // warps]
    if type(registers) is int and registers > 0:
        limits.append((device.registers or _REGISTERS) // (-(-registers * 32 // 256) * 256) // warps)
    if device.shared_memory:
        limits.append(device.shared_memory // shared_bytes)
    fitting = min(max(1, min(limits)), blocks / device.sm_count if blocks > 0 else math.inf)
    return 100.0 * min(1.0, fitting * warps / most_warps)
