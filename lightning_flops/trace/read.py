"""Trace files of torch.profiler as columns: decoded in blocks, each of whole events."""

from __future__ import annotations

import gzip
import importlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import compress
from os import PathLike, fspath
from typing import IO, Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace_marks import METADATA_KEY
from lightning_flops.errors import LightningFlopsError
from lightning_flops.records import RecordedInputs, TraceColumns
from lightning_flops.trace.columns import (
    CollectiveArguments,
    DeviceProperties,
    Lane,
    LaunchShape,
    MemoryEvents,
    Trace,
    TraceFormatError,
)
from lightning_flops.trace.intervals import Ints
from lightning_flops.trace.mend import mended
from lightning_flops.trace.names import (
    ELEMENT_BYTES,
    KIND_OF_CATEGORY,
    Kind,
    host_collective,
    is_scope_written_as_operator,
)

WITH_MODULES = "with_modules"
"""The key under which torch.profiler writes that it was asked for modules."""

BLOCK_BYTES = 1 << 17
"""How much is decoded at once: what is made of it should stay in a processor's second cache."""

_LONGEST_BYTES = 64 << 20
"""Most of a file that is searched for the end of one event, or of what stands beside the events."""

_HEAD_KEYS = ("deviceProperties", "distributedInfo", "baseTimeNanoseconds", WITH_MODULES, METADATA_KEY)
_EVENTS = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\s*,?\s*")
_BORDER = re.compile(rb"\s*[,\]]")
_END_OF_LIST = re.compile(r"trailing characters \(byte (\d+)\)")
_BACKSLASH = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_BARE = re.compile(rb"(?<=[:,\[])(\s*)(?:[-+]?(?:inf(?:inity)?|nan)(?:\([a-z]*\))?|N/A)(?=\s*[,}\]])", re.I)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_NULL_ARGUMENTS = re.compile(rb'"args"\s*:\s*null')
_CONTROLS = bytes(byte if byte >= 32 else 32 for byte in range(256))
_FOREIGN = 255


def _mask(*kinds: int) -> bytes:
    """For ``bytes.translate``: 1 for each of *kinds*, 0 for all others."""
    return bytes(kind in kinds for kind in range(256))


_ON_HOST = _mask(Kind.OPERATOR, Kind.ANNOTATION)
_RUNTIME = _mask(Kind.RUNTIME)
_ON_DEVICE = _mask(*(kind for kind in Kind if kind >= Kind.KERNEL))
_COMMUNICATES = _mask(Kind.ANNOTATION, *(kind for kind in Kind if kind >= Kind.KERNEL))
_CATEGORIES_NAMED = 5
_LONGEST_US = 2**62 / 1000
_ABSENT = -1
_LARGEST = 2**63 - 1
_RAW = msgspec.Raw(b"")


