"""What a path or a URL stands for: what runs have written, one file or all in a folder of logs, or files of traces."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any, Final, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_flops.config import OWN_FOLDER
from lightning_flops.errors import ComparisonError, LightningFlopsError, ProfileFormatError
from lightning_flops.schema.codec import LONGEST_PROFILE
from lightning_flops.schema.profile import Profile, ProfiledRun, ThroughputSummary
from lightning_flops.sinks.file import shown_path

#: ``profile.json``, ``profile-2.json``, ``profile.predict.json``, ``profile.rank3-2.json``, ``throughput.json``.
OWN_FILE: Final = re.compile(
    r"(?P<kind>profile|throughput)(?P<whose>(?:\.[a-z0-9]+)*)(?:-(?P<number>[0-9]{1,9}))?\.json"
)

_CLASSES: Final[Mapping[str, Any]] = {"profile": Profile, "throughput": ThroughputSummary}
KINDS: Final = tuple(_CLASSES)

_LOOP: Final = re.compile(r"(?:\.(?:predict|test|validate))?")  # the middle of a name of rank 0
_MOST_BYTES: Final = 4 * LONGEST_PROFILE + 1  # more would be more characters than are read
_TRACE_ENDINGS: Final = (".json", ".json.gz")
_OF_A_PROFILE: Final = b'"schema_version"'  # stands at the beginning of every report of this package, and in no trace
_OF_THROUGHPUT: Final = b'"ips_unit"'  # ... and this of a run's throughput
_LOOKED_AT_BYTES: Final = 4096
_OF_TRACES: Final = "`lightning-flops trace` reads traces"


class _FoundFile(NamedTuple):
    """A file whose name is one that runs give to what they write."""

    file: str
    kind: str
    logs: str  # the folder of the run's logs, which the file's own may lie in
    whose: str
    number: int
    written: float  # when, in seconds; 0 if the file system does not say


def read_runs(path: str) -> tuple[ProfiledRun, ...]:
    """Every run whose profiles lie at *path*, by name; runs of which no file could be read are there, with the reasons.

    *path* is a profile.json, or a folder that has such files anywhere below it; local, or any URL that fsspec opens.

    Raises:
        LightningFlopsError: there is nothing at *path*, it has no profile, or the one file cannot be read.
    """
    place = Place(path)
    root = place.root.rstrip("/")
    own_name = root.rpartition("/")[2]
    if not place.is_folder:
        return (ProfiledRun(name=own_name, windows=(place.read(place.root, "profile"),), problems=()),)
    runs: dict[str, tuple[list[Profile], list[str]]] = {}
    found = place.own("profile")
    if not found:
        raise place.has_none("profile")
    for one in sorted(found, key=lambda one: (one.number, one.file)):
        below = one.logs[len(root) :].strip("/") or own_name
        windows, problems = runs.setdefault(f"{below}{one.whose.replace('.', ' ')}", ([], []))
        try:
            windows.append(place.read(one.file, "profile"))
        except LightningFlopsError as error:
            problems.append(str(error))
    return tuple(
        ProfiledRun(name=run, windows=tuple(windows), problems=tuple(problems))
        for run, (windows, problems) in sorted(runs.items())
    )


def read_report(path: str | os.PathLike[str], *kinds: str) -> tuple[Any, str]:
    """The one report of the first of these *kinds* that *path* stands for, and the file it was read from.

    *path* is a report's file; or a folder of logs: its own report, or else the one that was written last in a folder
    below it. Of several runs with the same logs it is the last one's; training goes before other loops.

    Raises:
        LightningFlopsError: there is none, or it cannot be read; the message names what was looked at.
    """
    place = Place(os.fspath(path))
    file = place.root
    if place.is_folder:
        found = [one for one in place.own(*kinds) if _LOOP.fullmatch(one.whose)]
        if not found:
            raise place.has_none(*kinds)
        root = place.root.rstrip("/")
        file = max(
            found,
            key=lambda one: (
                -kinds.index(one.kind),
                one.logs == root,
                not one.whose,
                one.written,
                one.number,
                one.file,
            ),
        ).file
    return place.read(file, *kinds), place.shown(file)


def traces_at(path: str) -> tuple[str, ...] | None:
    """The trace files at *path*; None if a run has written it, or if there is such a file below a folder of logs.

    Any other folder stands for all files in it whose names end as traces' do. What can be read only once, such
    as a pipe, is taken for a profile.

    Raises:
        LightningFlopsError: there is nothing at *path*, or a folder with neither reports nor traces.
    """
    place = Place(path)
    if not place.is_folder:
        return None if place.holds_profile() else (path,)
    return None if place.own(*KINDS) else place.traces(f"{place.has_none(*KINDS)}, and")


class Place:
    """A file or a folder of some file system; a LightningFlopsError if there is nothing, or no reader for it."""

    def __init__(self, given: str) -> None:
        self.given = given
        with _errors_of(given):  # an unknown protocol, or whatever a client library raises
            self._system, self.root = fsspec.core.url_to_fs(given)
            self._is_local = isinstance(self._system, LocalFileSystem)
            self.is_folder = bool(self._system.isdir(self.root))
            there = self.is_folder or self._system.exists(self.root)
        if not there:
            raise LightningFlopsError(f"{given}: there is no such file or folder")

    def has_none(self, *kinds: str) -> LightningFlopsError:
        """What to raise for a folder without files of these *kinds*."""
        names = " or ".join(f"{kind}.json" for kind in kinds)
        return LightningFlopsError(f"{self.given}: no {names} is in this folder or below it")

    def holds_profile(self) -> bool:
        """Whether the file is a profile, and no trace; or one that cannot be read twice."""
        if OWN_FILE.fullmatch(self.root.rpartition("/")[2]) or (self._is_local and not os.path.isfile(self.root)):
            return True
        with _errors_of(self.given), self._system.open(self.root, "rb") as stream:
            return _OF_A_PROFILE in stream.read(_LOOKED_AT_BYTES)

    def traces(self, without: str) -> tuple[str, ...]:
        """The files in the folder, not below it, whose names are traces'; *without* begins the error if none is."""
        with _errors_of(self.given):
            files = sorted(one["name"] for one in self._system.ls(self.root, detail=True) if one["type"] == "file")
        names = ((file, file.rpartition("/")[2]) for file in files)
        found = [file for file, name in names if name.endswith(_TRACE_ENDINGS) and not OWN_FILE.fullmatch(name)]
        if not found:
            raise LightningFlopsError(f"{without} no trace ({', '.join(_TRACE_ENDINGS)}) is in this folder")
        return tuple(map(self.shown, found))

    def own(self, *kinds: str) -> Sequence[_FoundFile]:
        """The files of these *kinds* that runs have written anywhere below the folder."""
        with _errors_of(self.given):
            files = self._system.find(self.root, detail=True)
        found = []
        for file, about in sorted(files.items()):
            folder, _, name = file.rpartition("/")
            match = OWN_FILE.fullmatch(name)
            # A pipe would be waited for for ever.
            if match and match["kind"] in kinds and (not self._is_local or os.path.isfile(file)):
                logs, number = folder.removesuffix(f"/{OWN_FOLDER}"), int(match["number"] or 1)
                found.append(_FoundFile(file, match["kind"], logs, match["whose"], number, _written(about)))
        return found

    def read(self, file: str, *kinds: str) -> Any:
        """What a run has written into *file*, of one of these *kinds*."""
        shown = self.shown(file)
        opened = open if self._is_local else self._system.open  # fsspec's local files seek, which a pipe cannot
        with _errors_of(shown), opened(file, "rb") as stream:
            content = stream.read(_MOST_BYTES)
        kind = "throughput" if _OF_THROUGHPUT in content[:_LOOKED_AT_BYTES] else "profile"
        if kind not in kinds:
            raise LightningFlopsError(
                f"{shown}: this is the {kind} of a run, and its {' or '.join(kinds)} is needed here"
            )
        try:
            report = _CLASSES[kind].from_json(content.decode("utf-8"))
            if isinstance(report, Profile):
                _require_sense(report)
            return report
        except UnicodeDecodeError as error:
            raise LightningFlopsError(f"{shown}: this is no profile (not UTF-8); {_OF_TRACES}") from error
        except LightningFlopsError as error:
            hint = "" if _OF_A_PROFILE in content[:_LOOKED_AT_BYTES] else f"; {_OF_TRACES}"
            raise LightningFlopsError(f"{shown}: {error}{hint}") from error

    def shown(self, file: str) -> str:
        """*file* as a user would write it."""
        if file == self.root:
            return self.given
        if not self._is_local:
            return str(self._system.unstrip_protocol(file))
        return shown_path(file)


