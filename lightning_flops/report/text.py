"""The whole report as text: the answer, DeepSpeed's summary, then what its profiler does not tell, then the modules."""

from __future__ import annotations

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.analysis.offline_formula import FlopsFormula
from lightning_flops.report.advice_text import advice_lines
from lightning_flops.report.budget_text import budget_lines
from lightning_flops.report.compare_text import render_comparison
from lightning_flops.report.counts_text import render_counts
from lightning_flops.report.energy_text import energy_lines
from lightning_flops.report.formula_text import render_formula
from lightning_flops.report.headline import answer_lines
from lightning_flops.report.intensity_text import intensity_lines
from lightning_flops.report.layout import rule
from lightning_flops.report.memory_text import memory_lines
from lightning_flops.report.module_text import aggregated_lines, detailed_lines
from lightning_flops.report.ranks_text import ranks_lines
from lightning_flops.report.step_text import (
    flops_lines,
    notes_lines,
    operator_lines,
    throughput_lines,
    time_lines,
    uncounted_lines,
)
from lightning_flops.report.summary_text import summary_lines
from lightning_flops.report.throughput_text import render_throughput
from lightning_flops.report.traced_text import traced_lines
from lightning_flops.schema.comparison import Comparison
from lightning_flops.schema.formula import FormulaReport
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.throughput import ThroughputSummary
from lightning_flops.text.printable import page


def render_text(profile: Profile | ThroughputSummary | FlopCounts | FlopsFormula | FormulaReport | Comparison) -> str:
    """The report on *profile*, for people: lines of at most 120 columns for ordinary models, ending in a line break.

    Also of a run's throughput (the table that ends a run), and of what ``count_flops``, ``flops_formula`` and
    ``compare_profiles`` return (what ``print`` shows of it).

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
    sections = [
        answer_lines(profile),
        summary_lines(profile),
        time_lines(profile),
        budget_lines(profile),
        advice_lines(profile.advice),
        notes_lines(profile),
        flops_lines(profile),
        throughput_lines(profile),
        energy_lines(profile.energy, step_name=profile.step_name, lower_bound=profile.lower_bound),
        ranks_lines(profile),
        memory_lines(
            profile.memory, profile.traced, trains=profile.context.trains, parameter_bytes=profile.parameter_bytes
        ),
        operator_lines(profile),
        intensity_lines(profile),
        traced_lines(profile),
        uncounted_lines(profile),
        aggregated_lines(profile),
        detailed_lines(profile) if profile.settings.detailed else [],
    ]
    lines = [line for section in sections if section for line in (*section, "")]
    return page([*lines[:-1], rule()])
