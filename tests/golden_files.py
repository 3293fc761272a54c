"""Compares whole texts with files that people read."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"

REWRITE_VARIABLE = "REWRITE_GOLDEN_FILES"
"""With this set to 1 in the environment, the files are written anew; read what changed before you commit it."""


def golden(name: str, text: str) -> None:
    """Assert that *text* is, to the last character, what the file *name* in tests/golden holds."""
    path = FOLDER / name
    if os.environ.get(REWRITE_VARIABLE) == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"{path} is missing; {REWRITE_VARIABLE}=1 writes it"
    assert text == path.read_text(encoding="utf-8"), f"differs from {path}; {REWRITE_VARIABLE}=1 rewrites it"
