from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.idle_machine import idle_machine as idle_machine
from tests.lightning.nets import ROOT, ROOTS, new_trainer


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that names ``root`` itself runs under both import roots."""
    marks = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "root" in inspect.signature(metafunc.function).parameters and not any("root" in names for names in marks):
        metafunc.parametrize("root", ROOTS)


@pytest.fixture
def root() -> str:
    """The import root of a test that does not name one."""
    return ROOT


@pytest.fixture
def trainer(root: str, tmp_path: Path) -> Callable[..., Any]:
    """Makes a quiet Trainer of *root* with the given callbacks and settings."""
    return lambda *callbacks, **settings: new_trainer(root, tmp_path, *callbacks, **settings)
