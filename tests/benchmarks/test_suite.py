"""Comparing two runs of somebody else's tests finds what differs, what is left and what died, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite import (
    FAULTS,
    KNOWN,
    NONE,
    Known,
    Outcome,
    Project,
    Suite,
    compare,
    known_differences,
    main,
    outcomes,
)
from tests.forks import BEFORE_LIGHTNING, Fork, start_fork
from tests.ranks import environment_of_ranks

NO_OTHER_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Each process would import what the plugins that are installed need, for a second or two."""

PASSED, FAILS = Outcome(how="passed"), Outcome(how="failed", words="E   AssertionError: 3 callbacks\n")


def test_a_test_that_the_profiler_makes_fail_is_a_fault() -> None:
    result = compare({"a": PASSED}, {"a": FAILS}, {})
    assert not result.good
    assert result.lists[FAULTS] == {"a": "passed without, failed with the profiler: `AssertionError: 3 callbacks`"}


def test_a_listed_difference_counts_as_one_only_if_it_says_what_the_list_says() -> None:
    callbacks = Known("lists its callbacks", r"\d callbacks")
    assert compare({"a": PASSED}, {"a": FAILS}, {"a": callbacks}).lists[KNOWN] == {"a": "lists its callbacks"}
    assert compare({"a": PASSED}, {"a": FAILS}, {"a": Known("", "files")}).lists[FAULTS].keys() == {"a"}
    assert compare({"a": PASSED}, {"a": PASSED}, {"a": callbacks}).lists[NONE].keys() == {"a"}


# ---- a suite that passes, fails, leaks and dies

SUITE = """
import os
import pytest
from torch.nn.modules.module import register_module_forward_hook

def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.xfail
def test_expected(): assert False
def test_leaks(): register_module_forward_hook(lambda *args: None)
@pytest.fixture
def broken():
    yield
    raise ValueError("in a fixture")
def test_in_a_fixture(broken): pass
def test_dies(): os._exit(7) if os.environ.get("DIES") else None
def test_behind(): pass
"""


class Forked(Suite):
    """Its processes find torch imported, which is nearly all that they take."""

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], output: int) -> Fork:
        here: dict[str, Any] = {"folder": self.folder, "environment": environment_of_ranks({})}
        return start_fork(arguments, imports=BEFORE_LIGHTNING, place=variables, output=output, **here)


def test_every_test_of_a_run_has_an_outcome_also_behind_one_that_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(SUITE)
    (settings := tmp_path / "settings.ini").write_text("[pytest]\n")
    how: dict[str, Any] = {"environment": NO_OTHER_PLUGINS, "options": ("-p", "pytest_timeout")}
    suite = Forked(folder=tmp_path, settings=settings, **how)
    suite.run(["test_them.py"], tmp_path / "plain")
    suite.run(["test_them.py"], tmp_path / "profiled", DIES="1")
    plain, profiled = outcomes(tmp_path / "plain"), outcomes(tmp_path / "profiled")
    assert {name.partition("::")[2]: outcome.how for name, outcome in plain.items()} == {
        "test_passes": "passed", "test_fails": "failed", "test_skipped": "skipped", "test_expected": "xfailed",
        "test_leaks": "passed", "test_in_a_fixture": "error", "test_dies": "passed", "test_behind": "passed",
    }  # fmt: skip
    assert plain["test_them.py::test_leaks"].left == {"torch: hooks"}
    result = compare(plain, profiled, {})
    assert result.lists[FAULTS].keys() == {"test_them.py::test_dies"}
    assert profiled["test_them.py::test_dies"].words == "its process ended with 7"
    assert sum(result.same.values()) == 7
    # What has ended is not run again.
    before = (tmp_path / "plain").read_text()
    suite.run(["test_them.py"], tmp_path / "plain")
    assert (tmp_path / "plain").read_text() == before


# ---- the suites of other projects; running them is ``make test-lightning``


@pytest.mark.parametrize(
    ("project", "repository"), [("lightning", "Lightning-AI/pytorch-lightning"), ("deepspeed", "deepspeedai/DeepSpeed")]
)
def test_a_folder_without_the_source_is_refused_in_words(
    project: str, repository: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_spec(project) is None:
        pytest.skip(f"{project} is not installed")
    assert main([project, str(tmp_path), "--work", str(tmp_path / "work")]) == 2
    said = capsys.readouterr().err
    assert f"There is no {project} in {tmp_path}: give a folder that holds {repository} at the tag of" in said


@pytest.mark.parametrize("name", ["lightning", "deepspeed"])
def test_every_listed_difference_is_a_test_with_a_reason_and_what_it_says(name: str) -> None:
    project: Project = import_module(f"benchmarks.suite_{name}").PROJECT
    known = known_differences(project.known)
    assert known and all("::" in test and one.reason and one.says for test, one in known.items())
