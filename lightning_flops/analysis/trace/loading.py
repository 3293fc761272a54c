"""Read a torch trace file into columns, a block at a time."""

from __future__ import annotations

import gzip
import importlib
import reprlib
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike, fspath
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace.columns import CollectiveArguments, DeviceProperties, Lane, MemoryEvents, Trace
from lightning_flops.analysis.trace.json_stream import StreamError, event_batches, fast_decoder
from lightning_flops.analysis.trace.names import ELEMENT_BYTES, KIND_OF_CATEGORY, Kind, is_scope_written_as_operator
from lightning_flops.analysis.trace_marks import METADATA_KEY
from lightning_flops.errors import LightningFlopsError
from lightning_flops.records import TraceColumns

TEXTS_LIMIT_BYTES = 64 << 20
"""Most bytes of all distinct names, threads and process groups of a trace; some 100 KB is usual."""

_GZIP_MAGIC = b"\x1f\x8b"
_HEAD_KEYS = frozenset(("deviceProperties", "distributedInfo", "baseTimeNanoseconds", METADATA_KEY))
"""What is read of a file beside the events."""
_LARGEST_INTEGER = 2**63 - 1
_LONGEST_NS = 2**62
"""Sums of a time and a length stay below the largest integer of a column; 146 years."""
_MOST_RANKS = 1 << 20
_BYTES_OF_A_LANE = 400
_CATEGORIES_NAMED = 5
_NOTHING: Mapping[str, Any] = {}
_Number = TypeVar("_Number", np.int32, np.int64, np.float64)


class TraceFormatError(LightningFlopsError, ValueError):
    """A trace file cannot be read; the message names the file and what is wrong with it."""


