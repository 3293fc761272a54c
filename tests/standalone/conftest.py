from __future__ import annotations

import pytest
import torch._dynamo  # noqa: F401  adds to the warning filters when it is first imported, which is not ours to undo

from lightning_flops.measure.timing.clocks import WallClock
from tests.fake_clock import FakeNow


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> FakeNow:
    """The clock of every profiler, in the test's hands."""
    fake = FakeNow()
    monkeypatch.setattr("lightning_flops.adapters.standalone.clock_for", lambda device: WallClock(fake))
    return fake
