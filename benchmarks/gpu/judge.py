"""Holds what was seen to what was to be seen. Pure functions: no torch, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .results import Row

NOT_JUDGED = "not judged: a small run, on a machine that others use"


def exactly(claim: str, seen: Any, truth: Any) -> Row:
    """*seen* is to be *truth*, to the last digit."""
    met = seen == truth
    return Row(
        claim=claim,
        seen=_text(seen) if met else f"{_text(seen)}, where {_text(truth)} is right",
        verdict="met" if met else "missed",
        limit="exact",
    )


def within(
    claim: str,
    seen: float | None,
    truth: float,
    *,
    share: float,
    least: float = 0.0,
    unit: str = "",
    scale: float = 1.0,
) -> Row:
    """*seen* is to be *truth*, but for a *share* of it, or for *least* where that is more.

    Args:
        claim: in words.
        seen: None if there is no figure, which misses.
        truth: as measured in another way.
        share: of *truth*.
        least: in the unit of *truth*.
        unit: in which figures are shown.
        scale: by which they are multiplied for that.
    """
    limit = max(share * abs(truth), least)
    if seen is None or not math.isfinite(seen):
        return Row(claim=claim, seen=f"n/a beside {_number(truth * scale)} {unit}", verdict="missed", limit=_pm(share))
    excess = seen - truth
    relative = f" ({excess / truth:+.2%})" if truth else ""
    return Row(
        claim=claim,
        seen=f"{_number(seen * scale)} beside {_number(truth * scale)} {unit}".rstrip() + relative,
        verdict="met" if abs(excess) <= limit else "missed",
        limit=f"± {_number(limit * scale)} {unit}".rstrip(),
    )


def at_most(claim: str, seen: float | None, limit: float, *, unit: str = "", scale: float = 1.0) -> Row:
    """*seen* is to be no more than *limit*; None misses."""
    return _bounded(claim, seen, limit, unit=unit, scale=scale, sign="≤", met=seen is not None and seen <= limit)


def at_least(claim: str, seen: float | None, limit: float, *, unit: str = "", scale: float = 1.0) -> Row:
    """*seen* is to be no less than *limit*; None misses."""
    return _bounded(claim, seen, limit, unit=unit, scale=scale, sign="≥", met=seen is not None and seen >= limit)


def holds(claim: str, met: bool, seen: str) -> Row:
    """A claim that holds or not."""
    return Row(claim=claim, seen=seen, verdict="met" if met else "missed")


def told(claim: str, seen: Any) -> Row:
    """A figure that is held to nothing."""
    return Row(claim=claim, seen=_text(seen), verdict="told")


def not_here(claim: str, because: str) -> Row:
    """What cannot be looked at here, and why."""
    return Row(claim=claim, seen="n/a", verdict="n/a", note=because)


def failed(claim: str, traceback: str) -> Row:
    """What raised before there was anything to see."""
    return Row(claim=claim, seen="raised", verdict="failed", note=traceback)


def unjudged(rows: Iterable[Row], *, where: bool) -> Iterable[Row]:
    """*rows*; if *where*, what they miss or meet is only told: for times on a machine that is not still."""
    for row in rows:
        yield replace(row, verdict="told", note=NOT_JUDGED) if where and row.verdict in ("met", "missed") else row


def _bounded(claim: str, seen: float | None, limit: float, *, unit: str, scale: float, sign: str, met: bool) -> Row:
    return Row(
        claim=claim,
        seen="n/a" if seen is None else f"{_number(seen * scale)} {unit}".rstrip(),
        verdict="met" if met else "missed",
        limit=f"{sign} {_number(limit * scale)} {unit}".rstrip(),
    )


def _pm(share: float) -> str:
    return f"± {share:.0%}"


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
