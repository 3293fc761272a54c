"""Qualified names of modules: ``""`` is the root, dots lead down."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_flops.records import OUTSIDE


def parent_name(name: str) -> str:
    """Name of the module around *name*; the root is its own parent."""
    return name.rpartition(".")[0]


def short_name(name: str) -> str:
    """Last part of *name*: what its parent calls it."""
    return name.rpartition(".")[2]


def with_those_above(name: str) -> Iterator[str]:
    """Yield *name*, then those of the modules around it, the root last; ``OUTSIDE`` has nothing around it."""
    yield name
    if name == OUTSIDE:
        return
    while name:
        name = parent_name(name)
        yield name
