"""Other projects' own tests without and with the profiler, and what differs: `make test-lightning`, for example.

``python -m benchmarks.suite lightning FOLDER --work WORK`` takes a folder that holds the project's repository at the
tag of the installed version: its tests are no part of this project. ``suite_lightning`` and ``suite_deepspeed`` say
what is run. Each piece of a suite is a process of pytest with ``benchmarks.suite_plugin``, which writes a line for
every test as soon as it is over. A piece whose process dies is begun again behind the test that it died in. A test that
ends otherwise than without the profiler is run again alone, both ways; only what differs then, too, is a difference.
Differences that the profiler's presence makes by construction stand in a file, each with its reason. Given once more
with the same ``--work``, the command goes on where it ended, unless what it depends on has changed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from .machine import RESULTS, ROOT, ran_in_words
from .page import table, write_page
from .suite_plugin import RECORDS, read

RUNS = ("plain", "profiled")  # Without the profiler, and with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tests that run in one process, without the profiler and with it."""

    targets: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    profiled: Mapping[str, str] = field(default_factory=dict)  # With the profiler, in addition
    mark: str = ""  # Stands before the tests' names, where they run in another piece, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project whose tests are run."""

    package: str
    repository: str
    holds: str  # A file or folder by which its source is known
    version_files: tuple[str, ...]
    title: str
    about: str  # What is run, for the page
    pieces: Mapping[str, Piece]
    known: Path  # The list of differences by construction
    settings: str  # Pytest's settings file, seen from the folder of the tests
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()  # More options of pytest
    prepare: Callable[[Path], None] = lambda work: None  # Called with the folder for what runs


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How one test ended."""

    how: str = ""  # passed, failed, error (in a fixture), skipped, xfailed, died (its process), or hung
    words: str = ""  # The end of what it said, if it is no success
    left: set[str] = field(default_factory=set)  # What was left behind after it
    said: dict[str, None] = field(default_factory=dict)  # Warnings of the profiler's, from all its processes
    windows: int = 0  # Windows of the profiler's that closed in it
    traced: int = 0  # Of them, those with a traced step


@dataclass(frozen=True, slots=True)
class Known:
    """A difference that the profiler's presence makes by construction."""

    reason: str
    says: str  # Regular expression that is found in what the test then says


Pair = tuple[Outcome, Outcome]  # Without and with the profiler


FAULTS, UNSTEADY, LEFT = "Faults", "Differed once, and not when run again alone", "Left behind"
FAILED, ONE_WAY = "The profiler failed", "Ran one way only"
KNOWN, NONE = "By construction", "Listed as differences by construction, and none"
HEADINGS = (KNOWN, FAULTS, UNSTEADY, LEFT, FAILED, ONE_WAY, NONE)
"""Of the page's lists of tests."""


@dataclass(slots=True)
class Comparison:
    """Two runs of the same tests."""

    windows: int = 0
    traced: int = 0
    same: Counter[str] = field(default_factory=Counter)  # Tests that ended alike, by how they ended
    lists: dict[str, dict[str, str]] = field(default_factory=lambda: {heading: {} for heading in HEADINGS})

    @property
    def good(self) -> bool:
        """Whether the profiler made no difference but those it makes by construction."""
        return not any(self.lists[heading] for heading in (FAULTS, LEFT, FAILED, ONE_WAY))


OWN_FAILURE = re.compile(r"the FLOPs profiler failed|FLOPs profiler could not be (loaded|removed)")
"""What the profiler says when something of its own went wrong."""

TEST_SEC = 300  # A test that takes longer fails

_WORST = ("", "passed", "xfailed", "skipped", "failed", "error", "hung", "died")


# ---- reading and comparing


def outcomes(path: str | os.PathLike[str]) -> dict[str, Outcome]:
    """How each test of a run ended, by its id, from the plugin's records.

    A test that ran in several processes, which a launcher started from the same command, ended as the worst of them.
    """
    found: dict[str, Outcome] = {}
    for record in read(path):
        test = found.setdefault(record["test"], Outcome())
        match record["kind"]:
            case "ended" | "died":
                if _WORST.index(record["how"]) > _WORST.index(test.how):
                    test.how, test.words = record["how"], record["words"]
                test.left.update(record.get("left", ()))
            case "said":
                test.said[record["words"]] = None
            case "profiled":
                test.windows += 1
                test.traced += record["traced"]
    return {name: test for name, test in found.items() if test.how}


def known_differences(path: Path) -> dict[str, Known]:
    """The list of differences by construction at *path*, by the tests' ids.

    A line ``# words`` begins a reason, a line ``~ regular expression`` behind it says what its tests then say; each
    other line is the id of a test.
    """
    found, known = {}, Known("", "")
    for line in filter(None, map(str.strip, path.read_text().splitlines())):
        match line[:2]:
            case "# ":
                known = Known(line[2:], "")
            case "~ ":
                known = Known(known.reason, line[2:])
            case _:
                found[line] = known
    return found


