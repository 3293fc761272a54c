"""The one writer of results: tables and pages of Markdown."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

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


def write_page(path: Path, lines: Iterable[str]) -> None:
    """Write *lines* to *path*."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    logger.info("wrote %s", path)


def write_section(path: Path, name: str, lines: Sequence[str], *, head: str) -> None:
    """Put *lines* in place of the section *name* of the page at *path*, or at its end if it has none.

    Args:
        path: the page; it is made if there is none.
        name: tells the section from others; it stands in the page as a comment.
        lines: a heading and what belongs under it.
        head: what a new page begins with.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    section = "\n".join([begin, "", *lines, "", end])
    before, found, rest = (path.read_text() if path.exists() else head).partition(begin)
    write_page(path, [before + section + rest.partition(end)[2]] if found else [before.rstrip(), "", section])


TIME_HEAD = """# What times come to, and what timing costs

Each section is written by a benchmark of its own, which says where and when it ran. Again: `make bench-time`.
"""
