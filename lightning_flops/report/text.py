"""Reports as text: short unless details are asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.analysis.formula import FlopsFormula
from lightning_flops.report.compare_text import comparison_headline, comparison_sections, render_comparison
from lightning_flops.report.counts_text import counts_section, formula_section, run_section
from lightning_flops.report.document import VIEW, WHOLE, Section, as_html, draw, draw_all
from lightning_flops.report.headline import counted, figures, summary, summary_lines
from lightning_flops.report.module_text import aggregated_lines, detailed_lines, summary_section
from lightning_flops.report.predicted_document import plan_section, predicted_section
from lightning_flops.report.profile_document import (
    advice_section,
    flops_section,
    memory_section,
    notes_sections,
    operators_section,
    short_sections,
    times_section,
    traced_section,
    uncounted_section,
)
from lightning_flops.report.ranks_document import ranks_section
from lightning_flops.report.trace_document import trace_sections
from lightning_flops.schema.comparison import Comparison
from lightning_flops.schema.plan import FormulaReport, MemoryReport, Plan
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import Advice
from lightning_flops.schema.throughput import ThroughputSummary
from lightning_flops.units import page, plain, plural

_MOST_LINES = 59  # of the short report, above the rule that ends it

Renderable = Profile | Plan | ThroughputSummary | FlopCounts | FlopsFormula | FormulaReport | Comparison | MemoryReport

_DOCUMENTS: Mapping[type, Callable[[Any], Iterable[Section]]] = {
    Profile: lambda profile: short_sections(profile, lines=5, advice=4, notes=2),
    Comparison: comparison_sections,
    FlopCounts: lambda counts: [counts_section(counts)],
    FlopsFormula: lambda formula: [formula_section(formula.report())],
    FormulaReport: lambda report: [formula_section(report)],
    MemoryReport: lambda report: [predicted_section(report)],
    Plan: lambda plan: [plan_section(plan)],
    ThroughputSummary: lambda summary: [run_section(summary)],
}
"""The sections of the short form of each report."""


def render_text(profile: Renderable, *, detailed: bool | None = None) -> str:
    """The report on *profile*, for people: at most 60 lines of 100 columns, ending in a line break.

    Args:
        profile: a profile; also a run's throughput (the table that ends a run), and what ``count_flops``,
            ``flops_formula`` and ``compare_profiles`` return (what ``print`` shows of it).
        detailed: a profile with all advice and its sources, DeepSpeed's summary, everything else that was measured, and
            the tree of modules; None: as the profile's settings say.

    Raises:
        TypeError: *profile* is nothing that there is a report on.
    """
    if isinstance(profile, Comparison):
        return render_comparison(profile)
    if not isinstance(profile, Profile):
        return draw_all(_sections(profile), WHOLE)
    if not (profile.settings.detailed if detailed is None else detailed):
        return page([*_short_lines(profile), VIEW.rule()])
    sections = [*short_sections(profile), summary_section(profile), *detailed_sections(profile)]
    lines = [*summary_lines(profile), *_drawn(sections), "", *aggregated_lines(profile), "", *detailed_lines(profile)]
    return page([*lines, VIEW.rule()])


def _drawn(sections: Iterable[Section]) -> list[str]:
    return [line for section in sections for line in draw(section)]


def render_logged(profile: Profile) -> str:
    """The report as a run's loggers show it: also the short one has DeepSpeed's summary."""
    if profile.settings.detailed:
        return render_text(profile)
    return page([*_short_lines(profile), *draw(summary_section(profile)), VIEW.rule()])


def render_html(report: Renderable) -> str:
    """The short report for a notebook, as plain tables."""
    return as_html(summary(report) if isinstance(report, Profile) else (), _sections(report))


def line(report: Profile | ThroughputSummary | Comparison) -> str:
    """*report* in one line, for ``repr``."""
    if isinstance(report, Profile):
        return f"<Profile of {counted(report)}: {figures(report)}>"
    if isinstance(report, ThroughputSummary):
        return f"<ThroughputSummary of {plain(report.batches)} {plural('batch', report.batches)}>"
    return f"<Comparison: {comparison_headline(report)}>"


def _sections(report: object) -> Iterable[Section]:
    for kind, sections_of in _DOCUMENTS.items():
        if isinstance(report, kind):
            return sections_of(report)
    raise TypeError(f"render_text takes a Profile and the like, got {type(report).__name__}")


def _short_lines(profile: Profile) -> list[str]:
    """The short report: of many long names, fewer modules, pieces of advice and notes are shown."""
    lines: list[str] = []
    for modules, of_user, advice, notes in ((10, 5, 4, 2), (6, 5, 3, 1), (4, 5, 2, 1), (3, 4, 1, 0), (2, 2, 1, 0)):
        sections = short_sections(profile, modules=modules, lines=of_user, advice=advice, notes=notes)
        lines = [*summary_lines(profile), *_drawn(sections)]
        if len(lines) <= _MOST_LINES:
            break
    return lines[:_MOST_LINES]


def render_forwards(profile: Profile, *, detailed: bool) -> str:
    """The forwards of one model under DeepSpeed's labels, beginning with an empty line and ending in a line break."""
    several = profile.timing is not None and profile.timing.timed_steps > 1
    above = [summary_section(profile, of_run=False), *([times_section(profile)] if several else [])]
    modules = ["", *aggregated_lines(profile), *(["", *detailed_lines(profile)] if detailed else ())]
    below = [*([uncounted_section(profile)] if profile.uncounted else ()), *notes_sections(profile.notes)]
    return page([*_drawn(above), *modules, *_drawn(below), VIEW.rule()])


def render_aggregated(profile: Profile) -> str:
    """The classes of modules that weigh most at each depth, alone."""
    return page(aggregated_lines(profile))


def render_advice(advice: Sequence[Advice]) -> str:
    """The *advice* with its rules, ending in a line break."""
    return page(list(draw(advice_section(advice)))[2:])


def fenced(text: str) -> str:
    """*text* as Markdown: in a code block whose fence is longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}{'' if text.endswith(chr(10)) else chr(10)}{fence}\n"


_TRACED = {"Step time", "Devices", "Modules", "Communication", "Idle", "Memory"}
"""Tables of the traced step that a text has; the others are in the page, and in ``lightning-flops trace``."""


def detailed_sections(profile: Profile, traced: Collection[str] = _TRACED) -> Iterator[Section]:
    """What is not in the short report, with the tables of the *traced* step that have these titles; all without any."""
    for section in (flops_section, memory_section, operators_section, uncounted_section, traced_section, ranks_section):
        yield from filter(None, [section(profile)])
    tables = None if profile.traced is None else profile.traced.tables
    for one in () if tables is None else trace_sections(tables):
        if not traced or one.title in traced:
            yield replace(one, title=f"Traced {profile.context.step_word}: {one.title[:1].lower()}{one.title[1:]}")
