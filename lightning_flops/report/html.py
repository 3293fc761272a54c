"""HTML for notebooks: tables and paragraphs of plain text, as a tree of elements.

Words go into the tree as text and are escaped when it is written, so that no name is ever markup. There are no scripts,
no addresses and no colours of ours: a notebook's own style, light or dark, is what tables are shown in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from lightning_flops.text.printable import printable

_LEFT = "text-align: left"
_RIGHT = "text-align: right; white-space: nowrap"
_RIGHT_HEAD = "text-align: right"
_TABLE = "margin: 0 0 0.6em 0"
_PARAGRAPH = "margin: 0 0 0.4em 0; max-width: 75em"
_BAR = "background: currentColor; opacity: 0.45; height: 0.7em; width: {:.2f}em; min-width: 1px"
_LONGEST_BAR = 8.0


def block() -> Element:
    """What everything of one report stands in."""
    return Element("div", {"class": "lightning-flops"})


def paragraph(inside: Element, text: str, *, bold: bool = False) -> None:
    """Add *text* to *inside*."""
    words = SubElement(inside, "p", {"style": _PARAGRAPH})
    if bold:
        words = SubElement(words, "b")
    words.text = printable(text)


def table(
    inside: Element,
    head: Sequence[str],
    rows: Sequence[Sequence[str | float]],
    *,
    left: Collection[int] = (0,),
    indents: Sequence[int] | None = None,
) -> None:
    """Add a table to *inside*.

    Args:
        inside: what it stands in.
        head: names of the columns.
        rows: each as long as the head; a number is a share of one, and shown as a bar.
        left: columns that are aligned to the left; the others are to the right.
        indents: levels by which the first cell of each row is moved in.
    """
    whole = SubElement(inside, "table", {"style": _TABLE})
    names = SubElement(SubElement(whole, "thead"), "tr")
    for column, name in enumerate(head):
        cell = SubElement(names, "th", {"style": _LEFT if column in left else _RIGHT_HEAD})
        cell.text = printable(name)
    body = SubElement(whole, "tbody")
    for number, cells in enumerate(rows):
        row = SubElement(body, "tr")
        for column, value in enumerate(cells):
            style = _LEFT if column in left else _RIGHT
            if column == 0 and indents is not None:
                style += f"; padding-left: {0.5 + 1.2 * indents[number]:.1f}em"
            cell = SubElement(row, "td", {"style": style})
            if isinstance(value, str):
                cell.text = printable(value)
            elif value > 0:
                SubElement(cell, "div", {"style": _BAR.format(_LONGEST_BAR * min(1.0, value))})


def written(whole: Element) -> str:
    """*whole* as HTML, ending in a line break."""
    ElementTree.indent(whole)
    return ElementTree.tostring(whole, encoding="unicode", method="html") + "\n"
