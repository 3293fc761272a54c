"""What DeepSpeed's own tests end in, read and compared; running them is ``make test-deepspeed-suite``."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from benchmarks.deepspeed_suite import DIFFERENCES, Run, different, report, source_of

KNOWN = next(iter(DIFFERENCES))


def run_of(tmp_path: Path, *facts: dict[str, Any]) -> Run:
    path = tmp_path / "record.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in facts))
    return Run.read(path)


def ended(test: str, outcome: str, *, seconds: float = 1.0) -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "seconds": seconds, "words": "E boom" if outcome == "failed" else ""}


def test_a_test_whose_teardown_fails_has_failed_and_seconds_are_those_of_its_file(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        ended("a.py::one", "passed", seconds=2.0),
        {"engine": True},
        {"counting": True},
        ended("a.py::one", "failed", seconds=0.5),
        {"window": True},
        {"engine": True},
        ended("a.py::two", "skipped", seconds=0.0),
    )
    assert run.outcomes == {"a.py::one": "failed", "a.py::two": "skipped"}
    assert (run.seconds["a.py"], run.engines, run.counting, run.windows) == (2.5, 2, 1, 1)


@pytest.mark.parametrize(
    ("profiled", "fine"),
    [
        ([ended("a.py::one", "passed"), ended(KNOWN, "failed"), {"counting": True}], True),
        ([ended("a.py::one", "failed"), ended(KNOWN, "failed"), {"counting": True}], False),  # not in the list
        ([ended("a.py::one", "passed"), ended(KNOWN, "failed")], False),  # nothing was profiled
        ([ended("a.py::one", "passed"), {"counting": True}], False),  # one was not run
    ],
)
def test_a_difference_that_is_not_in_the_list_is_named(tmp_path: Path, profiled: list[Any], fine: bool) -> None:
    plain = run_of(tmp_path, {"chosen": KNOWN}, ended("a.py::one", "passed"), ended(KNOWN, "passed"))
    other = run_of(tmp_path, *profiled)
    text, is_fine = report({"without": plain, "with": other, "replaced": Run()}, source="1.2.3")
    assert is_fine is fine
    assert ("Of 2 chosen tests 1 were not reached" in text) == (len(other.outcomes) < 2)
    assert ("NOT EXPLAINED: E boom" in text) == (different(plain, other) == ["a.py::one", KNOWN])
    assert (DIFFERENCES[KNOWN] in text) == (KNOWN in different(plain, other))


def test_a_folder_without_deepspeed_is_said_to_be_one_and_another_version_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not metadata.packages_distributions().get("deepspeed"):
        pytest.skip("DeepSpeed is not installed")
    with pytest.raises(
        SystemExit, match=r"holds no DeepSpeed: give a folder with the repository deepspeedai/DeepSpeed"
    ):
        source_of(tmp_path)
    (tmp_path / "tests" / "unit" / "profiling").mkdir(parents=True)
    (tmp_path / "version.txt").write_text("0.0.1\n")
    assert source_of(tmp_path) == (tmp_path / "tests", "0.0.1")
    installed = metadata.version("deepspeed")
    assert capsys.readouterr().err == f"warning: the tests are those of DeepSpeed 0.0.1, and {installed} is installed\n"
