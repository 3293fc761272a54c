"""The traces of two runs compared, as text: what in a step takes longer, the most first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_flops.analysis.rank_names import name_files
from lightning_flops.report.compare_text import Scale, difference_sentence, figures_section
from lightning_flops.report.document import Column, Section, Table, draw_all, table
from lightning_flops.report.layout import View
from lightning_flops.schema.comparison import CONFIDENCE
from lightning_flops.schema.trace_comparison import (
    ComparedTraces,
    TableName,
    TimeDifference,
    TraceComparison,
)
from lightning_flops.units import NOT_AVAILABLE, plain, plural

ROWS_SHOWN = 12
"""Of each long table."""

_NAMED = 3
_NAME_CHARS = 56
_FILES_NAMED = 4

_TITLES: dict[TableName, str] = {
    "kernels": "By kernel, copy and memset",
    "operators": "By operator, on the host, without those it called",
    "collectives": "By collective",
}


def render_trace_comparison(comparison: TraceComparison, *, width: int | None = None) -> str:
    """The report on *comparison*, for people, in a terminal of *width* columns."""
    return draw_all(trace_comparison_sections(comparison), View(rows=ROWS_SHOWN, width=width))


def trace_comparison_headline(comparison: TraceComparison) -> str:
    """The difference, and what of it is beyond noise."""
    return " ".join(_said(comparison, _scale(comparison)))


def trace_comparison_sections(comparison: TraceComparison) -> list[Section]:
    """What in a step takes longer, the most first; all times in the unit that fits its step."""
    scale, mean = _scale(comparison), f"mean, {_scale(comparison).unit}"
    runs = [f"A: {_where(comparison.a)}", f"B: {_where(comparison.b)}", ""]
    found = [Section("Two traces compared", "", [*runs, *_said(comparison, scale)])]
    by_noise = Column("by noise", lambda row: _interval(row, scale), str, left=True)
    parts = table((*comparison.parts, comparison.step), [*_numbers(mean, scale), by_noise], whole=True)
    found.append(Section("By part of the step", "", [parts]))
    found += [Section(_TITLES[one.of], "", [_table(mean, one.rows, scale)]) for one in comparison.tables]
    found.append(figures_section(comparison.figures))
    return [*found, Section("How to read it", "", [f"- {note}" for note in _notes(comparison)])]


def _scale(comparison: TraceComparison) -> Scale:
    return Scale.of_steps(comparison.step.a_ns, comparison.step.b_ns)


def _said(comparison: TraceComparison, scale: Scale) -> Iterator[str]:
    """What the difference comes to, and the parts that changed most, if that is no noise."""
    step = comparison.step
    yield difference_sentence(
        "One step" if comparison.a.marked else "The whole trace", step.a_ns, step.b_ns, step.noise
    )
    found = [part for part in comparison.parts if part.noise is not None and part.noise.beyond]
    found.sort(key=lambda part: -abs(part.difference_ns))
    if words := [f"{part.name} {scale.signed(part.difference_ns)}" for part in found[:_NAMED]]:
        yield f"Beyond noise: {', '.join(words)}."


def _table(first: str, found: Sequence[TimeDifference], scale: Scale) -> Table | str:
    shown = [row for row in found if row.difference_ns or row.calls_a != row.calls_b]
    if not shown:
        return f"No difference in any of {plain(len(found))}."
    columns = [*_numbers(first, scale), Column("calls", _calls, str), Column("", _cause, str, left=True)]
    return table(shown, columns, least_width=7)


def _numbers(first: str, scale: Scale) -> list[Column]:
    return [
        Column(first, lambda row: row.name, str, chars=_NAME_CHARS),
        Column("A", lambda row: row.a_ns, scale.number),
        Column("B", lambda row: row.b_ns, scale.number),
        Column("B - A", lambda row: row.difference_ns, lambda ns: scale.number(ns, signed=True)),
    ]


def _cause(row: TimeDifference) -> str:
    """What a difference comes from, unless it is noise. What only one of the runs has is no chance."""
    if not row.calls_a or not row.calls_b:
        return "new" if row.calls_b else "gone"
    if row.noise is not None and not row.noise.beyond:
        return "noise"
    each = row.b_ns / row.calls_b - row.a_ns / row.calls_a
    calls = row.calls_b - row.calls_a
    words = [["fewer calls", "more calls"][calls > 0]] if calls else []
    return ", ".join(words + ([["shorter calls", "longer calls"][each > 0]] if each else []))


def _interval(row: TimeDifference, scale: Scale) -> str:
    if row.noise is None:
        return NOT_AVAILABLE
    low, high = (scale.number(ns, signed=True) for ns in (row.noise.low_ns, row.noise.high_ns))
    return f"{low} to {high}" if row.noise.beyond else "noise"


def _notes(comparison: TraceComparison) -> tuple[str, ...]:
    return (
        "Each moment of a step counts under the first part from the top that ran then, so the parts add up to the "
        "step. All other tables are sums of what was launched or began in the step; they may overlap. Longer calls may "
        "have other inputs.",
        f"Noise is the spread of the traced steps ({CONFIDENCE:.0%} by Welch's t). Of a "
        "hundred rows that do not differ, one seems to. What changes from one start of a program to the next is "
        "not in it: compare two traces of A to see that.",
        "Steps under torch.profiler are slower than others: record the same in both.",
        *comparison.notes,
    )


def _where(run: ComparedTraces) -> str:
    names = list(run.sources) if len(run.sources) == 1 else name_files(run.sources)
    more = f" and {len(names) - _FILES_NAMED} more" if len(names) > _FILES_NAMED else ""
    steps = f"{plain(run.steps)} {plural('step', run.steps)}" if run.marked else "no marks of steps"
    ranks = f"{plain(run.ranks)} ranks, " if run.ranks > 1 else ""
    return f"{', '.join(names[:_FILES_NAMED])}{more} ({run.device or 'no device'}, {ranks}{steps})"


def _calls(row: TimeDifference) -> str:
    """How often it runs in a step: one number, or that of A and that of B."""
    a, b = (plain(int(calls) if calls == int(calls) else calls) for calls in (row.calls_a or 0.0, row.calls_b or 0.0))
    return a if a == b else f"{a} -> {b}"
