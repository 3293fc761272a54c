"""What of a difference of mean steps is chance: Welch's t over the means of batches of neighbouring steps.

Steps that follow one another are alike: a core slows down for a while. So each run's timed steps are cut into batches
of n^(1/3) neighbours, at least five of them, whose means are nearly independent (A. Law and W. Kelton, "Simulation
Modeling and Analysis"), and B. L. Welch's interval (Biometrika 34, 1947) is that of these means.

It is the noise *within* the two runs. What changes from one start of a program to the next, such as where its memory
lies or what else the machine does, no run can see of itself (T. Mytkowicz et al., "Producing Wrong Data Without Doing
Anything Obviously Wrong!", ASPLOS 2009).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lightning_flops.schema.comparison import NoiseInterval

CONFIDENCE = 0.99
"""A step has some thirty parts and modules: at 95% one or two of them would seem to differ in any two runs."""
LEAST_STEPS = 4
"""Timed steps of each run, below which nothing is said of noise."""
_NORMAL = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
_MIDDLE_HALF = 2 * statistics.NormalDist().inv_cdf(0.75)
"""Standard deviations that the middle half of a normal distribution spans."""

Floats = npt.NDArray[np.float64]


def too_few(source: str, steps: str) -> str:
    """The sentence on the run *source* whose steps, in words, are fewer than ``LEAST_STEPS``."""
    return f"What is noise is not known: {source} has {steps}, and less than {LEAST_STEPS} say nothing of their spread."


def noise_interval(a: Floats, b: Floats, *, value_ns: int) -> NoiseInterval | None:
    """The noise of *value_ns*, the difference of the means of *a* and *b*: seconds of each timed step of both runs."""
    if min(len(a), len(b)) < LEAST_STEPS:
        return None
    half_ns = round(1e9 * _half_width(_batch_means(a), _batch_means(b)))
    low_ns, high_ns = value_ns - half_ns, value_ns + half_ns
    return NoiseInterval(low_ns=low_ns, high_ns=high_ns, beyond=low_ns > 0 or high_ns < 0)


def ratio_ends(a: Floats, b: Floats, *, over: tuple[Floats, Floats] | None = None) -> tuple[float, float] | None:
    """Factors from the ratio B / A of a figure to the two ends of its noise; None if it may as well be zero.

    Args:
        a: the figure in each timed step of run A.
        b: the same of run B.
        over: of a figure that is a share, what it is divided by.
    """
    means = [_batch_means(one) for one in (a, b)]
    if over is not None:
        means = [part / _batch_means(whole) for part, whole in zip(means, over, strict=True)]
    if not all(one.mean() > 0 for one in means):
        return None
    half = _half_width(*(one / one.mean() for one in means))
    return (math.exp(-half), math.exp(half)) if half < 1 else None


def single_step_noise_ns(a: Floats, b: Floats) -> Callable[[float, float], int]:
    """How far a share of one step of A and a share of one of B stray together, in all but 1% of the pairs.

    The spread is that of the middle half, which a step that something held up does not widen. Pieces of a step stray
    independently, so the variance of a piece is in proportion to its share.
    """
    quartiles = (np.quantile(one, (0.25, 0.75)) for one in (a, b))
    of_a, of_b = ((1e9 * _NORMAL * float(high - low) / _MIDDLE_HALF) ** 2 for low, high in quartiles)
    return lambda share_a, share_b: math.ceil(math.sqrt(share_a * of_a + share_b * of_b))


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
    return students_t(freedom=sum(squares) ** 2 / sum(parts)) * math.sqrt(sum(squares))


def students_t(*, freedom: float) -> float:
    """The quantile of Student's t at ``CONFIDENCE``; M. Abramowitz and I. Stegun, 26.7.5: within 1% from three on."""
    z = _NORMAL
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / math.pow(freedom, power) for power, term in enumerate(terms, start=1))
