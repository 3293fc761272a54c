"""Qualified names of modules: ``""`` is the root, dots lead down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from lightning_flops.records import OUTSIDE, PhaseBytes, PhaseFlops

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
