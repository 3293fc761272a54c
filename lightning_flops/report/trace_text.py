"""The tables of torch traces as text."""

from __future__ import annotations

from lightning_flops.analysis.rank_names import name_files
from lightning_flops.report.document import draw
from lightning_flops.report.layout import SortKey, View
from lightning_flops.report.profile_document import advice_section
from lightning_flops.report.ranks_document import rank_section
from lightning_flops.report.trace_answer_text import answer_lines, name_of
from lightning_flops.report.trace_document import trace_sections
from lightning_flops.report.work_document import job_section
from lightning_flops.schema.trace import TraceReport, TracesReport
from lightning_flops.text.printable import page
from lightning_flops.units import plain

TOP_ROWS = 20
"""How many rows of a long table are shown unless more are asked for."""


def render_traces(
    report: TracesReport,
    *,
    top_rows: int | None = TOP_ROWS,
    sort: SortKey | None = None,
    width: int | None = None,
) -> str:
    """The answer, every table of every trace, and the ranks side by side; ends with a line break.

    Args:
        report: what ``analyze_files`` returned.
        top_rows: rows shown of each long table; None for all.
        sort: what long tables are sorted by, where they have it; None for each table's own order.
        width: columns of the terminal, which everything is made to fit; None for no limit.
    """
    view = View(rows=top_rows, sort=sort, width=width)
    files = name_files([trace.source for trace in report.traces])
    lines = [*answer_lines(report, files, view), ""]
    lines += [line for trace, file in zip(report.traces, files, strict=True) for line in _trace(trace, view, file=file)]
    if report.ranks is not None:
        straggles = any(advice.rule == "straggler" for advice in report.advice)
        lines += draw(rank_section(report.ranks, files, straggles=straggles), view)
        if report.job_steps is not None:
            lines += draw(job_section(report.job_steps), view)
        elif any(trace.flops is not None for trace in report.traces):
            reason = "it takes a trace of each rank, with FLOPs and marks of steps"
            lines += ["", *view.line("FLOPs of all ranks", f"n/a ({reason})")]
    lines += draw(advice_section(report.advice, rules=True), view)
    return page([*lines, view.rule()])


def _trace(report: TraceReport, view: View, *, file: str) -> list[str]:
    lines = [view.title(f"Trace of {name_of(report, file)}")]
    lines += view.paragraph(f"{report.source}: {plain(report.events)} events, {_steps(report)}.")
    lines += [line for note in report.notes for line in view.paragraph(note)]
    for section in trace_sections(report):
        lines += draw(section, view)
    return lines


def _steps(report: TraceReport) -> str:
    times = report.step_times
    if not times.marked:
        return "no profiler steps: the whole trace is taken as one step"
    return f"{len(times.steps)} step{'s' if len(times.steps) > 1 else ''}"
