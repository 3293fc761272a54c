"""The callback that any Trainer gets where the environment says LIGHTNING_FLOPS=1."""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path
from typing import Any

import pytest

from lightning_flops import FlopsProfilerCallback
from lightning_flops.entry_points import callbacks_factory
from lightning_flops.report.text import figures
from tests.lightning.nets import FORWARD, ROOTS, MakeTrainer, loader, logger_in, new_net
from tests.listening import listening
from tests.results import profile_of


def ours(trainer: Any) -> list[FlopsProfilerCallback]:
    return [callback for callback in trainer.callbacks if isinstance(callback, FlopsProfilerCallback)]


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_FLOPS", raising=False)


@pytest.mark.parametrize("value", ["", "0"])
def test_both_roots_know_the_factory_and_without_the_switch_a_trainer_gets_nothing(
    trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    for root in ROOTS:
        points = importlib.metadata.entry_points(group=f"{root}.callbacks_factory")
        (point,) = [point for point in points if point.name == "lightning-flops"]
        assert point.load() is callbacks_factory
    assert callbacks_factory() == []
    monkeypatch.setenv("LIGHTNING_FLOPS", value)
    assert ours(trainer()) == []


def test_with_the_switch_a_trainer_is_profiled_by_the_defaults(
    root: str, trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LIGHTNING_FLOPS", "1")
    run = trainer(logger=logger_in(tmp_path, "CSVLogger", root))
    run.fit(new_net(root), loader(40))
    profile = profile_of(*ours(run))
    assert (profile.profile_step, profile.flops.forward, len(profile.timed_steps)) == (1, FORWARD, 10)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.suffix in (".json", ".txt")}
    assert found == {
        f"run/version_0/lightning_flops/{name}" for name in ("profile.json", "profile.txt", "throughput.json")
    }


def test_a_users_own_callback_works_alone(root: str, trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FLOPS", "1")
    own = FlopsProfilerCallback(profile_step=3, timing_steps=2)
    run = trainer(own)
    run.fit(new_net(root), loader(12))
    (other,) = [callback for callback in ours(run) if callback is not own]
    assert (other.profile, profile_of(own).profile_step) == (None, 3)


def test_any_other_value_and_a_failure_of_ours_are_a_warning(
    trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LIGHTNING_FLOPS", "yes")
    assert ours(trainer()) == []
    assert "LIGHTNING_FLOPS must be 0 or 1, got 'yes': nothing is profiled" in caplog.text
    monkeypatch.setenv("LIGHTNING_FLOPS", "1")
    monkeypatch.setattr(FlopsProfilerCallback, "for_any_trainer", lambda settings: 1 / 0)
    with caplog.at_level(logging.WARNING, logger="lightning_flops"):
        assert ours(trainer()) == []
    assert "could not be loaded; training goes on without it" in caplog.text


def test_who_did_not_write_the_callback_finds_no_files_without_a_logger_and_one_line_that_says_so(
    root: str, trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LIGHTNING_FLOPS", "1")
    monkeypatch.chdir(tmp_path)
    run = trainer(max_epochs=2)
    with caplog.at_level(logging.WARNING, logger="lightning_flops"), listening(root) as heard:
        run.fit(new_net(root), loader(40))
    profile = profile_of(*ours(run))
    assert (profile.flops.forward, list(tmp_path.rglob("*"))) == (FORWARD, [])
    assert [line for line in heard if "FLOPs" in line] == [
        f"FLOPs of step 1: {figures(profile)}. No file keeps it: give the Trainer a logger or "
        'a FlopsProfilerCallback, or call logging.basicConfig(level="INFO").'
    ]
