"""Two runs compared, by profiles or by traces, as text: what differs, why, and in which part, module or kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_flops.records import OUTSIDE
from lightning_flops.report.document import Column, Item, Section, Table, all_of, field, points, short, some_of
from lightning_flops.report.layout import View, draw_all
from lightning_flops.report.profile_document import missing_rates
from lightning_flops.schema.comparison import (
    CONFIDENCE,
    CalledDifference,
    CausedDifference,
    Comparison,
    FigureDifference,
    ModuleDifference,
    TableName,
    TimeDifference,
)
from lightning_flops.units import duration, percent, plain, si

_NS = 1e9
_CAUSES_NAMED = 3
_WORDS = {"work": ("more work", "less work"), "efficiency": ("worse efficiency", "better efficiency")} | {
    "waiting": ("more waiting", "less waiting")
}
_TITLES: dict[TableName, str] = {
    "kernels": "By kernel, copy and memset",
    "operators": "By operator, on the host, without those it called",
    "collectives": "By collective",
}


def render_comparison(comparison: Comparison, *, width: int | None = None) -> str:
    """The report on *comparison*, for people, in a terminal of *width* columns; None for no limit."""
    return draw_all(comparison_sections(comparison), View(rows=12, width=width))


def comparison_headline(comparison: Comparison) -> str:
    """The difference of the steps, and what of it is noise, in one sentence."""
    step = comparison.step
    share = f" ({'+' if step.difference_ns > 0 else ''}{percent(step.difference_ns / step.a_ns)})" if step.a_ns else ""
    of_a, of_b = (duration(ns / _NS) for ns in (step.a_ns, step.b_ns))
    which = "The whole trace" if step.name == "whole trace" else f"One {step.name}"
    words = f"{which} takes {of_b} in B and {of_a} in A: {_signed(step.difference_ns)}{share}"
    if step.noise_ns is None:
        return f"{words}; what of it is noise is not known."
    ends = " to ".join(_signed(step.difference_ns + one) for one in (-step.noise_ns, step.noise_ns))
    verdict = "more than noise explains" if step.beyond_noise else "within noise"
    return f"{words}, {verdict} ({CONFIDENCE:.0%}: {ends})."


def comparison_sections(comparison: Comparison) -> list[Section]:
    """What differs, why, by part, and by module or kernel."""
    of_traces = comparison.kind == "traces"
    sides = {"A": comparison.a, "B": comparison.b}
    items: list[Item] = [comparison_headline(comparison), *_most_of_it(comparison)]
    items += [f"{letter} was starved: {run.starved}" for letter, run in sides.items() if run.starved]
    items += [f"{letter}: {run.source} ({run.about})" for letter, run in sides.items()]
    if comparison.settings:
        name = Column("set up differently", lambda row: row[0].removeprefix("context."), str)
        both = field("A", "1.0", str, left=True), field("B", "1.1", str, left=True)
        items.append(Table([*comparison.settings.items()], [name, *both], whole=True))
    elif not of_traces:
        items.append("Set up alike: device, ranks, batch, precision, versions, parameters and settings.")
    columns = [*_columns("mean", causes=not of_traces), *all_of({"noise": "noise_ns"}, unit="ns"), _VERDICT]
    parts = Table((*comparison.parts, comparison.step), columns, whole=True)
    tables = [Section(_TITLES[of], "", [_table(rows)]) for of, rows in comparison.tables.items()]
    return [
        Section("Two traces compared" if of_traces else "Two runs compared", "", items),
        Section("By part of the step", "", [parts]),
        *(tables if of_traces else [Section("By module", "", list(_modules(comparison)))]),
        _figures_section(comparison.figures),
        Section("How to read it", "", points([_OF_TRACES if of_traces else _OF_PROFILES, _NOISE, *comparison.notes])),
    ]


def _signed(ns: int) -> str:
    return f"{'+' if ns > 0 else ''}{duration(ns / _NS)}"


def _columns(first: str, *, causes: bool) -> list[Column]:
    """Columns of differences: their names under *first*, the times of both, and their *causes*."""
    fields = {"A": "a_ns", "B": "b_ns", "B - A": "difference_ns"}
    fields |= {kind: f"{kind}_ns" for kind in _WORDS} if causes else {}
    return [Column(first, lambda row: short(_name(row)), str), *all_of(fields, unit="ns")]


def _most_of_it(comparison: Comparison) -> Iterator[str]:
    """The causes of the difference, which add up to it, and the parts and modules that it comes from beyond noise."""
    causes = {kind: int(getattr(comparison.step, f"{kind}_ns")) for kind in _WORDS}
    if any(causes.values()):
        words = [f"{_WORDS[kind][ns < 0]} {_signed(ns)}" for kind, ns in causes.items() if ns]
        yield f"By cause: {', '.join(words)}."
    found: list[tuple[int, str]] = []
    modules = [one for one in comparison.modules if one.beyond_noise or one.other_counts]
    by_module = ("forward", "backward") if modules and _timed(comparison) else ()  # modules say more
    for one in (*modules, *(part for part in comparison.parts if part.beyond_noise and part.name not in by_module)):
        ns = one.difference_ns if one.beyond_noise else one.work_ns
        time, cause = _signed(ns) if ns else "", f"({why})" if (why := _cause(one)) else ""
        found.append((ns, " ".join(filter(None, (_name(one), time, cause)))))
    if named := sorted(found, key=lambda item: -abs(item[0]))[:_CAUSES_NAMED]:
        half = 2 * abs(sum(ns for ns, _ in named)) >= abs(comparison.step.difference_ns)
        of = "Beyond noise" if comparison.kind == "traces" else "Most of it" if half else "Part of it"
        yield f"{of}: {', '.join(words for _, words in named)}."


def _modules(comparison: Comparison) -> Iterator[Item]:
    if not _timed(comparison):
        yield "No times of modules in both runs; the notes say why."
        if names := [f"{_name(one)} ({_counts(one)})" for one in comparison.modules[:-1] if one.other_counts]:
            yield f"Other counts: {some_of(names, most=8)}."
        return
    yield (
        "Forward and backward of each module without those below it; the parts are means over the timed steps, their "
        "shares from the traced steps."
    )
    rows = sorted(comparison.modules, key=lambda one: -abs(one.difference_ns))
    yield Table([one for one in rows if one.a_ns or one.b_ns], [*_columns("own", causes=True), _VERDICT])


def _timed(comparison: Comparison) -> bool:
    """Whether modules have times."""
    return any(one.a_ns or one.b_ns for one in comparison.modules[:-1])


def _table(found: Sequence[CalledDifference]) -> Table | str:
    """A table of traces, without the rows that do not differ."""
    shown = [row for row in found if row.difference_ns or row.calls_a != row.calls_b]
    if not shown:
        return f"No difference in any of {plain(len(found))}."
    calls = Column("calls", lambda row: " -> ".join(dict.fromkeys(map(plain, (row.calls_a, row.calls_b)))), str)
    return Table(shown, [*_columns("mean", causes=False), calls, _VERDICT])


def _verdict(row: TimeDifference) -> str:
    """The cause of a difference beyond noise, if it is known, or what else is special about a row."""
    if isinstance(row, CalledDifference) and not (row.calls_a and row.calls_b):
        return "new" if row.calls_b else "gone"  # which is no chance
    if row.beyond_noise:
        return _cause(row) or "beyond noise"
    words = ["noise"] if row.difference_ns and row.beyond_noise is not None else []
    words += [_counts(row)] if isinstance(row, ModuleDifference) and row.other_counts else []
    return ", ".join(words)


_VERDICT = Column("verdict", _verdict, str, left=True)


def _cause(row: TimeDifference) -> str:
    """The cause that has most of a difference, of those that have its sign; of one within noise its other counts."""
    if isinstance(row, ModuleDifference) and not row.beyond_noise:
        return _counts(row)
    sign = 1 if row.difference_ns > 0 else -1
    kind = max(_WORDS, key=lambda kind: sign * int(getattr(row, f"{kind}_ns", 0)))
    return _WORDS[kind][sign < 0] if isinstance(row, CausedDifference) and row.causes else ""


def _counts(one: ModuleDifference) -> str:
    """How many FLOPs, or else bytes, a step of B has more, or less; they are exact, whatever the times are."""
    for unit, name in (("FLOPs", "flops"), ("B", "bytes")):
        if more := getattr(one.b, name, 0) - getattr(one.a, name, 0):
            return f"{'+' if more > 0 else ''}{si(more, unit)}"
    return "new" if one.a is None else "gone"


def _name(row: TimeDifference) -> str:
    if not isinstance(row, ModuleDifference):
        return row.name
    name = "no module, waiting included" if row.name == OUTSIDE else row.name or "the root"
    if row.a is None or row.b is None:
        return f"{name} ({'new' if row.a is None else 'gone'})"
    return name if row.a.name == row.b.name else f"{row.a.name} -> {name}"


def _figures_section(figures: Sequence[FigureDifference]) -> Section:
    def by_noise(one: FigureDifference) -> str | None:
        return None if one.ends is None else "exact" if one.noise_factor == 1 else "{:.4f} to {:.4f}".format(*one.ends)

    columns = [
        field("figure", "name", str),
        *all_of({"A": "a", "B": "b"}),
        field("B / A", "ratio", "{:.4f}".format),
        Column("by noise", by_noise, str, left=True),
    ]
    reasons = {one.name: one.reason for one in figures if one.reason}
    return Section("Figures of both", "", [Table(figures, columns, whole=True), *missing_rates(reasons)])


_OF_PROFILES = (
    "Work: more or fewer FLOPs and bytes, and modules that only one run has. Efficiency: the rest of the time that "
    "computes. Waiting: for data, for other ranks, of the device for the host, and what the loop does around the "
    "model. The causes of a line add up to its B - A, and the lines to the whole. The verdict on a difference beyond "
    "noise (of a module: four standard errors of its traced steps) is its main cause; FLOPs or bytes that a module has "
    "more or fewer of are exact, and stand there within noise as well."
)
_OF_TRACES = (
    "Each moment of a step counts under the first part from the top that ran then. All other tables are sums of what "
    "was launched or began in the step; they may overlap. Steps under torch.profiler are slower: record both alike."
)
_NOISE = (
    f"Noise is the spread of the steps ({CONFIDENCE:.0%} by Welch's t). What changes from one start of a program to "
    "the next, or with what else the machine does, is not in it: compare two runs of A to see that."
)
