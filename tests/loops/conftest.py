from __future__ import annotations

import pytest

from lightning_flops.run.throughput import Monitor
from tests.fake_clock import FakeNow


@pytest.fixture
def now(now: FakeNow, monkeypatch: pytest.MonkeyPatch, prompt_reports: None) -> FakeNow:
    """The clock of the windows and of the monitor. Reports are there at once."""
    monkeypatch.setattr("lightning_flops.run.throughput.Monitor", lambda: Monitor(now))
    return now
