"""Most lines that each folder of the package may have: a mechanism that is added is paid for by one that goes.

A folder that has shrunk gets the lower number here, in the commit that made it smaller.
"""

from __future__ import annotations

from pathlib import Path

import lightning_flops

PACKAGE = Path(lightning_flops.__file__).parent
MOST_LINES = {
    "(root)": 1_870,
    "adapters": 2_400,
    "analysis": 4_220,
    "commands": 600,
    "config": 590,
    "measure": 6_580,
    "report": 2_600,
    "run": 1_500,
    "schema": 1_390,
    "sinks": 710,
    "trace": 2_650,
}
MOST_OF_A_FILE = 500


def lines_of(folder: str) -> int:
    """All lines of the Python files of *folder*."""
    files = PACKAGE.glob("*.py") if folder == "(root)" else (PACKAGE / folder).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def test_every_folder_has_a_budget_and_keeps_to_it() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert folders | {"(root)"} == set(MOST_LINES)
    lines = {folder: lines_of(folder) for folder in MOST_LINES}
    print(*(f"{folder:<12}{count:>8,} of {MOST_LINES[folder]:,}" for folder, count in lines.items()), sep="\n")  # noqa: T201
    print(f"{'sum':<12}{sum(lines.values()):>8,} of {sum(MOST_LINES.values()):,}")  # noqa: T201
    assert [folder for folder, count in lines.items() if count > MOST_LINES[folder]] == []
    assert sum(MOST_LINES.values()) <= 26_000


def test_no_file_is_longer_than_a_reader_takes_in() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert [str(path.relative_to(PACKAGE)) for path, length in lengths.items() if length > MOST_OF_A_FILE] == []
