"""What the zoo's figures say: exact, explained, wrong or not run; and the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from .page import described, table

Verdict = Literal["exact", "explained", "wrong", "not run"]
Figures = tuple[int, int, int]  # Forward, backward and recompute FLOPs
_WORST: tuple[Verdict, ...] = ("wrong", "explained", "exact", "not run")

WAYS = ("eager", "sdpa", "checkpointing", "autocast", "offline")
"""How an architecture is counted; the first is there whenever the architecture runs at all."""

_ESTIMATES = {
    "a Fourier transform is": ("aten._fft_",),
    "sampling at a grid is": ("aten.grid_sampler_",),
    "distances of pairs are": ("aten._cdist_", "aten._euclidean_dist"),
    "a matrix decomposition is": ("aten.linalg_", "aten._linalg_"),
}
"""What is counted by an estimate, and the beginnings of its operators' names: the rest must agree to the last FLOP."""

EXPLAINED: Mapping[tuple[str, str], str] = {
    ("reformer", way): "its reversible layers repeat their forward inside the backward: the counter attributes "
    "that to recompute, the oracle, which knows of checkpoints alone, to backward; the sums agree"
    for way in ("eager", "autocast")
} | {
    (architecture, "autocast"): "on a processor whose oneDNN has no bfloat16 LSTM torch runs one step after the other, "
    "and computes no gradient of an initial state that needs none: 8·B·H² less for each layer and direction"
    for architecture in ("encodec", "sequencer")
}
"""By architecture and way, why the figures may differ though none is wrong."""

NOT_THERE: Mapping[str, str] = {
    r"does not support an attention implementation through torch": "has no attention through sdpa",
    r"not compatible with gradient checkpointing|gradient checkpointing not supported": "has no checkpointing",
    r"requires the (\S+) library": "needs the package {0}",
    r"DataDependentOutputException|DynamicOutputShapeException": "its forward asks for a value that its weights decide",
    r"No module named '(\S+)'": "needs the package {0}",
}
"""By what an error says, that it is no failure but something the architecture lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One way of counting one architecture: the counter's figures beside those expected, or why there are none."""

    way: str
    counted: Figures | None = None
    expected: Figures | None = None
    not_run: str = ""
    batch: str = ""  # What the model was called with
    by_operator: Mapping[str, Figures] = field(default_factory=dict)  # The counter's
    said_at_least: tuple[str, ...] = ()  # What made the counter call its figures lower bounds


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
            return "not run", why_not(result.not_run)
        counted, expected = tuple(result.counted), tuple(result.expected)
        if counted == expected:
            operators = ", ".join(result.said_at_least)
            words = f"the figures are exact, and called lower bounds because of {operators}"
            return ("wrong", words) if operators else ("exact", "")
        estimates = {
            name: f"the oracle expects products alone, and {what} counted by an estimate"
            for what, begins in _ESTIMATES.items()
            for name in result.by_operator
            if name.startswith(begins)
        }
        products = [flops for name, flops in result.by_operator.items() if name not in estimates]
        if estimates and way != "offline" and tuple(map(sum, zip((0, 0, 0), *products, strict=True))) == expected:
            return "explained", "; ".join(sorted(set(estimates.values())))
        if reason := EXPLAINED.get((self.architecture, way)):
            return "explained", reason
        parts = zip(("forward", "backward", "recompute"), counted, expected, strict=True)
        return "wrong", "; ".join(f"{part} {one:,}, expected {other:,}" for part, one, other in parts if one != other)

    @property
    def verdict(self) -> Verdict:
        """The worst of its ways; not run only where none was."""
        return min((self.verdict_of(way)[0] for way in WAYS), key=_WORST.index)

    def in_words(self) -> str:
        """One line for the log."""
        if self.verdict == "not run":
            return f"{self.library} {self.architecture}: not run: {self.verdict_of('eager')[1]}"
        return f"{self.library} {self.architecture}: " + ", ".join(f"{way} {self.verdict_of(way)[0]}" for way in WAYS)


