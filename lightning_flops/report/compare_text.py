"""Two runs compared, as text: what differs, why, by part and by module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_flops.records import OUTSIDE
from lightning_flops.report.compare_words import Scale, difference_sentence, figures_section, settings_table
from lightning_flops.report.document import Figure, Section, Table, cells, draw
from lightning_flops.report.layout import View, shortened
from lightning_flops.schema.comparison import (
    Causes,
    ComparedRun,
    Comparison,
    Detail,
    ModuleDifference,
    PartDifference,
)
from lightning_flops.text.printable import page
from lightning_flops.units import NOT_AVAILABLE, plain, plural, si

_MODULES_SHOWN = 12
_NAMES_SHOWN = 8
_CAUSES_NAMED = 3
_NAME_CHARS = 48
_WORDS = {"work": ("more work", "less work"), "efficiency": ("worse efficiency", "better efficiency")} | {
    "waiting": ("more waiting", "less waiting")
}
_DETAILS: dict[str, tuple[tuple[Detail, str], ...]] = {
    "work": (("flops", "FLOPs"), ("bytes", "bytes"), ("modules", "new or gone modules")),
    "waiting": (("data", "data"), ("communication", "communication"), ("idle", "idle device"), ("loop", "the loop")),
}


def render_comparison(comparison: Comparison, *, width: int | None = None) -> str:
    """The report on *comparison*, for people, ending in a line break.

    Args:
        comparison: what to print.
        width: columns of the terminal, into which tables are made to fit; None for no limit.
    """
    view = View(rows=None, width=width)
    lines = [line for section in comparison_sections(comparison) for line in draw(section, view)]
    return page([*lines[1:], view.rule()])


def comparison_headline(comparison: Comparison) -> str:
    """The difference and its largest cause in one sentence."""
    return _Report(comparison).sentence()


def comparison_sections(comparison: Comparison) -> list[Section]:
    """What differs, why, by part and by module."""
    return _Report(comparison).sections()


class _Report:
    """Describes one comparison, all times in the unit that fits its step."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._scale = Scale.of_steps(comparison.step.causes.a_ns, comparison.step.causes.b_ns)

    def sections(self) -> list[Section]:
        """The whole report."""
        comparison = self._comparison
        sides = (("A", comparison.a), ("B", comparison.b))
        items: list[Figure | Table | str] = [f"{letter}: {_where(run)}" for letter, run in sides]
        if comparison.settings:
            items.append(settings_table(comparison.settings))
        else:
            items.append("Set up alike: device, ranks, batch, precision, versions, parameters and settings.")
        items += ["", self.sentence()]
        items += [f"{letter} was starved: {run.starved}" for letter, run in sides if run.starved]
        items += [self._causes(), *self._named()]
        return [
            Section("Two runs compared", "", items),
            self._parts(),
            Section("By module", "", list(self._modules())),
            figures_section(comparison.figures),
            Section("How to read it", "", [f"- {note}" for note in self._notes()]),
        ]

    def sentence(self) -> str:
        """What the difference comes to."""
        comparison, causes = self._comparison, self._comparison.step.causes
        return difference_sentence(
            f"One {comparison.step_name}",
            a_ns=causes.a_ns,
            b_ns=causes.b_ns,
            noise=comparison.step.difference,
            confidence=comparison.confidence,
            scale=self._scale,
        )

    def _causes(self) -> Table:
        step = self._comparison.step
        rows = []
        for kind in _WORDS:
            value = getattr(step.causes, f"{kind}_ns")
            rows.append((_WORDS[kind][value < 0], self._scale.signed(value), self._about(kind, step.causes)))
        return cells(["B - A by cause", "", ""], rows, left=(0, 2), least_width=0)

    def _about(self, kind: str, causes: Causes) -> str:
        parts = [
            f"{words} {self._scale.signed(value)}"
            for name, words in _DETAILS.get(kind, ())
            if (value := causes.details.get(name))
        ]
        if kind == "efficiency" and causes.efficiency_ns:
            parts.append(f"the same work, {'slower' if causes.efficiency_ns > 0 else 'faster'}")
        return "; ".join(parts)

    def _named(self) -> Iterator[str]:
        """The parts and modules that most of the difference comes from, if it is no noise."""
        found: list[tuple[int, str, str]] = []
        for module in self._comparison.modules:
            if module.beyond_noise:
                found.append((module.own.difference_ns, _name(module), f" ({_main_cause(module.own)})"))
            elif module.other_counts:
                found.append((module.own.work_ns, _name(module), f" ({_counts(module)})"))
        for part in self._comparison.parts:
            if part.difference is None or not part.difference.beyond:
                continue
            if not part.by_module:
                found.append((part.causes.difference_ns, part.name, f" ({_main_cause(part.causes)})"))
            elif part.causes.waiting_ns:
                found.append((part.causes.waiting_ns, f"waiting in {part.name}", ""))
        found.sort(key=lambda item: -abs(item[0]))
        if found:
            words = (
                f"{name}{f' {self._scale.signed(value)}' if value else ''}{why}"
                for value, name, why in found[:_CAUSES_NAMED]
            )
            yield f"Most of it: {', '.join(words)}."

    def _parts(self) -> Section:
        comparison = self._comparison
        rows = [self._part_row(part) for part in (*comparison.parts, comparison.step)]
        head = [f"mean, {self._scale.unit}", "A", "B", "B - A", "work", "efficiency", "waiting", "beyond noise"]
        return Section("By part of the step", "", [cells(head, rows, left=(0, 7))])

    def _part_row(self, part: PartDifference) -> list[str]:
        beyond = NOT_AVAILABLE
        if part.difference is not None:
            beyond = "yes" if part.difference.beyond else "-"
        return [part.name, *self._numbers(part.causes), beyond]

    def _numbers(self, *every: Causes, waiting: bool = True) -> list[str]:
        """A, B, their difference and its causes, added up; the last is left out without *waiting*."""
        fields = ("a_ns", "b_ns", "difference_ns", "work_ns", "efficiency_ns", "waiting_ns")
        sums = [sum(getattr(one, field) for one in every) for field in fields]
        shown = [self._scale.number(value, signed=place > 1) for place, value in enumerate(sums)]
        return shown if waiting else [*shown[:-1], ""]

    def _modules(self) -> Iterator[Table | str]:
        owned = [one for one in self._comparison.modules if not _is_outside(one)]
        if any(one.own.a_ns or one.own.b_ns for one in owned):
            yield from self._module_table(owned)
        else:
            yield "No times of modules in both runs; the notes say why."
        renamed = [one for one in owned if one.a and one.b and one.a.name != one.b.name]
        new, gone = [one for one in owned if one.a is None], [one for one in owned if one.b is None]
        if not any(one.own.a_ns or one.own.b_ns for one in owned):
            both = [one for one in owned if one.other_counts and one.a and one.b]
            yield from _names("Other counts", [f"{_name(one)} ({_counts(one)})" for one in both])
        yield from _names("Renamed", [f"{_of(one.a)} -> {_of(one.b)}" for one in _outermost(renamed)])
        yield from _names("New in B", [_described(one) for one in _outermost(new)])
        yield from _names("Gone from A", [_described(one) for one in _outermost(gone)])

    def _module_table(self, owned: Sequence[ModuleDifference]) -> Iterator[Table | str]:
        yield (
            "Forward and backward of each module without those below it; the parts are means over the timed steps, "
            "their shares from the traced step."
        )
        ranked = sorted(owned, key=lambda one: -abs(one.own.difference_ns))
        shown, rest = ranked[:_MODULES_SHOWN], ranked[_MODULES_SHOWN:]
        rows = [self._module_row(one) for one in shown if one.own.a_ns or one.own.b_ns]
        if rest:
            more = f"{plain(len(rest))} more {plural('module', len(rest))}"
            rows.append([more, *self._numbers(*(one.own for one in rest), waiting=False), ""])
        outside = [one.own for one in self._comparison.modules if _is_outside(one)]
        rows.append(["no module, waiting included", *self._numbers(*outside), ""])
        rows.append([self._comparison.step.name, *self._numbers(self._comparison.step.causes), ""])
        head = [f"own, {self._scale.unit}", "A", "B", "B - A", "work", "efficiency", "waiting", ""]
        yield cells(head, rows, left=(0, 7))

    def _module_row(self, one: ModuleDifference) -> list[str]:
        verdict = {None: "", False: "noise", True: _main_cause(one.own)}[one.beyond_noise]
        if one.other_counts and not one.beyond_noise:
            verdict = _counts(one)
        elif not one.own.difference_ns:
            verdict = ""
        return [shortened(_name(one), chars=_NAME_CHARS), *self._numbers(one.own, waiting=False), verdict]

    def _notes(self) -> tuple[str, ...]:
        comparison = self._comparison
        return (
            "Work: what goes with more or fewer FLOPs and bytes, and modules that only one run has. Efficiency: the "
            "rest of the time that computes. Waiting: for data, for other ranks, of the device for the host, and what "
            "the loop does around the model. The three causes of a line add up to its B - A, and the lines to the "
            "whole.",
            f"Noise is the spread of the timed steps ({plain(100 * comparison.confidence)}% by Welch's t). What "
            "changes from one start of a program to the next, or with what else the machine does, is not in it: "
            "compare two runs of A to see that.",
            *comparison.notes,
        )


