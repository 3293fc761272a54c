"""Trace files of torch.profiler as columns: decoded in blocks, and what is known to be written wrongly put right."""

from __future__ import annotations

import gzip
import importlib.util
import io
import math
import re
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from itertools import compress, count
from os import PathLike, fspath
from typing import IO, Any, cast

import msgspec
import numpy as np

from lightning_flops.errors import LightningFlopsError
from lightning_flops.records import METADATA_KEY
from lightning_flops.trace.columns import (
    KIND_OF_CATEGORY,
    Collective,
    DeviceProperties,
    Kind,
    RecordedInputs,
    Trace,
    TraceFormatError,
    is_users_scope,
)
from lightning_flops.trace.intervals import NS_PER_US, Ints, numbered

_ABSENT = -1
_LONGEST_US = 2**62 / 1000
_FOREIGN = 255
_FEW, _LONGER = 3, 10  # a kernel that runs over so many of its stream, each so many times shorter, has a wrong end
_MUCH_SHARED_BYTES = 48 << 10  # Kineto writes an occupancy of 0 for kernels with more shared memory
_REGISTERS = 65536  # of a multiprocessor since compute capability 5
_ELEMENT_BYTES = {  # by the lower-case names of what communicates
    **dict.fromkeys(("double", "long", "complexfloat"), 8), **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("half", "bfloat16", "short"), 2), **dict.fromkeys(("byte", "char", "bool"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
}  # fmt: skip
BLOCK_BYTES = 1 << 17  # decoded at once: larger pieces go back to the system, and their pages are faulted in anew
_LONGEST_BYTES = 64 << 20  # most that is searched for the end of one event, or of what stands beside the events
_HEAD_KEYS = ("deviceProperties", "distributedInfo", METADATA_KEY)
_EVENTS = re.compile(rb'\A\[|(?<!\\)"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\s*,?\s*")
_END_OF_EVENT = re.compile(rb"\s*[,\]]")
_END_OF_LIST = re.compile(r"trailing characters \(byte (\d+)\)")
_BACKSLASH = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_BARE = re.compile(rb"(?<=[:,\[])(\s*)(?:[-+]?(?:inf(?:inity)?|nan)(?:\([a-z]*\))?|N/A)(?=\s*[,}\]])", re.I)
_REASONS: tuple[tuple[Any, str], ...] = (
    (msgspec.ValidationError, "an event is none of torch's: {}"),
    (msgspec.DecodeError, "not valid JSON: {}"),
    ((EOFError, zlib.error, gzip.BadGzipFile), "the gzip data is damaged or cut off: {}"),
    (ArithmeticError, "an event has no time that a clock shows"),
    ((TypeError, ValueError), "{}"),
)
_NULL_ARGUMENTS = re.compile(rb'"args"\s*:\s*null')
_RAW = msgspec.Raw(b"")
# Of an event's ``args`` those that are read, in the order of torch's files, and what stands for one that is not
# there. Anything may stand there; of shapes, which are long and often the same, the text is kept.
_ARGUMENTS: dict[str, tuple[str, Any]] = {
    "external_id": ("External id", _ABSENT), "old_id": ("external id", _ABSENT),
    "sequence": ("Sequence number", _ABSENT), "forward_thread": ("Fwd thread id", _ABSENT),
    "concrete": ("Concrete Inputs", _RAW), "types": ("Input type", _RAW), "strides": ("Input Strides", _RAW),
    "dims": ("Input Dims", _RAW), "old_dims": ("Input dims", _RAW),
    "device": ("device", _ABSENT), "correlation": ("correlation", _ABSENT),
    "bytes": ("bytes", _ABSENT), "registers": ("registers per thread", _ABSENT),
    "shared_memory": ("shared memory", _ABSENT), "blocks_per_sm": ("blocks per SM", math.nan), "grid": ("grid", _RAW),
    "block": ("block", _RAW), "occupancy_percent": ("est. achieved occupancy %", math.nan),
    "collective": ("Collective name", None), "in_elements": ("In msg nelems", None),
    "out_elements": ("Out msg nelems", None), "group_size": ("Group size", None), "dtype": ("dtype", None),
    "group_name": ("Process Group Name", None), "group_ranks": ("Process Group Ranks", None),
    "total_allocated": ("Total Allocated", _ABSENT), "size": ("Bytes", 0),
    "device_index": ("Device Id", _ABSENT), "device_type": ("Device Type", 0),
}  # fmt: skip
_FIELDS = [
    (name, msgspec.Raw if default is _RAW else Any, msgspec.field(name=key, default=default))
    for name, (key, default) in _ARGUMENTS.items()
]
_Arguments: Any = msgspec.defstruct("_Arguments", _FIELDS, gc=False, frozen=True)


class _Distributed(msgspec.Struct):
    """What the head of a trace says of its rank's place in the run."""

    rank: int | None = None
    world_size: int | None = None
    pg_config: list[dict[str, Any]] | None = None


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


DECODER = msgspec.json.Decoder(list[Event])  # what no table needs of a text is checked and passed over
# Columns of what an event's ``args`` say.
_AS_WRITTEN = ("sequence", "forward_thread", "correlation", "blocks_per_sm", "occupancy_percent")
# Types of columns as ``struct`` and numpy name them.
_CODES = defaultdict(lambda: np.dtype(np.int64).char, blocks_per_sm="d", occupancy_percent="d", kind="b")
_CODES |= dict.fromkeys(("name", "lane", "inputs", "collective", "launch"), "i")


def _packed(name: str, values: Sequence[Any]) -> bytes:
    """A column; an argument that is no number, or over 64 bits, is as one that is not there."""
    try:
        return struct.pack(f"{len(values)}{_CODES[name]}", *values)  # faster than numpy, and takes no other types
    except (struct.error, OverflowError):
        return np.array([_number(value, _ARGUMENTS[name][1]) for value in values], dtype=_CODES[name]).tobytes()


def _nanoseconds(times_us: list[Any]) -> Ints:
    """Whole nanoseconds of times in microseconds: files give three decimals, so that sums are exact."""
    try:
        times = np.frombuffer(struct.pack(f"{len(times_us)}d", *times_us))
    except (struct.error, OverflowError):  # some are text
        return np.array([round(Decimal(time or 0) * 1000) for time in times_us], dtype=np.int64)
    if not (np.abs(times) < _LONGEST_US).all():  # nor is one that is no number
        raise ValueError("an event has no time that a clock shows")
    whole_us = np.floor(times)
    return np.rint((times - whole_us) * 1000).astype(np.int64) + whole_us.astype(np.int64) * 1000


def _number(value: Any, absent: float) -> float:
    try:
        number = type(absent)(value)
    except (TypeError, ValueError, OverflowError):
        return absent
    return number if abs(number) < 2**63 else absent


def _converted(value: Any, to: Any) -> Any:
    """*value* as what it should be; None if it is something else."""
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError:
        return None


@lru_cache(maxsize=4096)
def _kind_of(category: str | None) -> int:
    """The kind of events of this category, which torch 1.8 wrote with capitals; a number of its own if not torch's."""
    return KIND_OF_CATEGORY.get((category or "").lower(), _FOREIGN)


class Columns:
    """Columns that grow by one list of events after another."""

    def __init__(self, source: str) -> None:
        self._source = source
        # A number for each different key, in order of first appearance.
        self._names, self._lanes, self._inputs, self._collectives, self._launches = (
            defaultdict[Any, int](count().__next__) for _ in range(5)
        )
        self._parts, self._memory = defaultdict[str, bytearray](bytearray), defaultdict[str, bytearray](bytearray)
        self._foreign, self._seen = Counter[str](), 0

    def add(self, events: Sequence[Event]) -> None:
        """Append what *events* say; those of another tool are counted and left out."""
        spans, kinds = self._spans(events)
        times = _nanoseconds([*[span.ts for span in spans], *[span.dur for span in spans]])
        self._parts["start_ns"] += times[: len(spans)].tobytes()
        self._parts["duration_ns"] += times[len(spans) :].tobytes()
        self._parts["kind"] += kinds
        given = [span.args for span in spans]
        columns = self._numbers(spans) | {name: [getattr(one, name) for one in given] for name in _AS_WRITTEN}
        columns |= {
            "external_id": [one.old_id if one.external_id == _ABSENT else one.external_id for one in given],
            "device": [span.pid if span.args.device == _ABSENT else span.args.device for span in spans],
            "bytes": [one.bytes if one.collective is None else _bytes(one) for one in given],
            "launch": [self._launch(one) if one.occupancy_percent == 0 else _ABSENT for one in given],
        }
        for name, values in columns.items():
            self._parts[name] += _packed(name, values)

    def _spans(self, events: Sequence[Event]) -> tuple[list[Any], bytes]:
        """Those of *events* that have a length and are torch's, and their kinds; what all others say is noted."""
        spans = [event for event in events if event.ph == "X"]
        self._seen += len(events)
        if len(spans) < len(events):
            self._add_memory([event for event in events if event.ph == "i" and event.name == "[memory]"])
        kinds = bytes(map(_kind_of, [span.cat for span in spans]))
        if _FOREIGN not in kinds:
            return spans, kinds
        ours = [kind != _FOREIGN for kind in kinds]
        self._foreign.update(span.cat or "none" for span, own in zip(spans, ours, strict=True) if not own)
        return [*compress(spans, ours)], bytes(compress(kinds, ours))

    def _numbers(self, spans: Sequence[Any]) -> dict[str, list[Any]]:
        """Columns of what stands in many events: the number of each."""
        return {
            "name": [*map(self._names.__getitem__, [span.name for span in spans])],
            "lane": [self._lanes[span.pid, span.tid] for span in spans],
            "inputs": [
                self._inputs[(*map(bytes, (dims, one.types, one.concrete, one.strides)),)] if dims else _ABSENT
                for one in (span.args for span in spans)
                for dims in (one.dims or one.old_dims,)
            ],
            "collective": [
                _ABSENT if one.collective is None else self._collectives[_said(one)]
                for one in (span.args for span in spans)
            ],
        }

    def _launch(self, arguments: Any) -> int:
        """The number of a launch with so much shared memory that its occupancy of 0 is false; -1 for another one."""
        if (shared_memory := _number(arguments.shared_memory, 0)) <= _MUCH_SHARED_BYTES:
            return _ABSENT
        registers = _number(arguments.registers, 0)
        return self._launches[bytes(arguments.grid), bytes(arguments.block), registers, shared_memory]

    def _add_memory(self, marks: Sequence[Event]) -> None:
        """Append what the marks of allocations and frees say."""
        for name in ("size", "device_index", "device_type", "total_allocated"):
            self._memory[name] += _packed(name, [getattr(mark.args, name) for mark in marks])
        self._memory["lane"] += _packed("lane", [self._lanes[mark.pid, mark.tid] for mark in marks])
        self._memory["time_ns"] += _nanoseconds([mark.ts for mark in marks]).tobytes()

    def trace(self, metadata: Mapping[str, Any]) -> Trace:
        """The finished trace, with what else stands in the file as *metadata*; the columns are used up."""
        names = tuple(map(str, self._names))
        columns: dict[str, Any] = {name: np.frombuffer(part, _CODES[name]) for name, part in self._parts.items()}
        kind, lane = columns.pop("kind"), columns.pop("lane")
        scopes = np.array([not is_users_scope(text) for text in names], dtype=bool)[columns["name"]]
        devices = tuple(_converted(metadata.get("deviceProperties"), list[DeviceProperties]) or ())
        notes = [*self._left_out(kind), *self._mend_occupancy(columns, devices)]
        # A process or thread may be written as a number here and as text there.
        lanes, lane_of = numbered((str(process), str(thread)) for process, thread in self._lanes)
        memory = {name: np.frombuffer(part, _CODES[name]) for name, part in self._memory.items() if part}
        if memory:
            memory["lane"] = lane_of[memory["lane"]]
            memory["device"] = np.where(memory.pop("device_type") == 0, -1, memory.pop("device_index"))
        trace = Trace(
            source=self._source,
            names=names,
            kind=np.where((kind == Kind.OPERATOR) & scopes, np.int8(Kind.ANNOTATION), kind),
            lane=lane_of.astype(np.int32)[lane],
            processes=tuple(process for process, _ in lanes),
            recorded_inputs=tuple(map(_recorded_inputs, self._inputs)),
            collectives=(*self._collectives, Collective()),
            memory=memory,
            devices=devices,
            notes=tuple(notes),
            **columns,
            **_place_in_run(metadata),
        )
        wrong = trace.duration_ns < 0
        notes = [*trace.notes, f"Left out: events with a negative length: {wrong.sum():,}."]
        return _without_overlong(trace.only(~wrong, notes=tuple(notes)) if wrong.any() else trace)

    def _left_out(self, kind: Any) -> Iterator[str]:
        """What of the file is not read, in sentences; refuses a file of which nothing is."""
        left_out = {name: count for name, count in self._foreign.items() if name != "Trace"}  # around all of old ones
        foreign = ", ".join(repr(name)[:80] for name in sorted(left_out)[:5])
        if not self._seen:
            raise ValueError("it has no events: nothing was recorded while torch.profiler was on")
        if not (kind > Kind.PYTHON).any():
            raise ValueError(
                f"none of its {self._seen} events is an operator, a scope, a runtime call or a kernel of "
                f"torch.profiler; others are {foreign or 'none'}"
            )
        if foreign:
            yield f"Left out: events of categories that are not torch.profiler's ({foreign}): {sum(left_out.values())}."
        if any(types == b"[]" and dims.strip(b"[], ") for dims, types, *_ in self._inputs):
            yield "Dtypes are not in the file, as in those of torch 1.8: every tensor is taken for float32."

    def _mend_occupancy(self, columns: dict[str, Any], devices: Sequence[DeviceProperties]) -> Iterator[str]:
        """Work out occupancies that are falsely written as 0, and say of how many kernels."""
        launch, by_index = columns.pop("launch"), {one.index: one for one in devices}
        rows, launches = np.flatnonzero(launch >= 0), [*self._launches]
        found = [_occupancy(*launches[launch[row]], by_index.get(columns["device"][row])) for row in rows]
        columns["occupancy_percent"] = columns["occupancy_percent"].copy()
        columns["occupancy_percent"][rows] = found
        lost = sum(map(math.isnan, found))
        known = f"worked out for {len(found) - lost:,} of them, the others are left out" if lost else "worked out"
        if found:
            yield f"Occupancy is written as 0 for {len(found):,} kernels with much shared memory: {known}."


def _place_in_run(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The rank's place, by the fields of ``Trace``."""
    found = _converted(metadata.get("distributedInfo"), _Distributed) or _Distributed()
    own = _converted(metadata.get(METADATA_KEY), _Distributed) or _Distributed()
    # A group of all may be written as none, and frameworks make several of the same members, and of one rank alone.
    everyone = range(min(found.world_size or 0, 1 << 20))  # no job has more
    listed = [_converted(one.get("ranks"), list[int]) or everyone for one in found.pg_config or [{}]]
    groups = {tuple(sorted(ranks)) for ranks in listed if len(ranks) > 1}
    return {
        # torch names no rank in a run of one process, this package always does
        "rank": own.rank if found.rank is None else found.rank,
        "only_group": groups.pop() if len(groups) == 1 else None,
    }


def _recorded_inputs(texts: tuple[bytes, ...]) -> RecordedInputs:
    """What the texts of sizes, types, values and strides say; torch 1.8 has no types: what has sizes is float32."""
    dims, types, concrete, strides = (msgspec.json.decode(text) if text else None for text in texts)
    dims = dims if isinstance(dims, list) else []
    types = ["float" if one else "" for one in dims] if types == [] else types
    return RecordedInputs(dims=dims, types=types if isinstance(types, list) else (), concrete=concrete, strides=strides)


def _said(arguments: Any) -> Collective:
    # Groups of one name may have other members on other ranks, and groups of the same members another name.
    group = " ".join(str(part) for part in (arguments.group_name, arguments.group_ranks) if part)
    return Collective(str(arguments.collective), group or None, _converted(arguments.group_size, int))


def _bytes(arguments: Any) -> int:
    """Bytes of a collective's larger side, as benchmarks give it: what all_gather yields, or reduce_scatter takes."""
    size = _ELEMENT_BYTES.get(str(arguments.dtype).lower(), 0)
    known = [count for count in (arguments.in_elements, arguments.out_elements) if type(count) is int]
    return int(_number(max(known) * size, _ABSENT)) if known and size else _ABSENT


@lru_cache(maxsize=4096)
def _occupancy(grid: bytes, block: bytes, registers: int, shared_memory: int, device: DeviceProperties | None) -> float:
    """Percent of a multiprocessor's warps that a kernel launched so can fill; NaN where that is not known."""
    sizes = (msgspec.json.decode(text) if text else None for text in (grid, block))
    blocks, threads = (math.prod(_converted(size, list[int]) or [0]) for size in sizes)
    if device is None or threads <= 0 or not device.max_threads or not device.sm_count:
        return math.nan
    warps, most_warps = -(-threads // 32), device.max_threads // 32
    # What a multiprocessor has, by what a block takes of it; registers are given to a warp 256 at a time.
    of_registers = device.registers or _REGISTERS, -(-registers * 32 // 256) * 256 * warps
    limits = (most_warps, warps), of_registers, (device.shared_memory, shared_memory)
    fitting = max(1, min(has // takes for has, takes in limits if has and takes > 0))
    return float(100 * min(1.0, min(fitting, blocks / device.sm_count or math.inf) * warps / most_warps))


def _without_overlong(trace: Trace) -> Trace:
    """*trace* with a kernel that runs over its successors on the same stream ended where the next one begins."""
    rows = trace.by_start(trace.kind == Kind.KERNEL)
    rows = rows[np.argsort(trace.lane[rows], kind="stable")]
    first, wrong = rows[:-_FEW], np.full(max(0, len(rows) - _FEW), True)
    for place in range(1, _FEW + 1):
        other = rows[place : place + len(first)]
        # One call launches all kernels of a graph, and these may well run beside one another.
        wrong &= (trace.lane[other] == trace.lane[first]) & (trace.correlation[other] != trace.correlation[first])
        wrong &= trace.end_ns[first] >= trace.end_ns[other]
        wrong &= trace.duration_ns[first] > _LONGER * trace.duration_ns[other]
    found = np.flatnonzero(wrong)
    if not len(found):
        return trace
    duration_ns = trace.duration_ns.copy()
    duration_ns[rows[found]] = trace.start_ns[rows[found + 1]] - trace.start_ns[rows[found]]
    cut_us = int((trace.duration_ns - duration_ns).sum()) / NS_PER_US
    note = (
        "Cut at the start of the next one: kernels that seem to run over their successors on the same stream: "
        f"{len(found)}, by {cut_us:,.0f} us."
    )
    return replace(trace, duration_ns=duration_ns, notes=(*trace.notes, note))


def load_trace(path: str | PathLike[str]) -> Trace:
    """The trace in a Chrome-format JSON file that torch.profiler wrote, plain or gzipped; read once, so also a pipe.

    Args:
        path: a local path, or any URL that fsspec opens. Whether it is gzipped is seen from its first bytes.

    Raises:
        TraceFormatError: the file cannot be opened, is empty, cut off, no JSON, or no trace of torch.profiler.
    """
    source, metadata = fspath(path), dict[str, Any]()
    columns = Columns(source)
    try:
        with ExitStack() as stack:
            for events in _event_lists(_opened(source, stack), metadata):
                columns.add(events)
                events.clear()  # the next ones are made in their memory
            return columns.trace(metadata)
    except (LightningFlopsError, MemoryError):
        raise
    except Exception as error:  # whatever stands in a file, and whatever a remote file system raises
        reason = "the file ends in the middle: it was cut off or is still written"
        if not isinstance(error, msgspec.DecodeError) or "truncated" not in str(error):
            # Remote file systems often give a path alone.
            words = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            reason = next((form for kinds, form in _REASONS if isinstance(error, kinds)), "cannot be read: {}")
            reason = reason.format(words if reason.startswith("cannot") else error)
        raise TraceFormatError(f"{source}: {reason[:300]}") from error


def _opened(source: str, stack: ExitStack) -> IO[bytes]:
    try:
        opens = importlib.import_module("fsspec" if "://" in source or "::" in source else "io").open
        stream = stack.enter_context(io.BufferedReader(stack.enter_context(opens(source, "rb"))))
    except (ImportError, ValueError) as error:  # an unknown protocol, or its package is missing
        raise TraceFormatError(f"{source}: cannot be opened: {error}") from error
    if stream.peek(2)[:2] != b"\x1f\x8b":
        return stream
    # isal unpacks several times as fast where it is installed.
    unpacks = importlib.import_module("isal.igzip") if importlib.util.find_spec("isal") else gzip
    return cast("IO[bytes]", unpacks.open(stream, "rb"))


def _event_lists(stream: IO[bytes], metadata: dict[str, Any]) -> Iterator[list[Event]]:
    """The events in order, a list at a time; what else is asked for is put into *metadata*."""
    head, text = _head(stream)
    at_end = False
    while not at_end:
        found = _decoded(text) or _decoded(text, _mended)
        if found is not None:
            events, text, at_end = found
            yield events
        if not at_end:
            more = stream.read(max(BLOCK_BYTES, len(text)))  # where no event ends in a block: not so many tries
            if found is None and (not more or len(text) > _LONGEST_BYTES):
                DECODER.decode(b"[" + _mended(text.strip().removeprefix(b",")))  # says what is wrong with it
                raise ValueError("an event is longer than a trace has them")
            text += more
    if head != b"[":
        metadata |= _members(head + b"]" + text + stream.read(_LONGEST_BYTES))


def _head(stream: IO[bytes]) -> tuple[bytes, bytes]:
    """What stands before the first event, with the list's bracket; and what follows, as far as read."""
    text = stream.read(BLOCK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    while (found := _EVENTS.search(text)) is None:
        more = stream.read(len(text))
        if not more or len(text) > _LONGEST_BYTES:
            if text:
                _members(text)  # says what is wrong with it
            raise ValueError('a JSON object without a list "traceEvents"' if text else "the file is empty")
        text += more
    return text[: found.end()], text[found.end() :]


def _decoded(text: bytes, mend: Callable[[memoryview], Any] = memoryview) -> tuple[list[Event], bytes, bool] | None:
    """Events that stand whole at the beginning of *text*, what follows, and if the list ends there; None without."""
    # An event ends with a brace, and a comma behind it. Within an event such a pair may stand too; then the piece
    # before it is no list.
    begin = _BETWEEN.match(text).end()  # type: ignore[union-attr]  # it matches nothing as well
    if text.startswith(b"]", begin):
        return [], text[begin + 1 :], True
    end, tries = len(text), 0
    while tries < 8 and (end := text.rfind(b"}", begin, end)) >= 0:
        if _END_OF_EVENT.match(text, end + 1) is None:
            continue
        tries += 1
        piece = mend(memoryview(text)[begin : end + 1])
        try:
            return DECODER.decode(b"[%b]" % piece), text[end + 1 :], False
        except (msgspec.DecodeError, RecursionError) as error:
            if (trailing := _END_OF_LIST.search(str(error))) is not None:  # the list has ended before
                at = int(trailing[1]) - 2  # it counts from 1, and the bracket before
                return DECODER.decode(b"[" + piece[:at]), b"%b%b" % (piece[at:], text[end + 1 :]), True
    return None


def _mended(text: bytes | memoryview) -> bytes:
    """*text* with backslashes escaped, null for numbers that JSON does not have, and no bytes that are no UTF-8."""
    text = str(text, "utf-8", errors="replace").encode()
    text = _BACKSLASH.sub(lambda found: found[0] if found[1] else b"\\\\", text)
    return _NULL_ARGUMENTS.sub(b'"args":{}', _BARE.sub(rb"\1null", text))


def _members(text: bytes) -> dict[str, Any]:
    """What is asked for of the object in *text*."""
    found = msgspec.json.decode(_mended(text), type=dict[str, Any])
    return {key: found[key] for key in _HEAD_KEYS if key in found}