def why_not(error: str) -> str:
    """An error in the reader's words where it is known, else as it is."""
    for pattern, words in NOT_THERE.items():
        if found := re.search(pattern, error, re.IGNORECASE):
            return words.format(*found.groups())
    return error


def report(rows: Sequence[Row], *, about: str | None, code: str, only: str = "") -> list[str]:
    """The lines of the page; *only* is the part of the zoo that was asked for, where that was not everything."""
    ran = [row for row in rows if row.verdict != "not run"]
    by_way = {way: Counter(row.verdict_of(way)[0] for row in ran) for way in WAYS}
    counts = sum(by_way.values(), Counter[Verdict]())
    compared = counts.total() - counts["not run"]
    libraries = Counter(row.library for row in ran)
    those = " and ".join(f"{count} of {library}" for library, count in libraries.items())
    verdicts: tuple[Verdict, ...] = ("exact", "explained", "wrong", "not run")
    return [
        *described(about, "torch", "transformers", "timm", code=code),
        f"""{len(ran)} architectures ran ({those}; {len(rows) - len(ran)} more did not, and say why below): {compared:,}
counts, **{counts["exact"]:,} exact, {counts["explained"]:,} explained, {counts["wrong"]:,} wrong**. Exact means that
forward, backward and recompute FLOPs are each the oracle's to the last FLOP, and that the counter does not call them
lower bounds.{f" A part of the zoo: `--only '{only}'`." if only else ""}
""",
        *table(["", *(f">{v}" for v in verdicts)], [[way, *(of[v] for v in verdicts)] for way, of in by_way.items()]),
        *_reasons("explained", ran),
        *_reasons("wrong", ran),
        *_every_row(ran),
        *_not_run([row for row in rows if row.verdict == "not run"]),
    ]


def _reasons(verdict: Verdict, ran: Sequence[Row]) -> list[str]:
    found: dict[str, dict[tuple[str, str], list[str]]] = {}
    for row, way in product(ran, WAYS):
        said, reason = row.verdict_of(way)
        if said == verdict:
            found.setdefault(reason, {}).setdefault((row.library, row.architecture), []).append(way)
    lines = list[str]()
    for reason, by_name in found.items():
        names = ", ".join(f"{name} ({', '.join(ways)})" for (_, name), ways in by_name.items())
        lines.append(f"- {reason[0].upper()}{reason[1:]}: {names}.")
    return ["", f"## {verdict.capitalize()}", "", *(lines or ["None."])]


def _every_row(ran: Sequence[Row]) -> list[str]:
    notes: dict[str, int] = {}
    rows: list[list[str]] = []
    for row in ran:
        eager = row.result("eager") or Result(way="eager")
        forward, backward, _ = eager.counted or (0, 0, 0)
        name = row.architecture if row.library == "transformers" else f"{row.library} {row.architecture}"
        rows.append([name, eager.batch, f"{forward:,}", f"{backward:,}"])
        for verdict, reason in map(row.verdict_of, WAYS):
            note = f"– {notes.setdefault(reason, len(notes) + 1)}" if verdict == "not run" else verdict
            rows[-1].append("**wrong**" if verdict == "wrong" else note)
    lines = table(["architecture", "called with", ">forward", ">backward", *WAYS], rows)
    words = "FLOPs are those of the step with eager attention."
    footnotes = [f"{number}. {reason}" for reason, number in notes.items()]
    return ["", "## Every architecture", "", words, "", *lines, "", *footnotes]


def _not_run(rows: Sequence[Row]) -> list[str]:
    words = "No small configuration or batch was found for these, or they need what is not installed: nothing is known."
    lines = [f"- {row.library} {row.architecture}: {row.verdict_of('eager')[1]}" for row in rows]
    return ["", "## Not run", "", words, "", *lines] if rows else []
