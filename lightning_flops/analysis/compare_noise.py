"""What of a difference of mean steps is chance: Welch's t over the means of batches of neighbouring steps.

Steps that follow one another are alike: a core slows down for a while. So each run's timed steps are cut into batches
of n^(1/3) neighbours, at least five of them, whose means are nearly independent (A. Law and W. Kelton, "Simulation
Modeling and Analysis"), and B. L. Welch's interval (Biometrika 34, 1947) is that of these means.

It is the noise *within* the two runs: what changes from one start of a program to the next, no run can see of itself.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

LEAST_STEPS = 4
"""Timed steps of each run, below which nothing is said of noise."""
_T = (5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95, 2.92, 2.90, 2.88, 2.86, 2.85)
"""Student's t of ``CONFIDENCE``, two-sided, from three degrees of freedom on; the last of all beyond."""

Floats = npt.NDArray[np.float64]


def too_few(source: str, steps: str) -> str:
    """The sentence on the run *source* whose steps, in words, are fewer than ``LEAST_STEPS``."""
    return f"What is noise is not known: {source} has {steps}, and less than {LEAST_STEPS} say nothing of their spread."


def noise_ns(a: Floats, b: Floats) -> int | None:
    """How far the difference of the means of *a* and *b*, seconds of each step of both runs, may be chance."""
    return None if min(len(a), len(b)) < LEAST_STEPS else round(1e9 * _half_width(_batch_means(a), _batch_means(b)))


def noise_factor(a: Floats, b: Floats) -> float:
    """By what the ratio B / A of a figure, known of each step, may be multiplied or divided; 1 where one is 0."""
    means = [_batch_means(one) for one in (a, b)]
    return math.exp(_half_width(*(one / one.mean() for one in means))) if all(one.any() for one in means) else 1.0


def _batch_means(steps: Floats) -> Floats:
    length = max(1, min(round(math.pow(len(steps), 1 / 3)), len(steps) // 5))
    means: Floats = steps[: len(steps) // length * length].reshape(-1, length).mean(axis=1)
    return means


def _half_width(a: Floats, b: Floats) -> float:
    """Half of Welch's interval of the difference of two means."""
    squares = [float(one.var(ddof=1)) / len(one) for one in (a, b)]
    if not sum(squares):
        return 0.0
    parts = [square**2 / (len(one) - 1) for square, one in zip(squares, (a, b), strict=True)]
    freedom = int(sum(squares) ** 2 / sum(parts))
    return _T[min(freedom, len(_T) + 2) - 3] * math.sqrt(sum(squares))
