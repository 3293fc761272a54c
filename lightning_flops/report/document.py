"""A report as data: sections of figures, paragraphs and tables; drawn as text, as a page's data and as plain HTML."""

from __future__ import annotations

import html
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from lightning_flops.report.layout import VIEW, View, shortened_apart, shortened_inside
from lightning_flops.schema.trace_steps import Durations
from lightning_flops.text.printable import page, printable
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
    foot: Sequence[Sequence[str]] = ()
    """Cells of lines below all rows."""
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


Item = Figure | Table | str
"""Text is a paragraph."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report."""

    title: str
    note: str
    items: Sequence[Item]


def table(rows: Sequence[Any] | None, columns: Sequence[Column], /, **settings: Any) -> Table:
    """The table of *rows*; the settings that ``Table`` has no field for are keys to sort by."""
    fields = {name: settings.pop(name) for name in list(settings) if name in Table.__dataclass_fields__}
    return Table(rows=rows or (), columns=columns, keys=settings, **fields)


def cells(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,), least_width: int = 10
) -> Table:
    """The table of rows that are text already."""
    columns = [Column(label, itemgetter(at), str, left=at in left) for at, label in enumerate(head)]
    return table(rows, columns, whole=True, least_width=least_width)


def statistics(
    of: Callable[[Any], Durations | None],
    *,
    sorts: bool = True,
    labels: str = "total mean max min ratio",
    prefix: str = "",
) -> list[Column]:
    """Total, mean, longest, shortest and part of the whole of what *of* finds in a row; *prefix* of the first label."""

    def column(label: str) -> Column:
        name, show = ("ratio", percent) if label == "ratio" else (f"{label}_us", us)
        sort = label if sorts and label != "ratio" else ""
        return Column(label, lambda row: getattr(of(row), name, None), show, sort)

    first, *others = map(column, labels.split())
    return [replace(first, label=f"{prefix}{first.label}"), *others]


def at(path: str) -> Callable[[Any], Any]:
    """Finds what a row has at ``attribute.of_it``; None where it lacks either."""

    def of(row: Any) -> Any:
        for name in path.split("."):
            row = getattr(row, name, None)
        return row

    return of


def field(label: str, name: str, show: Callable[[Any], str] = plain, sort: str = "") -> Column:
    """The column of what a row has at *name*."""
    return Column(label, at(name), show, sort)


def named(label: str) -> Column:
    """The column of a row's name, cut."""
    return Column(label, at("name"), short, "name")


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
    return shortened_inside(name, chars=NAME_CHARS)


def place(of: str | None, *, chars: int = 36) -> str:
    """The end of a file's path and its line."""
    if of is None:
        return NOT_AVAILABLE
    return of if len(of) <= chars else f"…{of[len(of) - chars + 1 :]}"


def draw(section: Section, view: View = VIEW) -> Iterator[str]:
    """The lines of *section*, the first of them empty."""
    yield from ["", view.title(section.title), *view.paragraph(section.note)]
    for index, item in enumerate(section.items):
        if isinstance(item, Figure):
            yield from view.line(item.label, item.value)
        elif isinstance(item, str):
            yield from view.paragraph(item, rest=_hanging(item)) or [""]
        else:
            yield from [""] if index else []
            yield from _draw_table(item, view)


def draw_all(sections: Iterable[Section], view: View = VIEW) -> str:
    """*sections* as a report of their own, ending in a line break."""
    return page([*[line for section in sections for line in draw(section, view)][1:], view.rule()])


def _hanging(item: str) -> str:
    """What goes on below the number, or the dash, that a point of a list begins with."""
    mark, _, _ = item.partition(" ")
    return " " * (len(mark) + 1) if mark == "-" or mark.rstrip(".").isdecimal() else ""


def _draw_table(shown: Table, view: View) -> Iterator[str]:
    _, head, lines = _lay(shown, view)
    left = [0, *(index for index, column in enumerate(shown.columns) if column.left)]
    yield from view.paragraph(shown.note)
    yield from view.table(head, [*lines, *shown.foot], least_width=shown.least_width, left=left)
    for words in (*([] if shown.whole else view.more(shown.rows)), *shown.after):
        yield from view.paragraph(words)


