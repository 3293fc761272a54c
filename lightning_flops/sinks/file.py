"""Files that are written whole: at a local path, or at any URL that fsspec opens; among them traces that are kept.

Every error is an OSError that names the path.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_flops.signals import Quiet


def write_text_file(path: str | os.PathLike[str], text: str) -> None:
    """Replace the content of the file that the user has named by *text*, as UTF-8; missing folders are created.

    A local file appears whole or not at all: a reader, or a crash, never meets half a report. Links are followed. A
    newline is added at the end if there is none.
    """
    content = (text if text.endswith("\n") else text + "\n").encode()
    with _opened(path) as local:
        mode = local.stat().st_mode if local is not None and local.exists() else None
        if local is not None and mode is not None and not stat.S_ISREG(mode):
            local.write_bytes(content)  # a device or a pipe cannot be replaced; a folder raises, as it should
        else:  # a link stays a link; what it points to is replaced
            _replace(path, local and local.resolve(), content, mode=mode)


def write_own_file(path: str, content: bytes) -> None:
    """Replace our own file at *path*, as ``write_text_file`` does. A link that lies there is replaced, not followed."""
    with _opened(path) as local:
        _replace(path, local, content)


def _replace(path: str | os.PathLike[str], local: Path | None, content: bytes, *, mode: int | None = None) -> None:
    """Put *content* in the place of a remote file, or of a *local* one, which keeps its *mode* if it had one."""
    if local is None:
        _write_remote(path, content)
    else:
        with _draft(local, [content]) as draft:
            if mode is not None:
                draft.chmod(stat.S_IMODE(mode))
            draft.replace(local)


def write_new_file(path: str, content: Iterable[bytes], *, beside: Sequence[str] = ()) -> int:
    """Write *content* at the first of *path*, ``name-2.suffix``, ``name-3.suffix`` … that is free; none is replaced.

    The paths *beside* must be free under the same number, which is returned for ``numbered``.
    """
    with _opened(path) as local:
        number = _free(path, beside, after=0)
        if local is None:
            _write_remote(numbered(path, number), b"".join(content))
            return number
        with _draft(local, content) as draft:
            while True:
                name = local.with_name(os.path.basename(numbered(path, number)))
                with contextlib.suppress(FileExistsError):
                    name.touch(exist_ok=False)  # ours from here on; file systems without hard links can do this, too
                    try:
                        draft.replace(name)
                    except BaseException:
                        name.unlink(missing_ok=True)
                        raise
                    return number
                number = _free(path, beside, after=number)


def numbered(path: str, number: int) -> str:
    """*path* itself for number 1, else ``name-number.suffix``."""
    if number == 1:
        return path
    stem, dot, suffix = path.rpartition(".")
    return f"{stem}-{number}{dot}{suffix}"


def shown_path(path: str) -> str:
    """*path* from the working directory, if it lies below it, and if that is still there."""
    try:
        shown = os.path.relpath(path) if os.path.isabs(path) else path  # a URL is not
    except OSError:
        return path
    return path if shown.startswith("..") else shown


def remove_file(path: str) -> None:
    """Remove the file at *path*, if that can be done."""
    with Quiet(Exception):  # file systems raise what their client libraries raise
        file_system, name = fsspec.core.url_to_fs(path)
        file_system.rm_file(name)


def _free(path: str, beside: Sequence[str], *, after: int) -> int:
    file_system, _ = fsspec.core.url_to_fs(path)
    return next(
        number
        for number in count(after + 1)
        if not any(file_system.exists(numbered(one, number)) for one in (path, *beside))
    )


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[Path | None]:
    """*path* if it is a local one, or a URL of one, else None; every error inside is an OSError that names it."""
    try:
        file_system, name = fsspec.core.url_to_fs(str(path))
        yield Path(name) if isinstance(file_system, LocalFileSystem) else None
    except OSError as error:
        if error.errno is None:
            raise OSError(f"cannot write {path}: {error}") from error
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:  # file systems raise what their client libraries raise
        raise OSError(f"cannot write {path}: {type(error).__name__}: {error}") from error


def _write_remote(path: str | os.PathLike[str], content: bytes) -> None:
    file_system, name = fsspec.core.url_to_fs(str(path))
    # An object store needs no folders, and may not let us make the bucket that exists.
    with contextlib.suppress(PermissionError):
        file_system.makedirs(file_system._parent(name), exist_ok=True)
    with file_system.open(name, "wb") as file:
        file.write(content)


@contextlib.contextmanager
def _draft(path: Path, content: Iterable[bytes]) -> Iterator[Path]:
    """A whole file beside *path* with *content*, which is removed at the end, unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # No one can guess the name, and "x" follows no link. It is short: the name of the file may be as long as may be.
    draft = path.with_name(f".{secrets.token_hex(8)}.draft")
    try:
        with draft.open("xb") as file:
            file.writelines(content)
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def keep_trace(path: str, folder: str, *, rank: int, step: int) -> str:
    """Copy a trace file that torch wrote, and say where it lies now.

    The local file at *path* goes to *folder*, a path or URL, under a name that is free there.

    Raises:
        OSError: it cannot be read or written; the message names the file.
    """
    target = f"{folder.rstrip('/')}/rank{rank}_step{step}.pt.trace.json"
    with open(path, "rb") as file:
        return numbered(target, write_new_file(target, file))
