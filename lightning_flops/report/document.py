"""A report as data: sections of figures, paragraphs and tables; drawn as text, as a page's data and as plain HTML."""

from __future__ import annotations

import html
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_flops.report import layout
from lightning_flops.report.layout import View
from lightning_flops.schema.trace_steps import Durations
from lightning_flops.text.printable import printable
from lightning_flops.units import NOT_AVAILABLE, duration, percent, plain

NAME_CHARS = 56
"""Of a name in a column."""


@dataclass(frozen=True, slots=True)
class Column:
    """One property of a table's rows."""

    label: str
    of: Callable[[Any], Any]
    """What a row has."""
    show: Callable[[Any], str] = plain
    """The same as text."""
    sort: str = ""
    """The key under which rows are sorted by it; empty for none."""
    left: bool = False
    """Text, which stands on the left and may be cut; the first column always is."""
    chars: int = 0
    """Names are cut to so many characters, and different ones stay different; 0 for as they are."""
    unit: str = ""
    """Unit of numbers that have three significant digits, and one prefix in all columns of a table that share it."""
    bar: bool = False
    """Shares of one, which a page draws as bars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of one kind under the heads of columns."""

    rows: Sequence[Any]
    columns: Sequence[Column]
    keys: Mapping[str, Callable[[Any], Any]]
    """What rows are sorted by that no column has."""
    whole: bool = False
    """Show all rows, however many were asked for."""
    more: bool = True
    """Say how many rows are not shown."""
    only: Callable[[Any], bool] | None = None
    """Of the rows that would be shown, those that are."""
    below: Callable[[Any], Iterable[Sequence[str]]] | None = None
    """Cells of lines below a row."""
    top: Sequence[Sequence[str]] = ()
    """Cells of lines above all rows, as ``foot`` below them."""
    foot: Sequence[Sequence[str]] = ()
    least_width: int = 10
    note: str = ""
    """A paragraph before it."""
    after: Sequence[str] = ()
    """Paragraphs behind it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One value with its label."""

    label: str
    value: str


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report; text in it is a paragraph."""

    title: str
    note: str
    items: Sequence[Figure | Table | str]


def table(rows: Sequence[Any] | None, columns: Sequence[Column], /, **settings: Any) -> Table:
    """The table of *rows*; the settings that ``Table`` has no field for are keys to sort by."""
    fields = {name: settings.pop(name) for name in list(settings) if name in Table.__dataclass_fields__}
    return Table(rows=rows or (), columns=columns, keys=settings, **fields)


def cells(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,), least_width: int = 10
) -> Table:
    """The table of rows that are text already."""

    def column(at: int, label: str) -> Column:
        return Column(label, lambda row: row[at], str, left=at in left)

    columns = [column(at, label) for at, label in enumerate(head)]
    return table(rows, columns, whole=True, least_width=least_width)


def statistics(
    of: Callable[[Any], Durations | None], *, sorts: bool = True, labels: str = "", prefix: str = ""
) -> list[Column]:
    """Total, mean, longest, shortest and part of the whole of what *of* finds in a row; *prefix* of the first label."""

    def column(label: str, field: str, show: Callable[[Any], str]) -> Column:
        sort = label if sorts and label != "ratio" else ""
        shown = f"{prefix}{label}" if label == chosen[0] else label
        return Column(shown, lambda row: getattr(of(row), field, None), show, sort)

    chosen = labels.split() or ["total", "mean", "max", "min", "ratio"]
    return [
        column(label, label if label == "ratio" else f"{label}_us", percent if label == "ratio" else us)
        for label in chosen
    ]


def field(label: str, name: str, show: Callable[[Any], str] = plain, sort: str = "") -> Column:
    """The column of a row's attribute."""
    return Column(label, lambda row: getattr(row, name), show, sort)


def named(label: str) -> Column:
    """The column of a row's name, cut."""
    return Column(label, lambda row: row.name, short, "name")


CALLS = field("calls", "calls", sort="calls")
"""The column that most tables have."""


def quantity(label: str, of: Callable[[Any], Any], unit: str) -> Column:
    """The column of numbers of one unit, which its label names with the prefix that fits the table."""
    return Column(label, of, unit=unit)


def share(label: str, of: Callable[[Any], Any]) -> Column:
    """The column of fractions of one."""
    return Column(label, of, lambda value: NOT_AVAILABLE if value is None else f"{100 * value:.1f}%", bar=True)


def us(time_us: float | None) -> str:
    """Microseconds in the unit that fits."""
    return duration(None if time_us is None else time_us / 1e6)


def short(name: str) -> str:
    """A name cut to a column."""
    return layout.shortened_inside(name, chars=NAME_CHARS)


def place(of: str | None, *, chars: int = 36) -> str:
    """The end of a file's path and its line."""
    if of is None:
        return NOT_AVAILABLE
    return of if len(of) <= chars else f"…{of[len(of) - chars + 1 :]}"


def draw(section: Section, view: View) -> Iterator[str]:
    """The lines of *section*."""
    yield from ["", view.title(section.title), *view.paragraph(section.note)]
    for index, item in enumerate(section.items):
        if isinstance(item, Figure):
            yield from view.line(item.label, item.value)
        elif isinstance(item, str):
            yield from view.paragraph(item, rest=_hanging(item)) or [""]
        else:
            yield from [""] if index else []
            yield from draw_table(item, view)


def _hanging(item: str) -> str:
    """What goes on below the number, or the dash, that a point of a list begins with."""
    mark, _, _ = item.partition(" ")
    return " " * (len(mark) + 1) if mark == "-" or mark.rstrip(".").isdecimal() else ""


