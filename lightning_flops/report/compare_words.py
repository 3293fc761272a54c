"""What all reports on two runs compared have in common: the unit, the first sentence, settings and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_flops.report.document import Section, Table, cells
from lightning_flops.schema.comparison import FigureDifference, NoiseInterval, SettingDifference
from lightning_flops.units import NOT_AVAILABLE, percent, plain

_UNITS = ((10_000_000_000, 1e9, "s"), (1_000_000, 1e6, "ms"), (0, 1e3, "us"))
"""From which length of a step on, nanoseconds in one unit, and its name."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The one unit in which all times of a report are."""

    per_unit: float
    """Nanoseconds."""
    unit: str

    @classmethod
    def of_steps(cls, *steps_ns: int) -> Scale:
        """The unit that fits the longest of these steps."""
        longest = max(steps_ns)
        return next(cls(per, name) for least, per, name in _UNITS if longest >= least)

    def number(self, ns: int, *, signed: bool = False) -> str:
        """Without its unit, as it stands in a table."""
        text = f"{ns / self.per_unit:+,.3f}" if signed else f"{ns / self.per_unit:,.3f}"
        return "0" if not ns else text

    def time(self, ns: int) -> str:
        """With its unit."""
        return f"{self.number(ns)} {self.unit}"

    def signed(self, ns: int) -> str:
        """With its sign and its unit."""
        return f"{self.number(ns, signed=True)} {self.unit}"


def difference_sentence(
    step: str, *, a_ns: int, b_ns: int, noise: NoiseInterval | None, confidence: float, scale: Scale
) -> str:
    """What the difference of two steps comes to; *step* begins the sentence: "One global step"."""
    difference = b_ns - a_ns
    share = f" ({'+' if difference > 0 else ''}{percent(difference / a_ns)})" if a_ns else ""
    words = f"{step} takes {scale.time(b_ns)} in B and {scale.time(a_ns)} in A: {scale.signed(difference)}{share}"
    if noise is None:
        return f"{words}; what of it is noise is not known."
    ends = f"{scale.signed(noise.low_ns)} to {scale.signed(noise.high_ns)}"
    verdict = "more than noise explains" if noise.beyond else "within noise"
    return f"{words}, {verdict} ({plain(100 * confidence)}%: {ends})."


def settings_table(settings: Sequence[SettingDifference]) -> Table:
    """What is set up differently."""
    rows = [(one.name.removeprefix("context."), one.a, one.b) for one in settings]
    return cells(["set up differently", "A", "B"], rows, left=(0, 1, 2), least_width=0)


def figures_section(figures: Sequence[FigureDifference]) -> Section:
    """The figures of both runs."""
    rows = []
    reasons: dict[str, list[str]] = {}
    for one in figures:
        ratio = NOT_AVAILABLE if one.ratio is None else f"{one.ratio:.4f}"
        if one.reason:
            reasons.setdefault(one.reason, []).append(one.name)
        if one.ratio_low is None or one.ratio_high is None:
            noise = NOT_AVAILABLE
        elif one.ratio_low == one.ratio_high:
            noise = "exact"
        else:
            noise = f"{one.ratio_low:.4f} to {one.ratio_high:.4f}"
        rows.append([one.name, _figure(one.a), _figure(one.b), ratio, noise])
    why = [f"{NOT_AVAILABLE}: {', '.join(names)}: {reason}." for reason, names in reasons.items()]
    return Section("Figures of both", "", [cells(["figure", "A", "B", "B / A", "by noise"], rows, left=(0, 4)), *why])


def _figure(value: float | None) -> str:
    if value is None:
        return NOT_AVAILABLE
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
