"""How reports show themselves: tables in a notebook, a line as ``repr``, text for ``print`` (``schema.shown``)."""

from __future__ import annotations

from lightning_flops.report.compare_text import comparison_headline
from lightning_flops.report.document import as_html
from lightning_flops.report.headline import answer, counted, headline
from lightning_flops.report.html_page import render_comparison_page, render_page
from lightning_flops.report.profile_document import short_sections
from lightning_flops.report.text import Renderable, other_sections, render_text
from lightning_flops.schema.comparison import Comparison
from lightning_flops.schema.profile import Profile, ProfiledRun
from lightning_flops.schema.throughput import ThroughputSummary
from lightning_flops.units import plain, plural


def line(report: Profile | ThroughputSummary | Comparison) -> str:
    """*report* in one line, for ``repr``."""
    if isinstance(report, Profile):
        return f"<Profile of {counted(report)}: {headline(report)}>"
    if isinstance(report, ThroughputSummary):
        return f"<ThroughputSummary of {plain(report.batches)} {plural('batch', report.batches)}>"
    return f"<Comparison: {comparison_headline(report)}>"


def text(report: Renderable) -> str:
    """*report* as text; of a profile, the short one."""
    return render_text(report, detailed=False)


def html(report: Renderable) -> str:
    """For a notebook: the tables of the report as plain ones, of a profile those of the short report."""
    if isinstance(report, Profile):
        return as_html(short_sections(report), answer(report))
    return as_html(other_sections(report))


def whole_page(report: Profile | Comparison) -> str:
    """*report* as an HTML file of its own."""
    if isinstance(report, Comparison):
        return render_comparison_page(report)
    return render_page([ProfiledRun(name="this run", windows=(report,))])
