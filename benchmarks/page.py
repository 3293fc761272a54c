"""The one writer of results: tables and pages of Markdown."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from .machine import ran_in_words

logger = logging.getLogger("benchmarks.page")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table; a column whose name begins with ``>`` is right-aligned, None is an empty cell."""
    rule = "|".join("---:" if column.startswith(">") else "---" for column in columns)
    return [_line([column.removeprefix(">") for column in columns]), f"|{rule}|", *map(_line, rows)]


def _line(cells: Sequence[object]) -> str:
    texts = ("" if cell is None else str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return "|" + "".join(f" {text} |" if text else " |" for text in texts)


def met(holds: bool) -> str:
    """A verdict, for a cell."""
    return "met" if holds else "**missed**"


def described(about: str | None, *packages: str, level: str = "#", code: str = "") -> list[str]:
    """The beginning of a page or section: the benchmark's docstring, and when, where and with what it ran."""
    title, _, text = (about or "").partition("\n\n")
    return [f"{level} {title.rstrip('.')}", "", text.strip(), "", ran_in_words(packages, code=code), ""]


def write_page(path: Path, lines: Iterable[str]) -> None:
    """Write *lines* to *path*."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    logger.info("wrote %s", path)
