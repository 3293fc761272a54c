"""Columns find what they show by paths in text, which no type checker sees: each path is one of the dataclasses'."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_flops
from lightning_flops import records, schema
from lightning_flops.report import document
from lightning_flops.report.scalars import PATHS
from lightning_flops.schema.profile import Profile

MODULES = [
    records,
    *(importlib.import_module(f"{schema.__name__}.{one.name}") for one in pkgutil.iter_modules(schema.__path__)),
]
ROWS: set[type] = {
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}
FINDERS = {document.at.__name__, document.all_of.__name__}
"""Functions that take a path, or paths by their labels, as their first argument."""


def written() -> Iterator[tuple[str, str]]:
    """Each path in the package, and where it is."""
    for file in sorted(Path(lightning_flops.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in FINDERS:
                continue
            path = node.args[0]
            for one in path.values if isinstance(path, ast.Dict) else [path]:
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    yield one.value, f"{file.name}:{node.lineno}"


def kinds_at(kind: type, name: str) -> set[type] | None:
    """The classes of what rows of *kind* have as *name*; None if they have no such thing."""
    if name not in {*(field.name for field in dataclasses.fields(kind)), *dir(kind)}:
        return None
    own = getattr(kind, name, None)
    hint = typing.get_type_hints(own.fget).get("return") if isinstance(own, property) else None
    hint = hint or typing.get_type_hints(kind).get(name)
    return {one for one in (hint, *typing.get_args(hint)) if isinstance(one, type)}


def is_found(kinds: set[type], names: list[str]) -> bool:
    """Whether rows of one of *kinds* have what *names* lead to."""
    for kind in kinds:
        if dataclasses.is_dataclass(kind):
            inside = kinds_at(kind, names[0])
            if inside is not None and (len(names) == 1 or is_found(inside, names[1:])):
                return True
    return False


@pytest.mark.parametrize(("path", "where"), [*written()])
def test_a_column_shows_what_some_row_has(path: str, where: str) -> None:
    names = path.split(".")
    while names and names[0].isdecimal():  # of a pair
        names = names[1:]
    assert not names or is_found(ROWS, names), where


@pytest.mark.parametrize("path", PATHS.values())
def test_a_scalar_is_of_the_profile(path: str) -> None:
    assert is_found({Profile}, path.split("."))


def test_a_path_that_leads_nowhere_is_seen() -> None:
    assert is_found({Profile}, ["rates", "mfu"])
    assert not is_found({Profile}, ["rates", "mfv"]) and not is_found({Profile}, ["rates", "mfu", "mean"])
