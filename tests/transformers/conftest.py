from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_flops.measure.timing.clocks import WallClock
from tests.fake_clock import FakeNow
from tests.idle_machine import untold


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


@pytest.fixture(scope="session")
def available() -> Any:
    """Accelerate's question whether a package is installed, which looks through all folders, asked once for each."""
    from accelerate.utils import imports

    return cache(imports._is_package_available)


@pytest.fixture(autouse=True)
def no_time_is_spent_on_what_no_test_is_about(monkeypatch: pytest.MonkeyPatch, available: Any) -> None:
    """Each training's end collects garbage, and its steps ask for packages: that was half of a small training."""
    monkeypatch.setattr("accelerate.utils.imports._is_package_available", available)
    monkeypatch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=int))