class _Arguments(msgspec.Struct, gc=False, frozen=True):
    """What is read of an event's ``args``, in the order of torch's files; anything may stand there."""

    external_id: Any = msgspec.field(name="External id", default=_ABSENT)
    old_external_id: Any = msgspec.field(name="external id", default=_ABSENT)
    sequence: Any = msgspec.field(name="Sequence number", default=_ABSENT)
    forward_thread: Any = msgspec.field(name="Fwd thread id", default=_ABSENT)
    concrete: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=_RAW)
    types: msgspec.Raw = msgspec.field(name="Input type", default=_RAW)
    strides: msgspec.Raw = msgspec.field(name="Input Strides", default=_RAW)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=_RAW)
    old_dims: msgspec.Raw = msgspec.field(name="Input dims", default=_RAW)  # torch 1.8
    stack: msgspec.Raw = msgspec.field(name="Call stack", default=_RAW)
    device: Any = None
    stream: Any = _ABSENT
    correlation: Any = _ABSENT
    bytes: Any = _ABSENT
    registers: Any = msgspec.field(name="registers per thread", default=_ABSENT)
    shared_memory: Any = msgspec.field(name="shared memory", default=_ABSENT)
    blocks_per_sm: Any = msgspec.field(name="blocks per SM", default=math.nan)
    grid: msgspec.Raw = _RAW
    block: msgspec.Raw = _RAW
    occupancy_percent: Any = msgspec.field(name="est. achieved occupancy %", default=math.nan)
    collective: Any = msgspec.field(name="Collective name", default=None)
    in_elements: Any = msgspec.field(name="In msg nelems", default=None)
    out_elements: Any = msgspec.field(name="Out msg nelems", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    dtype: Any = None
    group_name: Any = msgspec.field(name="Process Group Name", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    source: Any = msgspec.field(name="Src Rank", default=None)
    destination: Any = msgspec.field(name="Dst Rank", default=None)
    total_reserved: Any = msgspec.field(name="Total Reserved", default=_ABSENT)
    total_allocated: Any = msgspec.field(name="Total Allocated", default=_ABSENT)
    allocated_bytes: Any = msgspec.field(name="Bytes", default=0)
    address: Any = msgspec.field(name="Addr", default=_ABSENT)
    device_index: Any = msgspec.field(name="Device Id", default=_ABSENT)
    device_type: Any = msgspec.field(name="Device Type", default=0)


_NO_ARGUMENTS = _Arguments()


class _Event(msgspec.Struct, gc=False):
    ph: Any = ""
    cat: str | None = ""
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: float | str = math.nan
    dur: float | str | None = 0.0
    args: _Arguments = _NO_ARGUMENTS


DECODER = msgspec.json.Decoder(list[_Event])
"""Makes events of the text of a JSON list; what no table needs is checked and passed over."""


def load_trace(path: str | PathLike[str], *, progress: Callable[[int], object] | None = None) -> Trace:
    """The trace in a Chrome-format JSON file that torch.profiler wrote, plain or gzipped; read once, so also a pipe.

    Args:
        path: a local path, or any URL that fsspec opens. Whether it is gzipped is seen from its first bytes.
        progress: is told now and then how many bytes of the file have been read.

    Raises:
        TraceFormatError: the file cannot be opened, is empty, cut off, no JSON, or no trace of torch.profiler.
    """
    source = fspath(path)
    metadata: dict[str, Any] = {}
    columns = _Columns(source)
    try:
        with ExitStack() as stack:
            for events in _event_lists(_opened(source, stack), metadata, progress):
                columns.add(events)
    except (LightningFlopsError, MemoryError):
        raise
    except (EOFError, gzip.BadGzipFile, _unpacking_errors()) as error:
        raise TraceFormatError(f"{source}: the gzip data is damaged or cut off: {error}") from error
    except OSError as error:
        reason = error.strerror or f"{type(error).__name__}: {error}"  # remote file systems often give a path alone
        raise TraceFormatError(f"{source}: cannot be read: {reason}") from error
    except Exception as error:
        if "://" in source:  # a remote file system may raise anything
            raise TraceFormatError(f"{source}: cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(error, (TypeError, ValueError, OverflowError)):
            raise
        what = f"{error}"[:120]
        raise TraceFormatError(f"{source}: {what}") from error
    return columns.trace(metadata)


def trace_from_events(
    events: Iterable[Mapping[str, Any]], *, metadata: Mapping[str, Any] | None = None, source: str = "(events)"
) -> Trace:
    """The trace of *events*, which are as in a file, with what stands beside them there."""
    columns = _Columns(source)
    columns.add(DECODER.decode(msgspec.json.encode(list(events))))
    return columns.trace(metadata or {})


def trace_from_columns(columns: TraceColumns, *, process: int, metadata: Mapping[str, Any] | None = None) -> Trace:
    """The trace of host events that the profiler left in memory as columns.

    Raises:
        TraceFormatError: none of the events is torch.profiler's.
    """
    kinds = np.array([KIND_OF_CATEGORY.get(one.lower(), _FOREIGN) for one in columns.categories], dtype=np.int8)
    kind = kinds[np.array(columns.category, dtype=np.int64)] if columns.category else np.zeros(0, dtype=np.int8)
    kept = np.flatnonzero(kind >= 0)
    found = _Columns("(profiler)")
    found.names = {name: number for number, name in enumerate(columns.names)}
    found.lanes = {Lane(str(process), str(thread)): number for number, thread in enumerate(columns.threads)}
    of_host = kept[(kind[kept] == Kind.OPERATOR) | (kind[kept] == Kind.ANNOTATION)]
    for name, values, rows in (
        ("name", columns.name, kept),
        ("lane", columns.thread, kept),
        ("start_ns", columns.start_ns, kept),
        ("duration_ns", columns.duration_ns, kept),
        ("sequence", columns.sequence, of_host),
        ("forward_thread", columns.forward_thread, of_host),
    ):
        found.keep(name, np.array(values, dtype=np.int64)[rows])
    found.keep("kind", kind[kept])
    return found.trace(metadata or {})


def _opened(source: str, stack: ExitStack) -> IO[bytes]:
    if "://" in source or "::" in source:
        try:
            fsspec = importlib.import_module("fsspec")
            stream = cast("IO[bytes]", stack.enter_context(fsspec.open(source, "rb")))
        except ModuleNotFoundError as error:
            raise TraceFormatError(f"{source}: opening a URL needs the package {error.name}") from error
        except (ImportError, ValueError) as error:  # an unknown protocol, or its package is missing
            raise TraceFormatError(f"{source}: cannot be opened: {error}") from error
        begin = stream.read(2)
        stream.seek(0)
    else:
        file = stack.enter_context(open(source, "rb"))  # noqa: SIM115 - the stack closes it
        stream, begin = file, file.peek(2)[:2]
    return cast("IO[bytes]", _gzip().open(stream, "rb")) if begin == b"\x1f\x8b" else stream


def _gzip() -> Any:
    """``isal`` unpacks several times as fast where it is installed."""
    try:
        return importlib.import_module("isal.igzip")
    except ImportError:
        return gzip


def _unpacking_errors() -> type[Exception]:
    try:
        return cast("type[Exception]", importlib.import_module("isal.isal_zlib").error)
    except ImportError:
        return importlib.import_module("zlib").error  # type: ignore[no-any-return]


def _event_lists(
    stream: IO[bytes], metadata: dict[str, Any], progress: Callable[[int], object] | None
) -> Iterator[list[_Event]]:
    """The events in order, a list at a time; what is asked for beside them is put into *metadata*."""
    text = stream.read(BLOCK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not text:
        raise ValueError("the file is empty")
    if text.startswith(b"["):
        begin = 1
    elif text.startswith(b"{"):
        while (found := _EVENTS.search(text)) is None:
            more = stream.read(len(text))
            if not more or len(text) > _LONGEST_BYTES:
                _members(text)  # says what is wrong with it
                raise ValueError('a JSON object without a list "traceEvents"')
            text += more
        begin = found.end()
        metadata |= _members(text[: found.start()].rstrip().rstrip(b",") + b"}")
    else:
        raise ValueError(f"a trace begins with {{ or [, not with {text[:1].decode(errors='replace')!r}")
    given, size, ended = len(text), BLOCK_BYTES, False
    text, at_end = text[begin:], False
    while not at_end:
        decoded = _decoded(text, mend=False) or _decoded(text, mend=True)
        if decoded is not None:
            events, text, at_end = decoded
            yield events
            size = BLOCK_BYTES
        elif ended or len(text) > _LONGEST_BYTES:
            raise ValueError(_what_is_wrong(text, given - len(text)))
        if not at_end:
            more = stream.read(size)
            size *= 2  # where no event ends in a block: not so many tries
            ended, given, text = not more, given + len(more), text + more
            if progress is not None:
                progress(_position(stream, given))
    while len(text) < _LONGEST_BYTES and (more := stream.read(BLOCK_BYTES)):
        text += more
    tail = text.strip()
    if begin > 1:
        metadata |= _members(b"{" + tail.removeprefix(b","))
    elif tail:
        raise ValueError(f"nothing may follow the end of the trace: {tail[:40]!r}")


def _decoded(text: bytes, *, mend: bool) -> tuple[list[_Event], bytes, bool] | None:
    """Events that stand whole at the beginning of *text*, what follows, and whether that is the end of their list.

    A border is a brace that closes, and a comma behind it. In an event such a pair may stand too; then the piece
    before it is no list. None where nothing can be read.
    """
    begin = _BETWEEN.match(text).end()  # type: ignore[union-attr]  # it matches nothing as well
    if text.startswith(b"]", begin):
        return [], text[begin + 1 :], True
    end, tries = len(text), 0
    while tries < 8 and (end := text.rfind(b"}", begin, end)) >= 0:
        if _BORDER.match(text, end + 1) is None:
            continue
        tries += 1
        piece = text[begin : end + 1]
        if mend:
            piece = _mended(piece)
        try:
            return DECODER.decode(b"[%b]" % piece), text[end + 1 :], False
        except (msgspec.DecodeError, RecursionError) as error:
            if (trailing := _END_OF_LIST.search(str(error))) is not None:  # the list has ended before
                at = int(trailing[1]) - 2  # it counts from 1, and the bracket before
                return DECODER.decode(b"[" + piece[:at]), piece[at:] + text[end + 1 :], True
    return None


def _mended(text: bytes) -> bytes:
    """*text* with backslashes escaped, null for numbers that JSON does not have, and no bytes that are no UTF-8."""
    text = text.decode("utf-8", errors="replace").encode().translate(_CONTROLS)
    text = _BACKSLASH.sub(lambda found: found[0] if found[1] else b"\\\\", text)
    text = _SURROGATE.sub(rb"\\ufffd", _BARE.sub(rb"\1null", text))
    return _NULL_ARGUMENTS.sub(b'"args":{}', text)


def _members(text: bytes) -> dict[str, Any]:
    """What is asked for of the object in *text*."""
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        try:
            found = msgspec.json.decode(_mended(text), type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(_said(error, "what stands beside its events is not valid JSON")) from error
    return {key: found[key] for key in _HEAD_KEYS if key in found}


def _what_is_wrong(text: bytes, given: int) -> str:
    try:
        DECODER.decode(b"[" + _mended(text.strip().removeprefix(b",")))
    except (msgspec.DecodeError, RecursionError) as error:
        wrong = "its events are no list" if text.lstrip(b", \r\n\t").startswith(b"]") else "an event is none of torch's"
        if not isinstance(error, msgspec.ValidationError):
            wrong = "not valid JSON"
        return _said(error, f"{wrong}, after {given:,} bytes")
    return "an event is longer than a trace has them"


def _said(error: Exception, words: str) -> str:
    if "truncated" in str(error):
        return "the file ends in the middle: it was cut off or is still written"
    return f"{words}: {error}"[:200]


def _position(stream: IO[bytes], given: int) -> int:
    try:
        return int((getattr(stream, "fileobj", None) or stream).tell())
    except (OSError, ValueError, AttributeError):  # a pipe
        return given


class _Columns:
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
        self._kinds = _Numbers(lambda name: KIND_OF_CATEGORY.get((name or "").lower(), _FOREIGN))
        self._parts: dict[str, list[npt.NDArray[Any]]] = {}
        self._collectives: dict[int, CollectiveArguments] = {}
        self._foreign: dict[str, int] = {}
        self._rows = self._seen = 0

    def keep(self, name: str, values: npt.NDArray[Any]) -> None:
        """Append to the column *name*."""
        self._parts.setdefault(name, []).append(values)

    def add(self, events: Sequence[_Event]) -> None:
        """Append what *events* say; those of another tool are counted and left out."""
        self._seen += len(events)
        spans = [event for event in events if event.ph == "X"]
        if len(spans) < len(events):
            self._add_memory([event for event in events if event.ph == "i" and event.name == "[memory]"])
        kinds = bytes([self._kinds[span.cat] for span in spans])
        if _FOREIGN in kinds:
            for span, kind in zip(spans, kinds, strict=True):
                if kind == _FOREIGN and span.cat != "Trace":  # around the whole of old traces
                    self._foreign[span.cat or ""] = self._foreign.get(span.cat or "", 0) + 1
            spans = [span for span, kind in zip(spans, kinds, strict=True) if kind != _FOREIGN]
            kinds = kinds.translate(None, bytes([_FOREIGN]))
        self.keep("kind", np.frombuffer(kinds, dtype=np.int8))
        self.keep("name", _packed("i", list(map(self._name_numbers.__getitem__, [span.name for span in spans]))))
        lanes = zip([span.pid for span in spans], [span.tid for span in spans], strict=True)
        self.keep("lane", _packed("i", list(map(self._lane_numbers.__getitem__, lanes))))
        self.keep("start_ns", _nanoseconds([span.ts for span in spans]))
        self.keep("duration_ns", _nanoseconds([span.dur for span in spans]))
        arguments = [span.args for span in spans]
        self._add_host(list(compress(arguments, kinds.translate(_ON_HOST))))
        calls = compress(arguments, kinds.translate(_RUNTIME))
        self.keep("launch_correlation", _integers([one.correlation for one in calls]))
        on_device = kinds.translate(_ON_DEVICE)
        if 1 in on_device:
            self._add_device(list(compress(arguments, on_device)), [span.pid for span in compress(spans, on_device)])
        for place in compress(range(len(spans)), kinds.translate(_COMMUNICATES)):
            if arguments[place].collective is not None:
                self._collectives[self._rows + place] = _collective(arguments[place])
        self._rows += len(spans)

    def _add_host(self, arguments: list[_Arguments]) -> None:
        self.keep("external_id", _external_ids(arguments))
        self.keep("sequence", _integers([one.sequence for one in arguments]))
        self.keep("forward_thread", _integers([one.forward_thread for one in arguments]))
        dims = [one.dims for one in arguments]
        dims = dims if any(dims) else [one.old_dims for one in arguments]
        if any(dims):
            columns = (dims, [one.types for one in arguments], [one.concrete for one in arguments])
            keys = zip(*(map(bytes, one) for one in (*columns, [one.strides for one in arguments])), strict=True)
            self.keep("inputs", _packed("i", [self._inputs[key] if key[0] else _ABSENT for key in keys]))
        else:
            self.keep("inputs", np.full(len(arguments), _ABSENT, dtype=np.int32))
        stacks = [one.stack for one in arguments]
        if any(stacks):
            self.keep("stack", _packed("i", [self._stacks[one] if one else _ABSENT for one in map(bytes, stacks)]))
        else:
            self.keep("stack", np.full(len(arguments), _ABSENT, dtype=np.int32))

    def _add_device(self, arguments: list[_Arguments], processes: list[Any]) -> None:
        devices = [pid if one.device is None else one.device for one, pid in zip(arguments, processes, strict=True)]
        self.keep("device", _integers(devices))
        self.keep("stream", _integers([one.stream for one in arguments]))
        self.keep("correlation", _integers([one.correlation for one in arguments]))
        self.keep("device_external_id", _external_ids(arguments))
        self.keep("bytes", _integers([one.bytes for one in arguments]))
        self.keep("blocks_per_sm", _fractions([one.blocks_per_sm for one in arguments]))
        self.keep("occupancy_percent", _fractions([one.occupancy_percent for one in arguments]))
        shapes = [(bytes(one.grid), bytes(one.block), one.registers, one.shared_memory) for one in arguments]
        self.keep("launch_shape", _packed("i", [self._shapes[shape] for shape in shapes]))

    def _add_memory(self, events: list[_Event]) -> None:
        arguments = [event.args for event in events]
        on_host = _integers([one.device_type for one in arguments]) == 0
        self.keep("memory_lane", _packed("i", [self._lane_numbers[event.pid, event.tid] for event in events]))
        self.keep("memory_ns", _nanoseconds([event.ts for event in events]))
        self.keep("memory_bytes", _integers([one.allocated_bytes for one in arguments]))
        self.keep("memory_device", np.where(on_host, -1, _integers([one.device_index for one in arguments])))
        self.keep("address", _integers([one.address for one in arguments]))
        self.keep("total_allocated", _integers([one.total_allocated for one in arguments]))
        self.keep("total_reserved", _integers([one.total_reserved for one in arguments]))

    def _whole(self, name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
        parts = self._parts.pop(name, [])
        return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype=dtype)

    def _spread(
        self, size: int, rows: Ints, name: str, dtype: type[np.generic] = np.int64, *, elsewhere: float = _ABSENT
    ) -> npt.NDArray[Any]:
        """A column of all *size* rows: the values in *rows*, and *elsewhere* in the others."""
        column = np.full(size, elsewhere, dtype=dtype)
        values = self._whole(name, dtype)
        column[rows[: len(values)]] = values
        return column

    def trace(self, metadata: Mapping[str, Any]) -> Trace:
        """The finished trace; the columns are used up."""
        names, lanes = tuple(self.names), tuple(self.lanes)
        name, kind = self._whole("name", np.int32), self._whole("kind", np.int8)
        if not (kind > Kind.PYTHON).any():
            raise TraceFormatError(f"{self.source}: {self._why_nothing()}")
        size = len(kind)
        host = np.flatnonzero((kind == Kind.OPERATOR) | (kind == Kind.ANNOTATION))
        runtime, device = np.flatnonzero(kind == Kind.RUNTIME), np.flatnonzero(kind >= Kind.KERNEL)
        scopes = np.array([is_scope_written_as_operator(text) for text in names], dtype=bool)
        kind = np.where((kind == Kind.OPERATOR) & scopes[name], np.int8(Kind.ANNOTATION), kind)
        duration_ns = self._whole("duration_ns", np.int64)
        notes = self._notes(int((duration_ns < 0).sum()))
        recorded = tuple(_recorded(texts) for texts in self._inputs)
        inputs = self._spread(size, host, "inputs", np.int32)
        correlation, external_id = (
            self._spread(size, runtime, "launch_correlation"),
            self._spread(size, host, "external_id"),
        )
        for column, other in ((correlation, "correlation"), (external_id, "device_external_id")):
            values = self._whole(other, np.int64)
            column[device[: len(values)]] = values
        return mended(
            Trace(
                source=self.source,
                names=names,
                lanes=lanes,
                name=name,
                kind=kind,
                lane=self._whole("lane", np.int32),
                start_ns=self._whole("start_ns", np.int64),
                duration_ns=np.maximum(duration_ns, 0),
                correlation=correlation,
                external_id=external_id,
                sequence=self._spread(size, host, "sequence"),
                forward_thread=self._spread(size, host, "forward_thread"),
                device=self._spread(size, device, "device"),
                stream=self._spread(size, device, "stream"),
                blocks_per_sm=self._spread(size, device, "blocks_per_sm", np.float64, elsewhere=np.nan),
                occupancy_percent=self._spread(size, device, "occupancy_percent", np.float64, elsewhere=np.nan),
                bytes=self._spread(size, device, "bytes"),
                inputs=inputs,
                recorded_inputs=recorded,
                stack=self._spread(size, host, "stack", np.int32),
                stacks=tuple(text if isinstance(text := _value(stack), str) else "" for stack in self._stacks),
                launch_shape=self._spread(size, device, "launch_shape", np.int32),
                launch_shapes=tuple(_launch_shape(*texts) for texts in self._shapes),
                collectives=self._collectives | self._host_collectives(kind, name, inputs, recorded),
                memory=self._memory_events(),
                devices=_devices_of(metadata.get("deviceProperties")),
                **_place_in_run(metadata),
                metadata=metadata,
                notes=notes,
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
        sizes = {number: _bytes_of(recorded[number]) for number in set(inputs[rows].tolist())}
        return {row: CollectiveArguments(bytes=sizes[int(inputs[row])]) for row in rows if row not in self._collectives}

    def _memory_events(self) -> MemoryEvents | None:
        lane = self._whole("memory_lane", np.int64)
        if not len(lane):
            return None
        return MemoryEvents(
            lane=lane,
            time_ns=self._whole("memory_ns", np.int64),
            bytes=self._whole("memory_bytes", np.int64),
            device=self._whole("memory_device", np.int64),
            address=self._whole("address", np.int64),
            total_allocated=self._whole("total_allocated", np.int64),
            total_reserved=self._whole("total_reserved", np.int64),
        )

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


def _packed(code: str, values: list[Any]) -> npt.NDArray[Any]:
    """*values* as a column; ``struct`` converts faster than numpy, and refuses what is of another type."""
    return np.frombuffer(struct.pack(f"{len(values)}{code}", *values), dtype=code)


def _nanoseconds(times_us: list[Any]) -> Ints:
    """Whole nanoseconds: files give microseconds with three decimals, as numbers or as text, so that sums are exact."""
    try:
        times = _packed("d", times_us)
    except (struct.error, OverflowError):
        if any(isinstance(time, str) for time in times_us):
            return np.array([_nanoseconds_of_text(str(time)) for time in times_us], dtype=np.int64)
        times = _packed("d", [0.0 if time is None else float(time) for time in times_us])
    if len(times) and not (float(np.abs(times).max()) < _LONGEST_US):  # nor is it one that is no number
        raise ValueError("an event has no time that a clock shows")
    whole_us = np.floor(times)
    found: Ints = whole_us.astype(np.int64) * 1000 + np.rint((times - whole_us) * 1000).astype(np.int64)
    return found


def _nanoseconds_of_text(time: str) -> int:
    whole, _, rest = time.strip().partition(".")
    if not whole.lstrip("-").isdecimal() or not (rest or "0").isdecimal():
        return round(float(time) * 1000)
    sign = -1 if whole.startswith("-") else 1
    return int(whole) * 1000 + sign * int(rest[:3].ljust(3, "0"))


def _integers(values: list[Any]) -> Ints:
    """Integer arguments; -1 for one that the event does not have, that reads "N/A", or that needs more than 64 bits."""
    try:
        return _packed("q", values)
    except (struct.error, OverflowError):
        return _packed("q", list(map(_integer, values)))


def _integer(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return _ABSENT
    return number if abs(number) <= _LARGEST else _ABSENT


def _fractions(values: list[Any]) -> npt.NDArray[np.float64]:
    """Float arguments; NaN for one that the event does not have, and for what is infinite."""
    try:
        found = _packed("d", values)
    except (struct.error, OverflowError):
        found = _packed("d", [float(value) if isinstance(value, (int, float)) else math.nan for value in values])
    return np.where(np.isinf(found), np.nan, found)


def _external_ids(arguments: list[_Arguments]) -> Ints:
    numbers = _integers([one.external_id for one in arguments])
    if (numbers == _ABSENT).any():  # as older traces write it
        numbers = np.where(numbers == _ABSENT, _integers([one.old_external_id for one in arguments]), numbers)
    return numbers


def _value(text: bytes) -> Any:
    """The JSON value of *text*; None for no text, and for what Python cannot hold."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None


def _recorded(texts: tuple[bytes, ...]) -> RecordedInputs:
    dims, types, concrete, strides = map(_value, texts)
    return RecordedInputs(
        dims=dims if isinstance(dims, list) else (),
        types=_types(types, dims),
        concrete=concrete,
        strides=strides,
    )


def _types(types: Any, dims: Any) -> Sequence[Any]:
    """The dtypes of the inputs; where torch 1.8 wrote none of them, what has sizes is taken for float32."""
    if isinstance(types, list) and not types and isinstance(dims, list):
        return ["float" if one else "" for one in dims]
    return types if isinstance(types, list) else ()


def _collective(arguments: _Arguments) -> CollectiveArguments:
    element_bytes = ELEMENT_BYTES.get(str(arguments.dtype).lower())
    known = [count for count in map(_whole, (arguments.in_elements, arguments.out_elements)) if count is not None]
    # Groups of one name may have other members on other ranks, and groups of the same members another name.
    group = [str(part) for part in (arguments.group_name, arguments.group_ranks) if part]
    return CollectiveArguments(
        name=str(arguments.collective),
        # The larger side, as communication benchmarks give it: what all_gather yields and reduce_scatter takes.
        bytes=max(known) * element_bytes if known and element_bytes is not None else None,
        group=" ".join(group) if group else None,
        group_size=_whole(arguments.group_size),
        source=_whole(arguments.source),
        destination=_whole(arguments.destination),
    )


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) <= _LARGEST else None


def _bytes_of(inputs: RecordedInputs) -> int | None:
    """Bytes of all inputs; None if one of them is not known."""
    total = 0
    for shape, dtype in zip(inputs.dims, inputs.types, strict=False):
        element_bytes = ELEMENT_BYTES.get(str(dtype).lower())
        if element_bytes is None or not isinstance(shape, list) or not all(type(one) is int for one in shape):
            return None
        total += math.prod(shape) * element_bytes
    return total if 0 < total <= _LARGEST else None


def _launch_shape(grid: bytes, block: bytes, registers: Any, shared_memory: Any) -> LaunchShape:
    def triple(text: bytes) -> tuple[int, int, int] | None:
        value = _value(text)
        if not isinstance(value, list) or len(value) != 3 or not all(type(one) is int for one in value):
            return None
        return value[0], value[1], value[2]

    sizes = [None if (one := _whole(value)) is None or one < 0 else one for value in (registers, shared_memory)]
    return LaunchShape(grid=triple(grid), block=triple(block), registers=sizes[0], shared_memory=sizes[1])


def _categories(names: Sequence[str]) -> str:
    shown = [repr(name)[:80] if name else "none" for name in names[:_CATEGORIES_NAMED]]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _devices_of(properties: Any) -> tuple[DeviceProperties, ...]:
    """The devices that the head of a trace lists; what is no list of devices has none."""
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
                max_threads=_whole(entry.get("maxThreadsPerMultiprocessor")),
                registers=_whole(entry.get("regsPerMultiprocessor")),
                shared_memory=_whole(entry.get("sharedMemPerMultiprocessor")),
            )
        )
    return tuple(found)


def _place_in_run(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the head of a trace says of its rank's place in the run, by the fields of ``Trace``."""
    distributed, own = (
        found if isinstance(found := metadata.get(key), dict) else {} for key in ("distributedInfo", METADATA_KEY)
    )
    backend, world_size = distributed.get("backend"), _whole(distributed.get("world_size"))
    if world_size is not None and not 0 < world_size <= 1 << 20:
        world_size = None  # no job has as many, and its ranks are listed
    return {
        # torch names no rank in a run of one process, this package always does
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
