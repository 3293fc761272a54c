from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from tests.idle_machine import idle_machine as idle_machine


@pytest.fixture(scope="session")
def available() -> Any:
    """Accelerate's question whether a package is installed, which looks through all folders, asked once for each."""
    from accelerate.utils import imports

    return cache(imports._is_package_available)


@pytest.fixture(autouse=True)
def no_time_for_what_no_test_is_about(monkeypatch: pytest.MonkeyPatch, available: Any) -> None:
    """Each training's end collects garbage, and its steps ask for packages: that was half of a small training."""
    monkeypatch.setattr("accelerate.utils.imports._is_package_available", available)
    monkeypatch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=int))
