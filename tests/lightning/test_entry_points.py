"""The callback that any Trainer gets where the environment says LIGHTNING_FLOPS=1."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_flops import FlopsProfilerCallback, Profile
from lightning_flops.entry_points import callbacks_factory
from lightning_flops.report.headline import figures
from tests.forks import run_fork
from tests.lightning.nets import ROOTS, batch_flops, loader, new_net
from tests.ranks import LIGHTNING

MakeTrainer = Callable[..., Any]


@pytest.fixture(params=ROOTS)
def root(request: pytest.FixtureRequest) -> str:
    """Both import roots, one after the other: what is here is asked of both in every run of the tests."""
    return str(request.param)


def ours(trainer: Any) -> list[FlopsProfilerCallback]:
    return [callback for callback in trainer.callbacks if isinstance(callback, FlopsProfilerCallback)]


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_FLOPS", raising=False)


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_switch_a_trainer_gets_nothing(
    trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is not None:
        monkeypatch.setenv("LIGHTNING_FLOPS", value)
    assert callbacks_factory() == []
    assert ours(trainer()) == []


def test_both_roots_know_the_factory() -> None:
    for root in ROOTS:
        points = importlib.metadata.entry_points(group=f"{root}.callbacks_factory")
        (point,) = [point for point in points if point.name == "lightning-flops"]
        assert point.load() is callbacks_factory


def test_with_the_switch_a_trainer_is_profiled_by_the_defaults(
    root: str, trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LIGHTNING_FLOPS", "1")
    csv_logger = importlib.import_module(f"{root}.loggers").CSVLogger(tmp_path, name="run", version=0)
    run = trainer(logger=csv_logger)
    run.fit(new_net(root), loader(40))
    (callback,) = ours(run)
    assert callback.profile is not None
    assert callback.profile.profile_step == 1
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.suffix in (".json", ".txt")}
    assert found == {
        f"run/version_0/lightning_flops/{name}" for name in ("profile.json", "profile.txt", "throughput.json")
    }
    assert callback.profile.flops.forward == batch_flops().forward
    assert len(callback.profile.timed_steps) == 20


def test_a_callback_of_the_users_own_is_the_only_one_that_works(
    root: str, trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_FLOPS", "1")
    own = FlopsProfilerCallback(profile_step=3, timing_steps=2)
    run = trainer(own)
    run.fit(new_net(root), loader(12))
    (other,) = [callback for callback in ours(run) if callback is not own]
    assert other.profile is None
    assert own.profile is not None and own.profile.profile_step == 3


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


class Listener(logging.Handler):
    """Hears what Lightning's own log says of FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "FLOPs" in record.getMessage():
            self.heard.append(record.getMessage())


@pytest.fixture
def heard(root: str) -> Iterator[list[str]]:
    listener = Listener()
    logging.getLogger(root).addHandler(listener)
    yield listener.heard
    logging.getLogger(root).removeHandler(listener)


def test_who_did_not_write_the_callback_finds_no_files_without_a_logger_and_one_line_that_says_so(
    root: str, trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("LIGHTNING_FLOPS", "1")
    monkeypatch.chdir(tmp_path)
    run = trainer(max_epochs=2)
    with caplog.at_level(logging.WARNING, logger="lightning_flops"):
        run.fit(new_net(root), loader(40))
    (callback,) = ours(run)
    assert callback.profile is not None and callback.profile.flops.forward == batch_flops().forward
    assert list(tmp_path.rglob("*")) == []
    assert heard == [
        f"FLOPs of step 1: {figures(callback.profile)}. No file keeps it: give the Trainer a logger or "
        'a FlopsProfilerCallback, or call logging.basicConfig(level="INFO").'
    ]


@pytest.mark.parametrize(
    ("logger", "options", "expected"),
    [
        ("CSVLogger('logs', name='run', version=0)", [], "logs/run/version_0/lightning_flops"),
        ("False", [], "lightning_flops"),
        ("False", ["--log-dir", "reports"], "reports/lightning_flops"),
    ],
)
def test_a_program_under_run_keeps_its_report_beside_its_logs_or_in_a_folder(
    logger: str, options: list[str], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "from lightning.pytorch.loggers import CSVLogger\n"
        "from tests.lightning.nets import loader, new_net, new_trainer\n"
        f"trainer = new_trainer('lightning.pytorch', 'root', logger={logger})\n"
        "trainer.fit(new_net('lightning.pytorch'), loader(30))\n"
    )
    arguments = ["-m", "lightning_flops", "run", *options, "train.py"]
    done = run_fork(arguments, folder=tmp_path, imports=LIGHTNING, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    (report,) = tmp_path.rglob("profile.json")
    assert report.parent == tmp_path / expected
    assert Profile.from_json(report.read_text()).flops.forward == batch_flops().forward
    assert f"Page: {expected}/profile.html\n" in done.stdout + done.stderr