def _where(run: ComparedRun) -> str:
    model = f"{run.model} on " if run.model else ""
    steps = f"{plain(run.timed_steps)} timed {plural('step', run.timed_steps)}"
    return f"{run.source} ({model}{run.device or 'unknown device'}, step {run.profile_step} counted, {steps})"


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


def _is_outside(one: ModuleDifference) -> bool:
    return one.b is not None and one.b.name == OUTSIDE


def _of(side: object) -> str:
    name = getattr(side, "name", "")
    return name or "the root"


def _name(one: ModuleDifference) -> str:
    if one.a is None:
        return f"{_of(one.b)} (new)"
    if one.b is None:
        return f"{_of(one.a)} (gone)"
    return _of(one.b) if one.a.name == one.b.name else f"{one.a.name} -> {one.b.name}"


def _described(one: ModuleDifference) -> str:
    side = one.b if one.a is None else one.a
    assert side is not None
    spent = f", {si(side.params)} params" if side.params else ""
    return f"{_of(side)} ({side.type_name or 'not described'}{spent})"


def _outermost(found: Sequence[ModuleDifference]) -> list[ModuleDifference]:
    """The outer ones of modules that lie inside one another."""
    names = {_place(one) for one in found}
    return [one for one in found if _place(one).rpartition(".")[0] not in names or not _place(one)]


def _place(one: ModuleDifference) -> str:
    side = one.a if one.b is None else one.b
    return "" if side is None else side.name


def _names(label: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = len(names) - _NAMES_SHOWN
        words = ", ".join(names[:_NAMES_SHOWN]) + (f" and {plain(more)} more" if more > 0 else "")
        yield f"{label}: {words}."
