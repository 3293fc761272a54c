"""Lines, tables and paragraphs of a text report, and how much of them a reader asked to see."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lightning_flops.text.printable import printable

WIDTH = 120
"""Most columns of a paragraph."""

TITLE_WIDTH = 100
"""Width of the rules that titles stand in."""

_LABEL_WIDTH = 70
_VALUE_CHARS = 30
_LEAST_NAME_CHARS = 16

SortKey = Literal["total", "self", "mean", "max", "min", "calls", "name", "flops", "rate", "bytes"]
"""Columns by which tables can be sorted."""

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a reader asked to see of each table, and the width that texts are made for."""

    rows: int | None
    """The most of each table; None for all."""
    sort: SortKey | None = None
    """None for each table's own order."""
    width: int | None = None
    """Of the terminal, in columns; None for no limit. A table with more numbers than fit is wider."""

    def sorted(self, rows: Sequence[_Row], /, **keys: Callable[[_Row], Any]) -> list[_Row]:
        """*rows* by what was asked for, the largest first, names by the alphabet; as they are if *keys* lacks that."""
        key = keys.get(self.sort or "")
        if key is None:
            return list(rows)
        if self.sort == "name":
            return sorted(rows, key=lambda row: str(key(row)))
        return sorted(rows, key=lambda row: -(key(row) or 0.0))

    def more(self, rows: Sequence[object]) -> list[str]:
        """What stands below a table that does not show all of *rows*."""
        return and_more(0 if self.rows is None else len(rows) - self.rows)

    def table(
        self, head: Sequence[str], rows: Sequence[Sequence[str]], *, least_width: int = 10, left: Collection[int] = (0,)
    ) -> list[str]:
        """Columns under *head*, right-aligned but for those in *left*, which are cut where they are too wide."""
        columns = [[printable(cell) for cell in column] for column in zip(head, *rows, strict=True)]
        widths = [max(least_width, *map(len, column)) for column in columns]
        room = (self.width or sum(widths) + 2 * len(widths)) - 2 * (len(widths) - 1)
        if sum(widths) > room:
            widths = [max(map(len, column)) for column in columns]
        least = [min(width, _LEAST_NAME_CHARS) if place in left else width for place, width in enumerate(widths)]
        while sum(least) <= room < sum(widths):
            widths[max(left, key=widths.__getitem__)] -= 1
        for place in left:
            columns[place][1:] = shortened_apart(columns[place][1:], chars=widths[place])
        return [
            "  ".join(
                f"{cell:<{width}}" if place in left else f"{cell:>{width}}"
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in zip(*columns, strict=True)
        ]

    def title(self, text: str) -> str:
        """*text* in the middle of a rule."""
        return f" {printable(text)} ".center(min(TITLE_WIDTH, self.width or TITLE_WIDTH), "-")

    def rule(self) -> str:
        """The rule that ends a report."""
        return "-" * min(TITLE_WIDTH, self.width or TITLE_WIDTH)

    def line(self, label: str, value: str) -> list[str]:
        """``label: value``, with the values of all lines in one column."""
        column = max(1, min(_LABEL_WIDTH, (self.width or TITLE_WIDTH) - _VALUE_CHARS))
        return [f"{printable(label) + ':':<{column}}  {printable(value)}".rstrip()]

    def paragraph(self, text: str, *, first: str = "", rest: str = "", most: int | None = None) -> list[str]:
        """*text* in at most *most* lines, the first of which begins with *first*, all others with *rest*."""
        return textwrap.wrap(
            printable(text),  # escaped first: what wraps takes every kind of line break for a space
            max(min(WIDTH, self.width or WIDTH), len(rest) + TITLE_WIDTH // 2),
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
            max_lines=most,
            placeholder=" …",
        )


WHOLE = View(rows=None)
"""Everything, as wide as it is."""

VIEW = View(rows=8, width=TITLE_WIDTH)
"""What of a profile is drawn as text."""


def some_of(names: Collection[str], *, most: int) -> str:
    """Names of modules; of many, the first *most* and the number of the others."""
    shown = [name or "the root" for name in names][:most]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def and_more(number: int) -> list[str]:
    """A line that says how many rows a list was cut by; none if it is whole."""
    return [f"(and {number:,} more)"] if number > 0 else []


def shortened(name: str, *, chars: int) -> str:
    """*name*, cut to *chars* characters."""
    name = printable(name)
    return name if len(name) <= chars else name[: chars - 1] + "…"


def shortened_inside(name: str, *, chars: int) -> str:
    """*name*, cut to *chars* characters: a C++ function's arguments go first, then its middle.

    So names that begin alike still differ.
    """
    name = printable(name)
    if len(name) > chars:
        name = _without_arguments(name)
    if len(name) <= chars:
        return name
    tail = (chars - 1) // 2
    return f"{name[: chars - 1 - tail]}…{name[len(name) - tail :]}"


def _without_arguments(name: str) -> str:
    """``kernel<float>`` of ``void kernel<float>(float const*, int)``; a name that is no such function's as it is."""
    level = 0
    for place in range(len(name) - 1, 0, -1) if name.endswith(")") else ():
        level += (name[place] == ")") - (name[place] == "(")
        if not level:
            return name[:place].removeprefix("void ") if not name[place - 1].isspace() else name
    return name


def shortened_apart(names: Sequence[str], *, chars: int) -> list[str]:
    """*names*, each cut to *chars* characters so that different names stay different.

    Names that would look the same once their middle is cut out keep what follows where they begin to differ instead.
    """
    alike: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        alike.setdefault(shortened_inside(name, chars=chars), []).append(name)
    shown = {group[0]: short for short, group in alike.items()}
    head = chars // 3
    for group in (group for group in alike.values() if len(group) > 1):
        same = max(len(os.path.commonprefix(group)) - 2, head)  # noqa: RUF071 - of characters, as is meant
        for name in group:
            shown[name] = f"{printable(name[:head])}…{shortened(name[same:], chars=chars - head - 1)}"
    return [shown[name] for name in names]
