"""Sections of a report drawn as lines of text, and how much of them a reader asked to see."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_flops.report.document import Section, SortKey, Table, distinct_width, short
from lightning_flops.units import page, printable

_WIDTH = 120  # of a paragraph, at most
_TITLE_WIDTH = 100  # of the rules that titles stand in
_LABEL_WIDTH = 70
_VALUE_CHARS = 30
_LEAST_NAME_CHARS, _NAME_CHARS = 16, 56
_MARK = re.compile(r"(-|\d+\.) ")  # what a point of a list begins with; the lines that go on stand behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a reader asked to see of each table, and the width that texts are made for."""

    rows: int | None  #: The most of each table; None for all.
    sort: SortKey | None = None  #: None for each table's own order.
    #: Of the terminal, in columns; None for no limit. Names are cut to fit it, as far as rows stay distinct.
    width: int | None = None

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
        """Columns under *head*, right-aligned but for those in *left*, the widest of which are cut if it fits then."""
        columns = [[printable(cell) for cell in column] for column in zip(head, *rows, strict=True)]
        whole = [max(map(len, column)) for column in columns]
        widths, most = list(whole), (self.width or sum(whole) + 2 * len(whole)) - 2 * (len(whole) - 1)
        least = (
            {place: distinct_width(columns[place], least=_LEAST_NAME_CHARS) for place in left}
            if sum(whole) > most
            else {}
        )
        while sum(widths) > most and (wide := [place for place in least if widths[place] > least[place]]):
            widths[max(wide, key=widths.__getitem__)] -= 1
        if sum(widths) > most:  # it is wider all the same
            widths = [min(width, max(_NAME_CHARS, least.get(place, width))) for place, width in enumerate(whole)]
        return [
            "  ".join(
                f"{short(cell, width):<{width}}" if place in left else f"{cell:>{width}}"
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in zip(*columns, strict=True)
        ]

    def rule(self, title: str = "") -> str:
        """A rule with a *title* in the middle; the one that ends a report has none."""
        words = f" {printable(title)} " if title else ""
        return words.center(min(_TITLE_WIDTH, self.width or _TITLE_WIDTH), "-")

    def line(self, label: str, value: str) -> str:
        """``label: value``, with the values of all lines in one column."""
        column = max(1, min(_LABEL_WIDTH, (self.width or _TITLE_WIDTH) - _VALUE_CHARS))
        return f"{printable(label) + ':':<{column}}  {printable(value)}".rstrip()

    def paragraph(self, text: str, *, first: str = "", rest: str = "", most: int | None = None) -> list[str]:
        """*text* in at most *most* lines, the first of which begins with *first*, all others with *rest*."""
        return textwrap.wrap(
            printable(text),  # escaped first: what wraps takes every kind of line break for a space
            max(min(_WIDTH, self.width or _WIDTH), len(rest) + _TITLE_WIDTH // 2),
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
            max_lines=most,
            placeholder=" …",
        )


WHOLE = View(rows=200)  # as wide as it is
VIEW = View(rows=8, width=_TITLE_WIDTH)  # what of a profile is drawn as text


def draw(section: Section, view: View = VIEW) -> Iterator[str]:
    """The lines of *section*, the first of them empty."""
    yield from ["", view.rule(section.title), *view.paragraph(section.note)]
    for index, item in enumerate(section.items):
        if isinstance(item, Mapping):
            yield from map(view.line, item.keys(), item.values())
        elif isinstance(item, Table):
            head, _, texts = zip(*item.lay(most=view.rows, sort=view.sort), strict=True)
            left = [0, *(at for at, column in enumerate(item.columns) if column.left)]
            yield from [""] if index else []
            yield from view.table(head, list(zip(*texts, strict=True)), left=left)
            yield from item.more(view.rows)
        else:
            mark = _MARK.match(item)
            yield from view.paragraph(item, rest=" " * mark.end() if mark else "")


def draw_all(sections: Iterable[Section], view: View = VIEW) -> str:
    """*sections* as a report of their own, ending in a line break."""
    return page([*[line for section in sections for line in draw(section, view)][1:], view.rule()])
