"""Names of modules (``""`` is the root, dots lead down), and ranks and trace files in words."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from lightning_flops.records import OUTSIDE, PhaseBytes, PhaseFlops
from lightning_flops.units import plural, run_text, runs_of

_Amount = TypeVar("_Amount", float, PhaseFlops, PhaseBytes)


def parent_name(name: str) -> str:
    """Name of the module around *name*; the root is its own parent."""
    return name.rpartition(".")[0]


def pattern_of(name: str) -> str:
    """*name* with a star for each number in it: what repeated layers have in common."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def with_those_above(name: str) -> Iterator[str]:
    """Yield *name*, then those of the modules around it, the root last; ``OUTSIDE`` has nothing around it."""
    yield name
    while name and name != OUTSIDE:
        name = parent_name(name)
        yield name


def with_those_below(own: Mapping[str, _Amount], nothing: _Amount) -> dict[str, _Amount]:
    """What each module has of its *own* and what those below it have, added up, beginning with *nothing*."""
    sums: dict[str, _Amount] = {}
    for name, amount in own.items():
        for above in with_those_above(name):
            sums[above] = sums.get(above, nothing) + amount
    return sums


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