def _require_sense(profile: Profile) -> None:
    """Show *profile* and compare it with itself, in vain.

    Raises:
        ProfileFormatError: that cannot be done, by figures that no run writes.
    """
    from lightning_flops.analysis.compare import compare_profiles
    from lightning_flops.report.text import render_text

    try:
        sizes = {one.name: min(astuple(one.total_bytes)) for one in profile.modules}
        if sizes and ("" not in sizes or min(sizes.values()) < 0):
            raise ValueError("no module is the root, or one has bytes below 0")
        render_text(profile, detailed=True)
        compare_profiles(profile, profile)
    except ComparisonError:
        pass  # nothing in it was timed
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ProfileFormatError(f"its figures do not fit together: {type(error).__name__}: {error}") from error


def _written(about: Any) -> float:
    moment = about.get("mtime") or about.get("LastModified") or about.get("updated") or 0
    moment = moment.timestamp() if hasattr(moment, "timestamp") else moment
    return float(moment) if isinstance(moment, (int, float)) else 0.0


@contextlib.contextmanager
def _errors_of(shown: str) -> Iterator[None]:
    """Say of every error inside that *shown* cannot be read; file systems raise what their client libraries raise."""
    try:
        yield
    except Exception as error:
        words = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise LightningFlopsError(f"{shown}: cannot be read: {words}") from error
