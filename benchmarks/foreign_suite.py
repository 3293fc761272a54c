"""Runs somebody else's tests without and with the profiler, and says what differs.

Each run is made of pieces, each a process of pytest with ``benchmarks.foreign_suite_plugin``, which writes a line for
every test as soon as it is over. A piece whose process dies is begun again behind the test that it died in. A test that
ends otherwise than without the profiler is run again alone, both ways; only what differs then, too, is a difference.
Differences that the profiler's presence makes by construction stand in a file, each with its reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from xml.etree import ElementTree

from .foreign_suite_plugin import LEFT, RECORDS, RUNNABLE, read

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one test ended."""

    how: str
    """passed, failed, error (in a fixture), skipped, xfailed, died (its process), or hung."""
    words: str = ""
    """The end of what it said, if it is no success."""
    left: tuple[str, ...] = ()
    """What was left behind after it."""
    said: tuple[str, ...] = ()
    """Warnings of the profiler's, from all its processes."""
    windows: int = 0
    """Windows of the profiler's that closed in it."""
    traced: int = 0
    """Of them, those with a traced step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A difference that the profiler's presence makes by construction."""

    reason: str
    says: str
    """Regular expression that is found in what the test then says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs of the same tests."""

    same: Counter[str] = field(default_factory=Counter)
    """Tests that ended alike, by how they ended."""
    by_construction: dict[str, Known] = field(default_factory=dict)
    faults: dict[str, tuple[Outcome, Outcome]] = field(default_factory=dict)
    """Without and with the profiler."""
    leaks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What is left after a test with the profiler and is not without."""
    failures: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Where the profiler said that it failed."""
    unsteady: dict[str, tuple[Outcome, Outcome]] = field(default_factory=dict)
    """Differed once, and not when they ran again alone."""
    missing: tuple[str, ...] = ()
    """Tests that one of the runs alone has."""
    known_and_the_same: tuple[str, ...] = ()
    """Listed as differences by construction, and none any more."""
    windows: int = 0
    traced: int = 0

    @property
    def good(self) -> bool:
        """Whether the profiler made no difference but those it makes by construction."""
        return not (self.faults or self.leaks or self.failures or self.missing)


OWN_FAILURE = re.compile(r"the FLOPs profiler failed|could not take every tap off|could not be loaded")
"""What the profiler says when something of its own went wrong."""


# ---- reading


def outcomes(path: str | os.PathLike[str]) -> dict[str, Outcome]:
    """How each test of a run ended, by its id: from the plugin's records, or from a junit file (``*.xml``).

    A test that ran in several processes, which a launcher started from the same command, ended as the worst of them. A
    junit file knows neither what was left behind nor what the profiler said.
    """
    if str(path).endswith(".xml"):
        return _outcomes_of_junit(path)
    found: dict[str, dict[str, Any]] = {}
    for record in read(path):
        test = found.setdefault(record["test"], {"how": "", "words": "", "left": [], "said": [], "windows": []})
        match record["kind"]:
            case "ended" | "died":
                if _WORST.index(record["how"]) > _WORST.index(test["how"]):
                    test["how"], test["words"] = record["how"], record["words"]
                test["left"] += record.get("left", ())
            case "said":
                test["said"].append(record["words"])
            case "profiled":
                test["windows"].append(record["traced"])
    return {
        name: Outcome(
            how=test["how"],
            words=test["words"],
            left=tuple(sorted(set(test["left"]))),
            said=tuple(dict.fromkeys(test["said"])),
            windows=len(test["windows"]),
            traced=sum(test["windows"]),
        )
        for name, test in found.items()
        if test["how"]
    }


_WORST = ("", "passed", "xfailed", "skipped", "failed", "error", "hung", "died")


def _outcomes_of_junit(path: str | os.PathLike[str]) -> dict[str, Outcome]:
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        how, words = "passed", ""
        for element, kind in (("skipped", "skipped"), ("failure", "failed"), ("error", "error")):
            said = case.find(element)
            if said is not None:
                how = "xfailed" if said.get("type") == "pytest.xfail" else kind
                words = f"{said.get('message', '')}\n{said.text or ''}"
        found[name] = Outcome(how=how, words=words)
    return found


