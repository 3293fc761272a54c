"""Finds and reads the files in which runs keep their profiles: one file, or all that lie in a folder of logs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import fsspec

from lightning_flops.errors import LightningFlopsError, ProfileFormatError
from lightning_flops.schema.dataclass_json import LONGEST_PROFILE
from lightning_flops.schema.profile import Profile

_FILE: Final = re.compile(r"profile(?P<whose>(?:\.[a-z0-9]+)*)(?:-(?P<number>[0-9]{1,9}))?\.json")
"""``profile.json``, ``profile-2.json``, ``profile.predict.json``, ``profile.rank3-2.json``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """The profiles of one run that lie in one folder."""

    name: str
    """The folder below the one that was searched; with the loop and the rank, if files name them."""
    windows: tuple[Profile, ...]
    """In the order in which they were written."""
    problems: tuple[str, ...]
    """Files that could not be read, in sentences."""


def read_runs(path: str) -> tuple[FoundRun, ...]:
    """Every run whose profiles lie at *path*, by name; runs of which no file could be read are there, with the reasons.

    Args:
        path: a profile.json, or a folder that has such files anywhere below it; a local path or any URL that fsspec
            opens.

    Raises:
        LightningFlopsError: there is nothing at *path*, it has no profile, or the one file cannot be read.
    """
    file_system, root = _file_system(path)
    try:
        is_folder = file_system.isdir(root)
        if not is_folder and not file_system.exists(root):
            raise LightningFlopsError(f"{path}: there is no such file or folder")
        names = sorted(file_system.find(root)) if is_folder else []
    except LightningFlopsError:
        raise
    except Exception as error:  # file systems raise what their client libraries raise
        raise LightningFlopsError(f"{path}: cannot be read: {_words(error)}") from error
    if not is_folder:
        name = root.rstrip("/").rpartition("/")[2]
        return (FoundRun(name=name, windows=(_read(file_system, root),), problems=()),)
    found = _grouped(root, names)
    if not found:
        raise LightningFlopsError(f"{path}: there is no profile.json in this folder or below it")
    return tuple(_read_run(file_system, name, files) for name, files in found.items())


def _file_system(path: str) -> tuple[Any, str]:
    try:
        file_system, root = fsspec.core.url_to_fs(path)
    except Exception as error:  # an unknown protocol, or its package is missing
        raise LightningFlopsError(f"{path}: cannot be read: {_words(error)}") from error
    return file_system, root


def _grouped(root: str, names: Sequence[str]) -> dict[str, list[str]]:
    """Files by run, both in order; windows by the numbers that their files were given."""
    runs: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        match = _FILE.fullmatch(file)
        if match is None:
            continue
        below = folder[len(root.rstrip("/")) :].strip("/") or folder.rpartition("/")[2]
        whose = match["whose"].replace(".", " ")
        runs.setdefault(f"{below}{whose}", []).append((int(match["number"] or 1), name))
    return {run: [name for _, name in sorted(files)] for run, files in sorted(runs.items())}


def _read_run(file_system: Any, name: str, files: Sequence[str]) -> FoundRun:
    windows: list[Profile] = []
    problems: list[str] = []
    for file in files:
        try:
            windows.append(_read(file_system, file))
        except LightningFlopsError as error:
            problems.append(str(error))
    return FoundRun(name=name, windows=tuple(windows), problems=tuple(problems))


def _read(file_system: Any, name: str) -> Profile:
    try:
        with file_system.open(name, "rb") as file:
            content: bytes = file.read(4 * LONGEST_PROFILE + 1)
        text = content.decode("utf-8")
    except Exception as error:
        raise LightningFlopsError(f"{name}: cannot be read: {_words(error)}") from error
    try:
        return Profile.from_json(text)
    except ProfileFormatError as error:
        raise LightningFlopsError(f"{name}: {error}") from error


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
