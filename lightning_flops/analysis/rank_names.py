"""Ranks in words, few of them however many ranks there are."""

from __future__ import annotations

from collections.abc import Iterable

_RUNS_NAMED = 4
"""Runs of ranks that a list names."""


def name_ranks(ranks: Iterable[int]) -> str:
    """*ranks* in words, however many there are: "rank 3", "ranks 0-2 and 5", "ranks 0, 2, 4, 6 and 20 more"."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:_RUNS_NAMED]]
    if more := sum(map(len, runs[_RUNS_NAMED:])):
        shown.append(f"{more} more")
    words = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"rank{'' if len(ordered) == 1 else 's'} {words}"
