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
from lightning_flops.trace.intervals import NS_PER_US, Ints
from lightning_flops.trace.names import ELEMENT_BYTES, KIND_OF_CATEGORY, Kind, is_users_scope
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
    "dims": ("Input Dims", _RAW), "old_dims": ("Input dims", _RAW),
    "device": ("device", _ABSENT), "stream": ("stream", _ABSENT), "correlation": ("correlation", _ABSENT),
    "bytes": ("bytes", _ABSENT), "registers": ("registers per thread", _ABSENT),
    "shared_memory": ("shared memory", _ABSENT), "blocks_per_sm": ("blocks per SM", math.nan), "grid": ("grid", _RAW),
    "block": ("block", _RAW), "occupancy_percent": ("est. achieved occupancy %", math.nan),
    "collective": ("Collective name", None), "in_elements": ("In msg nelems", None),
    "out_elements": ("Out msg nelems", None), "group_size": ("Group size", None), "dtype": ("dtype", None),
    "group_name": ("Process Group Name", None), "group_ranks": ("Process Group Ranks", None),
    "total_reserved": ("Total Reserved", _ABSENT), "total_allocated": ("Total Allocated", _ABSENT),
    "allocated_bytes": ("Bytes", 0), "device_index": ("Device Id", _ABSENT),
    "device_type": ("Device Type", 0),
}  # fmt: skip
"""Of an event's ``args`` those that are read, and what stands for one that is not there; in the order of torch's files.

Anything may stand there; of shapes, which are long and often the same, the text is kept.
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


_OF_HOST = ("sequence", "forward_thread", "external_id", "old_external_id")
_OF_LAUNCHES = ("correlation", "stream")
_OF_DEVICE = ("bytes", "device", "blocks_per_sm", "occupancy_percent", "external_id", "old_external_id")
_OF_MEMORY = ("allocated_bytes", "device_index", "device_type", "total_allocated", "total_reserved")


@lru_cache(maxsize=1024)
def _kind(category: str | None) -> int:
    return KIND_OF_CATEGORY.get((category or "").lower(), _FOREIGN)


def _numbers() -> defaultdict[Any, int]:
    """A number for each different key, in order of first appearance."""
    found: defaultdict[Any, int] = defaultdict()
    found.default_factory = found.__len__
    return found


def _packed(code: str, values: Sequence[Any]) -> npt.NDArray[Any]:
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


def _columns(arguments: list[Any], names: tuple[str, ...]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Arguments of events; -1 or NaN for one that an event does not have, that is no number, or over 64 bits."""
    for name, values in zip(names, zip(*map(attrgetter(*names), arguments), strict=True), strict=bool(arguments)):
        code, convert = ("d", _fraction) if isinstance(_ARGUMENTS[name][1], float) else ("q", _integer)
        try:
            yield name, _packed(code, values)
        except _NOT_AS_EXPECTED:
            yield name, np.array([*map(convert, values)], dtype=code)


