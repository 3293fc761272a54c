"""Files that are written whole: at a local path, or at any URL that fsspec opens."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable
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
    write_file(path, _lines(text))


def write_file(path: str | Path, content: Iterable[bytes], *, new: bool = False) -> None:
    """Replace the content of the file at *path* by *content*, piece by piece; otherwise as ``write_text_file``.

    Args:
        path: as there.
        content: the new content.
        new: no file may lie there. Where file systems cannot tell at the moment of writing, one is replaced.

    Raises:
        FileExistsError: one does.
        OSError: the file cannot be written, for whatever reason; the message names it.
    """
    try:
        file_system, name = fsspec.core.url_to_fs(str(path))
        if isinstance(file_system, LocalFileSystem):
            _write_local(Path(name), content, new=new)
            return
        # An object store needs no folders, and may not let us make the bucket that exists.
        with contextlib.suppress(PermissionError):
            file_system.makedirs(file_system._parent(name), exist_ok=True)
        with file_system.open(name, "wb") as file:
            for piece in content:
                file.write(piece)
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

    def write_text(self, path: str, text: str) -> str:
        """Write *text* to the first free name for *path*, though other processes may write there at the same time.

        Returns:
            The name.

        Raises:
            OSError: as for ``write_text_file``.
        """
        while True:
            free = self.free(path)
            try:
                write_file(free, _lines(text), new=True)
                return free
            except FileExistsError:
                if not fsspec.core.url_to_fs(free)[0].exists(free):  # a folder above it is a file
                    raise


def free_path(path: str) -> str:
    """The first free name of ``FreePaths`` for *path*."""
    return FreePaths().free(path)


def _numbered(path: str, number: int) -> str:
    if number == 1:
        return path
    stem, dot, suffix = path.rpartition(".")
    return f"{stem}-{number}{dot}{suffix}"


def _lines(text: str) -> list[bytes]:
    return [(text if text.endswith("\n") else text + "\n").encode()]


def _write_local(path: Path, content: Iterable[bytes], *, new: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.resolve()  # a link stays a link; what it points to is replaced
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        _write(path, content)  # a device or a pipe cannot be replaced; a folder raises, as it should
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        _write(draft, content)
        if mode is not None:
            shutil.copymode(path, draft)
        if not (new and _links(draft, path)):
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _links(draft: Path, path: Path) -> bool:
    """Give *draft* the name *path*, too; returns False on a file system that cannot do that.

    Raises:
        FileExistsError: a file has that name.
    """
    try:
        os.link(draft, path)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


def _write(path: Path, content: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(content)
