"""Lines, tables and paragraphs of a text report."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Collection, Sequence

from lightning_flops.text.printable import printable

WIDTH = 120
"""Width of a report in columns; only long names of the model exceed it."""

_LABEL_WIDTH = 70
_TITLE_WIDTH = 100


def title(text: str, *, width: int = _TITLE_WIDTH) -> str:
    """*text* in the middle of a rule."""
    return f" {printable(text)} ".center(width, "-")


def rule() -> str:
    """The rule that ends a report."""
    return "-" * _TITLE_WIDTH


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


def marked(text: str, *words: str) -> str:
    """*text* with *words* in brackets, if there are any: ``6.28 G (measured, lower bound)``."""
    return f"{text.rstrip()} ({', '.join(words)})" if words else text


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
