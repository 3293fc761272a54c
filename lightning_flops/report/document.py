"""A report as data, sections of figures, paragraphs and tables, and how it is drawn as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_flops.report import layout
from lightning_flops.report.trace_view import View
from lightning_flops.schema.trace_steps import Durations
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


def statistics(of: Callable[[Any], Durations | None], *, sorts: bool = True, labels: str = "") -> list[Column]:
    """Total, mean, longest, shortest and part of the whole of what *of* finds in a row."""

    def column(label: str, field: str, show: Callable[[Any], str]) -> Column:
        sort = label if sorts and label != "ratio" else ""
        return Column(label, lambda row: getattr(of(row), field, None), show, sort)

    fields = ("total", "mean", "max", "min", "ratio")
    return [
        column(label, label if label == "ratio" else f"{label}_us", percent if label == "ratio" else us)
        for label in (labels.split() or fields)
    ]


def field(label: str, name: str, show: Callable[[Any], str] = plain, sort: str = "") -> Column:
    """The column of a row's attribute."""
    return Column(label, lambda row: getattr(row, name), show, sort)


def named(label: str) -> Column:
    """The column of a row's name, cut."""
    return Column(label, lambda row: row.name, short, "name")


CALLS = field("calls", "calls", sort="calls")
"""The column that most tables have."""


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
            yield from view.paragraph(item) or [""]
        else:
            yield from [""] if index else []
            yield from draw_table(item, view)


def draw_table(shown: Table, view: View) -> Iterator[str]:
    """The lines of a table: its rows in the order and number that were asked for."""
    columns = shown.columns
    keys = {column.sort: column.of for column in reversed(columns) if column.sort} | dict(shown.keys)
    rows = view.sorted(shown.rows, **keys)[: None if shown.whole else view.rows]
    rows = rows if shown.only is None else list(filter(shown.only, rows))
    cells = [[column.show(column.of(row)) for column in columns] for row in rows]
    for place_of, column in enumerate(columns):
        if column.chars:
            names = layout.shortened_apart([line[place_of] for line in cells], chars=column.chars)
            for line, name in zip(cells, names, strict=True):
                line[place_of] = name
    lines = [*shown.top]
    for row, line in zip(rows, cells, strict=True):
        lines += [line, *(shown.below(row) if shown.below is not None else ())]
    left = [0, *(index for index, column in enumerate(columns) if column.left)]
    head = [column.label for column in columns]
    yield from view.paragraph(shown.note) if shown.note else ()
    yield from view.table(head, [*lines, *shown.foot], least_width=shown.least_width, left=left)
    if shown.more and not shown.whole:
        yield from view.more(shown.rows)
    for words in shown.after:
        yield from view.paragraph(words)
