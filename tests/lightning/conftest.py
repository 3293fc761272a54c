from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_flops.measure.timing.clocks import WallClock
from tests.fake_clock import FakeNow
from tests.idle_machine import untold
from tests.lightning.nets import ROOT, new_trainer


@pytest.fixture
def root() -> str:
    """The import root; files that ask it of both have a fixture of their own."""
    return ROOT


@pytest.fixture
def trainer(root: str, tmp_path: Path) -> Callable[..., Any]:
    """Makes a quiet Trainer of *root* with the given callbacks and settings."""
    return lambda *callbacks, **settings: new_trainer(root, tmp_path, *callbacks, **settings)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> FakeNow:
    """The phases' clock, in the test's hands."""
    fake = FakeNow()
    monkeypatch.setattr("lightning_flops.run.window.clock_for", lambda device: WallClock(fake))
    return fake


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No report here tells of what else runs on this machine."""
    monkeypatch.setattr("lightning_flops.run.window.ProcessorWatch", untold)
