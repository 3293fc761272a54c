"""Scenarios of engines, which run and judge themselves inside a launched process; needs no DeepSpeed."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SCENARIOS: dict[str, Callable[[], Any]] = {}
"""All of the modules that were imported, by their names; a worker runs them one after the other."""


class Skipped(Exception):
    """This DeepSpeed cannot run a scenario."""


def scenario(*cases: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a function as a scenario, once for each of *cases*, which it is given."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        for case in cases or (None,):
            name = function.__name__ if case is None else f"{function.__name__}[{case}]"
            SCENARIOS[name] = functools.partial(_run, function, () if case is None else (case,))
        return function

    return mark


def _run(function: Callable[..., None], given: tuple[Any, ...]) -> str | None:
    try:
        function(*given)
    except Skipped as reason:
        return str(reason)
    return None


def each(modules: str, *, but: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Parametrize a test with the scenarios of *modules* but some; the modules are read and not imported."""
    names = [name for module in modules.split("+") for name in _names_in(module) if name not in but]
    return pytest.mark.parametrize("name", names)


def _names_in(module: str) -> Iterator[str]:
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        for mark in getattr(node, "decorator_list", ()):
            if (
                isinstance(mark, ast.Call)
                and ast.unparse(mark.func) == "scenario"
                and isinstance(node, ast.FunctionDef)
            ):
                cases = [ast.literal_eval(one) for one in mark.args]
                yield from [f"{node.name}[{case}]" for case in cases] or [node.name]


def holds(returned: list[Any]) -> None:
    """Skip the test where the scenario was; what *returned* has failed otherwise."""
    if any(returned):
        pytest.skip(next(filter(None, returned)))
