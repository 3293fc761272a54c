"""Profiles read back from where a run wrote them: a file, a folder of logs, or a URL of either."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import fsspec

from lightning_flops.errors import LightningFlopsError
from lightning_flops.schema.dataclass_json import LONGEST_PROFILE
from lightning_flops.schema.profile import Profile

_NAME = re.compile(r"profile(?:\.(predict|test|validate))?(?:-(\d+))?\.json")
"""What a run calls its profile; those of other ranks have names of their own."""

_MOST_BYTES = 4 * LONGEST_PROFILE + 1
"""More would be more characters than are read."""


def read_profile(path: str | os.PathLike[str]) -> tuple[Profile, str]:
    """The profile at *path*, and the file it was read from.

    Args:
        path: a profile's file; or a folder of logs: its own profile, or, if it has none, the one that was written last
        in
            a folder below it. Of a run that was profiled several times, the last profile; one of training goes before
            one of another loop. A local path, or a URL of any file system that fsspec knows.

    Raises:
        LightningFlopsError: there is none, or it cannot be read; the message names what was looked at.
    """
    given = os.fspath(path)
    try:
        file_system, place = fsspec.core.url_to_fs(given)
        file = _profile_in(file_system, place, given) if file_system.isdir(place) else place
        with file_system.open(file, "rb") as stream:
            text = stream.read(_MOST_BYTES).decode("utf-8")
    except LightningFlopsError:
        raise
    except UnicodeDecodeError as error:
        raise LightningFlopsError(f"{given}: the profile is not UTF-8") from error
    except OSError as error:
        raise LightningFlopsError(f"{given}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # file systems raise what their client libraries raise
        raise LightningFlopsError(f"{given}: cannot be read: {type(error).__name__}: {error}") from error
    shown = given if file == place else _shown(file_system, file)
    try:
        return Profile.from_json(text), shown
    except LightningFlopsError as error:
        raise LightningFlopsError(f"{shown}: {error}") from error


def _profile_in(file_system: Any, folder: str, given: str) -> str:
    """The file of the profile that a folder of logs stands for."""
    found: dict[str, tuple[bool, bool, float, int, str]] = {}
    for file, about in file_system.find(folder, detail=True).items():
        name = _NAME.fullmatch(file.rpartition("/")[2])
        if name is not None:
            in_place = file.rpartition("/")[0].rstrip("/") == folder.rstrip("/")
            written = about.get("mtime") or about.get("LastModified") or about.get("updated") or 0
            moment = written.timestamp() if hasattr(written, "timestamp") else written
            number = int(name[2] or 1)
            found[file] = (in_place, name[1] is None, moment if isinstance(moment, (int, float)) else 0, number, file)
    if not found:
        raise LightningFlopsError(f"{given}: no profile.json is in this folder or below it")
    return max(found, key=found.__getitem__)


def _shown(file_system: Any, file: str) -> str:
    """*file* as a user would write it."""
    if "file" in (file_system.protocol if isinstance(file_system.protocol, tuple) else (file_system.protocol,)):
        relative = os.path.relpath(file)
        return file if relative.startswith("..") else str(Path(relative))
    return str(file_system.unstrip_protocol(file))
