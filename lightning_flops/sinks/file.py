"""Files that are written whole: at a local path, or at any URL that fsspec opens."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem


def write_text_file(path: str | Path, text: str) -> None:
    """Replace the content of the file at *path* by *text*, as UTF-8; missing folders are created.

    A local file appears whole or not at all: a reader, or a crash, never meets half a report.

    Args:
        path: local path, or a URL of any file system that fsspec knows.
        text: the new content; a newline is added at its end if it has none.

    Raises:
        OSError: the file cannot be written, for whatever reason; the message names it.
    """
    write_file(path, _content(text))


def _content(text: str) -> list[bytes]:
    return [(text if text.endswith("\n") else text + "\n").encode()]


def write_file(path: str | Path, content: Iterable[bytes]) -> None:
    """Replace the content of the file at *path* by *content*, piece by piece; otherwise as ``write_text_file``.

    Raises:
        OSError: the file cannot be written, for whatever reason; the message names it.
    """
    with _errors_of(path):
        if (local := _local(path)) is not None:
            _write_local(local, content)
            return
        file_system, name = fsspec.core.url_to_fs(str(path))
        # An object store needs no folders, and may not let us make the bucket that exists.
        with contextlib.suppress(PermissionError):
            file_system.makedirs(file_system._parent(name), exist_ok=True)
        with file_system.open(name, "wb") as file:
            for piece in content:
                file.write(piece)


@contextlib.contextmanager
def _errors_of(path: str | Path) -> Iterator[None]:
    """Make every error inside an OSError that names *path*."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise OSError(f"cannot write {path}: {error}") from error
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:  # file systems raise what their client libraries raise
        raise OSError(f"cannot write {path}: {type(error).__name__}: {error}") from error


class FreePaths:
    """Names under which no file lies yet; where many are asked for, none is looked at twice."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def free(self, path: str) -> str:
        """*path*, or ``name-2.suffix``, ``name-3.suffix`` … beside it: the first that is free.

        Those that were answered before, and the files that lay before them, count as taken.

        Args:
            path: local path, or a URL of any file system that fsspec knows; the answer where that cannot be asked.
        """
        number = self._last.get(path, 0) + 1
        try:
            file_system, _ = fsspec.core.url_to_fs(path)
            while file_system.exists(free := _numbered(path, number)):
                number += 1
        except Exception:  # whatever the file system's client raises, the writing that follows will say it
            return path
        self._last[path] = number
        return free

    def write(self, path: str, content: Iterable[bytes]) -> str:
        """Write *content* as ``write_file`` does, under a free name for *path*; returns that name.

        A local file that another process writes meanwhile is never replaced.

        Raises:
            OSError: the file cannot be written, for whatever reason; the message names it.
        """
        free = self.free(path)
        with _errors_of(free):
            local = _local(free)
        if local is None:
            write_file(free, content)
            return free
        with _errors_of(free), _draft(local, content) as draft:
            while not _takes_name(draft, local):
                free = self.free(path)
                local = local.with_name(free.rpartition("/")[2])
        return free

    def write_text(self, path: str, text: str) -> str:
        """The same of *text*, as ``write_text_file`` writes it."""
        return self.write(path, _content(text))


def _takes_name(draft: Path, path: Path) -> bool:
    """Give *draft* the name *path*; returns whether that was free."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        draft.replace(path)
    return True


def _local(path: str | Path) -> Path | None:
    """*path* if it is a local one, or a URL of one; None if it is not."""
    file_system, name = fsspec.core.url_to_fs(str(path))
    return Path(name) if isinstance(file_system, LocalFileSystem) else None


def _numbered(path: str, number: int) -> str:
    if number == 1:
        return path
    stem, dot, suffix = path.rpartition(".")
    return f"{stem}-{number}{dot}{suffix}"


def _write_local(path: Path, content: Iterable[bytes]) -> None:
    path = path.resolve()  # a link stays a link; what it points to is replaced
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        _write(path, content)  # a device or a pipe cannot be replaced; a folder raises, as it should
        return
    with _draft(path, content) as draft:
        if mode is not None:
            shutil.copymode(path, draft)
        draft.replace(path)


@contextlib.contextmanager
def _draft(path: Path, content: Iterable[bytes]) -> Iterator[Path]:
    """A whole file beside *path* with *content*, which is removed at the end, unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        _write(draft, content)
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _write(path: Path, content: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(content)