@dataclass(frozen=True, slots=True)
class _Laid:
    """A table whose rows are chosen and in order."""

    rows: Sequence[Any]
    head: Sequence[str]
    cells: Sequence[list[str]]


def _lay(shown: Table, view: View) -> _Laid:
    columns = shown.columns
    keys = {column.sort: column.of for column in reversed(columns) if column.sort} | dict(shown.keys)
    rows = view.sorted(shown.rows, **keys)[: None if shown.whole else view.rows]
    rows = rows if shown.only is None else list(filter(shown.only, rows))
    values = [[column.of(row) for row in rows] for column in columns]
    head = [column.label for column in columns]
    texts: list[Sequence[str]] = []
    for at, column in enumerate(columns):
        if column.unit:
            alike = [
                one for other, found in zip(columns, values, strict=True) if other.unit == column.unit for one in found
            ]
            prefixed, size = _fitting(column.unit, max((abs(one) for one in alike if one is not None), default=0.0))
            head[at] = f"{column.label}, {prefixed}" if column.label else prefixed
            texts.append([_significant(value, size) for value in values[at]])
        elif column.chars:
            texts.append(layout.shortened_apart([column.show(value) for value in values[at]], chars=column.chars))
        else:
            texts.append([column.show(value) for value in values[at]])
    return _Laid(rows, head, [list(line) for line in zip(*texts, strict=True)])


_PREFIXES = {"s": (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))}
_LARGE = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3), ("", 1.0))


def _fitting(unit: str, largest: float) -> tuple[str, float]:
    """*unit* with the prefix that keeps *largest* above one, and what it stands for."""
    sizes = _PREFIXES.get(unit) or [(f"{prefix}{unit}", size) for prefix, size in _LARGE]
    return next((one for one in sizes if largest >= one[1]), sizes[-1] if largest else (unit, 1.0))


def _significant(value: float | None, size: float) -> str:
    """Three significant digits."""
    if value is None:
        return NOT_AVAILABLE
    scaled = value / size
    digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2 if abs(scaled) >= 0.9995 else 3
    return "0" if not value else f"{scaled:,.{digits}f}"


def draw_table(shown: Table, view: View) -> Iterator[str]:
    """The lines of a table: its rows in the order and number that were asked for."""
    laid = _lay(shown, view)
    lines = [*shown.top]
    for row, line in zip(laid.rows, laid.cells, strict=True):
        lines += [line, *(shown.below(row) if shown.below is not None else ())]
    left = [0, *(index for index, column in enumerate(shown.columns) if column.left)]
    yield from view.paragraph(shown.note) if shown.note else ()
    yield from view.table(laid.head, [*lines, *shown.foot], least_width=shown.least_width, left=left)
    if shown.more and not shown.whole:
        yield from view.more(shown.rows)
    for words in shown.after:
        yield from view.paragraph(words)


_PAGE = View(rows=1000)
"""What a page has of long tables."""


def as_data(section: Section) -> dict[str, Any]:
    """*section* for the page: rows of each table as text, with the numbers that they are sorted by."""
    return {"title": section.title, "note": printable(section.note), "items": [_item(one) for one in section.items]}


def _item(item: Figure | Table | str) -> dict[str, Any]:
    if isinstance(item, str):
        return {"text": printable(item)}
    if isinstance(item, Figure):
        return {"label": printable(item.label), "value": printable(item.value)}
    laid, columns = _lay(item, _PAGE), item.columns
    rows = [[[printable(text), ""] for text in line] for line in item.top]
    for row, line in zip(laid.rows, laid.cells, strict=True):
        rows.append([_cell(text, column.of(row)) for text, column in zip(line, columns, strict=True)])
        rows += [[[printable(text)] for text in below] for below in (item.below(row) if item.below is not None else ())]
    rows += [[[printable(text)] for text in line] for line in item.foot]
    return {
        "head": [
            {"label": label, "left": not at or column.left, "bar": column.bar}
            for at, (label, column) in enumerate(zip(laid.head, columns, strict=True))
        ],
        "rows": rows,
        "note": printable(item.note),
        "after": [printable(words) for words in (*item.after, *([] if item.whole else _PAGE.more(item.rows)))],
    }


def _cell(text: str, value: Any) -> list[Any]:
    """What a cell shows, and the number that it is sorted by, if it has one that a page can hold."""
    known = isinstance(value, (int, float)) and -_LARGEST < value < _LARGEST
    return [text, value] if known else [printable(text)]


_LARGEST = 1e300


def as_html(sections: Iterable[Section], headline: Sequence[str]) -> str:
    """Plain tables for a notebook, with its own style: words are text, never markup."""
    words = [f"<p>{html.escape(printable(line))}</p>" for line in headline]
    for section in map(as_data, sections):
        words.append(f"<b>{html.escape(section['title'])}</b>")
        for item in section["items"]:
            if "text" in item:
                words.append(f"<p>{html.escape(item['text'])}</p>")
            elif "label" in item:
                words.append(f"<p>{html.escape(item['label'])}: {html.escape(item['value'])}</p>")
            else:
                words.append(_html_table(item))
    return f'<div class="lightning-flops">\n{chr(10).join(words)}\n</div>\n'


def _html_table(item: Mapping[str, Any]) -> str:
    def line(cells: Iterable[str], tag: str) -> str:
        sides = ["left" if column["left"] else "right" for column in item["head"]]
        return "".join(
            f'<{tag} style="text-align: {side}; white-space: pre">{html.escape(text)}</{tag}>'
            for text, side in zip(cells, sides, strict=True)
        )

    head = line((column["label"] for column in item["head"]), "th")
    body = "\n".join(f"<tr>{line((cell[0] for cell in row), 'td')}</tr>" for row in item["rows"])
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