def compare(
    plain: Mapping[str, Outcome],
    profiled: Mapping[str, Outcome],
    known: Mapping[str, Known],
    *,
    again: Mapping[str, Sequence[Pair]] | None = None,
) -> Comparison:
    """What the profiler changed; *again* has how tests ended that were run again alone."""
    ours = profiled.values()
    result = Comparison(sum(outcome.windows for outcome in ours), sum(outcome.traced for outcome in ours))
    lists = result.lists
    lists[ONE_WAY] = dict.fromkeys(sorted(plain.keys() ^ profiled.keys()), "")
    for test in sorted(plain.keys() & profiled.keys()):
        before, after = plain[test], profiled[test]
        pairs = [(before, after), *(again or {}).get(test, ())]
        # A leak is left every time that the profiler is there, and never without it.
        left = set.intersection(*(pair[1].left for pair in pairs))
        if left := left.difference(*(pair[0].left for pair in pairs)):
            lists[LEFT][test] = _code(", ".join(sorted(left)))
        if said := [words for words in after.said if OWN_FAILURE.search(words)]:
            lists[FAILED][test] = _code(said[0])
        if before.how == after.how:
            result.same[after.how] += 1
            if test in known:
                lists[NONE][test] = ""
        elif test in known and re.search(known[test].says, after.words):
            lists[KNOWN][test] = known[test].reason
        else:
            steady = all(one.how != other.how for one, other in pairs)
            words = _code(last_words(after) or last_words(before))
            ends = f"{before.how} without, {after.how} with the profiler: {words}"
            lists[FAULTS if steady else UNSTEADY][test] = ends
    return result


def last_words(outcome: Outcome) -> str:
    """The line that says most of what a test said: its last error, or its last line."""
    lines = [line.strip() for line in outcome.words.splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    (line,) = errors[:1] or lines[-1:] or [""]
    return line if len(line) <= 200 else line[:197] + "..."


def report(result: Comparison, *, title: str, about: str, ran: str) -> list[str]:
    """The lines of the page that says what *result* is."""
    same, lists = sum(result.same.values()), result.lists
    alike = ", ".join(f"{count:,} {how}" for how, count in sorted(result.same.items()))
    total = same + sum(len(lists[heading]) for heading in (KNOWN, FAULTS, UNSTEADY))
    rows = [("Ran without and with the profiler", f"{total:,}"), (f"Ended alike ({alike})", f"{same:,}")]
    rows += [(heading, f"{len(lists[heading]):,}") for heading in HEADINGS if heading != NONE]
    lines = [f"# {title}", "", about, "", ran, "", *table(["", ">tests"], rows)]
    lines += ["", f"{result.windows:,} windows closed in these tests, {result.traced:,} of them with a traced step."]
    reasons = dict.fromkeys(lists[KNOWN].values())
    by_reason = {f"{KNOWN}: {why}": {t: "" for t, words in lists[KNOWN].items() if words == why} for why in reasons}
    for heading, tests in {**lists, KNOWN: {}, **by_reason}.items():
        if tests:
            lines += ["", f"## {heading} ({len(tests)})", ""]
            lines += [f"- `{test}`" + (f": {words}" if words else "") for test, words in tests.items()]
    return lines


def _code(words: str) -> str:
    return f"`{words.replace('`', chr(39))}`" if words else "(no word)"


# ---- running


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A copy of a project's tests, and how they are run."""

    folder: Path  # Where pytest is started; ids of tests are paths from here
    settings: Path  # Pytest's settings file
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def run(self, targets: Sequence[str], records: Path, **environment: str) -> None:
        """Run *targets*, paths or ids of tests, in one process, and in a next one if it dies; add to *records*.

        What has ended according to *records* is not run again.
        """
        arguments = ["-m", "pytest", *targets, "-c", str(self.settings), f"--rootdir={self.folder}", "-q", "--tb=short"]
        arguments += [f"--timeout={TEST_SEC}", "-p", "benchmarks.suite_plugin", "-p", "no:cacheprovider", *self.options]
        arguments += ["-o", f"faulthandler_timeout={TEST_SEC + 60}", "-o", "faulthandler_exit_on_timeout=true"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment, RECORDS: str(records), **environment}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH"))))
        for _ in range(20):
            with open(f"{records}.log", "ab") as log:
                process = self.start(arguments, variables, log.fileno())
                try:
                    code = process.wait()
                finally:
                    with contextlib.suppress(ProcessLookupError):  # with all that its tests have started and left
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if code in (0, 1, 5):  # all passed, some failed, none was left to run
                return
            if not _record_death(records, code):
                print(f"pytest ended with {code} on {', '.join(targets)}: see {records}.log", file=sys.stderr)
                return

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], output: int) -> Any:
        """``python ARGUMENTS``, which leads a session of its own and writes to the file *output*."""
        command = [sys.executable, *arguments]
        return subprocess.Popen(
            command, cwd=self.folder, env=variables, stdout=output, stderr=output, start_new_session=True
        )


