"""Ranks and trace files in words."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from lightning_flops.units import plural, run_text, runs_of


def name_ranks(ranks: Iterable[int], *, most: int = 4) -> str:
    """*ranks* in words, however many there are: "rank 3", "ranks 0-2 and 5", "ranks 0, 2, 4, 6 and 20 more"."""
    runs = runs_of(ranks)
    shown = [run_text(run) for run in runs[:most]]
    if more := sum(map(len, runs[most:])):
        shown.append(f"{more} more")
    words = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{plural('rank', sum(map(len, runs)))} {words}"


def name_files(sources: Sequence[str]) -> list[str]:
    """The last part of each of *sources*, or all of it where the last parts are the same."""
    last = [os.path.basename(source.rstrip("/")) or source for source in sources]
    return [short if last.count(short) == 1 else source for short, source in zip(last, sources, strict=True)]
