"""What the tables of traces have in common: their cells, and what sorts them."""

from __future__ import annotations

from lightning_flops.report import layout
from lightning_flops.schema.trace_steps import Durations
from lightning_flops.units import NOT_AVAILABLE, duration, percent

STATISTICS = ("total", "mean", "max", "min", "ratio")
"""Columns of ``statistics``."""

NAME_CHARS = 56
OPERATOR_CHARS = 40

_PLACE_CHARS = 36


def statistics(durations: Durations | None) -> list[str]:
    """Lengths of several events, and their part of the whole."""
    if durations is None:
        return [NOT_AVAILABLE] * len(STATISTICS)
    lengths = (durations.total_us, durations.mean_us, durations.max_us, durations.min_us)
    return [*map(us, lengths), percent(durations.ratio)]


def us(time_us: float | None) -> str:
    """Microseconds in the unit that fits."""
    return duration(None if time_us is None else time_us / 1e6)


def yes(value: bool) -> str:
    """A flag in words."""
    return "yes" if value else "no"


def short(name: str) -> str:
    """A name cut to a column."""
    return layout.shortened_inside(name, chars=NAME_CHARS)


def place(of: str | None) -> str:
    """The end of a file's path and its line."""
    if of is None:
        return NOT_AVAILABLE
    return of if len(of) <= _PLACE_CHARS else f"…{of[len(of) - _PLACE_CHARS + 1 :]}"
