"""What the parts have seen, as frozen records, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

Verdict = Literal["met", "missed", "failed", "told", "n/a"]
"""``told``: a figure that is held to nothing. ``failed``: it could not be looked at, because something raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One claim, and what was seen."""

    claim: str
    seen: str
    verdict: Verdict
    limit: str = ""
    """What it was held to."""
    note: str = ""
    """Why there is nothing to see, or the traceback of what raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of the program, run to its end or as far as it came."""

    number: int
    name: str
    rows: tuple[Row, ...]
    seconds: float
    broken: str = ""
    """Why it did not come to its end; empty if it did."""

    @property
    def holds(self) -> bool:
        """Whether it came to its end and nothing in it is missed or failed."""
        return not self.broken and not any(row.verdict in ("missed", "failed") for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole run of the program."""

    device: str
    """``cuda`` or ``cpu``."""
    small: bool
    machine: Mapping[str, str] = field(default_factory=dict)
    """What it ran on, by what it is."""
    parts: tuple[Part, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every part does."""
        return bool(self.parts) and all(part.holds for part in self.parts)

    def count(self, verdict: Verdict) -> int:
        """How many rows have this verdict."""
        return sum(row.verdict == verdict for part in self.parts for row in part.rows)

    def to_json(self) -> str:
        """Indented JSON; the field names are the keys."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Report:
        """The report that ``to_json`` wrote."""
        found = json.loads(text)
        parts = tuple(
            Part(**{**part, "rows": tuple(Row(**row) for row in part["rows"])}) for part in found.pop("parts")
        )
        return Report(**found, parts=parts)


def worst(rows: Iterable[Row]) -> Verdict:
    """The verdict to look at first."""
    order: tuple[Verdict, ...] = ("failed", "missed", "met", "told", "n/a")
    return min((row.verdict for row in rows), key=order.index, default="n/a")
