"""Lines, tables and paragraphs of a text report, and how much of them a reader asked to see."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lightning_flops.text.printable import printable

WIDTH = 120
"""Width of a report in columns; only long names of the model exceed it."""

TITLE_WIDTH = 100
"""Width of the rules that titles stand in."""

_LABEL_WIDTH = 70
_VALUE_CHARS = 30
_LEAST_NAME_CHARS = 16

SortKey = Literal["name", "calls", "total", "self", "mean", "max", "min", "flops", "rate", "bytes"]

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a reader asked to see of each table, and the width that everything must fit."""

    rows: int | None
    """The most of each table; None for all."""
    sort: SortKey | None = None
    """None for each table's own order."""
    width: int | None = None
    """Of the terminal, in columns; None for no limit."""

    @property
    def text_width(self) -> int:
        """Columns of a paragraph."""
        return min(WIDTH, self.width or WIDTH)

    def sorted(self, rows: Sequence[_Row], /, **keys: Callable[[_Row], Any]) -> list[_Row]:
        """*rows* by what was asked for, the largest first, names by the alphabet; as they are if there is no such key.

        Args:
            rows: of a table.
            keys: what a row has under each key that the table knows; None sorts last.
        """
        key = None if self.sort is None else keys.get(self.sort)
        if key is None:
            return list(rows)
        if self.sort == "name":
            return sorted(rows, key=lambda row: str(key(row)))
        return sorted(rows, key=lambda row: -(key(row) or 0.0))

    def more(self, rows: Sequence[object]) -> list[str]:
        """What stands below a table that does not show all of *rows*."""
        return and_more(0 if self.rows is None else len(rows) - self.rows)

    def table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        least_width: int = 10,
        left: Collection[int] = (0,),
    ) -> list[str]:
        """A table of the function ``table`` where that fits, else narrower, with all of its numbers."""
        lines = table(head, rows, least_width=least_width, left=left)
        if self.width is None or max(map(len, lines)) <= self.width:
            return lines
        return _narrow_table(head, rows, left=left, width=self.width)

    def title(self, text: str) -> str:
        """*text* in the middle of a rule."""
        return title(text, width=min(TITLE_WIDTH, self.width or TITLE_WIDTH))

    def rule(self) -> str:
        """The rule that ends a report."""
        return rule()[: self.width]

    def line(self, label: str, value: str) -> list[str]:
        """A line of the function ``line``; what does not fit goes on below the label, indented."""
        if self.width is None:
            return [line(label, value)]
        label, value = f"{printable(label)}:", printable(value)
        for column in (_LABEL_WIDTH, max(self.width - _VALUE_CHARS, self.width // 2), self.width - 2 - len(value)):
            if max(column, len(label)) + 2 + len(value) <= self.width:
                return [f"{label:<{column}}  {value}".rstrip()]
        return [*self.paragraph(label, rest="  "), *self.paragraph(value, first="    ", rest="    ")]

    def paragraph(self, text: str, *, first: str = "", rest: str = "") -> list[str]:
        """*text* wrapped, the first line beginning with *first*, all others with *rest*."""
        return wrapped(text, width=self.text_width, first=first, rest=rest)


WHOLE = View(rows=None)
"""Everything, as wide as it is."""


def title(text: str, *, width: int = TITLE_WIDTH) -> str:
    """*text* in the middle of a rule."""
    return f" {printable(text)} ".center(width, "-")


def rule() -> str:
    """The rule that ends a report."""
    return "-" * TITLE_WIDTH


def line(label: str, value: str) -> str:
    """``label: value`` with the values of all lines in one column."""
    return f"{printable(label) + ':':<{_LABEL_WIDTH}}  {printable(value)}".rstrip()


def paragraph(text: str, *, first: str = "", rest: str = "") -> list[str]:
    """*text* wrapped to the report's width.

    Args:
        text: one sentence or several.
        first: what the first line begins with.
        rest: what all others begin with.
    """
    return wrapped(text, width=WIDTH, first=first, rest=rest)


def wrapped(text: str, *, width: int, first: str, rest: str) -> list[str]:
    """*text* in lines of *width* columns, the first of which begins with *first*, all others with *rest*."""
    # Escaped first: what wraps takes every kind of line break for a space.
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def cut(lines: list[str], *, most: int, width: int) -> list[str]:
    """At most so many of *lines*, of which none is wider than *width*; the last says that there are more."""
    if len(lines) <= most:
        return lines
    last = lines[most - 1]
    while len(last) + 2 > width and " " in last.strip():
        last = last.rpartition(" ")[0]
    return [*lines[: most - 1], f"{last} …"]


def marked_before(text: str, *words: str) -> str:
    """*words* in brackets, if there are any, and then *text*, so that it ends its line: ``(measured) 6.28 G``."""
    return f"({', '.join(words)}) {text}" if words else text


def some_of(names: Collection[str], *, most: int) -> str:
    """Names of modules; of many, the first *most* and the number of the others."""
    shown = [name or "the root" for name in names][:most]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, least_width: int = 10, left: Collection[int] = (0,)
) -> list[str]:
    """Columns under *head*, right-aligned but for those in *left*."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(least_width, *map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if i in left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def _narrow_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, width: int, left: Collection[int]
) -> list[str]:
    """A table in *width* columns, with all of its numbers.

    First the texts on the left are cut, the widest first. If that is not enough, the table is cut into several below
    one another, each of which begins with the first column.
    """
    columns = [[printable(cell) for cell in column] for column in zip(head, *rows, strict=True)]
    whole = [max(map(len, column)) for column in columns]
    widths, room = list(whole), width - 2 * (len(whole) - 1)
    while sum(widths) > room and max(widths[place] for place in left) > _LEAST_NAME_CHARS:
        widths[max(left, key=widths.__getitem__)] -= 1
    if sum(widths) > room:  # cut into several there is more room
        most = max(_LEAST_NAME_CHARS, width // 3)
        widths = [min(own, most) if place in left else own for place, own in enumerate(whole)]
    for place in left:
        first, *others = columns[place]
        chars = widths[place]
        columns[place] = [shortened(first, chars=chars), *shortened_apart(others, chars=chars)]
    blocks, used = [[0]], widths[0]
    for place, own in enumerate(widths[1:], 1):
        if used + own + 2 > width and len(blocks[-1]) > 1:
            blocks.append([0])
            used = widths[0]
        blocks[-1].append(place)
        used += own + 2
    lines: list[str] = []
    for block in blocks:
        shown, *below = zip(*(columns[place] for place in block), strict=True)
        on_left = [at for at, place in enumerate(block) if place in left]
        lines += [*([""] if lines else []), *table(shown, below, least_width=0, left=on_left)]
    return lines


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
    if not name.endswith(")"):
        return name
    level = 0
    for place in range(len(name) - 1, 0, -1):
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
    shown: dict[str, str] = {}
    for short, group in alike.items():
        if len(group) == 1:
            shown[group[0]] = short
            continue
        same = len(os.path.commonprefix(group))  # noqa: RUF071 - of characters, as is meant
        head = chars // 3
        for name in group:
            rest = name[max(same - 2, head) :]
            tail = rest if len(rest) < chars - head else f"{rest[: chars - head - 2]}…"
            shown[name] = printable(f"{name[:head]}…{tail}")
    return [shown[name] for name in names]
