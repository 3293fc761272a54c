"""Lines, tables and paragraphs of a text report."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence

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


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, least_width: int = 10, left: Collection[int] = (0,)
) -> list[str]:
    """Columns under *head*, right-aligned but for those in *left*."""
    widths = [max(least_width, *map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if i in left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def shortened(name: str, *, chars: int) -> str:
    """*name*, cut to *chars* characters."""
    return name if len(name) <= chars else name[: chars - 1] + "…"
