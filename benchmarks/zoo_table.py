"""What the zoo's figures say: exact, explained, wrong or not run; and the page that tells it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Literal

from .machine import machine_in_words, versions

Verdict = Literal["exact", "explained", "wrong", "not run"]
Figures = tuple[int, int, int]
"""Forward, backward and recompute FLOPs."""

WAYS = ("eager", "sdpa", "checkpointing", "autocast", "offline")
"""How an architecture is counted; the first is there whenever the architecture runs at all."""

NOT_PRODUCTS: Mapping[str, str] = {
    "aten._fft_": "the oracle expects products alone, and a Fourier transform is counted by an estimate",
    "aten.grid_sampler_": "the oracle expects products alone, and sampling at a grid is counted by an estimate",
    "aten._cdist_": "the oracle expects products alone, and distances of pairs are counted by an estimate",
    "aten._euclidean_dist": "the oracle expects products alone, and distances of pairs are counted by an estimate",
    "aten.linalg_": "the oracle expects products alone, and a matrix decomposition is counted by an estimate",
    "aten._linalg_": "the oracle expects products alone, and a matrix decomposition is counted by an estimate",
}
"""By the beginning of an operator's name, why the oracle does not expect it: the rest must agree to the last FLOP."""

EXPLAINED: Mapping[tuple[str, str], str] = {
    ("reformer", way): "its reversible layers repeat their forward inside the backward: the counter books that as "
    "recompute, the oracle, which is told of checkpoints alone, as backward; the sums agree"
    for way in ("eager", "autocast")
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
    batch: str = ""
    """What the model was called with."""
    by_operator: Mapping[str, Figures] = field(default_factory=dict)
    """The counter's, for people who look for a difference."""
    by_call: Mapping[str, int] = field(default_factory=dict)
    """The oracle's."""
    uncounted: tuple[str, ...] = ()
    """What the counter says it could not count."""
    said_at_least: tuple[str, ...] = ()
    """Of that, what made the counter call its figures lower bounds."""


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
        if tuple(result.counted) == tuple(result.expected):
            if result.said_at_least:
                operators = ", ".join(result.said_at_least)
                return "wrong", f"the figures are exact, and called lower bounds because of {operators}"
            return "exact", ""
        beside = {
            name: reason
            for name in result.by_operator
            for prefix, reason in NOT_PRODUCTS.items()
            if name.startswith(prefix)
        }
        products = [flops for name, flops in result.by_operator.items() if name not in beside]
        if beside and way != "offline" and summed(products) == tuple(result.expected):
            return "explained", "; ".join(sorted(set(beside.values())))
        reason = EXPLAINED.get((self.architecture, way), "")
        return ("explained", reason) if reason else ("wrong", difference(result))

    @property
    def verdict(self) -> Verdict:
        """The worst of its ways; not run only where none was."""
        verdicts = {self.verdict_of(way)[0] for way in WAYS}
        order: tuple[Verdict, ...] = ("wrong", "explained", "exact")
        return next((verdict for verdict in order if verdict in verdicts), "not run")

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


def summed(figures: Iterable[Figures]) -> tuple[int, ...]:
    """The figures added up, part by part."""
    return tuple(map(sum, zip((0, 0, 0), *figures, strict=True)))


def difference(result: Result) -> str:
    """Where the counter's figures are not those expected."""
    assert result.counted is not None
    assert result.expected is not None
    parts = zip(("forward", "backward", "recompute"), result.counted, result.expected, strict=True)
    return "; ".join(f"{part} {counted:,}, expected {wanted:,}" for part, counted, wanted in parts if counted != wanted)


def report(rows: Sequence[Row], *, code: str, asked: str = "") -> str:
    """The page, as Markdown; *asked* are the arguments of a run that was to count less than everything."""
    ran = [row for row in rows if row.verdict != "not run"]
    parts = (
        _head(rows, ran, code=code, asked=asked),
        _summary(ran),
        _reasons("Explained", "explained", ran),
        _reasons("Wrong", "wrong", ran),
        _every_row(ran),
        _not_run(rows),
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(rows: Sequence[Row], ran: Sequence[Row], *, code: str, asked: str) -> str:
    installed = ", ".join(f"{name} {version}" for name, version in versions(("torch", "transformers", "timm")).items())
    counts = Counter(verdict for row in ran for way in WAYS for verdict, _ in [row.verdict_of(way)])
    compared = sum(counts[verdict] for verdict in ("exact", "explained", "wrong"))
    libraries = Counter(row.library for row in ran)
    those = " and ".join(f"{count} of {library}" for library, count in libraries.items())
    command = f"python -m benchmarks.zoo {asked}` (a part of it" if asked else "make bench-zoo` (all of it"
    return f"""# The zoo: {len(ran)} architectures beside an oracle of their Python calls

Written by `{command}) on {date.today().isoformat()}: {installed}; {code}; {machine_in_words()}.

{len(ran)} architectures ran ({those}; {len(rows) - len(ran)} more did not, and say why below): {compared:,} counts,
**{counts["exact"]:,} exact, {counts["explained"]:,} explained, {counts["wrong"]:,} wrong**. Exact means that forward,
backward and recompute FLOPs are each the oracle's to the last FLOP, and that the counter does not call them lower
bounds.

Every architecture is a tiny model of random weights, in training without dropout, on a batch of two. It is counted
with eager attention, with torch's fused attention (sdpa), with activation checkpointing, and under autocast (bfloat16),
each beside an oracle that sees the Python calls (`torch.matmul`, `F.linear`, `F.conv2d`, …) instead of the operators,
and works out from their shapes what they, their gradients and their repetition cost; `benchmarks/zoo_oracle.py` is all
of it. The last column holds `count_offline`, which computes on shapes, to the count of the step that ran."""


def _summary(ran: Sequence[Row]) -> str:
    lines = ["| | exact | explained | wrong | not run |", "|---|---:|---:|---:|---:|"]
    for way in WAYS:
        counts = Counter(row.verdict_of(way)[0] for row in ran)
        cells = (counts[verdict] for verdict in ("exact", "explained", "wrong", "not run"))
        lines.append(f"| {way} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _reasons(title: str, verdict: Verdict, ran: Sequence[Row]) -> str:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for row in ran:
        ways: defaultdict[str, list[str]] = defaultdict(list)
        for way in WAYS:
            said, reason = row.verdict_of(way)
            if said == verdict:
                ways[reason].append(way)
        for reason, names in ways.items():
            found[reason].append(f"{row.architecture} ({', '.join(names)})")
    lines = [f"- {reason[0].upper()}{reason[1:]}: {', '.join(names)}." for reason, names in found.items()]
    return f"## {title}\n\n" + ("\n".join(lines) or "None.")


def _every_row(ran: Sequence[Row]) -> str:
    notes: dict[str, int] = {}
    lines = [
        f"| architecture | called with | forward | backward | {' | '.join(WAYS)} |",
        f"|---|---|---:|---:|{'---|' * len(WAYS)}",
    ]
    for row in ran:
        cells = []
        for way in WAYS:
            verdict, reason = row.verdict_of(way)
            if verdict == "not run":
                cells.append(f"– {notes.setdefault(reason, len(notes) + 1)}")
            else:
                cells.append("**wrong**" if verdict == "wrong" else verdict)
        eager = row.result("eager")
        forward, backward, _ = (eager.counted if eager else None) or (0, 0, 0)
        batch = eager.batch if eager else ""
        name = row.architecture if row.library == "transformers" else f"{row.library} {row.architecture}"
        lines.append(f"| {name} | {batch} | {forward:,} | {backward:,} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {reason}" for reason, number in notes.items())]
    return "## Every architecture\n\nFLOPs are those of the step with eager attention.\n\n" + "\n".join(lines)


def _not_run(rows: Sequence[Row]) -> str:
    lines = [
        f"- {row.library} {row.architecture}: {row.verdict_of('eager')[1]}" for row in rows if row.verdict == "not run"
    ]
    if not lines:
        return ""
    words = "No small configuration or batch was found for these, or they need what is not installed: nothing is known."
    return f"## Not run\n\n{words}\n\n" + "\n".join(lines)