def _integer(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return _ABSENT
    return number if abs(number) <= _LARGEST else _ABSENT


def _fraction(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


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
        self._names, self._lanes, self._inputs = _numbers(), _numbers(), _numbers()
        self._parts: defaultdict[str, list[npt.NDArray[Any]]] = defaultdict(list)
        self._memory: defaultdict[str, list[npt.NDArray[Any]]] = defaultdict(list)
        self._collectives: dict[int, CollectiveArguments] = {}
        self._without_occupancy: dict[int, Any] = {}
        """By row the arguments."""
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
        absent = {name: _ARGUMENTS[name][1] for name in (*_OF_HOST, *_OF_LAUNCHES, *_OF_DEVICE)}
        columns: dict[str, Any] = {name: np.full(len(spans), value) for name, value in absent.items()}
        columns["kind"] = kind
        columns["name"] = _packed("i", [self._names[span.name] for span in spans])
        columns["lane"] = _packed("i", [self._lanes[span.pid, span.tid] for span in spans])
        times = _nanoseconds([*[span.ts for span in spans], *[span.dur for span in spans]])
        columns["start_ns"], columns["duration_ns"] = times[: len(spans)], times[len(spans) :]
        columns["inputs"] = np.full(len(spans), _ABSENT, dtype=np.int32)
        on_host = (kind == Kind.OPERATOR) | (kind == Kind.ANNOTATION)
        on_device = kind >= Kind.KERNEL
        for chosen, names in ((on_host, _OF_HOST), (kind >= Kind.RUNTIME, _OF_LAUNCHES), (on_device, _OF_DEVICE)):
            rows, arguments = np.flatnonzero(chosen), [span.args for span in compress(spans, chosen.tobytes())]
            for name, values in _columns(arguments, names):
                columns[name][rows] = values
            if names is _OF_HOST and any(one.dims or one.old_dims for one in arguments):
                columns["inputs"][rows] = [*map(self._input, arguments)]
            if names is not _OF_LAUNCHES:
                self._keep((rows + self._rows).tolist(), arguments)
        if (unnamed := on_device & (columns["device"] == _ABSENT)).any():
            columns["device"][unnamed] = [_integer(span.pid) for span in compress(spans, unnamed.tobytes())]
        for name, values in columns.items():
            self._parts[name].append(values)
        self._rows += len(spans)

    def _input(self, one: Any) -> int:
        dims = one.dims or one.old_dims
        return self._inputs[(*map(bytes, (dims, one.types, one.concrete, one.strides)),)] if dims else _ABSENT

    def _keep(self, rows: list[int], arguments: list[Any]) -> None:
        for row, one in zip(rows, arguments, strict=True):
            if one.collective is not None:
                self._collectives[row] = _collective(one)
            if one.occupancy_percent == 0 and type(one.shared_memory) is int and one.shared_memory > _MUCH_SHARED_BYTES:
                self._without_occupancy[row] = one

    def _add_memory(self, events: list[Event]) -> None:
        for name, values in _columns([event.args for event in events], _OF_MEMORY):
            self._memory[name].append(values)
        self._memory["lane"].append(_packed("i", [self._lanes[event.pid, event.tid] for event in events]))
        self._memory["time_ns"].append(_nanoseconds([event.ts for event in events]))

    def trace(self, metadata: Mapping[str, Any]) -> Trace:
        """The finished trace; the columns are used up.

        Raises:
            ValueError: none of the events is one that a table needs.
        """
        names = tuple(map(str, self._names))
        columns: dict[str, Any] = {name: np.concatenate(parts) for name, parts in self._parts.items()}
        kind, name_of = columns.pop("kind").astype(np.int8), columns["name"]
        old_ids, ids = columns.pop("old_external_id"), columns["external_id"]
        columns["external_id"] = np.where(ids == _ABSENT, old_ids, ids)
        del self._foreign["Trace"]  # around the whole of old traces
        foreign = ", ".join(repr(name or "none")[:80] for name in sorted(self._foreign)[:_CATEGORIES_NAMED])
        if not (kind > Kind.PYTHON).any():
            words = "is an operator, a scope, a runtime call or a kernel of torch.profiler; others are"
            raise ValueError(f"none of its {self._seen} events {words} {foreign or 'none'}")
        scopes = np.array([not is_users_scope(text) for text in names], dtype=bool)
        kind = np.where((kind == Kind.OPERATOR) & scopes[name_of], np.int8(Kind.ANNOTATION), kind)
        devices = tuple(converted(metadata.get("deviceProperties"), list[DeviceProperties]) or ())
        notes = []
        if foreign:
            left_out = f"({foreign}): {self._foreign.total()}."
            notes.append(f"Left out: events of categories that are not torch.profiler's {left_out}")
        if any(types == b"[]" and dims.strip(b"[], ") for dims, types, *_ in self._inputs):
            notes.append("Dtypes are not in the file, as in those of torch 1.8: every tensor is taken for float32.")
        if without := self._without_occupancy:
            by_index, on = {one.index: one for one in devices}, columns["device"]
            found = [_occupancy(one, by_index.get(on[row])) for row, one in without.items()]
            columns["occupancy_percent"][[*without]] = found
            known = len(found) - sum(map(math.isnan, found))
            words = "kernels with much shared memory: worked out of"
            notes.append(f"Occupancy is written as 0 of {len(found)} {words} {known}.")
        # A process or thread may be written as a number here and as text there.
        lanes = _numbers()
        lane_of = np.array([lanes[str(process), str(thread)] for process, thread in self._lanes], dtype=np.int32)
        trace = Trace(
            source=self._source,
            names=names,
            lanes=tuple(lanes),
            kind=kind,
            lane=lane_of[columns.pop("lane")],
            duration_ns=np.maximum(columns.pop("duration_ns"), 0),
            recorded_inputs=tuple(map(_recorded_inputs, self._inputs)),
            collectives=self._collectives,
            memory=self._memory_events(lane_of),
            devices=devices,
            metadata=metadata,
            notes=tuple(notes),
            **columns,
            **_place_in_run(metadata),
        )
        return _without_overlong(trace)

    def _memory_events(self, lane_of: npt.NDArray[np.int32]) -> MemoryEvents | None:
        found = {name: np.concatenate(parts) for name, parts in self._memory.items()}
        if not len(found.get("lane", ())):
            return None
        on_host, index = found.pop("device_type") == 0, found.pop("device_index")
        lane, sizes = lane_of[found.pop("lane")], found.pop("allocated_bytes")
        return MemoryEvents(lane=lane, bytes=sizes, device=np.where(on_host, -1, index), **found)


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


def _value(text: bytes) -> Any:
    return msgspec.json.decode(text) if text else None


def _recorded_inputs(texts: tuple[bytes, ...]) -> RecordedInputs:
    """What the texts of sizes, types, values and strides say; torch 1.8 has no types: what has sizes is float32."""
    dims, types, concrete, strides = map(_value, texts)
    dims = dims if isinstance(dims, list) else []
    if types == []:
        types = ["float" if one else "" for one in dims]
    return RecordedInputs(dims=dims, types=types if isinstance(types, list) else (), concrete=concrete, strides=strides)


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
    first = rows[: max(0, len(rows) - _FEW), np.newaxis]
    others = rows[np.arange(len(first))[:, np.newaxis] + np.arange(1, _FEW + 1)]

    def same(column: Ints) -> Any:
        return column[others] == column[first]

    longer = trace.duration_ns[first] > _LONGER * trace.duration_ns[others]
    # One call launches all kernels of a graph, and these may well run beside one another.
    wrong = same(trace.stream) & same(trace.device) & ~same(trace.correlation) & longer
    wrong = (wrong & (trace.end_ns[first] >= trace.end_ns[others])).all(axis=1)
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


def _occupancy(launched: Any, device: DeviceProperties | None) -> float:
    """Percent of a multiprocessor's warps that a kernel of these arguments can fill; NaN where it is not known.

    Registers are given to a warp 256 at a time.
    """
    blocks, threads, registers = _product(bytes(launched.grid)), _product(bytes(launched.block)), launched.registers
    if device is None or threads <= 0 or not device.max_threads or not device.sm_count:
        return math.nan
    warps, most_warps = -(-threads // 32), device.max_threads // 32
    limits = [most_warps // warps]
    if type(registers) is int and registers > 0:
        limits.append((device.registers or _REGISTERS) // (-(-registers * 32 // 256) * 256) // warps)
    if device.shared_memory:
        limits.append(device.shared_memory // launched.shared_memory)
    fitting = min(max(1, min(limits)), blocks / device.sm_count if blocks > 0 else math.inf)
    return 100.0 * min(1.0, fitting * warps / most_warps)
