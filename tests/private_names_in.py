"""The private names of others that files of ours ask for."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path


def private_names_in(paths: Iterable[Path], *, own: frozenset[str] = frozenset()) -> set[str]:
    """All that stand as a text, and all attributes but those that *own* names or that a file has itself."""
    found: set[str] = set()
    for path in paths:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        ours = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"}
        ours |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)} | own
        texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)} - ours
        found |= {name for name in texts | attributes if name.isidentifier() and name[0] == "_" != name[1]}
    return found
