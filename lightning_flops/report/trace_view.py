"""How reports with many tables are shown: how many rows, in which order, how wide."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lightning_flops.report import layout
from lightning_flops.schema.trace_steps import Durations

SortKey = Literal["name", "calls", "total", "self", "mean", "max", "min", "flops", "rate", "bytes"]

_Row = TypeVar("_Row")
_DURATIONS = {"total": "total_us", "mean": "mean_us", "max": "max_us", "min": "min_us"}
"""The keys that ``Durations`` has, and its fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a reader asked to see of each table, and the width that everything must fit."""

    rows: int | None
    """The most of each table; None for all."""
    sort: SortKey | None = None
    """None for each table's own order."""
    width: int | None = None
    """Of the terminal, in columns; None for no limit."""

    @property
    def text_width(self) -> int:
        """Columns of a paragraph."""
        return layout.WIDTH if self.width is None else min(layout.WIDTH, self.width)

    def sorted(
        self,
        rows: Sequence[_Row],
        /,
        *,
        durations: Callable[[_Row], Durations | None] | None = None,
        **keys: Callable[[_Row], Any],
    ) -> list[_Row]:
        """*rows* by what was asked for, the largest first, names by the alphabet; as they are if there is no such key.

        Args:
            rows: of a table.
            durations: what a row has under the keys ``total``, ``mean``, ``max`` and ``min``.
            keys: what a row has under each other key that the table knows; None sorts last.
        """
        if durations is not None and self.sort in _DURATIONS:
            field = _DURATIONS[self.sort]
            return sorted(rows, key=lambda row: -(getattr(durations(row), field, None) or 0.0))
        key = None if self.sort is None else keys.get(self.sort)
        if key is None:
            return list(rows)
        if self.sort == "name":
            return sorted(rows, key=lambda row: str(key(row)))
        return sorted(rows, key=lambda row: -(key(row) or 0.0))

    def first(
        self,
        rows: Sequence[_Row],
        /,
        *,
        durations: Callable[[_Row], Durations | None] | None = None,
        **keys: Callable[[_Row], Any],
    ) -> list[_Row]:
        """Those of *rows* that are shown, as ``sorted``."""
        return self.sorted(rows, durations=durations, **keys)[: self.rows]

    def more(self, rows: Sequence[object]) -> list[str]:
        """What stands below a table that does not show all of *rows*."""
        return layout.and_more(0 if self.rows is None else len(rows) - self.rows)

    def table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        least_width: int = 10,
        left: Collection[int] = (0,),
    ) -> list[str]:
        """As ``layout.table`` where that fits, else as ``layout.narrow_table``."""
        lines = layout.table(head, rows, least_width=least_width, left=left)
        if self.width is None or max(map(len, lines)) <= self.width:
            return lines
        return layout.narrow_table(head, rows, left=left, width=self.width)

    def title(self, text: str) -> str:
        """As ``layout.title``."""
        return (
            layout.title(text) if self.width is None else layout.title(text, width=min(layout.TITLE_WIDTH, self.width))
        )

    def rule(self) -> str:
        """As ``layout.rule``."""
        return layout.rule() if self.width is None else layout.rule()[: self.width]

    def line(self, label: str, value: str) -> list[str]:
        """As ``layout.line``, on several lines where one is too short."""
        return [layout.line(label, value)] if self.width is None else layout.narrow_line(label, value, width=self.width)

    def paragraph(self, text: str, *, first: str = "", rest: str = "") -> list[str]:
        """As ``layout.paragraph``."""
        return layout.wrapped(text, width=self.text_width, first=first, rest=rest)

    def section(self, title: str, explanation: str) -> list[str]:
        """What a part of a report begins with."""
        return ["", self.title(title), *self.paragraph(explanation)]


WHOLE = View(rows=None)
"""Everything, as wide as it is."""
