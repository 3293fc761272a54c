"""The gate on Lightning's own tests sees what is left on a Trainer, and says what it needs."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import lightning_suite_factory as factory
from benchmarks.foreign_suite import known_differences
from benchmarks.lightning_suite import KNOWN, _all_outcomes, _drop_stale_records, _make_entry_point, main
from lightning_flops import FlopsProfilerCallback
from lightning_flops.config import ProfilerConfig
from lightning_flops.entry_points import SWITCH, callbacks_factory
from lightning_flops.run import reports as run_reports
from tests.lightning.nets import ROOTS, loader, new_net, new_trainer


@pytest.fixture
def no_older_objects() -> Iterator[None]:
    """Nothing that is there now is among the objects that are looked through, of which there are a million."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("no_older_objects")
@pytest.mark.parametrize("owner", ["trainer", "fit_loop", "strategy", "layer"])
def test_what_is_left_on_a_trainer_or_what_it_holds_is_seen(owner: str, tmp_path: Path) -> None:
    run, net = new_trainer(ROOTS[0], tmp_path), new_net(ROOTS[0])
    run.fit(net, loader(2))
    assert factory.left_on_trainers() == []
    thing: Any = {"trainer": run, "fit_loop": run.fit_loop, "strategy": run.strategy, "layer": net.net}[owner]
    thing.left = callbacks_factory  # any function of ours
    assert factory.left_on_trainers() == [f"{type(thing).__name__}.left"]
    del thing.left
    hook = net.register_forward_hook(callbacks_factory)
    assert factory.left_on_trainers() == ["Net._forward_hooks"]
    hook.remove()
    assert factory.left_on_trainers() == []


def test_windows_that_close_and_what_is_warned_of_are_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(factory, "write", lambda **record: written.append(record))
    # What it does once in a process is undone here.
    monkeypatch.setattr(run_reports, "profile_of_window", vars(run_reports)["profile_of_window"])
    logger = logging.getLogger("lightning_flops")
    monkeypatch.setattr(logger, "handlers", list(logger.handlers))
    factory._prepare_process.__wrapped__()
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
    monkeypatch.setattr(factory, "_prepare_process", lambda: None)
    monkeypatch.delenv(SWITCH, raising=False)
    assert factory.callbacks_factory() == []
    assert (ProfilerConfig().timing_steps, ProfilerConfig().profile_step) == (20, 1)
    monkeypatch.setenv(SWITCH, "1")
    steps = set()
    for number in range(20):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", f"test_a.py::test[{number}] (call)")
        assert factory.running_test() == f"test_a.py::test[{number}]"
        assert factory.callbacks_factory() == []
        assert ProfilerConfig().timing_steps == 2
        steps.add(ProfilerConfig().profile_step)
    assert steps == {0, 1}


def test_every_process_with_the_entry_point_on_its_path_finds_the_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib.metadata import entry_points

    _make_entry_point(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for root in ROOTS:
        found = {entry.name: entry for entry in entry_points(group=f"{root}.callbacks_factory")}
        assert found["suite"].load() is factory.callbacks_factory


def test_a_folder_without_the_source_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightning")
    assert main([str(tmp_path), "--work", str(tmp_path / "work")]) == 2
    said = capsys.readouterr().err
    assert f"There is no Lightning source in {tmp_path}" in said
    assert "LIGHTNING_SOURCE must be a folder that holds Lightning-AI/pytorch-lightning at its tag" in said


def test_records_of_other_code_are_thrown_away_and_those_of_the_plain_run_are_kept(tmp_path: Path) -> None:
    def files() -> set[str]:
        return {path.name for path in tmp_path.glob("*.jsonl")}

    _drop_stale_records(tmp_path)
    both = {"core-plain.jsonl", "core-profiled.jsonl"}
    for name in both:
        (tmp_path / name).write_text("")
    _drop_stale_records(tmp_path)
    assert files() == both
    (tmp_path / "profiled.stamp").write_text("other code")
    _drop_stale_records(tmp_path)
    assert files() == {"core-plain.jsonl"}
    (tmp_path / "plain.stamp").write_text("other packages")
    _drop_stale_records(tmp_path)
    assert files() == set()


def test_a_test_that_runs_alone_is_told_from_the_same_one_in_its_part(tmp_path: Path) -> None:
    for piece, how in (("core", "skipped"), ("standalone", "passed")):
        line = {"kind": "ended", "test": "a", "launched": False, "how": how, "words": "", "left": []}
        (tmp_path / f"{piece}-plain.jsonl").write_text(json.dumps(line) + "\n")
    found = _all_outcomes(tmp_path, ["core", "standalone"], "plain")
    assert {name: outcome.how for name, outcome in found.items()} == {"a": "skipped", "[standalone] a": "passed"}


def test_every_listed_difference_is_a_test_with_a_reason_and_what_it_says() -> None:
    assert all("::" in test and known.reason and known.says for test, known in known_differences(KNOWN).items())
