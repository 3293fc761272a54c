"""How the tables of traces are shown: how many rows, in which order, how wide."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from lightning_flops.report import layout

SortKey = Literal["name", "calls", "total", "self", "mean", "max", "min", "flops", "rate", "bytes"]
SORT_KEYS: tuple[str, ...] = get_args(SortKey)

_LEAST_NAME_CHARS = 16
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a reader asked to see of each table."""

    rows: int | None
    """The most of each table; None for all."""
    sort: SortKey | None = None
    """None for each table's own order."""
    width: int | None = None
    """Of the terminal, in columns; None for no limit."""

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

    def table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        least_width: int = 10,
        left: Collection[int] = (0,),
    ) -> list[str]:
        """As ``layout.table``, the first column cut where the table is wider than the terminal."""
        lines = layout.table(head, rows, least_width=least_width, left=left)
        excess = 0 if self.width is None else max(map(len, lines)) - self.width
        if excess <= 0:
            return lines
        widest = max(len(row[0]) for row in (head, *rows))
        chars = max(_LEAST_NAME_CHARS, widest - excess)
        names = layout.shortened_apart([row[0] for row in rows], chars=chars)
        cut = [[name, *row[1:]] for name, row in zip(names, rows, strict=True)]
        return layout.table(head, cut, least_width=least_width, left=left)
