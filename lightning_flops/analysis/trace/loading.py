"""Read a torch trace file into columns, a block at a time."""

from __future__ import annotations

import gzip
import importlib
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from os import PathLike, fspath
from pathlib import Path
from typing import IO, Any, cast

from lightning_flops.analysis.trace.columns import Trace, TraceFormatError
from lightning_flops.analysis.trace.events import TraceBuilder
from lightning_flops.analysis.trace.json_stream import StreamError, event_batches, fast_decoder
from lightning_flops.analysis.trace_marks import METADATA_KEY
from lightning_flops.errors import LightningFlopsError

_GZIP_MAGIC = b"\x1f\x8b"
_HEAD_KEYS = frozenset(("deviceProperties", "distributedInfo", "baseTimeNanoseconds", METADATA_KEY))
"""What is read of a file beside the events."""


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
    columns = TraceBuilder(source)
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
        # A remote file system may raise anything; we add which file it was.
        raise TraceFormatError(f"{source}: cannot be read: {type(error).__name__}: {error}") from error
    return columns.trace(metadata)


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
    """A stream from its beginning, of which *head* was already read: a pipe cannot be rewound."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._unread = head
        self._rest = rest

    def read(self, size: int) -> bytes:
        """The next bytes: fewer than *size* where the head ends, none where the stream does."""
        found, self._unread = self._unread[:size], self._unread[size:]
        return found or self._rest.read(size)
