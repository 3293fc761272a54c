"""The tables of torch traces as text, below what they say at first sight."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_flops.analysis.peaks import why_no_mfu
from lightning_flops.analysis.rank_names import name_files
from lightning_flops.analysis.rates import ratio
from lightning_flops.report.document import draw, short, us
from lightning_flops.report.headline import try_first
from lightning_flops.report.layout import SortKey, View, and_more
from lightning_flops.report.profile_document import advice_section
from lightning_flops.report.ranks_document import rank_section
from lightning_flops.report.trace_document import trace_sections
from lightning_flops.schema.trace import TraceReport, TracesReport
from lightning_flops.schema.trace_steps import STEP_PARTS
from lightning_flops.text.printable import page
from lightning_flops.units import percent, plain, si

TOP_ROWS = 20
"""How many rows of a long table are shown unless more are asked for."""
_TRACES = 4
_PARTS = 4
_KERNELS = 3


def render_traces(
    report: TracesReport,
    *,
    top_rows: int | None = TOP_ROWS,
    sort: SortKey | None = None,
    width: int | None = None,
) -> str:
    """The answer, *top_rows* or all rows of every table of every trace, and the ranks side by side."""
    view = View(rows=top_rows, sort=sort, width=width)
    files = name_files([trace.source for trace in report.traces])
    lines = [*answer_lines(report, files, view), ""]
    lines += [line for trace, file in zip(report.traces, files, strict=True) for line in _trace(trace, view, file=file)]
    if report.ranks is not None:
        straggles = any(advice.rule == "straggler" for advice in report.advice)
        lines += draw(rank_section(report.ranks, straggles=straggles), view)
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


# ---- the answer


def answer_lines(report: TracesReport, files: Sequence[str], view: View) -> list[str]:
    """The section that a report of traces begins with; *files* are their names."""
    lines = [view.title("The answer")]
    alone = len(report.traces) == 1
    for trace, file in list(zip(report.traces, files, strict=True))[:_TRACES]:
        lines += view.paragraph(_time(trace), first="" if alone else f"{name_of(trace, file)}: ", rest="  ")
        lines += view.paragraph(_mfu(trace), first="" if alone else "  ", rest="  ")
        if alone and trace.kernels:
            lines += view.paragraph(_kernels(trace), rest="  ")
    lines += and_more(len(report.traces) - _TRACES)
    return [*lines, *try_first(report.advice, view)]


def name_of(trace: TraceReport, file: str) -> str:
    """What a trace from *file* is called: by its rank, if it says that."""
    return short(file) if trace.rank is None else f"rank {trace.rank}"


def _mfu(trace: TraceReport) -> str:
    flops = trace.flops
    if flops is None or flops.mfu is None:
        return f"MFU is n/a: {why_no_mfu([trace]) or 'its FLOPs are not known'}."
    peaks = " and ".join(f"{si(peak, 'FLOP/s')} in {dtype}" for dtype, peak in flops.peaks.items())
    least = "at least " if any(step.lower_bound for step in flops.steps) else ""
    shares = f"MFU is {least}{percent(flops.mfu)}, HFU {least}{percent(flops.hfu)}"
    return f"{shares} of the device's dense peak, {peaks}."


def _kernels(trace: TraceReport) -> str:
    """The kernels that took most time, which are those to begin with."""
    from lightning_flops.trace.names import own_name  # which loads numpy

    shares = {row.name: row.peak_share for row in (trace.flops.kernels if trace.flops else None) or ()}
    first = (trace.kernels or ())[:_KERNELS]
    names = [short(own_name(row.name)) for row in first]
    top_kernels = [
        f"{name} {percent(row.device.ratio)}"
        + ("" if (peak := shares.get(row.name)) is None else f" (at {percent(peak)} of the peak)")
        for name, row in zip(names, first, strict=True)
    ]
    return f"Most kernel time: {', '.join(top_kernels)}."


def _time(trace: TraceReport) -> str:
    """How long a step takes, and what filled most of it."""
    times = trace.step_times
    wall = us(times.mean.wall_us)
    if not times.marked:
        what = f"The whole trace takes {wall}"
    elif len(times.steps) == 1:
        what = f"The step takes {wall}"
    else:
        what = f"A step takes {wall}, the mean of {plain(len(times.steps))}"
    known = [(name, getattr(times.mean, field) or 0.0) for name, field in STEP_PARTS]
    longest = sorted((part for part in known if part[1]), key=lambda part: -part[1])[:_PARTS]
    parts = ", ".join(f"{name} {percent(ratio(part=time_us, whole=times.mean.wall_us))}" for name, time_us in longest)
    return f"{what}: {parts}." if parts else f"{what}."
