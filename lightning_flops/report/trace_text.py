"""Torch traces as text: what they say at first sight, then their tables."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_flops.analysis.peaks import why_no_mfu
from lightning_flops.analysis.rank_names import name_files
from lightning_flops.analysis.rates import ratio
from lightning_flops.report.document import Section, SortKey, and_more, short, us
from lightning_flops.report.layout import View, draw
from lightning_flops.report.profile_document import NO_ADVICE, advice_section, saving
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
    names, lines = names_of(report), [view.title("The answer")]
    for words in answer(report):
        lines += view.paragraph(words, rest="  ", most=4)
    for trace, name in zip(report.traces, names, strict=True):
        marked, steps = trace.step_times.marked, len(trace.step_times.steps)
        of_steps = f"{steps} step{'s' if steps > 1 else ''}"
        taken = of_steps if marked else "no profiler steps: the whole trace is taken as one step"
        lines += ["", view.title(f"Trace of {name}")]
        for words in (f"{trace.source}: {plain(trace.events)} events, {taken}.", *trace.notes):
            lines += view.paragraph(words)
        for section in trace_sections(trace):
            lines += draw(section, view)
    for section in (*ranks_of(report), advice_section(report.advice, rules=True)):
        lines += draw(section, view)
    return page([*lines, view.rule()])


def names_of(report: TracesReport) -> list[str]:
    """What each trace is called: by its rank, if it says that, else by its file."""
    files = name_files([trace.source for trace in report.traces])
    return [
        short(file) if trace.rank is None else f"rank {trace.rank}"
        for trace, file in zip(report.traces, files, strict=True)
    ]


def ranks_of(report: TracesReport) -> Iterator[Section]:
    """The ranks side by side, if there are several."""
    if report.ranks is not None:
        yield rank_section(report.ranks, straggles=any(advice.rule == "straggler" for advice in report.advice))


# ---- the answer


def answer(report: TracesReport) -> list[str]:
    """What the traces say at first sight, and what to try first, in sentences."""
    if len(report.traces) == 1:
        (trace,) = report.traces
        said = [_time(trace), _mfu(trace), *([_kernels(trace)] if trace.kernels else [])]
    else:
        named = list(zip(report.traces, names_of(report), strict=True))[:_TRACES]
        said = [f"{name}: {_time(trace)} {_mfu(trace)}" for trace, name in named]
    said += and_more(len(report.traces) - _TRACES)
    for one, first in zip(report.advice, ("Try first", "Then", "Then"), strict=False):
        said.append(f"{first}: {one.fact} {one.remedy}{saving(one)}")
    return said if report.advice else [*said, NO_ADVICE]


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

    top_kernels = []
    for row in (trace.kernels or ())[:_KERNELS]:
        hfu = None if row.flops is None else row.flops.hfu
        of_peak = "" if hfu is None else f" (at {percent(hfu)} of the peak)"
        top_kernels.append(f"{short(own_name(row.name))} {percent(row.device.ratio)}{of_peak}")
    return f"Most kernel time: {', '.join(top_kernels)}."


def _time(trace: TraceReport) -> str:
    """How long a step takes, and what filled most of it."""
    times = trace.step_times
    wall, many = us(times.mean.wall_us), len(times.steps) > 1
    what = f"A step takes {wall}, the mean of {plain(len(times.steps))}" if many else f"The step takes {wall}"
    known = [(name, getattr(times.mean, field) or 0.0) for name, field in STEP_PARTS]
    longest = sorted((part for part in known if part[1]), key=lambda part: -part[1])[:_PARTS]
    parts = [f"{name} {percent(ratio(part=time_us, whole=times.mean.wall_us))}" for name, time_us in longest]
    what = what if times.marked else f"The whole trace takes {wall}"
    return f"{what}: {', '.join(parts)}." if parts else f"{what}."
