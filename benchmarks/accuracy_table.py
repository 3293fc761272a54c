"""Arithmetic and text of the accuracy report: reported counts against truths, tool by tool. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .isolation import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRow:
    """One network: its truths and what every tool made of it."""

    name: str
    family: str
    forward_truth: int | None
    """FLOPs of one call of the model; None where the step is not one call of the model."""
    step_truth: int
    """FLOPs of the whole step: forward, backward, recomputation and optimizer."""
    has_backward: bool
    """The step does more than a forward."""
    forward: Mapping[str, Outcome] = field(default_factory=dict)
    """By tool; a tool that was not asked is left out."""
    step: Mapping[str, Outcome] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSummary:
    """How one tool did on all networks that it was asked about."""

    tool: str
    asked: int
    exact: int
    too_low: int
    too_high: int
    raised: int
    """Raised, crashed or did not answer in time."""
    lowest: float | None
    """Smallest ratio of a reported count to its truth; None when nothing was reported."""
    highest: float | None


def ratio_text(outcome: Outcome | None, truth: int | None) -> str:
    """A cell: ``1`` is exact and nothing else is; three digits otherwise, or how the tool failed."""
    if outcome is None or truth is None:
        return "–"
    if outcome.kind != "counted" or outcome.flops is None:
        return outcome.kind
    if outcome.flops == truth:
        return "1"
    if truth == 0:
        return "∞"
    return inexact_text(outcome.flops / truth)


def inexact_text(ratio: float) -> str:
    """A ratio that is not exactly one, with as many digits as it takes to show that."""
    for digits in range(3, 17):
        text = f"{ratio:.{digits}g}"
        if float(text) != 1.0:
            return "0" if ratio == 0 else text
    return "≈1"


def summarize(tool: str, outcomes: Sequence[tuple[Outcome | None, int | None]]) -> ToolSummary:
    """One tool's outcomes beside their truths; pairs without an outcome or a truth are not counted as asked."""
    asked = [(outcome, truth) for outcome, truth in outcomes if outcome is not None and truth is not None]
    counted = [(outcome.flops, truth) for outcome, truth in asked if outcome.kind == "counted"]
    ratios = [flops / truth for flops, truth in counted if flops is not None and truth > 0]
    return ToolSummary(
        tool=tool,
        asked=len(asked),
        exact=sum(flops == truth for flops, truth in counted),
        too_low=sum(flops is not None and flops < truth for flops, truth in counted),
        too_high=sum(flops is not None and flops > truth for flops, truth in counted),
        raised=len(asked) - len(counted),
        lowest=min(ratios, default=None),
        highest=max(ratios, default=None),
    )


def summary_table(summaries: Sequence[ToolSummary]) -> list[str]:
    """Markdown: one line per tool."""
    lines = [
        "| tool | exact on | too low on | too high on | raised on | ratios from … to |",
        "|---|---|---|---|---|---|",
    ]
    for summary in summaries:
        lines.append(
            f"| {summary.tool} | {summary.exact} of {summary.asked} | {summary.too_low} | {summary.too_high} "
            f"| {summary.raised} "
            f"| {_bound(summary.lowest)} … {_bound(summary.highest)} |"
        )
    return lines


def ratio_table(rows: Sequence[NetworkRow], tools: Sequence[str], *, step: bool) -> list[str]:
    """Markdown: one line per network, its truth, and each tool's ratio to it."""
    lines = ["| network | truth | " + " | ".join(tools) + " |", "|---|---:|" + "---:|" * len(tools)]
    for row in rows:
        truth = row.step_truth if step else row.forward_truth
        outcomes = row.step if step else row.forward
        cells = [ratio_text(outcomes.get(tool), truth) for tool in tools]
        lines.append(f"| {row.family}.{row.name} | {truth:,} | " + " | ".join(cells) + " |")
    return lines


def failures_table(rows: Sequence[NetworkRow], tools: Sequence[str]) -> list[str]:
    """Markdown: each tool's distinct reasons for not answering, and how many networks had each."""
    lines = ["| tool | networks | said |", "|---|---:|---|"]
    for tool in tools:
        reasons: dict[str, int] = {}
        for row in rows:
            outcome = row.forward.get(tool)
            if outcome is not None and outcome.kind != "counted":
                # The first words of a message tell its kind; the rest often names the one network's tensors.
                reason = f"{outcome.kind}: {outcome.message}".replace("|", "\\|")[:110]
                reasons[reason] = reasons.get(reason, 0) + 1
        lines += [f"| {tool} | {count} | {reason} |" for reason, count in reasons.items()]
    return lines


def _bound(ratio: float | None) -> str:
    if ratio is None:
        return "–"
    return "1" if ratio == 1 else inexact_text(ratio)
