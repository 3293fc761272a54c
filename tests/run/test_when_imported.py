"""What waits for an import hears of it once, and changes nothing of it."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lightning_flops.adapters.when_imported import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that can be imported and has not been."""
    name = "package_that_is_waited_for"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("from . import part\nvalue = part.value\n")
    (tmp_path / name / "part.py").write_text("value = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield name
    sys.meta_path[:] = finders
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def test_an_import_is_waited_for_and_told_once(package: str) -> None:
    seen: list[int] = []
    finders = list(sys.meta_path)
    when_imported(package, lambda module: seen.append(module.value))
    spec = importlib.util.find_spec(package)  # asks, and does not import
    assert spec is not None and spec.loader is not None
    assert spec.loader.is_package(package)  # type: ignore[attr-defined]  # the loader answers as its own
    assert seen == [] and package not in sys.modules
    module = importlib.import_module(package)
    assert seen == [5]  # the package was complete
    assert sys.meta_path == finders
    assert module.__spec__ is not None
    assert type(module.__loader__) is type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    importlib.reload(module)
    assert seen == [5]


def test_what_has_been_imported_is_told_at_once(package: str) -> None:
    importlib.import_module(package)
    seen: list[bool] = []
    when_imported(package, lambda module: seen.append(True))
    assert seen == [True]


def test_an_import_goes_on_when_what_is_told_fails(package: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(module: ModuleType) -> None:
        raise RuntimeError("broken")

    when_imported(package, fail)
    with caplog.at_level(logging.WARNING, logger="lightning_flops"):
        assert importlib.import_module(package).value == 5
        when_imported(package, fail)  # it is imported already
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"the FLOPs profiler could not be installed for {package}; the program goes on"] * 2
    assert caplog.text.count("RuntimeError: broken") == 2


def test_an_import_that_fails_may_be_tried_again(package: str, tmp_path: Path) -> None:
    part = tmp_path / package / "part.py"
    part.write_text("1 / 0\n")
    seen: list[bool] = []
    when_imported(package, lambda module: seen.append(True))
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(package)
    assert seen == []
    part.write_text("value = 12345\n")  # of another length: bytecode is told by size and time
    assert importlib.import_module(package).value == 12345
    assert seen == [True]
