"""Lines, tables and paragraphs of a text report."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Collection, Sequence

from lightning_flops.text.printable import printable

WIDTH = 120
"""Width of a report in columns; only long names of the model exceed it."""

TITLE_WIDTH = 100
"""Width of the rules that titles stand in."""

_LABEL_WIDTH = 70
_VALUE_CHARS = 30
_LEAST_NAME_CHARS = 16


def title(text: str, *, width: int = TITLE_WIDTH) -> str:
    """*text* in the middle of a rule."""
    return f" {printable(text)} ".center(width, "-")


def rule() -> str:
    """The rule that ends a report."""
    return "-" * TITLE_WIDTH


def line(label: str, value: str) -> str:
    """``label: value`` with the values of all lines in one column."""
    return f"{printable(label) + ':':<{_LABEL_WIDTH}}  {printable(value)}".rstrip()


def narrow_line(label: str, value: str, *, width: int) -> list[str]:
    """As ``line`` in *width* columns; what does not fit goes on below the label, indented."""
    label, value = f"{printable(label)}:", printable(value)
    for column in (_LABEL_WIDTH, max(width - _VALUE_CHARS, width // 2), width - 2 - len(value)):
        if max(column, len(label)) + 2 + len(value) <= width:
            return [f"{label:<{column}}  {value}".rstrip()]
    return [*wrapped(label, width=width, first="", rest="  "), *wrapped(value, width=width, first="    ", rest="    ")]


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


def narrow_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, width: int, left: Collection[int] = (0,)
) -> list[str]:
    """As ``table`` in *width* columns, with all of its numbers.

    First the columns move together, then the texts on the left are cut, the widest first. If that is not enough, the
    table is cut into several below one another, each of which begins with the first column.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    widths = _cut_widths(widths, left, excess)
    if sum(widths) + 2 * (len(widths) - 1) <= width:
        return table(*_cut_columns(head, rows, widths, left), least_width=0, left=left)
    whole = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    widths = [min(own, max(_LEAST_NAME_CHARS, width // 3)) if place in left else own for place, own in enumerate(whole)]
    head, rows = _cut_columns(head, rows, widths, left)
    lines: list[str] = []
    for columns in _blocks(widths, width):
        shown = [[row[place] for place in columns] for row in (head, *rows)]
        on_left = [at for at, place in enumerate(columns) if place in left]
        lines += [*([""] if lines else []), *table(shown[0], shown[1:], least_width=0, left=on_left)]
    return lines


def _cut_widths(widths: Sequence[int], left: Collection[int], excess: int) -> list[int]:
    """*widths* less *excess*, as far as the texts in *left* can give way: always the widest of them."""
    found = list(widths)
    while excess > 0:
        widest = max(left, key=found.__getitem__, default=None)
        if widest is None or found[widest] <= _LEAST_NAME_CHARS:
            break
        found[widest] -= 1
        excess -= 1
    return found


def _cut_columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int], left: Collection[int]
) -> tuple[list[str], list[list[str]]]:
    heads = [shortened(cell, chars=widths[place]) if place in left else cell for place, cell in enumerate(head)]
    columns = [
        shortened_apart(column, chars=widths[place]) if place in left else list(column)
        for place, column in enumerate(zip(*rows, strict=True))
    ]
    return heads, [list(row) for row in zip(*columns, strict=True)]


def _blocks(widths: Sequence[int], width: int) -> list[list[int]]:
    """The columns of each of the tables that one is cut into."""
    blocks = [[0]]
    room = width - widths[0]
    for place, own in enumerate(widths[1:], 1):
        if own + 2 > room and len(blocks[-1]) > 1:
            blocks.append([0])
            room = width - widths[0]
        blocks[-1].append(place)
        room -= own + 2
    return blocks


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
