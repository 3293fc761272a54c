"""What random checks tell of predictions: the mean difference and its 95% interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

ENOUGH = 3
"""With fewer random checks nothing is said of the error."""

_T = (4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)
"""Student's t of 95%, two-sided, from two degrees of freedom on."""


class MeanDifference(NamedTuple):
    """Mean of counted minus predicted, and half the width of its 95% interval."""

    mean: float
    half_width: float


def mean_difference(
    checks: Sequence[float], *, others: Sequence[float] = (), shapes: float = math.inf
) -> MeanDifference:
    """The mean over random *checks* with its interval.

    Args:
        checks: counted minus predicted, of each random check; at least three.
        others: the same of counted steps that were not drawn at random: they tell of the spread alone.
        shapes: so many differences the steps have, if those of one shape share theirs.
    """
    number = len(checks)
    mean = math.fsum(checks) / number
    # Few draws of something rare, or of something that takes turns, are often all alike. So the spread is that of one
    # draw more, half of it at each end of all that was seen; "plus four" intervals of proportions do the same.
    seen = (*checks, *others, 0.0)
    ends = ((min(seen) - mean) ** 2 + (max(seen) - mean) ** 2) / 2
    variance = (math.fsum((check - mean) ** 2 for check in checks) + ends) / number
    freedom = number - 1
    t = _T[freedom - 2] if freedom - 2 < len(_T) else 1.96 + 2.6 / freedom
    return MeanDifference(mean, t * math.sqrt(variance * (1 / number + 1 / shapes)))
