"""Ranks side by side, each table described once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_flops.analysis.stragglers import are_compared, longest_own_time
from lightning_flops.report.document import (
    Column,
    Figure,
    Section,
    Table,
    short,
    table,
    us,
)
from lightning_flops.schema.communication import RankComparison
from lightning_flops.units import NOT_AVAILABLE, percent, plain


def rank_section(comparison: RankComparison, files: Sequence[str], *, straggles: bool) -> Section:
    """Ranks side by side, or traces that name none."""
    names = [
        short(file) if row.rank is None else str(row.rank) for row, file in zip(comparison.ranks, files, strict=True)
    ]
    known = any(row.rank is not None for row in comparison.ranks)
    note = (
        "Transfer: the shortest of the ranks for each call of a collective; wait: the rest, until the last rank came. "
        "A straggler is a rank that the others wait for: without communication that no computation hides, its step is "
        "longer than theirs by more than the advice's thresholds."
        if known
        else "Of separate runs, as none of these files says its rank; nobody waited here for another."
    )
    listed = list(zip(names, comparison.ranks, strict=True))

    def of_rank(label: str, of: Callable[[Any], Any], show: Callable[[Any], str] = us, sort: str = "") -> Column:
        return Column(label, lambda one: of(one[1]), show, sort)

    def over_median(value: float | None) -> str:
        return NOT_AVAILABLE if value is None else f"{value:.3f}"

    columns = [
        # Ranks are in order.
        Column("rank" if known else "trace", lambda one: one[0], str, "" if known else "name"),
        of_rank("steps", lambda row: row.steps, plain),
        of_rank("wall", lambda row: row.overlap.wall_us, sort="total"),
        of_rank("compute", lambda row: row.overlap.computation_us),
        of_rank("comm", lambda row: row.overlap.communication_us),
        of_rank("overlap", lambda row: row.overlap.overlap_us),
        of_rank("of comm", lambda row: row.overlap.overlap_ratio, percent),
        of_rank("transfer", lambda row: row.transfer_us),
        of_rank("wait", lambda row: row.wait_us),
        of_rank("compute/median", lambda row: row.compute_over_median, over_median),
    ]
    items: list[Figure | Table | str] = [table(listed, columns, whole=True, least_width=6)]
    collectives = [(name, row) for name, rank in listed for row in rank.collectives]
    if collectives:
        columns = [
            Column("rank" if known else "trace", lambda one: one[0], str),
            Column("collective", lambda one: one[1].name, str, "name", left=True),
            of_rank("calls", lambda row: row.calls, plain, "calls"),
            of_rank("matched", lambda row: row.matched_calls, plain),
            of_rank("bytes", lambda row: row.bytes, plain, "bytes"),
            of_rank("latency", lambda row: row.latency_us, sort="total"),
            of_rank("transfer", lambda row: row.transfer_us),
            of_rank("wait", lambda row: row.wait_us),
        ]
        items.append(table(collectives, columns, whole=True, least_width=6))
    longest = straggler = NOT_AVAILABLE
    if are_compared(comparison):
        by = comparison.computes_longest
        longest = "several alike" if by is None else f"rank {by}"
        straggler = f"rank {names[longest_own_time(comparison)]}" if straggles else "none"
    if known:
        items += ["", Figure("computes longest", longest), Figure("straggler", straggler)]
    return Section("Ranks" if known else "Traces side by side", note, [*items, *comparison.notes])
