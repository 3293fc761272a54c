"""docs/architecture.md names what is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_and_folder_that_the_page_names_is_there() -> None:
    named = re.findall(r"`([\w./]+(?:\.py|/))`", PAGE)
    assert len(named) > 40
    missing = [
        name
        for name in named
        if not any((place / name).exists() for place in (ROOT, ROOT / "lightning_flops"))
        # A file that is named beside another one of its folder.
        and not list((ROOT / "lightning_flops").glob(f"*/{name}"))
    ]
    assert missing == []


def test_every_folder_of_the_package_has_its_place_on_the_page() -> None:
    folders = {path.parent.name for path in (ROOT / "lightning_flops").glob("*/__init__.py")}
    assert {folder for folder in folders if f"`{folder}/`" not in PAGE} == set()


def test_the_page_is_read_in_one_sitting() -> None:
    assert len(PAGE.splitlines()) <= 150
