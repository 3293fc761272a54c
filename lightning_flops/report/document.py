"""A report as data: sections of figures, paragraphs and tables; and as lines of text, for a page and for a notebook."""

from __future__ import annotations

import re
import textwrap
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from itertools import accumulate, chain, repeat
from typing import Any, Literal

from lightning_flops.units import NOT_AVAILABLE, duration, page, percent, plain, printable

# Columns by which tables can be sorted.
SortKey = Literal["total", "self", "mean", "max", "min", "calls", "name", "flops", "rate", "bytes"]


@dataclass(frozen=True, slots=True)
class Column:
    """One property of a table's rows."""

    label: str
    of: Callable[[Any], Any]  #: What a row has.
    show: Callable[[Any], str] = plain  #: The same as text; what is not known is n/a in every column.
    sort: str = ""  #: The key under which rows are sorted by it; empty for none.
    left: bool = False  #: Text, which stands on the left and may be cut; the first column always is.
    #: Unit of numbers with three significant digits; the first column of a *group* gives all of them its prefix.
    unit: str = ""
    group: str = ""
    is_name: bool = False  #: Text that a page cuts, too, as far as rows stay distinct.
    bar: bool = False  #: Shares of one, which a page draws as bars.
    link: Callable[[Any], str] | None = None  #: Where a page's cell of it leads; empty: nowhere.


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one kind under the heads of columns."""

    rows: Sequence[Any]
    columns: Sequence[Column]
    whole: bool = False  #: Show all rows, however many were asked for.

    def lay(self, *, most: int | None, sort: str | None = None) -> Iterator[tuple[str, list[Any], list[str]]]:
        """The label of each column, and what *most* rows have of it, as it is and as text; the largest *sort* first."""
        rows = self._sorted(sort)[: None if self.whole else most]
        values = [[column.of(row) for row in rows] for column in self.columns]
        prefixes: dict[tuple[str, str], tuple[str, float]] = {}
        for column, found in zip(self.columns, values, strict=True):
            if largest := max((abs(value) for value in found if isinstance(value, (int, float))), default=0):
                prefixes.setdefault((column.unit, column.group), _fitting(column.unit, largest))
        for column, found in zip(self.columns, values, strict=True):
            unit, size = prefixes.get((column.unit, column.group), (column.unit, 1.0))
            show = partial(_significant, size=size) if column.unit else column.show
            label = ", ".join(filter(None, (column.label, unit.strip() if column.unit else "")))
            yield label, found, [NOT_AVAILABLE if value is None or value != value else show(value) for value in found]

    def _sorted(self, sort: str | None) -> Sequence[Any]:
        # Of several columns with this key the last: a device's times stand behind the host's.
        key = next((one.of for one in reversed(self.columns) if sort and one.sort == sort), None)
        if key is None:
            return self.rows
        return sorted(self.rows, key=key if sort == "name" else lambda row: -(key(row) or 0.0))

    def more(self, most: int | None) -> list[str]:
        """What stands below it if only *most* rows are shown."""
        cut = 0 if self.whole or most is None else len(self.rows) - most
        return [f"(and {cut:,} more)"] if cut > 0 else []


Item = Table | Mapping[str, str] | str  # a table, figures by their labels, or a paragraph


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report."""

    title: str
    note: str
    items: Sequence[Item]
    picture: str = ""  #: What a page draws before the items: ``steps``, ``modules``, ``roofline`` or ``curves``.


# ---- columns


def at(path: str) -> Callable[[Any], Any]:
    """Finds what a row has at ``attribute.of_it``, or at the ``0.attribute`` of a pair; None where it lacks either."""

    def of(row: Any) -> Any:
        for name in path.split("."):
            row = row[int(name)] if name.isdecimal() else getattr(row, name, None)
        return row

    return of


def all_of(paths: Mapping[str, str], show: Callable[[Any], str] = plain, *, unit: str = "") -> list[Column]:
    """The columns, by their labels, of what a row has at each path, all shown in one way or in one *unit*."""
    return [Column(label, at(path), show, unit=unit) for label, path in paths.items()]


