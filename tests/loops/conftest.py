from __future__ import annotations

import pytest

from tests.fake_clock import FakeNow


@pytest.fixture
def now(now: FakeNow, prompt_reports: None) -> FakeNow:
    """The host's clock. Reports are there at once."""
    return now
