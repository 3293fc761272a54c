"""What the suites of other projects run with, and what is seen of it; running them is ``make test-lightning``."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import suite_lightning as lightning
from benchmarks import suite_plugin as plugin
from benchmarks.suite import Job, Piece, Project, drop_stale_records, known_differences, main
from lightning_flops import FlopsProfilerCallback
from lightning_flops.config import ProfilerConfig
from lightning_flops.entry_points import SWITCH
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


def test_windows_are_short_where_the_profiler_is_switched_on_and_as_ever_where_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    defaults = dict(ProfilerConfig.__init__.__kwdefaults__ or {})
    monkeypatch.setattr(ProfilerConfig.__init__, "__kwdefaults__", defaults)
    monkeypatch.setattr(lightning, "record_the_profiler", lambda: None)
    monkeypatch.delenv(SWITCH, raising=False)
    assert lightning.callbacks_factory() == []
    assert (ProfilerConfig().timing_steps, ProfilerConfig().profile_step) == (20, 1)
    monkeypatch.setenv(SWITCH, "1")
    steps = set()
    for number in range(20):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"test_a.py::test[{number}] (call)")
        assert plugin.running_test() == f"test_a.py::test[{number}]"
        assert lightning.callbacks_factory() == []
        assert ProfilerConfig().timing_steps == 2
        steps.add(ProfilerConfig().profile_step)
    assert steps == {0, 1}


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


def test_records_of_other_code_are_thrown_away_and_those_of_the_plain_run_are_kept(tmp_path: Path) -> None:
    def files() -> set[str]:
        return {path.name for path in tmp_path.glob("*.jsonl")}

    drop_stale_records(tmp_path)
    both = {"core-plain.jsonl", "core-profiled.jsonl"}
    for name in both:
        (tmp_path / name).write_text("")
    drop_stale_records(tmp_path)
    assert files() == both
    (tmp_path / "profiled.stamp").write_text("other code")
    drop_stale_records(tmp_path)
    assert files() == {"core-plain.jsonl"}
    (tmp_path / "plain.stamp").write_text("other packages")
    drop_stale_records(tmp_path)
    assert files() == set()


def test_a_test_that_runs_in_two_pieces_is_two_tests(tmp_path: Path) -> None:
    pieces = {"core": Piece(targets=()), "replaced": Piece(targets=(), mark="[replaced] ")}
    for piece, how in (("core", "skipped"), ("replaced", "passed")):
        line = {"kind": "ended", "test": "a", "launched": False, "how": how, "words": "", "left": []}
        (tmp_path / f"{piece}-plain.jsonl").write_text(json.dumps(line) + "\n")
    job = Job(replace(lightning.PROJECT, pieces=pieces), tmp_path, tmp_path)
    found = job.outcomes(pieces, "plain")
    assert {name: outcome.how for name, outcome in found.items()} == {"a": "skipped", "[replaced] a": "passed"}


def test_what_a_piece_is_run_with() -> None:
    piece = Piece(targets=(), environment={"MODE": "plain", "A": "1"}, profiled={"MODE": "profiled"})
    assert piece.variables("plain") == {"MODE": "plain", "A": "1"}
    assert piece.variables("profiled") == {"MODE": "profiled", "A": "1"}


@pytest.mark.parametrize("name", ["lightning", "deepspeed"])
def test_every_listed_difference_is_a_test_with_a_reason_and_what_it_says(name: str) -> None:
    project: Project = import_module(f"benchmarks.suite_{name}").PROJECT
    known = known_differences(project.known)
    assert known and all("::" in test and one.reason and one.says for test, one in known.items())
