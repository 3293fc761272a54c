"""Read a torch trace file into columns, a block at a time."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from os import PathLike, fspath
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from lightning_flops.analysis.trace.columns import Trace, TraceFormatError
from lightning_flops.analysis.trace.decoding import fast_decoder
from lightning_flops.analysis.trace.events import TraceBuilder
from lightning_flops.analysis.trace.head import WITH_MODULES
from lightning_flops.analysis.trace.json_stream import StreamError, event_batches
from lightning_flops.analysis.trace_marks import METADATA_KEY
from lightning_flops.errors import LightningFlopsError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST_INFLATION = 200
"""A gzipped file may hold so many times its own bytes; traces hold 10 to 40 times, and gzip can at most 1,032."""

_FREE_INFLATION_BYTES = 64 << 20
"""What any gzipped file may hold."""

_GZIP_MAGIC = b"\x1f\x8b"
_HEAD_KEYS = frozenset(("deviceProperties", "distributedInfo", "baseTimeNanoseconds", WITH_MODULES, METADATA_KEY))
"""What is read of a file beside the events."""


def load_trace(
    path: str | PathLike[str],
    *,
    decoder: Callable[[str], Any] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Trace:
    """The trace in a Chrome-format JSON file that torch.profiler wrote, plain or gzipped.

    The file is read once, from its beginning to its end, so it may be a pipe. In memory are

    - of each event at most 130 bytes, and of one that tells of a collective at most 700;
    - every distinct name, thread and process group once: more than ``TEXTS_LIMIT_BYTES`` of these are an error;
    - every distinct set of shapes and every call stack once: more than ``DETAILS_LIMIT_BYTES`` are left out, with a
      note;
    - some megabytes of text: an event of more than ``json_stream.VALUE_LIMIT`` characters is an error, and one of so
      many can take 150 MB while it is read.

    What stands beside the events and no table needs is passed over, in time that grows with its length alone. A gzipped
    file that holds more than ``MOST_INFLATION`` times its own bytes is an error.

    Args:
        path: a local path, or any URL that fsspec opens. Whether it is gzipped is seen from its first bytes.
        decoder: makes events of JSON text; msgspec's where it is installed, else the standard library's.
        progress: is told now and then how many bytes of the file have been read.

    Raises:
        TraceFormatError: the file cannot be opened, is empty, cut off, no JSON, no trace of torch.profiler, or beyond
            one of these limits.
    """
    source = fspath(path)
    metadata: dict[str, Any] = {}
    columns = TraceBuilder(source)
    try:
        with ExitStack() as stack:
            stream = _open(source, stack, progress)
            for batch in event_batches(stream, metadata, keys=_HEAD_KEYS, loads=decoder or fast_decoder()):
                columns.add(batch)
    except StreamError as error:
        raise TraceFormatError(f"{source}: {error}") from error
    except OSError as error:
        reason = error.strerror or f"{type(error).__name__}: {error}"  # remote file systems often give a path alone
        raise TraceFormatError(f"{source}: cannot be read: {reason}") from error
    except LightningFlopsError:
        raise
    except Exception as error:
        if "://" not in source:
            raise
        # A remote file system may raise anything; we add which file it was.
        raise TraceFormatError(f"{source}: cannot be read: {type(error).__name__}: {error}") from error
    return columns.trace(metadata)


def _open(source: str, stack: ExitStack, progress: Callable[[int], object] | None) -> IO[bytes]:
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
    begun = _Begun(head, stream, progress)
    return cast("IO[bytes]", _Unpacked(begun) if head == _GZIP_MAGIC else begun)


class _Begun(io.RawIOBase):
    """A stream from its beginning, of which *head* was already read: a pipe cannot be rewound."""

    def __init__(self, head: bytes, rest: IO[bytes], progress: Callable[[int], object] | None) -> None:
        super().__init__()
        self.given = 0
        self._unread = head
        self._rest = rest
        self._progress = progress

    def readable(self) -> bool:
        """It is there to be read."""
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes, fewer than asked for where the head ends; all of them without a size."""
        if size < 0:
            found, self._unread = self._unread + self._rest.read(), b""
        elif self._unread:
            found, self._unread = self._unread[:size], self._unread[size:]
        else:
            found = self._rest.read(size)
        self.given += len(found)
        if self._progress is not None:
            self._progress(self.given)
        return found

    def readinto(self, room: Buffer) -> int:
        """Put the next bytes into *room*."""
        found = self.read(len(memoryview(room)))
        memoryview(room)[: len(found)] = found
        return len(found)


class _Unpacked:
    """What a gzipped stream holds; isal unpacks it where it is installed, and zlib where it is not."""

    def __init__(self, packed: _Begun) -> None:
        self._packed = packed
        self._given = 0
        self._file = cast("IO[bytes]", _gzip_module().open(packed, "rb"))

    def read(self, size: int) -> bytes:
        """The next bytes."""
        try:
            found = self._file.read(size)
        except _gzip_errors() as error:
            raise StreamError(f"the gzip data is damaged or cut off: {error}") from error
        self._given += len(found)
        if self._given > _FREE_INFLATION_BYTES + MOST_INFLATION * self._packed.given:
            raise StreamError(f"the gzip data holds more than {MOST_INFLATION} times its own bytes: it is no trace")
        return found


def _gzip_module() -> Any:
    try:
        return importlib.import_module("isal.igzip")
    except ImportError:
        return gzip


def _gzip_errors() -> tuple[type[Exception], ...]:
    known = (EOFError, gzip.BadGzipFile, zlib.error)
    try:
        return (*known, importlib.import_module("isal.isal_zlib").error)
    except ImportError:
        return known
