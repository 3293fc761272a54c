"""A clock that stands still in every loop here."""

from __future__ import annotations

import pytest

from lightning_flops.measure.timing.clocks import WallClock
from lightning_flops.run.monitor import Monitor
from tests.fake_clock import FakeNow
from tests.prompt_worker import PromptWorker


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> FakeNow:
    """The clock of the windows and of the monitor. Reports are there at once."""
    now = FakeNow()
    monkeypatch.setattr("lightning_flops.run.window.clock_for", lambda device: WallClock(now))
    monkeypatch.setattr("lightning_flops.run.run.Monitor", lambda: Monitor(now))
    monkeypatch.setattr("lightning_flops.run.reports.Worker", PromptWorker)
    return now
