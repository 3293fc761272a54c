"""What the suites of other projects run with, and what is seen of it; running them is ``make test-lightning``."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.suite import Project, known_differences, main


@pytest.mark.parametrize(
    ("project", "repository"),
    [("lightning", "Lightning-AI/pytorch-lightning"), ("deepspeed", "deepspeedai/DeepSpeed")],
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