def load_trace(path: str | PathLike[str], *, decoder: Callable[[str], Any] | None = None) -> Trace:
    """The trace in a Chrome-format JSON file that torch.profiler wrote, plain or gzipped.

    The file is read once, from its beginning to its end, so it may be a pipe. In memory are

    - of each event at most 160 bytes, and of one that tells of a collective or of shapes at most 700;
    - every distinct name, thread and process group once: more than ``TEXTS_LIMIT_BYTES`` of these are an error;
    - some megabytes of text: an event of more than ``json_stream.VALUE_LIMIT`` characters is an error, and one of so
      many can take 150 MB while it is read.

    What stands beside the events and no table needs is passed over, in time that grows with its length alone.

    Args:
        path: a local path, or any URL that fsspec opens. Whether it is gzipped is seen from its first bytes.
        decoder: makes Python values of JSON text; orjson's where it is installed, else the standard library's.

    Raises:
        TraceFormatError: the file cannot be opened, is empty, cut off, no JSON, no trace of torch.profiler, or beyond
            one of these limits.
    """
    source = fspath(path)
    metadata: dict[str, Any] = {}
    columns = _Builder(source)
    try:
        with ExitStack() as stack:
            stream = _open(source, stack)
            for batch in event_batches(stream, metadata, keys=_HEAD_KEYS, loads=decoder or fast_decoder()):
                columns.add(batch)
    except StreamError as error:
        raise TraceFormatError(f"{source}: {error}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceFormatError(f"{source}: the gzip data is damaged or cut off: {error}") from error
    except OSError as error:
        reason = error.strerror or f"{type(error).__name__}: {error}"  # remote file systems often give a path alone
        raise TraceFormatError(f"{source}: cannot be read: {reason}") from error
    except LightningFlopsError:
        raise
    except Exception as error:
        if "://" not in source:
            raise
        # What a remote file system raises is its own affair; that it was this file is ours.
        raise TraceFormatError(f"{source}: cannot be read: {type(error).__name__}: {error}") from error
    return columns.trace(metadata)


def trace_from_events(
    events: Iterable[Mapping[str, Any]], *, metadata: Mapping[str, Any] | None = None, source: str = "(events)"
) -> Trace:
    """The trace of events that are already in memory, as dicts in the Chrome trace format.

    Args:
        events: dicts as they stand in a file's ``traceEvents``.
        metadata: the other keys at the top of a file, such as ``deviceProperties``.
        source: what messages call these events.

    Raises:
        TraceFormatError: an event lacks what its kind must have, or none is torch.profiler's.
    """
    columns = _Builder(source)
    columns.add(list(events))
    return columns.trace(metadata or {})


def trace_from_columns(
    columns: TraceColumns, *, process: int, metadata: Mapping[str, Any] | None = None, source: str = "(profiler)"
) -> Trace:
    """The trace of host events that are already in memory as columns: no event is looked at by itself.

    Args:
        columns: the events.
        process: number of the process they ran in.
        metadata: what stands at the top of a file, beside the events.
        source: what messages call these events.

    Raises:
        TraceFormatError: none of the events is torch.profiler's.
    """
    metadata = metadata or {}
    kinds = np.array([KIND_OF_CATEGORY.get(category.lower(), -1) for category in columns.categories], dtype=np.int8)
    kind = kinds[_int32(columns.category)] if columns.category else np.zeros(0, dtype=np.int8)
    kept = np.flatnonzero(kind >= 0)
    kind, name = kind[kept], _int32(columns.name)[kept]
    scopes = np.array([is_scope_written_as_operator(text) for text in columns.names], dtype=bool)
    kind = np.where((kind == Kind.OPERATOR) & scopes[name], np.int8(Kind.ANNOTATION), kind)
    if not (kind != Kind.OTHER).any():
        raise TraceFormatError(f"{source}: the trace holds no events of torch.profiler")
    nowhere = np.full(len(kept), -1, dtype=np.int64)
    unknown = np.full(len(kept), np.nan)
    memory_count = len(columns.memory_bytes)
    memory = MemoryEvents(
        lane=_int32(columns.memory_thread),
        time_ns=_int64(columns.memory_time_ns),
        bytes=_int64(columns.memory_bytes),
        device_type=np.zeros(memory_count, dtype=np.int32),
        device=np.full(memory_count, -1, dtype=np.int32),
    )
    return Trace(
        source=source,
        names=columns.names,
        lanes=tuple(Lane(process=str(process), thread=str(thread)) for thread in columns.threads),
        name=name,
        kind=kind,
        lane=_int32(columns.thread)[kept],
        start_ns=_int64(columns.start_ns)[kept],
        duration_ns=_int64(columns.duration_ns)[kept],
        correlation=nowhere,
        external_id=nowhere,
        sequence=_int64(columns.sequence)[kept],
        forward_thread=_int64(columns.forward_thread)[kept],
        device=nowhere.astype(np.int32),
        stream=nowhere,
        blocks_per_sm=unknown,
        occupancy_percent=unknown,
        bytes=nowhere,
        collectives={
            new: CollectiveArguments(bytes=_bytes_of(*columns.inputs[old]))
            for new, old in enumerate(kept.tolist())
            if old in columns.inputs
        }
        if columns.inputs
        else {},
        memory=memory if memory_count else None,
        devices=(),
        **_place(metadata),
        metadata=metadata,
    )


def _open(source: str, stack: ExitStack) -> IO[bytes]:
    if "://" in source or "::" in source:
        try:
            fsspec = importlib.import_module("fsspec")
        except ImportError as error:
            raise TraceFormatError(f"{source}: opening a URL needs the package fsspec") from error
        try:
            stream = cast("IO[bytes]", stack.enter_context(fsspec.open(source, "rb")))
        except OSError:
            raise
        except (ImportError, ValueError) as error:  # an unknown protocol, or its package is missing
            raise TraceFormatError(f"{source}: cannot be opened: {error}") from error
    else:
        stream = stack.enter_context(Path(source).open("rb"))  # noqa: SIM115 - the stack closes it
    head = stream.read(len(_GZIP_MAGIC))
    begun = cast("IO[bytes]", _Begun(head, stream))
    return cast("IO[bytes]", stack.enter_context(gzip.open(begun, "rb"))) if head == _GZIP_MAGIC else begun


class _Begun:
    """A stream of which *head* has been read, from its beginning: a pipe cannot be wound back."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._unread = head
        self._rest = rest

    def read(self, size: int) -> bytes:
        """The next bytes: fewer than *size* where the head ends, none where the stream does."""
        found, self._unread = self._unread[:size], self._unread[size:]
        return found or self._rest.read(size)


class _Builder:
    """Columns that grow by one batch of events after another."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.seen = 0
        self.clamped = 0
        self.foreign: dict[str, int] = {}
        self.names: dict[str, int] = {}
        self.groups: dict[str, str] = {}
        self.texts_bytes = 0
        self.scopes: set[int] = set()
        self.lanes: dict[tuple[Any, Any], int] = {}
        self.lane_texts: dict[Lane, int] = {}
        self.name, self.lane = array("i"), array("i")
        self.kind = array("b")
        self.start, self.duration = array("q"), array("q")
        self.correlation, self.external_id, self.sequence = array("q"), array("q"), array("q")
        self.forward_thread = array("q")
        self.device_row, self.device, self.stream, self.bytes = array("q"), array("i"), array("q"), array("q")
        self.blocks, self.occupancy = array("d"), array("d")
        self.collectives: dict[int, CollectiveArguments] = {}
        self.memory = tuple(array("q") for _ in range(5))

    def add(self, events: list[Any]) -> None:
        """Append what *events* say; an event of another tool is counted and left out."""
        begin = self.seen
        try:
            for event in events:
                phase = event.get("ph")
                if phase == "X":
                    self._add_span(event)
                elif phase == "i" and event.get("name") == "[memory]":
                    self._add_memory(event)
                self.seen += 1
        except TraceFormatError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"{type(error).__name__}: {_cut(str(error))}"
            raise TraceFormatError(
                f"{self.source}: event {self.seen} (counted from 0) is no event of torch.profiler ({what}): "
                f"{_shown_event(events[self.seen - begin])}"
            ) from error

    def _keep(self, text_bytes: int) -> None:
        """So many bytes more stay in memory beside the columns."""
        self.texts_bytes += text_bytes
        if self.texts_bytes > TEXTS_LIMIT_BYTES:
            raise TraceFormatError(
                f"{self.source}: event {self.seen} (counted from 0): with it the trace's distinct names, threads and "
                f"process groups take more than {TEXTS_LIMIT_BYTES:,} bytes"
            )

    def _add_span(self, event: dict[str, Any]) -> None:
        category = event.get("cat", "")
        kind = KIND_OF_CATEGORY.get(category)
        if kind is None and (kind := KIND_OF_CATEGORY.get(category.lower())) is None:
            if category != "Trace":
                if category not in self.foreign:
                    self._keep(_bytes_of_text(category))
                self.foreign[category] = self.foreign.get(category, 0) + 1
            return
        name = event["name"]
        arguments = event.get("args") or _NOTHING
        index = self.names.get(name)
        if index is None:
            if not isinstance(name, str):
                raise TypeError("name must be a text")
            self._keep(_bytes_of_text(name))
            index = self.names[name] = len(self.names)
            if is_scope_written_as_operator(name):
                self.scopes.add(index)
        if kind is Kind.OPERATOR and index in self.scopes:
            kind = Kind.ANNOTATION
        # Traces give microseconds with three decimals: whole nanoseconds, which are exact to add up.
        start = round(event["ts"] * 1000)
        duration = round(event.get("dur", 0) * 1000)
        if not -_LONGEST_NS < start < _LONGEST_NS > duration:
            raise OverflowError("no time that a clock shows")
        if duration < 0:
            duration = 0
            self.clamped += 1
        self.name.append(index)
        self.kind.append(kind)
        self.lane.append(self._lane_index(event))
        self.start.append(start)
        self.duration.append(duration)
        find = arguments.get
        self.correlation.append(_integer(find("correlation")))
        external_id = find("External id")
        self.external_id.append(_integer(find("external id") if external_id is None else external_id))
        self.sequence.append(_integer(find("Sequence number")))
        self.forward_thread.append(_integer(find("Fwd thread id")))
        if kind >= Kind.KERNEL:
            self.device_row.append(len(self.name) - 1)
            self.device.append(_integer(find("device", event.get("pid"))))
            self.stream.append(_integer(find("stream")))
            self.bytes.append(_integer(find("bytes")))
            self.blocks.append(_number(find("blocks per SM")))
            self.occupancy.append(_number(find("est. achieved occupancy %")))
        if "Collective name" in arguments:
            self.collectives[len(self.name) - 1] = self._collective(arguments)
        elif kind is Kind.ANNOTATION and "Input Dims" in arguments:
            self.collectives[len(self.name) - 1] = CollectiveArguments(
                bytes=_bytes_of(arguments["Input Dims"], arguments.get("Input type") or ())
            )

    def _add_memory(self, event: dict[str, Any]) -> None:
        arguments = event["args"]
        values = (
            self._lane_index(event),
            round(event["ts"] * 1000),
            int(arguments["Bytes"]),
            int(arguments.get("Device Type", 0)),
            int(arguments.get("Device Id", -1)),
        )
        for column, value in zip(self.memory, values, strict=True):
            column.append(value)

    def _lane_index(self, event: dict[str, Any]) -> int:
        key = (event.get("pid"), event.get("tid"))
        index = self.lanes.get(key)
        if index is None:
            # Old traces write a thread as a number in one event and as a text in the next.
            lane = Lane(process=str(key[0]), thread=str(key[1]))
            # The key, the lane and their texts, which the columns hold as numbers.
            self._keep(_BYTES_OF_A_LANE + 2 * (_bytes_of_text(lane.process) + _bytes_of_text(lane.thread)))
            index = self.lanes[key] = self.lane_texts.setdefault(lane, len(self.lane_texts))
        return index

    def _collective(self, arguments: Mapping[str, Any]) -> CollectiveArguments:
        element_bytes = ELEMENT_BYTES.get(str(arguments.get("dtype", "")).lower())
        elements = [_whole(arguments.get(key)) for key in ("In msg nelems", "Out msg nelems")]
        known = [count for count in elements if count is not None]
        # Groups of one name may have other members on other ranks, and groups of the same members another name.
        group = [str(arguments[key]) for key in ("Process Group Name", "Process Group Ranks") if arguments.get(key)]
        return CollectiveArguments(
            name=self._once(str(arguments["Collective name"])),
            # The larger side, as communication benchmarks give it: what all_gather yields and reduce_scatter takes.
            bytes=max(known) * element_bytes if known and element_bytes is not None else None,
            group=self._once(" ".join(group)) if group else None,
            group_size=_whole(arguments.get("Group size")),
            source=_whole(arguments.get("Src Rank")),
            destination=_whole(arguments.get("Dst Rank")),
        )

    def _once(self, text: str) -> str:
        """The one copy of *text*: thousands of calls name the same group, and that may be thousands of ranks long."""
        if text not in self.groups:
            self._keep(_bytes_of_text(text))
        return self.groups.setdefault(text, text)

    def trace(self, metadata: Mapping[str, Any]) -> Trace:
        """The finished trace."""
        kinds = np.frombuffer(self.kind, dtype=np.int8) if self.kind else np.zeros(0, dtype=np.int8)
        if not (kinds != Kind.OTHER).any():
            raise TraceFormatError(f"{self.source}: {self._why_nothing()}")
        return Trace(
            source=self.source,
            names=tuple(self.names),
            lanes=tuple(self.lane_texts),
            name=_int32(self.name),
            kind=kinds,
            lane=_int32(self.lane),
            start_ns=_int64(self.start),
            duration_ns=_int64(self.duration),
            correlation=_int64(self.correlation),
            external_id=_int64(self.external_id),
            sequence=_int64(self.sequence),
            forward_thread=_int64(self.forward_thread),
            device=self._on_device_rows(self.device, -1, np.int32),
            stream=self._on_device_rows(self.stream, -1, np.int64),
            blocks_per_sm=self._on_device_rows(self.blocks, np.nan, np.float64),
            occupancy_percent=self._on_device_rows(self.occupancy, np.nan, np.float64),
            bytes=self._on_device_rows(self.bytes, -1, np.int64),
            collectives=self.collectives,
            memory=self._memory_events(),
            devices=_devices(metadata.get("deviceProperties")),
            **_place(metadata),
            metadata=metadata,
            notes=self._notes(),
        )

    def _on_device_rows(self, values: array[Any], elsewhere: float, dtype: type[_Number]) -> npt.NDArray[_Number]:
        """A whole column of *values*, which only device events have."""
        column = np.full(len(self.name), elsewhere, dtype=dtype)
        if values:
            column[_int64(self.device_row)] = np.frombuffer(values, dtype=dtype)
        return column

    def _memory_events(self) -> MemoryEvents | None:
        if not self.memory[0]:
            return None
        lane, time, size, device_type, device = (_int64(column) for column in self.memory)
        return MemoryEvents(
            lane=lane.astype(np.int32),
            time_ns=time,
            bytes=size,
            device_type=device_type.astype(np.int32),
            device=device.astype(np.int32),
        )

    def _why_nothing(self) -> str:
        if not self.seen:
            return "the trace holds no events"
        found = _categories(sorted(self.foreign, key=self.foreign.__getitem__, reverse=True))
        return (
            f"none of its {self.seen} events is an operator, a scope, a runtime call or a kernel of torch.profiler"
            + (f"; its categories are {found}" if found else "")
        )

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self.foreign:
            names = _categories(sorted(self.foreign))
            notes.append(
                f"Left out: events of categories that are not torch.profiler's ({names}): {sum(self.foreign.values())}."
            )
        if self.clamped:
            notes.append(f"Taken as of no length: events of negative length: {self.clamped}.")
        return tuple(notes)


def _bytes_of_text(text: str) -> int:
    """About what *text* takes as the key of a dict; a character is at most 4 bytes."""
    return 100 + (1 if text.isascii() else 4) * len(text)


def _categories(names: Sequence[str]) -> str:
    shown = [_cut(repr(name)) for name in names[:_CATEGORIES_NAMED]]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _cut(text: str, *, chars: int = 80) -> str:
    return text if len(text) <= chars else text[: chars - 1] + "…"


def _shown_event(event: Any) -> str:
    """The beginning of *event*, which may be anything, and nested as deep as a decoder lets it be."""
    shown = reprlib.Repr()
    shown.maxdict, shown.maxlevel, shown.maxstring = 12, 3, 60
    return _cut(shown.repr(event), chars=120)


def _integer(value: Any) -> int:
    """An argument that an event need not have, and that may read "N/A"; -1 for none, and for one beyond 64 bits."""
    if value is None:
        return -1
    if type(value) is not int:
        try:
            value = int(value)
        except (TypeError, ValueError, OverflowError):
            return -1
    number: int = value
    return number if -_LARGEST_INTEGER <= number <= _LARGEST_INTEGER else -1


def _number(value: Any) -> float:
    """As ``_integer``; NaN for none, and for what is not finite."""
    if value is None:
        return np.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return np.nan
    return number if np.isfinite(number) else np.nan


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) <= _LARGEST_INTEGER else None


