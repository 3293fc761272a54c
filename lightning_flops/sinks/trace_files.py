"""The trace files that a path stands for: one, or those of a run's ranks in a folder; and what is a profile instead."""

from __future__ import annotations

from lightning_flops.errors import LightningFlopsError
from lightning_flops.sinks.profile_files import PROFILE_FILE, Place

_ENDINGS = (".json", ".json.gz")
_GZIP_MAGIC = b"\x1f\x8b"
_OF_A_PROFILE = b'"schema_version"'
"""Stands at the beginning of every report of this package, and in no trace."""

_LOOKED_AT_BYTES = 4096


def traces_at(path: str) -> tuple[str, ...] | None:
    """The trace files at *path*; None if there is a profile, or a folder of logs with profiles below it.

    A folder without profiles stands for all files in it whose names end as traces' do. What can be read only once, such
    as a pipe, is taken for a profile.

    Args:
        path: a file or a folder; a local path, or a URL of any file system that fsspec knows.

    Raises:
        LightningFlopsError: there is nothing at *path*, or a folder with neither profiles nor traces.
    """
    place = Place(path)
    if not place.is_folder:
        return None if _is_profile(place) else (path,)
    if place.find():
        return None
    if not (files := _traces_in(place)):
        raise LightningFlopsError(f"{place.has_none}, and no trace (.json, .json.gz) in it")
    return files


def traces_in(folder: str) -> tuple[str, ...]:
    """The trace files in *folder*, also where a run has profiles there.

    Raises:
        LightningFlopsError: there is no such folder, or no trace in it.
    """
    if not (files := _traces_in(Place(folder))):
        raise LightningFlopsError(f"{folder}: no trace (.json, .json.gz) is in this folder")
    return files


def _traces_in(place: Place) -> tuple[str, ...]:
    """Files whose names end as traces' do, and are not those of profiles."""
    names = [(file, file.rpartition("/")[2]) for file in place.files()]
    return tuple(
        place.shown(file) for file, name in names if name.endswith(_ENDINGS) and PROFILE_FILE.fullmatch(name) is None
    )


def _is_profile(place: Place) -> bool:
    name = place.root.rpartition("/")[2]
    if PROFILE_FILE.fullmatch(name) is not None or not place.is_regular:
        return True
    if name.endswith(".gz"):
        return False
    begin = place.head(_LOOKED_AT_BYTES)
    return not begin.startswith(_GZIP_MAGIC) and _OF_A_PROFILE in begin