def filled(rows: Sequence[Any], columns: Sequence[Column]) -> list[Column]:
    """The *columns* of which at least one of *rows* has a value, or any text."""
    return [column for column in columns if any(column.of(row) not in (None, "") for row in rows)]


def named(label: str) -> Column:
    """The column of a row's name."""
    return Column(label, at("name"), str, "name", is_name=True)


CALLS = Column("calls", at("calls"), sort="calls")  # the column that most tables have


def spread(path: str, labels: str = "total mean max min ratio", *, prefix: str = "", sort: str = "") -> list[Column]:
    """Durations at *path*, one column each, sorted under *sort* or its own label; *prefix* of the first label."""
    group = path.removesuffix("_self")
    columns = [
        Column(label, at(f"{path}.ratio"), percent)
        if label == "ratio"
        # A total is a thousand times the others.
        else Column(label, at(f"{path}.{label}_us"), unit="us", sort=sort or label, group=f"{group} {label == 'total'}")
        for label in labels.split()
    ]
    return [replace(columns[0], label=f"{prefix}{columns[0].label}"), *columns[1:]]


def share(label: str, of: Callable[[Any], Any]) -> Column:
    """The column of fractions of one."""
    return Column(label, of, percent, bar=True)


# ---- values as text


def us(time_us: float | None) -> str:
    """Microseconds in the unit that fits."""
    return duration(None if time_us is None else time_us / 1e6)


_ARGUMENTS = re.compile(r"(?<=\S)\((?:[^()]|\([^()]*\))*\)$")
_NAMESPACES = re.compile(r"^void |\(anonymous namespace\)::|\b(at|native|c10|std)::")


def short(name: str, chars: int = 56) -> str:
    """*name*, cut to *chars* characters: a C++ function's arguments and namespaces go first, then its middle."""
    name = printable(name)
    if len(name) > chars:
        name = _NAMESPACES.sub("", _ARGUMENTS.sub("", name))
    tail = (chars - 1) // 2
    return name if len(name) <= chars else f"{name[: chars - 1 - tail]}…{name[len(name) - tail :]}"


def distinct_width(cells: Collection[str], *, least: int) -> int:
    """To how many characters *cells* can be cut by ``short``, *least* or more, so that none looks like another."""
    width, longest, different = least, max(map(len, cells), default=0), len({*cells})
    while width < longest and len({short(cell, width) for cell in cells}) < different:
        width += max(1, width // 16)
    return min(width, max(least, longest))


def sentences(*parts: str) -> str:
    """Those of *parts* that say something, one behind the other."""
    return " ".join(filter(None, parts))


def some_of(names: Collection[str], *, most: int) -> str:
    """Names of modules; of many, the first *most* and the number of the others."""
    shown, more = [name or "the root" for name in names][:most], len(names) - most
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def points(items: Sequence[str], most: int | None = None, *, mark: str = "- ", others: str = "") -> list[str]:
    """*most* of *items*, each after the *mark* of a list, and how many *others* there are."""
    cut = len(items) - len(items[:most])
    more = f"And {plain(cut)} more {others}." if most else f"{plain(cut)} {others}."
    return [f"{mark}{one}" for one in (*items[:most], *([more] if cut else []))]


_PREFIXES = {
    "ns": (("s", 1e9), ("ms", 1e6), ("us", 1e3), ("ns", 1.0)),
    "s": (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)),
    "us": (("s", 1e6), ("ms", 1e3), ("us", 1.0), ("ns", 1e-3)),
}
_LARGE = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3), ("", 1.0))


def _fitting(unit: str, largest: float) -> tuple[str, float]:
    """*unit* with the prefix that keeps *largest* above one, and what it stands for."""
    sizes = _PREFIXES.get(unit) or [(f"{prefix}{unit}", size) for prefix, size in _LARGE]
    return next((one for one in sizes if largest >= one[1]), sizes[-1])


