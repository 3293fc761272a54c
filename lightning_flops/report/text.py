"""Reports as text: short unless details are asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.analysis.offline_formula import FlopsFormula
from lightning_flops.report.compare_text import comparison_headline, comparison_sections, render_comparison
from lightning_flops.report.counts_text import counts_section, formula_section, run_section
from lightning_flops.report.document import Section, as_html
from lightning_flops.report.headline import answer, answer_lines, counted, figures
from lightning_flops.report.layout import VIEW, WHOLE, draw, draw_all
from lightning_flops.report.module_text import aggregated_lines, detailed_lines
from lightning_flops.report.profile_document import (
    DETAILS,
    advice_section,
    notes_section,
    short_sections,
    times_section,
    uncounted_section,
)
from lightning_flops.report.ranks_document import ranks_section
from lightning_flops.report.summary_text import summary_section
from lightning_flops.report.trace_document import MEMORY_TITLES, trace_sections
from lightning_flops.schema.comparison import Comparison
from lightning_flops.schema.formula import FormulaReport
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import Advice
from lightning_flops.schema.throughput import ThroughputSummary
from lightning_flops.units import page, plain, plural

_MOST_LINES = 59
"""Lines of the short report above the rule that ends it."""

Renderable = Profile | ThroughputSummary | FlopCounts | FlopsFormula | FormulaReport | Comparison


def render_text(profile: Renderable, *, detailed: bool | None = None) -> str:
    """The report on *profile*, for people: at most 60 lines of 100 columns, ending in a line break.

    Args:
        profile: a profile; also a run's throughput (the table that ends a run), and what ``count_flops``,
            ``flops_formula`` and ``compare_profiles`` return (what ``print`` shows of it).
        detailed: append to the report on a profile DeepSpeed's summary, everything else that was measured, and the tree
            of modules; None: as the profile's settings say.

    Raises:
        TypeError: *profile* is nothing that there is a report on.
    """
    if isinstance(profile, Comparison):
        return render_comparison(profile)
    if not isinstance(profile, Profile):
        return draw_all(_other_sections(profile), WHOLE)
    lines = _short_lines(profile)
    if profile.settings.detailed if detailed is None else detailed:
        sections = [summary_section(profile)]
        sections += [advice_section(profile.advice, rules=True)] if profile.advice else []
        sections += [notes_section(profile.notes)] if profile.notes else []
        for section in (*sections, *detailed_sections(profile), *_traced(profile)):
            lines += draw(section)
        lines += ["", *aggregated_lines(profile), "", *detailed_lines(profile)]
    return page([*lines, VIEW.rule()])


def render_html(report: Renderable) -> str:
    """The short report as plain tables, for a notebook."""
    if isinstance(report, Profile):
        return as_html(short_sections(report), answer(report))
    return as_html(_other_sections(report))


def line(report: Profile | ThroughputSummary | Comparison) -> str:
    """*report* in one line, for ``repr``."""
    if isinstance(report, Profile):
        return f"<Profile of {counted(report)}: {figures(report)}>"
    if isinstance(report, ThroughputSummary):
        return f"<ThroughputSummary of {plain(report.batches)} {plural('batch', report.batches)}>"
    return f"<Comparison: {comparison_headline(report)}>"


def _other_sections(report: object) -> Sequence[Section]:
    """The document of a *report* that is no profile."""
    if isinstance(report, Comparison):
        return comparison_sections(report)
    if isinstance(report, FlopCounts):
        return [counts_section(report)]
    if isinstance(report, ThroughputSummary):
        return [run_section(report)]
    if isinstance(report, FlopsFormula | FormulaReport):
        return [formula_section(report if isinstance(report, FormulaReport) else report.report())]
    raise TypeError(f"render_text takes a Profile and the like, got {type(report).__name__}")


def _short_lines(profile: Profile) -> list[str]:
    """The short report: of many long names, fewer modules, pieces of advice and notes are shown."""
    lines: list[str] = []
    for modules, advice, notes in ((10, 4, 2), (10, 3, 1), (6, 2, 1), (2, 1, 0)):
        lines = answer_lines(profile)
        for section in short_sections(profile, modules=modules, advice=advice, notes=notes):
            lines += draw(section)
        if len(lines) <= _MOST_LINES:
            break
    return lines[:_MOST_LINES]


def render_forwards(profile: Profile, *, detailed: bool) -> str:
    """The forwards of one model under DeepSpeed's labels, beginning with an empty line and ending in a line break."""
    sections = [summary_section(profile, of_run=False)]
    if profile.timing is not None and profile.timing.timed_steps > 1:
        sections.append(times_section(profile))
    lines = [line for section in sections for line in draw(section)]
    lines += ["", *aggregated_lines(profile), *(["", *detailed_lines(profile)] if detailed else ())]
    lines += draw(uncounted_section(profile)) if profile.uncounted else ()
    lines += draw(notes_section(profile.notes)) if profile.notes else ()
    return page([*lines, VIEW.rule()])


def render_aggregated(profile: Profile) -> str:
    """The classes of modules that weigh most at each depth, alone."""
    return page(aggregated_lines(profile))


def render_advice(advice: Sequence[Advice]) -> str:
    """The *advice* with its rules, ending in a line break."""
    return page(list(draw(advice_section(advice, rules=True)))[2:])


def fenced(text: str) -> str:
    """*text* as Markdown: in a code block whose fence is longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}{'' if text.endswith(chr(10)) else chr(10)}{fence}\n"


_TRACED = {"Step time", "Devices", "Modules", "Communication", "Idle", *MEMORY_TITLES}
"""Tables of the traced step that the detailed report has; of the others, ``lightning-flops trace`` and the page."""


def _traced(profile: Profile) -> Iterator[Section]:
    tables = None if profile.traced is None else profile.traced.tables
    if tables is not None:
        yield from (one for one in trace_sections(tables) if one.title in _TRACED)


def detailed_sections(profile: Profile) -> Iterator[Section]:
    """What is not in the short report."""
    yield from filter(None, (section(profile) for section in (*DETAILS, ranks_section)))
