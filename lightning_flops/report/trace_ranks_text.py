"""Communication of a trace, and traces of several ranks side by side, as text."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_flops.analysis.stragglers import are_compared, longest_own_time
from lightning_flops.report.trace_cells import STATISTICS, short, statistics, us
from lightning_flops.report.trace_view import View
from lightning_flops.schema.communication import RankComparison
from lightning_flops.schema.trace import TraceReport
from lightning_flops.units import NOT_AVAILABLE, percent, plain


def communication_lines(report: TraceReport, view: View) -> list[str]:
    """Communication beside computation, and each collective."""
    share = report.overlap
    if share is None:
        return []
    explanation = "Overlapping events are merged. Computation is every kernel that does not communicate."
    lines = view.section("Communication", explanation)
    for label, time_us in (
        ("computation without communication", share.computation_us - share.overlap_us),
        ("both at once", share.overlap_us),
        ("communication without computation", share.communication_us - share.overlap_us),
        ("neither", share.other_us),
    ):
        part = percent(time_us / share.wall_us) if share.wall_us else NOT_AVAILABLE
        lines += view.line(label, f"{us(time_us)} ({part} of the steps)")
    lines += view.line("overlap / communication", percent(share.overlap_ratio))
    rows = [
        [short(row.name), plain(row.calls), plain(row.bytes), *statistics(row.latency)]
        for row in view.first(
            report.collectives or (),
            name=lambda row: row.name,
            calls=lambda row: row.calls,
            bytes=lambda row: row.bytes,
            durations=lambda row: row.latency,
        )
    ]
    table = view.table(["collective", "calls", "bytes", *STATISTICS], rows)
    return [*lines, "", *table, *view.more(report.collectives or ())]


def rank_lines(comparison: RankComparison, files: Sequence[str], view: View, *, straggles: bool) -> list[str]:
    """Ranks side by side, or traces that name none."""
    names = [
        short(file) if row.rank is None else str(row.rank) for row, file in zip(comparison.ranks, files, strict=True)
    ]
    explanation = (
        "Transfer: the shortest of the ranks for each call of a collective; wait: the rest, until the last rank came. "
        "A straggler is a rank that the others wait for: without communication that no computation hides, its step is "
        "longer than theirs by more than the advice's thresholds."
    )
    known = any(row.rank is not None for row in comparison.ranks)
    if not known:
        explanation = "Of separate runs, as none of these files says its rank; nobody waited here for another."
    lines = ["", *view.section("Ranks" if known else "Traces side by side", explanation)[1:]]
    what = "rank" if known else "trace"
    by_name = {} if known else {"name": lambda one: one[0]}  # ranks are in order
    listed = list(zip(names, comparison.ranks, strict=True))
    rows = [
        [
            name,
            plain(row.steps),
            us(row.overlap.wall_us),
            us(row.overlap.computation_us),
            us(row.overlap.communication_us),
            us(row.overlap.overlap_us),
            percent(row.overlap.overlap_ratio),
            us(row.transfer_us),
            us(row.wait_us),
            NOT_AVAILABLE if row.compute_over_median is None else f"{row.compute_over_median:.3f}",
        ]
        for name, row in view.sorted(listed, total=lambda one: one[1].overlap.wall_us, **by_name)
    ]
    head = [what, "steps", "wall", "compute", "comm", "overlap", "of comm", "transfer", "wait", "compute/median"]
    lines += view.table(head, rows, least_width=6)
    rows = [
        [name, row.name, plain(row.calls), plain(row.matched_calls), plain(row.bytes)]
        + [us(value) for value in (row.latency_us, row.transfer_us, row.wait_us)]
        for name, row in view.sorted(
            [(name, row) for name, rank in listed for row in rank.collectives],
            name=lambda one: one[1].name,
            calls=lambda one: one[1].calls,
            bytes=lambda one: one[1].bytes,
            total=lambda one: one[1].latency_us,
        )
    ]
    if rows:
        head = [what, "collective", "calls", "matched", "bytes", "latency", "transfer", "wait"]
        lines += ["", *view.table(head, rows, least_width=6, left=(0, 1))]
    if are_compared(comparison):
        longest, straggler = "several alike", "none"
        if comparison.computes_longest is not None:
            longest = f"rank {comparison.computes_longest}"
        if straggles:
            straggler = f"rank {names[longest_own_time(comparison)]}"
    else:
        longest = straggler = NOT_AVAILABLE
    if known:
        lines += ["", *view.line("computes longest", longest), *view.line("straggler", straggler)]
    return [*lines, *(line for note in comparison.notes for line in view.paragraph(note))]
