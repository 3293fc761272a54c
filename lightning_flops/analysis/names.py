"""Names of modules (``""`` is the root, dots lead down), and ranks, stragglers and trace files in words."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from lightning_flops.records import OUTSIDE, PhaseBytes, PhaseFlops
from lightning_flops.schema.trace import Straggler
from lightning_flops.units import duration, percent, plural, run_text, runs_of

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


def straggler_evidence(straggler: Straggler) -> str:
    """Who waits for whom, how long, and where that comes from, in a sentence."""
    late = (
        f"The other ranks wait {duration(straggler.late_sec)} a step ({percent(straggler.share)} of it) for "
        f"rank {straggler.rank}"
    )
    if straggler.part is None:
        return f"{late}: no part of its step stands out alone."
    part = "what is in no named part of its step" if straggler.part == "other" else f"its {straggler.part}"
    # Not by how much in the module: that is of the traced step, and the part's figure may be of all timed ones.
    module = "" if straggler.module is None else f", mostly in {straggler.module or 'the root module'}"
    if straggler.outside_modules:
        module = ", outside its modules"
    return f"{late}: {part} takes {duration(straggler.part_sec)} longer than theirs{module}."


def straggler_action(straggler: Straggler) -> str:
    """What to try, in a sentence."""
    if straggler.part == "data wait":
        return "Look at how that rank gets its data: its storage, its workers, the lengths of its samples."
    if straggler.module is not None:
        return f"Look at what {straggler.module or 'the root module'} is given there, and at that rank's device."
    if straggler.outside_modules:
        return f"Look at what that rank does around its modules in its {straggler.part}: losses, metrics, hooks."
    return "Balance the work between ranks, and look at that rank's device."
