"""The callback that any Trainer gets where the environment says LIGHTNING_FLOPS=1."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_flops import FlopsProfilerCallback, Profile
from lightning_flops.entry_points import callbacks_factory
from tests.lightning.nets import ROOTS, batch_flops, loader, new_net

MakeTrainer = Callable[..., Any]
REPOSITORY = Path(__file__).parents[2]


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
    root: str, trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_FLOPS", "1")
    run = trainer()
    run.fit(new_net(root), loader(40))
    (callback,) = ours(run)
    assert callback.profile is not None
    assert callback.profile.profile_step == 1
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


def test_any_other_value_is_a_warning(
    trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LIGHTNING_FLOPS", "yes")
    with caplog.at_level(logging.WARNING, logger="lightning_flops"):
        assert ours(trainer()) == []
    assert "LIGHTNING_FLOPS must be 0 or 1, got 'yes': nothing is profiled" in caplog.text


def test_a_trainer_is_made_also_where_we_fail(
    trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LIGHTNING_FLOPS", "1")
    monkeypatch.setattr(FlopsProfilerCallback, "for_any_trainer", lambda: 1 / 0)
    with caplog.at_level(logging.WARNING, logger="lightning_flops"):
        assert ours(trainer()) == []
    assert "could not be loaded; training goes on without it" in caplog.text


def test_without_the_switch_the_factory_loads_nothing() -> None:
    program = (
        "import sys\n"
        "from lightning_flops.entry_points import callbacks_factory\n"
        "assert callbacks_factory() == []\n"
        "print([name for name in ('torch', 'lightning', 'lightning_flops.lightning') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={name: value for name, value in os.environ.items() if name != "LIGHTNING_FLOPS"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout == "[]\n"


@pytest.mark.parametrize("root", [ROOTS[0], pytest.param(ROOTS[1], marks=pytest.mark.slow)])
def test_a_program_of_lightning_is_profiled_under_run(root: str, tmp_path: Path) -> None:
    """No word of ours in the program; its one report lies beside its logs."""
    (tmp_path / "train.py").write_text(
        "import sys\n"
        "from tests.lightning.nets import loader, new_net, new_trainer\n"
        "root, folder = sys.argv[1:]\n"
        "new_trainer(root, folder).fit(new_net(root), loader(30))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "lightning_flops", "run", "train.py", root, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (report,) = tmp_path.glob("profile.json")
    assert Profile.from_json(report.read_text()).flops.forward == batch_flops().forward


@pytest.mark.slow
def test_processes_that_lightning_starts_are_profiled_too(tmp_path: Path) -> None:
    """Its launcher starts the second rank as ``python train.py``, which the environment reaches."""
    (tmp_path / "train.py").write_text(
        "from tests.lightning.nets import loader, new_net, new_trainer\n"
        "from lightning_flops import FlopsProfilerCallback\n"
        "trainer = new_trainer('lightning.pytorch', 'logs', strategy='ddp', devices=2)\n"
        "trainer.fit(new_net('lightning.pytorch'), loader(80))\n"
        "(callback,) = [one for one in trainer.callbacks if isinstance(one, FlopsProfilerCallback)]\n"
        "open(f'rank{trainer.global_rank}.json', 'w').write(callback.profile.to_json())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "lightning_flops", "run", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        profile = Profile.from_json((tmp_path / f"rank{rank}.json").read_text())
        assert (profile.context.rank, profile.context.world_size) == (rank, 2)
        assert profile.flops.forward == batch_flops().forward
