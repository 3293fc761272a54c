"""The clock that everything here is timed by is the host's: what tests put in its place is asked nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lightning_flops

PACKAGE = Path(lightning_flops.__file__).parent
REPLACED_BY_TESTS = {"datetime", "time", "uuid"}
"""Where people who test take what is different each time, and put something else in its place."""


def test_no_other_file_asks_what_tests_replace() -> None:
    asking = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if _imports(path)}
    assert asking == {"host_clock.py"}


def _imports(path: Path) -> set[str]:
    return REPLACED_BY_TESTS.intersection(_imported(ast.parse(path.read_text(encoding="utf-8"))))


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
            yield node.module.partition(".")[0]