def _significant(value: float | str, size: float) -> str:
    """Three significant digits, three decimals at most; ints without a prefix in full, and text as it is."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and size == 1.0:
        return plain(value)
    scaled = value / size
    if 0 < abs(scaled) < 0.0005:
        return "<0.001" if scaled > 0 else ">-0.001"
    digits = 0 if abs(scaled) >= 99.95 else 1 if abs(scaled) >= 9.995 else 2 if abs(scaled) >= 0.9995 else 3
    return f"{scaled:,.{digits}f}" if value else "0"


# ---- the page and the notebook

_ROWS, _NAME_CHARS = 1000, 56  # what a page has of long tables and names
LARGEST = 1e300  # more is no figure of a run, and may be an int that no float can hold


def as_data(section: Section) -> dict[str, Any]:
    """*section* for the page: rows of each table as text, with the numbers that they are sorted by."""
    picture = [{"picture": section.picture}] if section.picture else []
    items = [*picture, *chain.from_iterable(map(_items, section.items))]
    return {"title": section.title, "note": printable(section.note), "items": items}


def _items(item: Item) -> Iterator[dict[str, Any]]:
    words = [item] if isinstance(item, str) else []
    if isinstance(item, Table):
        laid = list(item.lay(most=_ROWS))
        head = [
            {"label": label, "left": not place or column.left, "bar": column.bar}
            for place, (column, (label, _, _)) in enumerate(zip(item.columns, laid, strict=True))
        ]
        columns = [
            map(
                _cell,
                _cut(texts) if column.is_name else texts,
                values,
                map(column.link, item.rows) if column.link else repeat(None),
            )
            for column, (_, values, texts) in zip(item.columns, laid, strict=True)
        ]
        yield {"head": head, "rows": list(map(list, zip(*columns, strict=True)))}
        words = item.more(_ROWS)
    elif isinstance(item, Mapping):
        yield from ({"label": printable(label), "value": printable(value)} for label, value in item.items())
    yield from ({"text": printable(text)} for text in words if text)


def _cut(names: Sequence[str]) -> list[str]:
    """*names* as a page has room for them, different ones different."""
    width = distinct_width(names, least=_NAME_CHARS)
    return [short(name, width) for name in names]


def _cell(text: str, value: Any, link: str | None) -> list[Any]:
    """What a cell shows, with its *link*, or the number that it is sorted by, if it has one that a page can hold."""
    if link is not None:
        return [printable(text), None, link]
    known = isinstance(value, (int, float)) and -LARGEST < value < LARGEST
    return [text, value] if known else [printable(text)]


def as_html(summary: Sequence[str], sections: Iterable[Section]) -> str:
    """The *summary* and plain tables, for a notebook: words are text, never markup."""
    made = [f"<p>{escape(printable(words))}</p>" for words in summary]
    for section in map(as_data, sections):
        made.append(f"<b>{escape(section['title'])}</b><p>{escape(section['note'])}</p>")
        for item in section["items"]:
            if "head" in item:
                made += [
                    "<table>",
                    _html_row("th", [column["label"] for column in item["head"]], item["head"]),
                    *(_html_row("td", [text for text, *_ in row], item["head"]) for row in item["rows"]),
                    "</table>",
                ]
            elif "picture" not in item:
                made.append(f"<p>{escape(': '.join(item.values()))}</p>")
    return "\n".join(['<div class="lightning-flops">', *made, "</div>\n"])


def _html_row(tag: str, texts: Sequence[str], head: Sequence[Mapping[str, Any]]) -> str:
    styles = (f"text-align: {'left' if column['left'] else 'right'}; white-space: pre" for column in head)
    cells = (f'<{tag} style="{style}">{escape(text)}</{tag}>' for style, text in zip(styles, texts, strict=True))
    return f"<tr>{''.join(cells)}</tr>"


_WIDTH = 120  # of a paragraph, at most
_TITLE_WIDTH = 100  # of the rules that titles stand in
_LABEL_WIDTH = 70
_VALUE_CHARS = 30
_LEAST_NAME_CHARS, _ENOUGH_NAME_CHARS = 16, 26
_MARK = re.compile(r"(-|\d+\.) ")  # what a point of a list begins with; the lines that go on stand behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a reader asked to see of each table, and the width that texts are made for."""

    rows: int | None  #: The most of each table; None for all.
    sort: SortKey | None = None  #: None for each table's own order.
    #: Of the terminal, in columns; None for no limit. Names are cut to fit it, as far as rows stay distinct, but at
    #: least to a third of it.
    width: int | None = None
    searched: bool = False  #: Figures end their lines, for those who search for labels, but in a narrow terminal.

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
        """Columns under *head*, right-aligned but for those in *left*, the widest of which are cut if it fits then.

        Columns that do not fit all the same stand below, behind the first one again.
        """
        columns = [[printable(cell) for cell in column] for column in zip(head, *rows, strict=True)]
        widths = self._fitted(columns, left)
        ends = [end + 2 * place for place, end in enumerate(accumulate(widths))]
        fitting = max(2, bisect_right(ends, self.width or ends[-1]))
        lines = [
            "  ".join(
                f"{short(cell, width):<{width}}" if place in left else f"{cell:>{width}}"
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in zip(*columns, strict=True)
        ]
        return lines if fitting >= len(head) else self._parts([head, *rows], left, fitting)

    def _fitted(self, columns: Sequence[Sequence[str]], left: Collection[int]) -> list[int]:
        """How wide each column is, the widest of those in *left* cut as far as it takes, and as their cells differ."""
        widths = [max(map(len, column)) for column in columns]
        most = (self.width or sum(widths) + 2 * len(widths)) - 2 * (len(widths) - 1)
        cut, enough = left if sum(widths) > most else (), max(_ENOUGH_NAME_CHARS, (self.width or 0) // 3)
        least = {place: min(enough, distinct_width(columns[place], least=_LEAST_NAME_CHARS)) for place in cut}
        while sum(widths) > most and (wide := [place for place in least if widths[place] > least[place]]):
            widths[max(wide, key=widths.__getitem__)] -= 1
        return widths

    def _parts(self, rows: Sequence[Sequence[str]], left: Collection[int], fitting: int) -> list[str]:
        """The first *fitting* columns as a table, and below it the others behind the first one."""
        drawn = list[str]()
        for places in ([*range(fitting)], [0, *range(fitting, len(rows[0]))]):
            head, *others = [[row[place] for place in places] for row in rows]
            drawn += ["", *self.table(head, others, left=[places.index(place) for place in left if place in places])]
        return drawn[1:]

    def rule(self, title: str = "") -> str:
        """A rule with a *title* in the middle; the one that ends a report has none."""
        words = f" {printable(title)} " if title else ""
        return words.center(min(_TITLE_WIDTH, self.width or _TITLE_WIDTH), "-")

    def line(self, label: str, value: str) -> list[str]:
        """``label: value``, with the values of all lines in one column."""
        width = self.width or _TITLE_WIDTH
        column = max(1, min(_LABEL_WIDTH, width - _VALUE_CHARS))
        text = f"{printable(label) + ':':<{column}}  {printable(value)}".rstrip()
        keeps = self.width is None or (self.searched and width >= _TITLE_WIDTH and not value.startswith(NOT_AVAILABLE))
        return [text] if keeps or len(text) <= width else self.paragraph(text, rest=" " * (column + 2))

    def paragraph(self, text: str, *, first: str = "", rest: str = "", most: int | None = None) -> list[str]:
        """*text* in at most *most* lines, the first of which begins with *first*, all others with *rest*."""
        return textwrap.wrap(
            printable(text),  # escaped first: what wraps takes every kind of line break for a space
            max(min(_WIDTH, self.width or _WIDTH), len(rest) + _VALUE_CHARS - 2),
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
            max_lines=most,
            placeholder=" …",
        )


VIEW = View(rows=8, width=_TITLE_WIDTH, searched=True)  # what of a profile is drawn as text


def draw(section: Section, view: View = VIEW) -> Iterator[str]:
    """The lines of *section*, the first of them empty."""
    yield from ["", view.rule(section.title), *view.paragraph(section.note)]
    for index, item in enumerate(section.items):
        if isinstance(item, Mapping):
            yield from (line for one in item.items() for line in view.line(*one))
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
