from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_flops.instrument.timing.clocks import WallClock
from tests.fake_clock import FakeNow
from tests.idle_machine import untold
from tests.lightning.nets import ROOTS, new_trainer


@pytest.fixture(params=[ROOTS[0], pytest.param(ROOTS[1], marks=pytest.mark.slow)])
def root(request: pytest.FixtureRequest) -> str:
    """Both import roots, one after the other: the same Trainer under two names.

    The second one is slow; files that hold a claim about it have a fixture of their own.
    """
    return str(request.param)


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
