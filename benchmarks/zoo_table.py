"""What the zoo's figures say: exact, explained, wrong or not run, and the table of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from .zoo import Result

Verdict = Literal["exact", "explained", "wrong", "not run"]

WAYS = ("eager", "sdpa", "checkpointing", "autocast", "offline")

NOT_PRODUCTS: dict[str, str] = {
    "aten._fft_": "the oracle expects products alone; a Fourier transform is an estimate of this project's",
    "aten.grid_sampler_2d": "the oracle expects products alone; interpolation at a grid's points is an estimate",
    "aten._cdist": "the oracle expects products alone; distances are an estimate",
    "aten.linalg_": "the oracle expects products alone; decompositions are estimates",
    "aten._linalg_": "the oracle expects products alone; decompositions are estimates",
}
"""Operators that are counted and that the oracle does not expect: the rest must agree exactly."""

EXPLAINED: dict[tuple[str, str], str] = {}
"""By architecture and way, why the figures may differ though none is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One architecture, counted in several ways."""

    library: str
    architecture: str
    results: tuple[Result, ...]

    def result(self, way: str) -> Result | None:
        """How it was counted that way."""
        return next((result for result in self.results if result.way == way), None)

    def verdict_of(self, way: str) -> tuple[Verdict, str]:
        """What is to be said of one way, and why if it is not exact."""
        result = self.result(way)
        if result is None:
            return "not run", ""
        if result.counted is None or result.expected is None:
            return "not run", result.not_run
        if tuple(result.counted) == tuple(result.expected):
            return "exact", ""
        for prefix, reason in NOT_PRODUCTS.items():
            others = [flops for name, flops in result.by_operator.items() if not name.startswith(prefix)]
            if len(others) < len(result.by_operator) and _summed(others) == tuple(result.expected):
                return "explained", reason
        reason = EXPLAINED.get((self.architecture, way)) or EXPLAINED.get((self.architecture, "")) or ""
        return ("explained", reason) if reason else ("wrong", _difference(result))

    @property
    def verdict(self) -> Verdict:
        """The worst of its ways; not run only where none was."""
        verdicts = {self.verdict_of(way)[0] for way in WAYS}
        order: tuple[Verdict, ...] = ("wrong", "explained", "exact")
        return next((verdict for verdict in order if verdict in verdicts), "not run")

    def in_words(self) -> str:
        """One line for the log."""
        ways = ", ".join(f"{way} {self.verdict_of(way)[0]}" for way in WAYS)
        if self.verdict == "not run":
            ways = f"not run: {self.verdict_of('eager')[1]}"
        return f"{self.library} {self.architecture}: {ways}"


def _summed(figures: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    return tuple(sum(each[place] for each in figures) for place in range(3))


def _difference(result: Result) -> str:
    assert result.counted is not None
    assert result.expected is not None
    parts = zip(("forward", "backward", "recompute"), result.counted, result.expected, strict=True)
    return "; ".join(f"{part} {counted:,}, expected {wanted:,}" for part, counted, wanted in parts if counted != wanted)


def report(rows: Sequence[Row]) -> str:
    """The table, as Markdown."""
    ran = [row for row in rows if row.verdict != "not run"]
    counts = Counter(row.verdict for row in rows)
    lines = [
        f"{len(ran)} architectures ran: {counts['exact']} exact, {counts['explained']} explained, {counts['wrong']} wrong; "
        f"{counts['not run']} did not run.",
        "",
        f"| architecture | {' | '.join(WAYS)} |",
        f"|---|{'---|' * len(WAYS)}",
    ]
    for row in ran:
        cells = [row.verdict_of(way)[0].replace("not run", "–") for way in WAYS]
        lines.append(f"| {row.architecture} | {' | '.join(cells)} |")
    lines += ["", "Not exact:", ""]
    for row in ran:
        for way in WAYS:
            verdict, reason = row.verdict_of(way)
            if verdict != "exact":
                lines.append(f"- {row.architecture}, {way}: {verdict}: {reason}")
    lines += ["", "Not run:", ""]
    lines += [f"- {row.architecture}: {row.verdict_of('eager')[1]}" for row in rows if row.verdict == "not run"]
    return "\n".join(lines) + "\n"
