"""What the suites of other projects run with, and what is seen of it; running them is ``make test-lightning``."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import suite_lightning as lightning
from benchmarks import suite_plugin as plugin
from benchmarks.suite import Project, known_differences, main
from lightning_flops import FlopsProfilerCallback
from lightning_flops.run import reports as run_reports
from tests.lightning.nets import ROOTS, loader, new_net, new_trainer


def test_windows_that_close_and_what_is_warned_of_are_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(plugin, "write", lambda **record: written.append(record))
    # What it does once in a process is undone here.
    monkeypatch.setattr(run_reports, "profile_of_window", vars(run_reports)["profile_of_window"])
    logger = logging.getLogger("lightning_flops")
    monkeypatch.setattr(logger, "handlers", list(logger.handlers))
    plugin.record_the_profiler.__wrapped__()
    profiler = FlopsProfilerCallback(profile_step=1, timing_steps=2, trace=False)
    new_trainer(ROOTS[0], tmp_path, profiler, max_epochs=1).fit(new_net(ROOTS[0]), loader(8))
    logger.warning("heard")
    assert [(one["timed"], one["traced"]) for one in written if one["kind"] == "profiled"] == [(2, False)]
    assert written[-1]["words"] == "heard"


def test_every_process_with_the_entry_point_on_its_path_finds_the_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import entry_points

    lightning.make_entry_point(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "entry_point"))
    for root in ROOTS:
        found = {entry.name: entry for entry in entry_points(group=f"{root}.callbacks_factory")}
        assert found["suite"].load() is lightning.callbacks_factory


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