def _int64(column: array[int]) -> npt.NDArray[np.int64]:
    return np.frombuffer(column, dtype=np.int64) if column else np.zeros(0, dtype=np.int64)


def _int32(column: array[int]) -> npt.NDArray[np.int32]:
    return np.frombuffer(column, dtype=np.int32) if column else np.zeros(0, dtype=np.int32)


def _bytes_of(shapes: Sequence[Any], dtypes: Sequence[Any]) -> int | None:
    """Bytes of inputs of these shapes and dtypes; None if one of the dtypes is not known."""
    total = 0
    for shape, dtype in zip(shapes, dtypes, strict=False):
        element_bytes = ELEMENT_BYTES.get(str(dtype).lower())
        if element_bytes is None or not all(type(size) is int for size in shape):
            return None
        elements = 1
        for size in shape:
            elements *= size
            if not 0 <= elements <= _LARGEST_INTEGER:
                return None
        total += elements * element_bytes
    return total or None


def _place(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the head of a trace says of its rank's place in the run, by the fields of ``Trace``."""
    found = metadata.get("distributedInfo")
    distributed: Mapping[str, Any] = found if isinstance(found, dict) else _NOTHING
    found = metadata.get(METADATA_KEY)  # torch names no rank in a run of one process, this package always does
    own: Mapping[str, Any] = found if isinstance(found, dict) else _NOTHING
    backend, world_size = distributed.get("backend"), _whole(distributed.get("world_size"))
    if world_size is not None and not 0 < world_size <= _MOST_RANKS:
        world_size = None  # no job has as many: who takes part in it is listed
    return {
        "rank": _whole(distributed.get("rank", own.get("rank"))),
        "world_size": world_size,
        "backend": backend if isinstance(backend, str) else None,
        "groups": _groups(distributed.get("pg_config"), world_size),
    }


def _groups(listed: Any, world_size: int | None) -> tuple[tuple[int, ...], ...] | None:
    if not isinstance(listed, list):
        return None
    groups = []
    everyone = tuple(range(world_size or 0))
    for group in listed:
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
            return None
        groups.append(tuple(sorted(ranks)) or everyone)  # a group of all may be written as none
    return tuple(groups)


def _devices(properties: Any) -> tuple[DeviceProperties, ...]:
    found = []
    for entry in properties if isinstance(properties, list) else ():
        if not isinstance(entry, dict) or type(entry.get("id")) is not int:
            continue
        major, minor = _whole(entry.get("computeMajor")), _whole(entry.get("computeMinor"))
        found.append(
            DeviceProperties(
                index=entry["id"],
                name=str(entry.get("name", "")),
                sm_count=_whole(entry.get("numSms")),
                memory_bytes=_whole(entry.get("totalGlobalMem")),
                compute_capability=None if major is None or minor is None else (major, minor),
            )
        )
    return tuple(found)
