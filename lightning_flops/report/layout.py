"""Lines, tables and paragraphs of a text report."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 120
"""Columns that a report keeps to where the model's own names let it."""

_LABEL_WIDTH = 70
_TITLE_WIDTH = 100


def title(text: str) -> str:
    """*text* in the middle of a rule."""
    return f" {text} ".center(_TITLE_WIDTH, "-")


def rule() -> str:
    """The rule that ends a report."""
    return "-" * _TITLE_WIDTH


def line(label: str, value: str) -> str:
    """``label: value`` with the values of all lines in one column."""
    return f"{label + ':':<{_LABEL_WIDTH}}  {value}".rstrip()


def paragraph(text: str, *, first: str = "", rest: str = "") -> list[str]:
    """*text* wrapped to the report's width.

    Args:
        text: one sentence or several.
        first: what the first line begins with.
        rest: what all others begin with.
    """
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, least_width: int = 10) -> list[str]:
    """Columns under *head*: the first to the left, the others, numbers, to the right."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(least_width, *map(len, column)) for column in columns]
    return [
        "  ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in (head, *rows)
    ]
