"""One figure of two runs: its ratio B / A, and how far that may be noise."""

from __future__ import annotations

import sys
from collections.abc import Callable

from lightning_flops.schema.comparison import FigureDifference

NO_NOISE = "single steps are not known, or too few to say what is noise"

TOO_WIDE = "its single steps stray so far that zero is within its noise"

EXACT = (1.0, 1.0)
"""The noise of a count."""


def figure_difference(
    name: str,
    a: float | None,
    b: float | None,
    *,
    noise: Callable[[], tuple[float, float] | str],
    unknown: Callable[[str], str | None],
) -> FigureDifference:
    """The figure *name* in both runs.

    Args:
        name: of the figure.
        a: its value in run A; None if it is not known.
        b: its value in run B.
        noise: factors from the ratio to the ends of its noise, or why that is not known.
        unknown: why the figure is not known in the run "A" or "B"; None if there are no words for it.
    """
    ratio = low = high = None
    reason = ""
    if a is None or b is None:
        which = "A" if a is None else "B"
        words = unknown(which)
        reason = f"not known in {which}" + (f": {words}" if words else "")
    elif not a and b:
        reason = "0 in A"
    elif a and abs(b) / sys.float_info.max >= abs(a):
        reason = "too far apart"
    else:
        ratio = b / a if a else 1.0
        ends = noise() if ratio != 1.0 or a else EXACT
        if isinstance(ends, str):
            reason = ends
        else:
            low, high = ratio * ends[0], ratio * ends[1]
    return FigureDifference(name=name, a=a, b=b, ratio=ratio, ratio_low=low, ratio_high=high, reason=reason)
