"""No private name of torch stands outside of ``measure/torch_private``: read from the source of every other file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_flops

PACKAGE = Path(lightning_flops.__file__).parent

TORCHS_PATH = re.compile(r"torch(\.\w+)*[.:]_\w[\w.:]*")


def torchs() -> set[str]:
    """Private names that common objects of torch have."""
    made: list[Any] = [
        nn.Linear(1, 1),
        torch.zeros(1, requires_grad=True).sin().grad_fn,
        torch.zeros(1),
        torch.optim.SGD([nn.Parameter(torch.zeros(1))]),
        torch.ops.aten.mm.default,
        iter(DataLoader([1])),  # type: ignore[arg-type]
        torch.nn.modules.module,
    ]
    return {name for one in made for name in dir(one) if is_private(name)}


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[^_]\w*", name) is not None


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_names_in(source: str, known: set[str]) -> Iterator[str]:
    """Private names of torch in a file: through ``torch``, as paths in texts, and *known* ones of other objects."""
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if root_of(node) == "torch":
                if not ast.unparse(node).startswith("torch.ops."):  # the dispatcher's names of operators
                    yield node.attr
            elif node.attr in known - own and root_of(node) not in ("self", "cls", "sys", "functools", "warnings"):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from filter(is_private, ((node.module or "") + "." + ".".join(a.name for a in node.names)).split("."))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if TORCHS_PATH.match(alias.name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and TORCHS_PATH.fullmatch(node.value):
            yield node.value


def test_no_private_name_of_torch_stands_outside_of_its_room() -> None:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if "torch_private" not in path.parts]
    known = torchs()
    found = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in files
        for name in private_names_in(path.read_text(), known)
    }
    assert not sorted(found)