def known_differences(path: Path) -> dict[str, Known]:
    """The list of differences by construction at *path*, by the tests' ids.

    A line ``# words`` begins a reason, a line ``~ regular expression`` behind it says what its tests then say; each
    other line is the id of a test.
    """
    found, reason, says = {}, "", ""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.startswith("# "):
            reason, says = line[2:], ""
        elif line.startswith("~ "):
            says = line[2:]
        elif line.strip():
            if not reason or not says:
                raise ValueError(f"{path}:{number}: a test stands behind a reason and what it then says")
            found[line.strip()] = Known(reason=reason, says=says)
    return found


# ---- comparing


def compare(
    plain: Mapping[str, Outcome],
    profiled: Mapping[str, Outcome],
    known: Mapping[str, Known],
    *,
    again: Mapping[str, Sequence[tuple[Outcome, Outcome]]] | None = None,
) -> Comparison:
    """What the profiler changed.

    Args:
        plain: how each test ended without the profiler.
        profiled: and with it.
        known: the differences by construction.
        again: for tests that were run again alone, how they ended then without and with the profiler.
    """
    result = Comparison(
        missing=tuple(sorted(plain.keys() ^ profiled.keys())),
        windows=sum(outcome.windows for outcome in profiled.values()),
        traced=sum(outcome.traced for outcome in profiled.values()),
    )
    the_same = []
    for test in sorted(plain.keys() & profiled.keys()):
        before, after = plain[test], profiled[test]
        pairs = [(before, after), *(again or {}).get(test, ())]
        # A leak is left every time that the profiler is there, and never without it.
        left = set(after.left).intersection(*(pair[1].left for pair in pairs))
        if left := left.difference(*(pair[0].left for pair in pairs)):
            result.leaks[test] = tuple(sorted(left))
        if said := tuple(words for words in after.said if OWN_FAILURE.search(words)):
            result.failures[test] = said
        if before.how == after.how:
            result.same[after.how] += 1
            if test in known:
                the_same.append(test)
        elif test in known and re.search(known[test].says, after.words):
            result.by_construction[test] = known[test]
        elif all(one.how != other.how for one, other in pairs):
            result.faults[test] = pairs[-1]
        else:
            result.unsteady[test] = (before, after)
    return Comparison(
        **{name: getattr(result, name) for name in Comparison.__slots__ if name != "known_and_the_same"},
        known_and_the_same=tuple(the_same),
    )


def last_words(outcome: Outcome) -> str:
    """The line that says most of what a test said: its last error, or its last line."""
    lines = [line.strip() for line in outcome.words.splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    (line,) = errors[:1] or lines[-1:] or [""]
    return line if len(line) <= 200 else line[:197] + "..."


def report(result: Comparison, *, title: str, how_to: str, ran: str) -> str:
    """The page that says what *result* is."""
    total = sum(result.same.values()) + len(result.by_construction) + len(result.faults) + len(result.unsteady)
    alike = ", ".join(f"{count:,} {how}" for how, count in sorted(result.same.items()))
    lines = [f"# {title}", "", how_to, "", f"*{ran}*", ""]
    lines += [
        "| | tests |",
        "|---|---:|",
        f"| ran without and with the profiler | {total:,} |",
        f"| ended alike ({alike}) | {sum(result.same.values()):,} |",
        f"| differ by construction, as listed | {len(result.by_construction):,} |",
        f"| differ otherwise: faults | {len(result.faults):,} |",
        f"| differed once, and not when run again alone | {len(result.unsteady):,} |",
        f"| after which something of the profiler's was left | {len(result.leaks):,} |",
        f"| in which the profiler said that it failed | {len(result.failures):,} |",
        f"| that ran one way only | {len(result.missing):,} |",
        "",
        f"{result.windows:,} windows closed in these tests, {result.traced:,} of them with a traced step.",
    ]
    lines += _section(
        "Faults",
        [
            f"`{test}`: {before.how} without, {after.how} with the profiler: {_code(last_words(after))}"
            for test, (before, after) in result.faults.items()
        ],
    )
    lines += _section("Left behind", [f"`{test}`: {_code(', '.join(left))}" for test, left in result.leaks.items()])
    lines += _section("The profiler failed", [f"`{test}`: {_code(said[0])}" for test, said in result.failures.items()])
    lines += _section("Ran one way only", [f"`{test}`" for test in result.missing])
    lines += _section(
        "Differed once, and not when run again alone",
        [
            f"`{test}`: {before.how} without, {after.how} with: {_code(last_words(after) or last_words(before))}"
            for test, (before, after) in result.unsteady.items()
        ],
    )
    for reason in dict.fromkeys(known.reason for known in result.by_construction.values()):
        tests = [test for test, known in result.by_construction.items() if known.reason == reason]
        lines += _section(f"By construction: {reason}", [f"`{test}`" for test in tests])
    lines += _section("Listed as differences by construction, and none", [f"`{t}`" for t in result.known_and_the_same])
    return "\n".join(lines) + "\n"


def _code(words: str) -> str:
    return f"`{words.replace('`', chr(39))}`" if words else "(no word)"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"## {title} ({len(lines)})", "", *(f"- {line}" for line in lines)] if lines else []