def _record_death(records: Path, code: int) -> bool:
    """Record the test in which a process died as dead; whether there was one."""
    running = {}
    for record in read(records):
        if record["kind"] == "started" and not record["launched"]:
            running[record["test"]] = record
        elif record["kind"] in ("ended", "died"):
            running.pop(record["test"], None)
    with open(records, "a") as lines:
        for test in running:
            death = {"kind": "died", "test": test, "how": "died", "words": f"its process ended with {code}"}
            lines.write(json.dumps(death) + "\n")
    return bool(running)


@dataclass(frozen=True, slots=True)
class Job:
    """A project's source, the folder for what runs, and by run a hash of what its records depend on."""

    project: Project
    source: Path
    work: Path
    stamps: Mapping[str, str]

    def run(self, piece: Piece, run: str, records: str, folder: str, *targets: str) -> dict[str, Outcome]:
        """How *targets*, or all of *piece*, ended in a copy of the tests: they look for files that others leave."""
        tests, project = self.work / folder / "tests", self.project
        if not tests.exists():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(self.source / "tests", tests, ignore=ignored, symlinks=True)
        suite = Suite(
            folder=tests,
            settings=tests / project.settings,
            environment={"PYTHONPATH": str(self.work / "entry_point"), **project.environment},
            options=("--continue-on-collection-errors", "-p", "no:randomly", *project.options),
        )
        path = self.work / f"{records}-{run}-{self.stamps[run]}.jsonl"
        variables = {**piece.environment, **(piece.profiled if run == "profiled" else {})}
        suite.run(targets or piece.targets, path, **variables)
        return {piece.mark + test: outcome for test, outcome in outcomes(path).items()}

    def again(self, tests: Iterable[str]) -> dict[str, list[Pair]]:
        """How *tests* end alone, without and with the profiler, twice each."""
        found: dict[str, list[Pair]] = {}
        for test in tests:
            pieces = [piece for piece in self.project.pieces.values() if test.startswith(piece.mark)]
            piece = max(pieces, key=lambda piece: len(piece.mark))
            for attempt in range(2):
                records = f"again-{attempt}-{_hashed(test)}"
                ends = [self.run(piece, run, records, "again", test.removeprefix(piece.mark)) for run in RUNS]
                before, after = (end.get(test, Outcome(how="died", words="no record")) for end in ends)
                found.setdefault(test, []).append((before, after))
        return found


def _hashed(*words: str) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def stamps() -> dict[str, str]:
    """By run, a hash of what its records depend on: all packages, and with the profiler this one's code."""
    installed = sorted(f"{each.name}=={each.version}" for each in metadata.distributions())
    folders = (ROOT / "lightning_flops", ROOT / "benchmarks")
    code = [path.read_text() for folder in folders for path in sorted(folder.rglob("*.py"))]
    return {"plain": _hashed(*installed), "profiled": _hashed(*installed, *code)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both, compare, write the page; 0 if the profiler made no difference but those by construction."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__)
    parser.add_argument("project", choices=("lightning", "deepspeed"))
    parser.add_argument("source", type=Path, help="folder that holds its repository")
    parser.add_argument("--work", type=Path, required=True, help="folder for what runs, and for the records")
    parser.add_argument("--output", type=Path, help="the page (default: in benchmarks/results, without --parts)")
    parser.add_argument("--jobs", type=int, default=2, help="pieces that run at the same time")
    parser.add_argument("--parts", nargs="+", help="some of its pieces")
    options = parser.parse_args(arguments)
    project: Project = import_module(f".suite_{options.project}", __package__).PROJECT
    source, work, installed = options.source.resolve(), options.work.resolve(), metadata.version(project.package)
    if not (source / project.holds).exists():
        said = f"There is no {project.package} in {source}: give a folder that holds {project.repository} at the tag of"
        print(f"{said} {installed}, the installed version.", file=sys.stderr)
        return 2
    files = [source / name for name in project.version_files if (source / name).is_file()]
    version = files[0].read_text().strip() if files else "unknown"
    if version != installed:
        print(f"warning: the source is of version {version}, and {installed} is installed", file=sys.stderr)
    work.mkdir(parents=True, exist_ok=True)
    project.prepare(work)
    job, names = Job(project, source, work, stamps()), options.parts or list(project.pieces)
    asked = [(name, run) for run in RUNS for name in names]
    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(lambda one: job.run(project.pieces[one[0]], one[1], one[0], "-".join(one)), asked))
    plain, profiled = dict(ChainMap(*found[: len(names)])), dict(ChainMap(*found[len(names) :]))
    known = known_differences(project.known)
    first = compare(plain, profiled, known)
    result = compare(plain, profiled, known, again=job.again([*first.lists[FAULTS], *first.lists[LEFT]]))
    ran = f"{ran_in_words(('torch', project.package, 'pytest'))} The source is of version {version}."
    page = report(result, title=project.title, about=f"{project.about} Parts: {', '.join(names)}.", ran=ran)
    print("\n".join(page))
    output = options.output or (None if options.parts else RESULTS / f"{options.project}_suite.md")
    if output is not None:
        write_page(output, page)
    return 0 if result.good and (result.windows or options.parts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