def _lay(shown: Table, view: View) -> tuple[Sequence[Any], list[str], list[tuple[str, ...]]]:
    """The rows to show in their order, the labels of the columns, and the text of each cell."""
    columns = shown.columns
    keys = {column.sort: column.of for column in reversed(columns) if column.sort} | dict(shown.keys)
    rows = view.sorted(shown.rows, **keys)[: None if shown.whole else view.rows]
    values = [[column.of(row) for row in rows] for column in columns]
    largest: dict[str, float] = {}
    for column, found in zip(columns, values, strict=True):
        if column.unit:
            known = [abs(value) for value in found if value is not None]
            largest[column.unit] = max([largest.get(column.unit, 0.0), *known])
    head, texts = [], []
    for column, found in zip(columns, values, strict=True):
        label, texts_of = column.label, [column.show(value) for value in found] if not column.unit else []
        if column.unit:
            prefixed, size = _fitting(column.unit, largest[column.unit])
            label = f"{label}, {prefixed}" if label else prefixed
            texts_of = [_significant(value, size) for value in found]
        head.append(label)
        texts.append(shortened_apart(texts_of, chars=column.chars) if column.chars else texts_of)
    return rows, head, list(zip(*texts, strict=True))


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


_PAGE = View(rows=1000)
"""What a page has of long tables."""
_LARGEST = 1e300


def as_data(section: Section) -> dict[str, Any]:
    """*section* for the page: rows of each table as text, with the numbers that they are sorted by."""
    return {"title": section.title, "note": printable(section.note), "items": [_item(one) for one in section.items]}


def _item(item: Item) -> dict[str, Any]:
    if isinstance(item, str):
        return {"text": printable(item)}
    if isinstance(item, Figure):
        return {"label": printable(item.label), "value": printable(item.value)}
    columns, (rows, head, lines) = item.columns, _lay(item, _PAGE)
    return {
        "head": [
            {"label": label, "left": not at or column.left, "bar": column.bar}
            for at, (label, column) in enumerate(zip(head, columns, strict=True))
        ],
        "rows": [
            *(
                [_cell(text, column.of(row)) for text, column in zip(line, columns, strict=True)]
                for row, line in zip(rows, lines, strict=True)
            ),
            *([[printable(text)] for text in line] for line in item.foot),
        ],
        "note": printable(item.note),
        "after": [printable(words) for words in (*item.after, *([] if item.whole else _PAGE.more(item.rows)))],
    }


def _cell(text: str, value: Any) -> list[Any]:
    """What a cell shows, and the number that it is sorted by, if it has one that a page can hold."""
    known = isinstance(value, (int, float)) and -_LARGEST < value < _LARGEST
    return [text, value] if known else [printable(text)]


def as_html(sections: Iterable[Section], headline: Sequence[str]) -> str:
    """Plain tables for a notebook, with its own style: words are text, never markup."""
    words = [f"<p>{html.escape(printable(line))}</p>" for line in headline]
    for section in map(as_data, sections):
        words.append(f"<b>{html.escape(section['title'])}</b>")
        for item in section["items"]:
            if "head" in item:
                rows = [_html_row(item["head"], [cell[0] for cell in row], "td") for row in item["rows"]]
                head = _html_row(item["head"], [column["label"] for column in item["head"]], "th")
                words.append(f"<table><thead>{head}</thead>\n<tbody>{chr(10).join(rows)}</tbody></table>")
            else:
                words.append(f"<p>{html.escape(': '.join(item.values()))}</p>")
    return f'<div class="lightning-flops">\n{chr(10).join(words)}\n</div>\n'


def _html_row(head: Sequence[Mapping[str, Any]], cells: Sequence[str], tag: str) -> str:
    styles = [f"text-align: {'left' if column['left'] else 'right'}; white-space: pre" for column in head]
    texts = [f'<{tag} style="{style}">{html.escape(text)}</{tag}>' for text, style in zip(cells, styles, strict=True)]
    return f"<tr>{''.join(texts)}</tr>"
