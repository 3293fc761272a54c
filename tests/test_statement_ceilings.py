"""Most statements that each folder of the package may have: a mechanism has a price.

A folder has 5% of room, so that code can move; all of them together have none: who puts in takes out. Nothing here
counts lines, but for what a reader takes in of one file: a budget in lines buys wide lines.
"""

from __future__ import annotations

import ast
from pathlib import Path

import lightning_flops

PACKAGE = Path(lightning_flops.__file__).parent
MOST_STATEMENTS = {
    "(root)": 1_260,
    "adapters": 2_110,
    "analysis": 3_010,
    "commands": 480,
    "config": 290,
    "measure": 4_760,
    "report": 1_720,
    "run": 1_410,
    "schema": 1_010,
    "sinks": 470,
    "trace": 1_820,
}
MOST_OF_ALL = 17_500
MOST_LINES_OF_A_FILE = 500


def statements_of(folder: str) -> int:
    """All statements of the Python files of *folder*."""
    files = PACKAGE.glob("*.py") if folder == "(root)" else (PACKAGE / folder).rglob("*.py")
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in files)
    return sum(isinstance(node, ast.stmt) for tree in trees for node in ast.walk(tree))


def test_every_folder_has_a_ceiling_and_keeps_to_it() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders | {"(root)"} == set(MOST_STATEMENTS)
    statements = {folder: statements_of(folder) for folder in MOST_STATEMENTS}
    print(*(f"{one:<12}{count:>8,} of {MOST_STATEMENTS[one]:,}" for one, count in statements.items()), sep="\n")  # noqa: T201
    assert [folder for folder, count in statements.items() if count > MOST_STATEMENTS[folder]] == []
    assert sum(statements.values()) <= MOST_OF_ALL


def test_no_file_is_longer_than_a_reader_takes_in() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert [str(path.relative_to(PACKAGE)) for path, length in lengths.items() if length > MOST_LINES_OF_A_FILE] == []
