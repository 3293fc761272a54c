"""Reports as text: short unless details are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.analysis.offline_formula import FlopsFormula
from lightning_flops.report.compare_text import render_comparison
from lightning_flops.report.counts_text import render_counts
from lightning_flops.report.device_document import energy_section, memory_section, traced_section
from lightning_flops.report.document import Section, draw
from lightning_flops.report.formula_text import render_formula
from lightning_flops.report.headline import answer_lines
from lightning_flops.report.layout import TITLE_WIDTH, View
from lightning_flops.report.module_text import aggregated_lines, detailed_lines
from lightning_flops.report.profile_document import (
    MODULES_SHOWN,
    advice_section,
    flops_section,
    notes_section,
    operators_section,
    short_sections,
    throughput_section,
    times_section,
    uncounted_section,
)
from lightning_flops.report.ranks_document import ranks_section
from lightning_flops.report.summary_text import summary_lines
from lightning_flops.report.throughput_text import render_throughput
from lightning_flops.report.trace_document import MEMORY_TITLES, trace_sections
from lightning_flops.schema.advice import Advice
from lightning_flops.schema.comparison import Comparison
from lightning_flops.schema.formula import FormulaReport
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.throughput import ThroughputSummary
from lightning_flops.text.printable import page

VIEW = View(rows=8, width=TITLE_WIDTH)
"""What of a profile is drawn as text."""

MOST_LINES = 60
"""Lines of the short report."""

Renderable = Profile | ThroughputSummary | FlopCounts | FlopsFormula | FormulaReport | Comparison


def render_text(profile: Renderable, *, detailed: bool | None = None) -> str:
    """The report on *profile*, for people: at most 60 lines of 100 columns, ending in a line break.

    Args:
        profile: a profile; also a run's throughput (the table that ends a run), and what ``count_flops``,
            ``flops_formula`` and ``compare_profiles`` return (what ``print`` shows of it).
        detailed: append to the report on a profile DeepSpeed's summary, everything else that was measured, and the tree
            of modules; None: as the profile's settings say.

    Raises:
        TypeError: there is no report on such an object, as on the ``profile`` of a run that was too short to have one.
    """
    if isinstance(profile, Comparison):
        return render_comparison(profile)
    if isinstance(profile, FlopCounts):
        return render_counts(profile)
    if isinstance(profile, ThroughputSummary):
        return render_throughput(profile)
    if isinstance(profile, FlopsFormula | FormulaReport):
        return render_formula(profile.report() if isinstance(profile, FlopsFormula) else profile)
    if not isinstance(profile, Profile):
        raise TypeError(
            "render_text takes a Profile, a ThroughputSummary, or what count_flops, flops_formula or compare_profiles "
            f"return, got {type(profile).__name__}"
        )
    lines = _short_lines(profile)
    if profile.settings.detailed if detailed is None else detailed:
        lines += ["", *summary_lines(profile)]
        for section in (*detailed_sections(profile), *_traced(profile)):
            lines += draw(section, VIEW)
        lines += ["", *aggregated_lines(profile), "", *detailed_lines(profile)]
    return page([*lines, VIEW.rule()])


_SIZES = (
    *((MODULES_SHOWN, 4, 2), (MODULES_SHOWN, 3, 1), (8, 3, 1), (8, 2, 1)),
    *((6, 2, 1), (4, 2, 0), (2, 2, 0), (2, 1, 0)),
)
"""Modules, pieces of advice and notes of the short report, in the order in which they are tried.

The second advice stays longer than notes: on a busy machine the first one is about the machine, not the program.
"""


def _short_lines(profile: Profile) -> list[str]:
    """At most 59 lines: of many long names, fewer modules and less advice are shown."""
    lines: list[str] = []
    for modules, advice, notes in _SIZES:
        lines = answer_lines(profile, advice=False)
        for section in short_sections(profile, modules=modules, advice=advice, notes=notes):
            lines += draw(section, VIEW)
        if len(lines) < MOST_LINES:
            break
    return lines[: MOST_LINES - 1]


def render_forwards(profile: Profile, *, detailed: bool) -> str:
    """The forwards of one model under DeepSpeed's labels, beginning with an empty line and ending in a line break."""
    lines = ["", *summary_lines(profile, of_run=False)]
    if profile.timing is not None and profile.timing.timed_steps > 1:
        lines += draw(times_section(profile, spread=True), VIEW)
    lines += ["", *aggregated_lines(profile), *(["", *detailed_lines(profile)] if detailed else ())]
    lines += draw(uncounted_section(profile), VIEW) if profile.uncounted else ()
    lines += draw(notes_section(profile.notes), VIEW) if profile.notes else ()
    return page([*lines, VIEW.rule()])


def render_aggregated(profile: Profile) -> str:
    """The classes of modules that weigh most at each depth, alone."""
    return page(aggregated_lines(profile))


def render_advice(advice: Sequence[Advice]) -> str:
    """The *advice* with its rules, ending in a line break."""
    return page(list(draw(advice_section(advice, rules=True), VIEW))[2:])


_TRACED = ("Step time", "Devices", "Modules", "Communication", "Idle", *MEMORY_TITLES)
"""Tables of the traced step that the detailed report has; of the others, ``lightning-flops trace`` and the page."""


def _traced(profile: Profile) -> Iterator[Section]:
    tables = None if profile.traced is None else profile.traced.tables
    if tables is not None:
        yield from (one for one in trace_sections(tables) if one.title in _TRACED)


def detailed_sections(profile: Profile) -> Iterator[Section]:
    """What is not in the short report."""
    if profile.timing is not None:
        yield times_section(profile, spread=True)
    if profile.advice:
        yield advice_section(profile.advice, rules=True)
    if profile.notes:
        yield notes_section(profile.notes)
    sections = (
        flops_section(profile),
        throughput_section(profile),
        energy_section(profile),
        ranks_section(profile),
        memory_section(profile),
        operators_section(profile),
        uncounted_section(profile),
        traced_section(profile),
    )
    yield from (section for section in sections if section is not None)
