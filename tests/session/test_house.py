"""How the session and the doors are built: objects that have one another, and no state that a reader must know of."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_flops

PACKAGE = Path(lightning_flops.__file__).parent
FILES = sorted(
    path for folder in ("doors", "session") for path in (PACKAGE / folder).glob("*.py") if path.stem != "__init__"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_nothing_is_asserted_to_be_there(path: Path) -> None:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    assert [node.lineno for node in nodes if isinstance(node, ast.Assert)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_class_inherits_from_another_of_ours(path: Path) -> None:
    module = importlib.import_module(f"lightning_flops.{path.parent.name}.{path.stem}")
    assert list(_heirs(module.__name__, vars(module))) == []


def _heirs(module: str, names: dict[str, object]) -> Iterator[tuple[str, str]]:
    for kind in names.values():
        if not inspect.isclass(kind) or kind.__module__ != module or issubclass(kind, Exception):
            continue
        for base in kind.__bases__:
            if base.__module__.startswith("lightning_flops") and not getattr(base, "_is_protocol", False):
                yield kind.__name__, base.__name__
