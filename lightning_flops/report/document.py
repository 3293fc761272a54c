"""A report as data: sections of figures, paragraphs and tables; drawn as text, as a page's data and as plain HTML."""

from __future__ import annotations

import html
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import itemgetter
from typing import Any

from lightning_flops.report.layout import VIEW, View, shortened_apart, shortened_inside
from lightning_flops.schema.tables import Durations
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
        if label == "ratio":
            return Column(label, lambda row: getattr(of(row), label, None), percent)
        return Column(label, lambda row: getattr(of(row), f"{label}_us", None), us, label if sorts else "")

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
    head, _, texts = zip(*_lay(shown, view), strict=True)
    left = [0, *(index for index, column in enumerate(shown.columns) if column.left)]
    yield from view.paragraph(shown.note)
    yield from view.table(head, [*zip(*texts, strict=True), *shown.foot], least_width=shown.least_width, left=left)
    for words in (*([] if shown.whole else view.more(shown.rows)), *shown.after):
        yield from view.paragraph(words)


def _lay(shown: Table, view: View) -> Iterator[tuple[str, list[Any], list[str]]]:
    """The label of each column, what the rows have of it in the order in which they are shown, and the same as text."""
    keys = {column.sort: column.of for column in reversed(shown.columns) if column.sort} | dict(shown.keys)
    rows = view.sorted(shown.rows, **keys)[: None if shown.whole else view.rows]
    values = [[column.of(row) for row in rows] for column in shown.columns]
    largest: dict[str, float] = {}
    for column, found in zip(shown.columns, values, strict=True):
        known = [abs(value) for value in found if value is not None] if column.unit else []
        largest[column.unit] = max([largest.get(column.unit, 0.0), *known])
    for column, found in zip(shown.columns, values, strict=True):
        label = column.label
        if column.unit:
            unit, size = _fitting(column.unit, largest[column.unit])
            label = f"{label}, {unit}" if label else unit
            texts = [_significant(value, size) for value in found]
        else:
            texts = [column.show(value) for value in found]
        yield label, found, shortened_apart(texts, chars=column.chars) if column.chars else texts


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
    laid = list(_lay(item, _PAGE))
    cells = [map(_cell, texts, values) for _, values, texts in laid]
    return {
        "head": [
            {"label": label, "left": not place or column.left, "bar": column.bar}
            for place, (column, (label, _, _)) in enumerate(zip(item.columns, laid, strict=True))
        ],
        "rows": [*map(list, zip(*cells, strict=True)), *([[printable(text)] for text in line] for line in item.foot)],
        "note": printable(item.note),
        "after": [printable(words) for words in (*item.after, *([] if item.whole else _PAGE.more(item.rows))) if words],
    }


def _cell(text: str, value: Any) -> list[Any]:
    """What a cell shows, and the number that it is sorted by, if it has one that a page can hold."""
    known = isinstance(value, (int, float)) and -_LARGEST < value < _LARGEST
    return [text, value] if known else [printable(text)]


def as_html(sections: Iterable[Section], headline: Sequence[str] = ()) -> str:
    """Plain tables for a notebook, with its own style: words are text, never markup."""
    lines = [_element("p", printable(words)) for words in headline]
    for section in map(as_data, sections):
        lines += [_element("b", section["title"]), _element("p", section["note"])]
        for item in section["items"]:
            if "head" not in item:
                lines.append(_element("p", ": ".join(item.values())))
                continue
            sides = ["left" if column["left"] else "right" for column in item["head"]]
            head = _html_row("th", [column["label"] for column in item["head"]], sides)
            rows = [_html_row("td", [text for text, *_ in row], sides) for row in item["rows"]]
            table_lines = f"<table><thead>{head}</thead>\n<tbody>{chr(10).join(rows)}</tbody></table>"
            lines += [_element("p", item["note"]), table_lines, *(_element("p", words) for words in item["after"])]
    return f'<div class="lightning-flops">\n{chr(10).join(filter(None, lines))}\n</div>\n'


def _html_row(tag: str, texts: Sequence[str], sides: Sequence[str]) -> str:
    styles = (f' style="text-align: {side}; white-space: pre"' for side in sides)
    return f"<tr>{''.join(map(_element, repeat(tag), texts, styles))}</tr>"


def _element(tag: str, text: str, style: str = "") -> str:
    return f"<{tag}{style}>{html.escape(text)}</{tag}>" if text or tag != "p" else ""
