"""Trace files of torch.profiler as columns: decoded in blocks, each of whole events."""

from __future__ import annotations

import gzip
import importlib
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from os import PathLike, fspath
from typing import IO, Any, cast

import msgspec

from lightning_flops.errors import LightningFlopsError
from lightning_flops.records import METADATA_KEY
from lightning_flops.trace.columns import Trace, TraceFormatError
from lightning_flops.trace.events import DECODER, Columns, Event

WITH_MODULES = "with_modules"
"""The key under which torch.profiler writes that it was asked for modules."""
BLOCK_BYTES = 1 << 18
"""How much is decoded at once: what is made of it should stay in a processor's second cache."""
_LONGEST_BYTES = 64 << 20
"""Most of a file that is searched for the end of one event, or of what stands beside the events."""
_HEAD_KEYS = ("deviceProperties", "distributedInfo", WITH_MODULES, METADATA_KEY)
_EVENTS = re.compile(rb'\A\[|(?<!\\)"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\s*,?\s*")
_END_OF_EVENT = re.compile(rb"\s*[,\]]")
_END_OF_LIST = re.compile(r"trailing characters \(byte (\d+)\)")
_BACKSLASH = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_BARE = re.compile(rb"(?<=[:,\[])(\s*)(?:[-+]?(?:inf(?:inity)?|nan)(?:\([a-z]*\))?|N/A)(?=\s*[,}\]])", re.I)
_NULL_ARGUMENTS = re.compile(rb'"args"\s*:\s*null')


def load_trace(path: str | PathLike[str]) -> Trace:
    """The trace in a Chrome-format JSON file that torch.profiler wrote, plain or gzipped; read once, so also a pipe.

    Args:
        path: a local path, or any URL that fsspec opens. Whether it is gzipped is seen from its first bytes.

    Raises:
        TraceFormatError: the file cannot be opened, is empty, cut off, no JSON, or no trace of torch.profiler.
    """
    source = fspath(path)
    metadata: dict[str, Any] = {}
    columns = Columns(source)
    try:
        with ExitStack() as stack:
            for events in _event_lists(_opened(source, stack), metadata):
                columns.add(events)
            return columns.trace(metadata)
    except (LightningFlopsError, MemoryError):
        raise
    except Exception as error:  # whatever stands in a file, and whatever a remote file system raises
        raise TraceFormatError(f"{source}: {_reason(error)[:300]}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, msgspec.ValidationError):
        return f"an event is none of torch's: {error}"
    if isinstance(error, msgspec.DecodeError):
        cut_off = "the file ends in the middle: it was cut off or is still written"
        return cut_off if "truncated" in str(error) else f"not valid JSON: {error}"
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)) or type(error).__name__ == "IsalError":
        return f"the gzip data is damaged or cut off: {error}"
    if isinstance(error, ArithmeticError):
        return "an event has no time that a clock shows"
    if isinstance(error, (TypeError, ValueError)):
        return str(error)
    # Remote file systems often give a path alone.
    return f"cannot be read: {getattr(error, 'strerror', None) or f'{type(error).__name__}: {error}'}"


def _opened(source: str, stack: ExitStack) -> IO[bytes]:
    if "://" in source or "::" in source:
        try:
            stream = stack.enter_context(importlib.import_module("fsspec").open(source, "rb"))
        except (ImportError, ValueError) as error:  # an unknown protocol, or its package is missing
            raise TraceFormatError(f"{source}: cannot be opened: {error}") from error
        begin = stream.read(2)
        stream.seek(0)
    else:
        stream = stack.enter_context(open(source, "rb"))  # noqa: SIM115 - the stack closes it
        begin = stream.peek(2)[:2]
    if begin != b"\x1f\x8b":
        return cast("IO[bytes]", stream)
    try:  # it unpacks several times as fast where it is installed
        return cast("IO[bytes]", importlib.import_module("isal.igzip").open(stream, "rb"))
    except ImportError:
        return cast("IO[bytes]", gzip.open(stream, "rb"))


def _event_lists(stream: IO[bytes], metadata: dict[str, Any]) -> Iterator[list[Event]]:
    """The events in order, a list at a time; what else is asked for is put into *metadata*."""
    head, text = _head(stream)
    size, at_end = BLOCK_BYTES, False
    while not at_end:
        found = _decoded(text) or _decoded(text, _mended)
        if found is not None:
            events, text, at_end = found
            yield events
            size = BLOCK_BYTES
        if not at_end:
            more = stream.read(size)
            if found is None and (not more or len(text) > _LONGEST_BYTES):
                DECODER.decode(b"[" + _mended(text.strip().removeprefix(b",")))  # says what is wrong with it
                raise ValueError("an event is longer than a trace has them")
            size *= 2  # where no event ends in a block: not so many tries
            text += more
    while len(text) < _LONGEST_BYTES and (more := stream.read(BLOCK_BYTES)):
        text += more
    if head:
        metadata |= _members(head.rstrip().rstrip(b",") + b"}") | _members(b"{" + text.strip().removeprefix(b","))


def _head(stream: IO[bytes]) -> tuple[bytes, bytes]:
    """What stands before the list of events, nothing where that is all of the file; and its begin, as far as read."""
    text = stream.read(BLOCK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    while (found := _EVENTS.search(text)) is None:
        more = stream.read(len(text))
        if not more or len(text) > _LONGEST_BYTES:
            if text:
                _members(text)  # says what is wrong with it
            raise ValueError('a JSON object without a list "traceEvents"' if text else "the file is empty")
        text += more
    return text[: found.start()], text[found.end() :]


def _decoded(
    text: bytes, mend: Callable[[bytes], bytes] = lambda piece: piece
) -> tuple[list[Event], bytes, bool] | None:
    """Events that stand whole at the beginning of *text*, what follows, and whether that is the end of their list.

    An event ends with a brace, and a comma behind it. Within an event such a pair may stand too; then the piece before
    it is no list. None where nothing can be read.
    """
    begin = _BETWEEN.match(text).end()  # type: ignore[union-attr]  # it matches nothing as well
    if text.startswith(b"]", begin):
        return [], text[begin + 1 :], True
    end, tries = len(text), 0
    while tries < 8 and (end := text.rfind(b"}", begin, end)) >= 0:
        if _END_OF_EVENT.match(text, end + 1) is None:
            continue
        tries += 1
        piece = mend(text[begin : end + 1])
        try:
            return DECODER.decode(b"[%b]" % piece), text[end + 1 :], False
        except (msgspec.DecodeError, RecursionError) as error:
            if (trailing := _END_OF_LIST.search(str(error))) is not None:  # the list has ended before
                at = int(trailing[1]) - 2  # it counts from 1, and the bracket before
                return DECODER.decode(b"[" + piece[:at]), piece[at:] + text[end + 1 :], True
    return None


def _mended(text: bytes) -> bytes:
    """*text* with backslashes escaped, null for numbers that JSON does not have, and no bytes that are no UTF-8."""
    text = text.decode("utf-8", errors="replace").encode()
    text = _BACKSLASH.sub(lambda found: found[0] if found[1] else b"\\\\", text)
    return _NULL_ARGUMENTS.sub(b'"args":{}', _BARE.sub(rb"\1null", text))


def _members(text: bytes) -> dict[str, Any]:
    """What is asked for of the object in *text*."""
    found = msgspec.json.decode(_mended(text), type=dict[str, Any])
    return {key: found[key] for key in _HEAD_KEYS if key in found}
