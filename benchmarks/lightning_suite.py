"""Lightning's own tests without and with the callback in every Trainer: `make test-lightning LIGHTNING_SOURCE=folder`.

The source is not part of this project: *folder* holds Lightning-AI/pytorch-lightning at the tag of the version that is
installed, of which the folder ``tests`` is enough. Takes an hour or two; what has run is not run again when the command
is given once more with the same ``--work``, unless what it depends on has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib import metadata
from pathlib import Path

from lightning_flops.entry_points import SWITCH

from .foreign_suite import Outcome, Suite, compare, known_differences, outcomes, report
from .machine import code_in_words, machine_in_words, versions

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "lightning_flops"
KNOWN = HERE / "lightning_suite_known.txt"
RUNS = {"plain": False, "profiled": True}

PARTS = (
    "trainer",
    "callbacks",
    "loops",
    "models",
    "strategies",
    "core",
    "checkpointing",
    "utilities",
    "loggers",
    "tuner",
    "plugins",
    "profilers",
    "accelerators",
    "overrides",
    "test_cli.py",
)
"""Of ``tests/tests_pytorch``."""

LEFT_OUT = ("checkpointing/test_legacy_checkpoints.py",)
"""Needs checkpoints of old versions, which are no part of the source."""

STANDALONE = "standalone"
"""The piece of tests that start themselves again as further ranks, and so run each in a process of their own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both, compare, write the page; 0 if the callback made no difference but those by construction."""
    options = _options(arguments)
    if not (options.source / "tests" / "tests_pytorch" / "conftest.py").is_file():
        print(
            f"There is no Lightning source in {options.source}: LIGHTNING_SOURCE must be a folder that holds "
            f"Lightning-AI/pytorch-lightning at its tag {_installed()}, the installed version's.",
            file=sys.stderr,
        )
        return 2
    source = _version_of(options.source)
    if source != _installed():
        said = f"is of version {source}" if source else "does not say its version"
        print(f"warning: the source {said}, and Lightning {_installed()} is installed", file=sys.stderr)
    options.work.mkdir(parents=True, exist_ok=True)
    _drop_stale_records(options.work)
    _make_entry_point(options.work / "entry_point")
    pieces = [(piece, run) for piece in options.parts for run in RUNS]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda each: _run_piece(options.source, options.work, *each), pieces))
    plain, profiled = (_all_outcomes(options.work, options.parts, run) for run in RUNS)
    known = known_differences(KNOWN)
    first = compare(plain, profiled, known)
    again = _run_again(options.source, options.work, [*first.faults, *first.leaks])
    result = compare(plain, profiled, known, again=again)
    ran = ", ".join(f"{name} {found}" for name, found in versions(("torch", "lightning", "pytest")).items())
    page = report(
        result,
        title="Lightning's own tests with the profiler in every Trainer",
        how_to=__doc__.partition("\n")[0] + f" Parts: {', '.join(options.parts)}.",
        ran=f"{date.today()}, {code_in_words()}. {machine_in_words()}. Source {source or 'unknown'}; {ran}.",
    )
    print(page)
    if options.output:
        options.output.write_text(page)
    return 0 if result.good else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lightning_suite", description=__doc__)
    parser.add_argument("source", type=Path, help="folder that holds Lightning's source")
    parser.add_argument("--work", type=Path, required=True, help="folder for what runs, and for the records")
    parser.add_argument("--output", type=Path, help="the page is written here, too")
    parser.add_argument("--jobs", type=int, default=1, help="pieces that run at the same time")
    parser.add_argument("--parts", nargs="+", default=[*PARTS, STANDALONE], help="of tests/tests_pytorch")
    options = parser.parse_args(arguments)
    options.source, options.work = options.source.resolve(), options.work.resolve()
    return options


def _installed() -> str:
    return metadata.version("lightning")


def _version_of(source: Path) -> str | None:
    """The version that the source says it is; None if only its tests are there."""
    for name in ("src/version.info", "src/lightning/version.info"):
        if (source / name).is_file():
            return (source / name).read_text().strip()
    return None


def _drop_stale_records(work: Path) -> None:
    """Throw away records of other versions: of all packages for a run without the profiler, of this one with it."""
    installed = sorted(f"{each.name}=={each.version}" for each in metadata.distributions())
    code = [path.read_bytes() for folder in (PACKAGE, HERE) for path in sorted(folder.rglob("*.py"))]
    stamps = {"plain": "\n".join(installed), "profiled": hashlib.sha256(b"".join(code)).hexdigest()}
    stale = [run for run, stamp in stamps.items() if not _is_stamped(work / f"{run}.stamp", stamp)]
    for run in RUNS if "plain" in stale else stale:
        for records in (*work.glob(f"*-{run}.jsonl"), *work.glob("again-records/*.jsonl")):
            records.unlink()
    for run, stamp in stamps.items():
        (work / f"{run}.stamp").write_text(stamp)


def _is_stamped(path: Path, stamp: str) -> bool:
    return path.is_file() and path.read_text() == stamp


def _make_entry_point(folder: Path) -> None:
    """Have ``importlib.metadata`` find our factory in every process that has *folder* on its path."""
    described = folder / "lightning_flops_suite-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-flops-suite\nVersion: 0\n")
    groups = ("lightning.pytorch", "pytorch_lightning")
    factory = "suite = benchmarks.lightning_suite_factory:callbacks_factory\n"
    (described / "entry_points.txt").write_text("".join(f"[{g}.callbacks_factory]\n{factory}" for g in groups))


def _suite(source: Path, work: Path, name: str) -> Suite:
    """A suite in a copy of its own: Lightning's tests look for files that others leave in the folder."""
    copy = work / name
    if not copy.exists():
        shutil.copytree(source / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    return Suite(
        folder=copy / "tests",
        settings=HERE / "lightning_suite.ini",
        left="benchmarks.lightning_suite_factory:left_on_trainers",
        environment={"PYTHONPATH": str(work / "entry_point")},
        profiled={SWITCH: "1"},
        # A file that cannot be imported, for want of a package, runs neither way.
        options=("--continue-on-collection-errors", *(f"--ignore=tests_pytorch/{path}" for path in LEFT_OUT)),
    )


def _run_piece(source: Path, work: Path, piece: str, run: str) -> None:
    suite = _suite(source, work, f"{piece}-{run}")
    records, with_profiler = work / f"{piece}-{run}.jsonl", RUNS[run]
    if piece != STANDALONE:
        suite.run([f"tests_pytorch/{piece}"], records, with_profiler=with_profiler)
        return
    environment = {"PL_RUN_STANDALONE_TESTS": "1"}
    over = outcomes(records)
    for test in suite.collect(["tests_pytorch"], **environment):
        if test not in over:
            suite.run([test], records, with_profiler=with_profiler, **environment)


def _all_outcomes(work: Path, parts: Iterable[str], run: str) -> dict[str, Outcome]:
    found = {}
    for piece in parts:
        mark = f"[{STANDALONE}] " if piece == STANDALONE else ""
        found.update({mark + test: outcome for test, outcome in outcomes(work / f"{piece}-{run}.jsonl").items()})
    return found


def _run_again(source: Path, work: Path, tests: Iterable[str]) -> dict[str, list[tuple[Outcome, Outcome]]]:
    """How *tests* end alone, without and with the profiler, twice each."""
    found: dict[str, list[tuple[Outcome, Outcome]]] = {}
    suite = _suite(source, work, "again")
    for number, test in enumerate(tests):
        mark, _, test_id = test.rpartition("] ") if test.startswith("[") else ("", "", test)
        environment = {"PL_RUN_STANDALONE_TESTS": "1"} if mark else {}
        for attempt in range(2):
            pair = []
            for run, with_profiler in RUNS.items():
                name = re.sub(r"\W+", "_", test)[-80:]
                records = work / "again-records" / f"{name}-{number}-{attempt}-{run}.jsonl"
                records.parent.mkdir(exist_ok=True)
                suite.run([test_id], records, with_profiler=with_profiler, **environment)
                pair.append(outcomes(records).get(test_id, Outcome(how="died", words="no record")))
            found.setdefault(test, []).append((pair[0], pair[1]))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