# ---- running


class Process(Protocol):
    """A program that runs, as far as a suite needs it."""

    pid: int

    def wait(self) -> int:
        """Its exit status, when it has ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Somebody else's tests, and how they are run."""

    folder: Path
    """Where pytest is started; ids of tests are paths from here."""
    settings: Path
    """Pytest's settings file."""
    left: str = ""
    """``module:function`` that says what is left behind; see the plugin."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For every run."""
    profiled: Mapping[str, str] = field(default_factory=dict)
    """For the runs with the profiler, too."""
    test_sec: int = 300
    """A test that takes longer fails."""
    options: tuple[str, ...] = ()
    """More options of pytest."""

    def run(self, targets: Sequence[str], records: Path, *, with_profiler: bool, **environment: str) -> None:
        """Run *targets*, paths or ids of tests, in one process, and in a next one if it dies; add to *records*.

        What has ended according to *records* is not run again.
        """
        for _ in range(20):
            code = self._run_once(targets, records, with_profiler=with_profiler, environment=environment)
            if code in (0, 1, 5):  # all passed, some failed, none was left to run
                return
            if not self._book_death(records, code):
                print(f"pytest ended with {code} on {', '.join(targets)}: see {records}.log", file=sys.stderr)
                return

    def _run_once(
        self, targets: Sequence[str], records: Path, *, with_profiler: bool, environment: Mapping[str, str]
    ) -> int:
        arguments = [*self._pytest(targets), "-q", "--tb=short", f"--timeout={self.test_sec}"]
        arguments += ["-o", f"faulthandler_timeout={self.test_sec + 60}", "-o", "faulthandler_exit_on_timeout=true"]
        variables = {RECORDS: str(records), LEFT: self.left, **(self.profiled if with_profiler else {}), **environment}
        with open(f"{records}.log", "ab") as log:
            process = self.start(arguments, self._variables(variables), log.fileno())
            try:
                return process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):  # with all that its tests have started and left
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], output: int) -> Process:
        """``python ARGUMENTS``, which leads a session of its own and writes to the file *output*."""
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=variables,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    @staticmethod
    def _book_death(records: Path, code: int) -> bool:
        """Book the test in which a process died as dead; whether there was one."""
        running = {}
        for record in read(records):
            if record["kind"] == "started" and not record["launched"]:
                running[record["test"]] = record
            elif record["kind"] in ("ended", "died"):
                running.pop(record["test"], None)
        with open(records, "a") as lines:
            for test in running:
                words = f"its process ended with {code}"
                lines.write(json.dumps({"kind": "died", "test": test, "how": "died", "words": words}) + "\n")
        return bool(running)

    def collect(self, targets: Sequence[str], **environment: str) -> list[str]:
        """The ids of the tests in *targets* that are not skipped for want of something."""
        arguments = [*self._pytest(targets), "--collect-only", "-q"]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
            self.start(arguments, self._variables({RUNNABLE: "1", **environment}), printed.fileno()).wait()
            printed.seek(0)
            lines = printed.read().splitlines()
        return [line for line in lines if ".py::" in line and not line.startswith((" ", "ERROR"))]

    def _pytest(self, targets: Sequence[str]) -> list[str]:
        pytest = ["-m", "pytest", *targets, "-c", str(self.settings), f"--rootdir={self.folder}"]
        return [*pytest, "-p", "benchmarks.foreign_suite_plugin", "-p", "no:cacheprovider", *self.options]

    def _variables(self, more: Mapping[str, str]) -> dict[str, str]:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment, **more}
        paths = [str(REPOSITORY), variables.get("PYTHONPATH", "")]
        return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
