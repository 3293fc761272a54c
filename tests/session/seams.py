"""The seams of a session: each function, class and method of ours that it and its door call, by introspection.

A seam is written as the dotted path at which ``unittest.mock.patch`` replaces it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import PropertyMock, patch

import lightning_flops.session

SESSION = tuple(
    f"lightning_flops.session.{path.stem}"
    for path in sorted(Path(str(lightning_flops.session.__file__)).parent.glob("*.py"))
    if path.stem not in ("__init__", "border", "rank_exchange", "ranks")
)
"""The modules of the session but its border, which is what must hold, and what needs other ranks."""

NOT_SEAMS = ("Border", "UndoLedger", "RankReports", "guarded", "package_logger", "untapped", "_NoOutput", "RankOutput")
"""The border itself, what needs other ranks, and what is called after a failure."""

AFTER_A_FAILURE = (
    *("undo", "remove", "take_out", "abandon", "close", "out", "border", "_take_off", "leave_again"),
    *("_tell_failure", "_warn", "_failed", "_broke", "reset_fetcher", "put_back"),
)
"""What runs after a failure, too: there a second one has tests of its own."""


def seams(*doors: str) -> list[str]:
    """The seams of a session whose door is made of these modules."""
    modules = [importlib.import_module(name) for name in (*SESSION, *doors)]
    asked = set().union(*map(_attributes_asked, modules))
    found: set[str] = set()
    for module in modules:
        for name, thing in vars(module).items():
            ours = getattr(thing, "__module__", "").startswith("lightning_flops")
            if not ours or name in (*NOT_SEAMS, *AFTER_A_FAILURE):
                continue
            if inspect.isclass(thing):
                found.update(_of_class(module, name, thing, asked))
            elif inspect.isfunction(thing) and name in _names_called(module):
                found.add(f"{module.__name__}.{name}")
    return sorted(found)


DOORS_IN_TURN = ("loop", "evaluation", "transformers", "deepspeed")
"""The doors that share the session's seams among them, where not all are tried under each."""


def shared_out(door: str, found: Iterable[str]) -> tuple[list[str], list[str]]:
    """Of the seams *found* of one of ``DOORS_IN_TURN``: those that are always tried, and those only where all are.

    Every seam of Lightning's fit is always tried under that one. So of these each is tried under one other door, in
    turn; what a fit has not, always.
    """
    of_a_fit = {seam: number for number, seam in enumerate(seams("lightning_flops.doors.lightning_fit"))}
    turn = DOORS_IN_TURN.index(door)
    always: list[str] = []
    others: list[str] = []
    for seam in found:
        number = of_a_fit.get(seam)
        (always if number is None or number % len(DOORS_IN_TURN) == turn else others).append(seam)
    return always, others


def each_seam(door: str, *modules: str) -> list[Any]:
    """Those of *door*, made of these modules, as a test's parameters: the others of ``shared_out`` are slow."""
    import pytest  # not above: a program that is launched asks for seams, too

    always, others = shared_out(door, seams(*modules))
    return [*always, *(pytest.param(seam, marks=pytest.mark.slow) for seam in others)]


def _of_class(module: ModuleType, name: str, kind: type, asked: set[str]) -> Iterator[str]:
    if getattr(kind, "_is_protocol", False) or issubclass(kind, (tuple, BaseException)):
        return
    if name in _names_called(module):
        yield f"{module.__name__}.{name}"
    for method, value in vars(kind).items():
        guards_itself = hasattr(value, "__wrapped__")
        named = method in asked and not method.startswith("__") and method not in AFTER_A_FAILURE
        if named and not guards_itself and (inspect.isfunction(value) or isinstance(value, property)):
            yield f"{kind.__module__}.{kind.__qualname__}.{method}"


@functools.cache
def _tree(module: ModuleType) -> ast.AST:
    return ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))


@functools.cache
def _attributes_asked(module: ModuleType) -> set[str]:
    return {node.attr for node in ast.walk(_tree(module)) if isinstance(node, ast.Attribute)}


@functools.cache
def _names_called(module: ModuleType) -> set[str]:
    calls = (node.func for node in ast.walk(_tree(module)) if isinstance(node, ast.Call))
    return {called.id for called in calls if isinstance(called, ast.Name)}


def broken_at(seam: str, error: Exception) -> Any:
    """A context in which the seam raises *error*; what is entered knows whether it was called."""
    if _is_property(seam):
        return patch(seam, new_callable=PropertyMock, side_effect=error)
    return patch(seam, side_effect=error)


def _is_property(seam: str) -> bool:
    path, _, name = seam.rpartition(".")
    owner, _, kind = path.rpartition(".")
    try:
        return isinstance(vars(getattr(importlib.import_module(owner), kind)).get(name), property)
    except (ImportError, AttributeError):  # a module's own
        return False
