"""No private name of torch stands outside of ``instrument/torch_private``: read from the source of every other file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_flops

PACKAGE = Path(lightning_flops.__file__).parent
ROOM = PACKAGE / "instrument" / "torch_private"

FRAMEWORKS = ("adapters/", "lightning.py", "deepspeed.py", "instrument/module_scope.py")
"""Files that name private attributes of Lightning and DeepSpeed: of torch only what its objects are known to have."""

PYTHONS = {"sys", "warnings", "functools", "os"}
"""Modules of Python's own, whose private names are not torch's."""

PYTHONS_ATTRIBUTES = {"_replace", "_fields", "_asdict", "_parent"}
"""Of named tuples; the last is fsspec's."""

ASKING = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "replace", "get", "pop"}
"""Functions and methods that are given the name of an attribute."""

TORCHS_PATH = re.compile(r"torch(\.\w+)*[.:]_\w+")


class _Function(torch.autograd.Function):
    """Any."""


def _torchs() -> set[str]:
    """Private names that common objects of torch have."""
    made: list[Any] = [
        nn.Linear(1, 1),
        torch.zeros(1),
        torch.zeros(1).untyped_storage(),
        torch.zeros(1, requires_grad=True).sin().grad_fn,
        torch.optim.SGD([nn.Parameter(torch.zeros(1))]),
        torch.ops.aten.mm.default,
        torch.ops.aten.mm,
        iter(DataLoader([1])),  # type: ignore[arg-type]
        torch.profiler.profile,  # one that is made is counted as set up until its block ends
        _Function,
        torch.library,
        torch.autograd.profiler,
        torch.nn.modules.module,
    ]
    return {name for one in made for name in dir(one) if _is_private(name)}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != "" and name.isidentifier()


def _files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if ROOM not in path.parents]


def _nodes(source: str) -> list[ast.AST]:
    """All nodes of a file: a walk takes longer than parsing."""
    return list(ast.walk(ast.parse(source)))


def _own_names(files: Iterable[list[ast.AST]]) -> set[str]:
    """Private names that this package defines."""
    own: set[str] = set()
    for nodes in files:
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                own.add(node.attr)
    return {name for name in own if _is_private(name)}


def _is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
        return True
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _docstrings(nodes: list[ast.AST]) -> set[ast.expr]:
    return {node.value for node in nodes if isinstance(node, ast.Expr)}


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _asked_for(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions that stand for an attribute's name."""
    if isinstance(node, ast.Call):
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        operators = bool(node.args) and ast.unparse(node.args[0]).startswith("torch.ops")
        if name in ASKING and not operators:
            yield from node.args
    elif isinstance(node, ast.Compare):
        yield node.left  # "name" in vars(module)
    elif isinstance(node, ast.Subscript):
        yield node.slice


def private_names_in(
    nodes: list[ast.AST], *, own: set[str], torchs: set[str], foreign: bool
) -> Iterator[tuple[int, str]]:
    """(line, name) of each private name of torch in a file.

    Args:
        nodes: of the file.
        own: private names that are this package's.
        torchs: those that objects of torch are known to have.
        foreign: other frameworks' private names stand in it, too.
    """

    def is_torchs(name: str) -> bool:
        return _is_private(name) and (name in torchs or not foreign)

    docstrings = _docstrings(nodes)
    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            if _root(node).startswith("torch"):
                if not ast.unparse(node).startswith("torch.ops."):  # the dispatcher's names of operators
                    yield node.lineno, node.attr
                continue
            mine = node.attr in own and (_is_self(node.value) or node.attr not in torchs)
            if not mine and is_torchs(node.attr) and _root(node) not in PYTHONS and node.attr not in PYTHONS_ATTRIBUTES:
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for name in (*(node.module or "").split("."), *(alias.name for alias in node.names)):
                if _is_private(name):
                    yield node.lineno, name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if TORCHS_PATH.match(alias.name):
                    yield node.lineno, alias.name
        elif (text := _text(node)) and node not in docstrings and TORCHS_PATH.match(text):
            yield node.lineno, text  # type: ignore[attr-defined]  # a text is an expression
        for asked in _asked_for(node):
            name = _text(asked)
            if is_torchs(name) and (name not in own or name in torchs):
                yield asked.lineno, name


def test_no_private_name_of_torch_stands_outside_of_its_room() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): _nodes(path.read_text()) for path in _files()}
    own, torchs = _own_names(files.values()), _torchs()
    found = {
        (path, name, line)
        for path, nodes in files.items()
        for line, name in private_names_in(nodes, own=own, torchs=torchs, foreign=path.startswith(FRAMEWORKS))
    }
    assert not sorted(found)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._subclasses import FakeTensor", "_subclasses"),
        ("from torch.utils.data.dataloader import _BaseDataLoaderIter", "_BaseDataLoaderIter"),
        ("torch._C.Graph", "_C"),
        ("torch_module._global_forward_hooks", "_global_forward_hooks"),
        ("x = tensor._nnz()", "_nnz"),
        ("getattr(module, '_parameters')", "_parameters"),
        ("'_parameters' in vars(module)", "_parameters"),
        ("sys.modules['torch._dynamo.eval_frame']", "torch._dynamo.eval_frame"),
        ("def f(self):\n    self._own = 1\n    return module._is_replica", "_is_replica"),
    ],
)
def test_a_private_name_is_found_however_it_is_written(source: str, name: str) -> None:
    nodes = _nodes(source)
    found = private_names_in(nodes, own=_own_names([nodes]), torchs=_torchs(), foreign=False)
    assert name in {one for _, one in found}


@pytest.mark.parametrize(
    "source",
    [
        "torch.ops.aten._grouped_mm.default",  # the dispatcher's name of an operator
        "sys._getframe(1)",
        "class One:\n    def __init__(self):\n        self._own = 1\n\ndef of(one):\n    return one._own",
        '"""It is torch._C that knows."""',
    ],
)
def test_what_is_not_a_private_name_of_torch_is_left_alone(source: str) -> None:
    nodes = _nodes(source)
    assert not list(private_names_in(nodes, own=_own_names([nodes]), torchs=_torchs(), foreign=False))
