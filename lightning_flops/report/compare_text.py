"""Two runs compared, as text: what differs, why, by part and by module; and what two traces compared say alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_flops.report.document import Figure, Section, Table, cells, draw_all
from lightning_flops.report.layout import View, shortened, some_of
from lightning_flops.schema.comparison import (
    CONFIDENCE,
    Causes,
    Comparison,
    FigureDifference,
    ModuleDifference,
    ModuleSide,
    NoiseInterval,
    SettingDifference,
)
from lightning_flops.units import NOT_AVAILABLE, percent, plain, plural, si

_MODULES_SHOWN = 12
_NAMES_SHOWN = 8
_CAUSES_NAMED = 3
_NAME_CHARS = 48
_WORDS = {"work": ("more work", "less work"), "efficiency": ("worse efficiency", "better efficiency")} | {
    "waiting": ("more waiting", "less waiting")
}
_WORK = ("flops", "bytes", "modules")
_HEAD = ("A", "B", "B - A", "work", "efficiency", "waiting")
_BY_MODULE = ("forward", "backward")


def render_comparison(comparison: Comparison, *, width: int | None = None) -> str:
    """The report on *comparison*, for people, ending in a line break.

    Args:
        comparison: what to print.
        width: columns of the terminal, into which tables are made to fit; None for no limit.
    """
    return draw_all(comparison_sections(comparison), View(rows=None, width=width))


def comparison_headline(comparison: Comparison) -> str:
    """The difference, and what of it is noise, in one sentence."""
    step = comparison.step
    return difference_sentence(f"One {step.name}", step.causes.a_ns, step.causes.b_ns, step.difference)


def comparison_sections(comparison: Comparison) -> list[Section]:
    """What differs, why, by part and by module; all times in the unit that fits the step."""
    step = comparison.step
    scale = Scale.of_steps(step.causes.a_ns, step.causes.b_ns)
    sides = (("A", comparison.a), ("B", comparison.b))
    items: list[Figure | Table | str] = [f"{letter}: {run.source} ({run.about})" for letter, run in sides]
    if comparison.settings:
        items.append(settings_table(comparison.settings))
    else:
        items.append("Set up alike: device, ranks, batch, precision, versions, parameters and settings.")
    items += ["", comparison_headline(comparison)]
    items += [f"{letter} was starved: {run.starved}" for letter, run in sides if run.starved]
    items += [_causes(step.causes, scale), *_most_of_it(comparison, scale)]
    rows = []
    for part in (*comparison.parts, step):
        beyond = NOT_AVAILABLE if part.difference is None else "yes" if part.difference.beyond else "-"
        rows.append([part.name, *_numbers(scale, part.causes), beyond])
    head = [f"mean, {scale.unit}", *_HEAD, "beyond noise"]
    return [
        Section("Two runs compared", "", items),
        Section("By part of the step", "", [cells(head, rows, left=(0, 7))]),
        Section("By module", "", list(_modules(comparison, scale))),
        figures_section(comparison.figures),
        Section("How to read it", "", [f"- {note}" for note in _notes(comparison)]),
    ]


def _causes(causes: Causes, scale: Scale) -> Table:
    details: dict[str, list[str]] = {"work": [], "efficiency": [], "waiting": []}
    for name, ns in causes.details.items():
        label = "FLOPs" if name == "flops" else name
        details["work" if name in _WORK else "waiting"].append(f"{label} {scale.signed(ns)}")
    rows = []
    for kind, (more, less) in _WORDS.items():
        value = getattr(causes, f"{kind}_ns")
        rows.append((less if value < 0 else more, scale.signed(value), "; ".join(details[kind])))
    return cells(["B - A by cause", "", ""], rows, left=(0, 2), least_width=0)


def _most_of_it(comparison: Comparison, scale: Scale) -> Iterator[str]:
    """The parts and modules that most of the difference comes from, if it is no noise."""
    found: list[tuple[int, str, str]] = []
    for one in comparison.modules:
        if one.beyond_noise:
            found.append((one.own.difference_ns, _name(one), f" ({_main_cause(one.own)})"))
        elif one.other_counts:
            found.append((one.own.work_ns, _name(one), f" ({_counts(one)})"))
    for part in comparison.parts:
        if part.difference is None or not part.difference.beyond:
            continue
        if part.name not in _BY_MODULE or not _timed(comparison):
            found.append((part.causes.difference_ns, part.name, f" ({_main_cause(part.causes)})"))
    found.sort(key=lambda item: -abs(item[0]))
    words = [f"{name}{f' {scale.signed(ns)}' if ns else ''}{why}" for ns, name, why in found[:_CAUSES_NAMED]]
    if words:
        yield f"Most of it: {', '.join(words)}."


def _numbers(scale: Scale, *every: Causes) -> list[str]:
    """A, B, their difference and its causes, added up."""
    fields = ("a_ns", "b_ns", "difference_ns", "work_ns", "efficiency_ns", "waiting_ns")
    sums = [sum(getattr(one, field) for one in every) for field in fields]
    return [scale.number(value, signed=place > 1) for place, value in enumerate(sums)]


def _modules(comparison: Comparison, scale: Scale) -> Iterator[Table | str]:
    *owned, outside = comparison.modules
    if _timed(comparison):
        ranked = sorted(owned, key=lambda one: -abs(one.own.difference_ns))
        rows = [
            [shortened(_name(one), chars=_NAME_CHARS), *_numbers(scale, one.own), _verdict(one)]
            for one in ranked[:_MODULES_SHOWN]
            if one.own.a_ns or one.own.b_ns
        ]
        if rest := ranked[_MODULES_SHOWN:]:
            more = f"{plain(len(rest))} more {plural('module', len(rest))}"
            rows.append([more, *_numbers(scale, *(one.own for one in rest)), ""])
        rows.append(["no module, waiting included", *_numbers(scale, outside.own), ""])
        rows.append([comparison.step.name, *_numbers(scale, comparison.step.causes), ""])
        yield (
            "Forward and backward of each module without those below it; the parts are means over the timed steps, "
            "their shares from the traced steps."
        )
        yield cells([f"own, {scale.unit}", *_HEAD, ""], rows, left=(0, 7))
    else:
        yield "No times of modules in both runs; the notes say why."
        if names := [f"{_name(one)} ({_counts(one)})" for one in owned if one.other_counts]:
            yield f"Other counts: {some_of(names, most=_NAMES_SHOWN)}."
    if names := [_name(one) for one in owned if not one.a or not one.b or one.a.name != one.b.name]:
        yield f"Only one run has, or names otherwise: {some_of(names, most=_NAMES_SHOWN)}."


def _timed(comparison: Comparison) -> bool:
    """Whether modules have times."""
    return any(one.own.a_ns or one.own.b_ns for one in comparison.modules[:-1])


def _verdict(one: ModuleDifference) -> str:
    if one.other_counts and not one.beyond_noise:
        return _counts(one)
    if not one.own.difference_ns or one.beyond_noise is None:
        return ""
    return _main_cause(one.own) if one.beyond_noise else "noise"


def _notes(comparison: Comparison) -> tuple[str, ...]:
    return (
        "Work: what goes with more or fewer FLOPs and bytes, and modules that only one run has. Efficiency: the rest "
        "of the time that computes. Waiting: for data, for other ranks, of the device for the host, and what the loop "
        "does around the model. The three causes of a line add up to its B - A, and the lines to the whole.",
        f"Noise is the spread of the timed steps ({CONFIDENCE:.0%} by Welch's t), of a module "
        "four standard errors of its traced steps. What changes from one start of a program to the next, or with what "
        "else the machine does, is not in it: compare two runs of A to see that.",
        *comparison.notes,
    )


def _main_cause(causes: Causes) -> str:
    """The cause that has most of a difference, of those that have its sign."""
    sign = 1 if causes.difference_ns > 0 else -1
    kind = max(_WORDS, key=lambda kind: sign * int(getattr(causes, f"{kind}_ns")))
    return _WORDS[kind][sign < 0]


def _counts(one: ModuleDifference) -> str:
    """How many FLOPs, or else bytes, a step of B has more, or less; they are exact, whatever the times are."""
    for unit, name in (("FLOPs", "flops"), ("B", "bytes")):
        more = getattr(one.b, name, 0) - getattr(one.a, name, 0)
        if more:
            return f"{'+' if more > 0 else ''}{si(more, unit)}"
    return "new" if one.a is None else "gone"


def _of(side: ModuleSide | None) -> str:
    return (side and side.name) or "the root"


def _name(one: ModuleDifference) -> str:
    if one.a is None:
        return f"{_of(one.b)} (new)"
    if one.b is None:
        return f"{_of(one.a)} (gone)"
    return _of(one.b) if one.a.name == one.b.name else f"{one.a.name} -> {one.b.name}"


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

    def signed(self, ns: int) -> str:
        """With its sign and its unit."""
        return f"{self.number(ns, signed=True)} {self.unit}"


def difference_sentence(step: str, a_ns: int, b_ns: int, noise: NoiseInterval | None) -> str:
    """What the difference of two steps comes to; *step* begins the sentence: "One global step"."""
    difference, scale = b_ns - a_ns, Scale.of_steps(a_ns, b_ns)
    share = f" ({'+' if difference > 0 else ''}{percent(difference / a_ns)})" if a_ns else ""
    of_a, of_b = (f"{scale.number(ns)} {scale.unit}" for ns in (a_ns, b_ns))
    words = f"{step} takes {of_b} in B and {of_a} in A: {scale.signed(difference)}{share}"
    if noise is None:
        return f"{words}; what of it is noise is not known."
    ends = f"{scale.signed(noise.low_ns)} to {scale.signed(noise.high_ns)}"
    verdict = "more than noise explains" if noise.beyond else "within noise"
    return f"{words}, {verdict} ({CONFIDENCE:.0%}: {ends})."


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
