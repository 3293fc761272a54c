"""Medians and ratios of what was measured in the same rounds, how far they can be trusted, and limits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from .page import met

CONFIDENCE, RESAMPLES = 0.95, 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A median and its bootstrap interval."""

    value: float
    low: float
    high: float

    def text(self, digits: int) -> str:
        """Such as ``1.039 [1.033–1.046]``."""
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}–{self.high:.{digits}f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a figure of this project is to stay under."""

    limit: float
    unit: str

    def verdict(self, estimate: Estimate) -> str:
        """Met or missed by the median; an interval that holds the limit says so."""
        inside = ", the limit is inside the interval" if estimate.low <= self.limit < estimate.high else ""
        return f"≤ {self.limit:g} {self.unit}: {met(estimate.value <= self.limit)}{inside}"


def median_with_interval(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """The median of *values* and the percentile interval of medians of resampled values."""
    generator = random.Random(seed)
    medians = sorted(median(generator.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    low, high = medians[int(tail * RESAMPLES)], medians[min(RESAMPLES - 1, int((1 - tail) * RESAMPLES))]
    return Estimate(value=median(values), low=low, high=high)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """The median of round-by-round ratios: what slows the machine down for a while slows both and cancels."""
    return median_with_interval([one / other for one, other in zip(numerators, denominators, strict=True)])


def difference(ones: Sequence[float], others: Sequence[float]) -> Estimate:
    """The median of round-by-round differences."""
    return median_with_interval([one - other for one, other in zip(ones, others, strict=True)])
