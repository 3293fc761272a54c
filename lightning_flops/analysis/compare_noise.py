"""What of a difference of mean steps is chance: the spread of the timed steps themselves, by bootstrap.

Each run's timed steps are drawn again with replacement, as many as there are, and their means compared; the quantiles
of many such draws are the interval of the difference (B. Efron and R. Tibshirani, "An Introduction to the Bootstrap",
1993). All parts of a step are drawn together, so that what one part gains from another stays so.

- Steps that follow one another are alike: a core slows down for a while. So blocks of neighbours are drawn, n^(1/3)
  steps long, the last followed by the first (H. Künsch, Ann. Statist. 17, 1989; P. Hall, J. Horowitz and B.-Y. Jing,
  Biometrika 82, 1995; D. Politis and J. Romano, 1992).
- A bootstrap of few draws is too narrow, by sqrt((m - 1) / m) for m blocks and by the tails of Student's t. Intervals
  are widened by both (T. Hesterberg, "What Teachers Should Know About the Bootstrap", Am. Statist. 69, 2015). The run
  with fewer blocks decides.

It is the noise *within* the two runs. What changes from one start of a program to the next, such as where its memory
lies or what else the machine does, no run can see of itself (T. Mytkowicz et al., "Producing Wrong Data Without Doing
Anything Obviously Wrong!", ASPLOS 2009).

The random numbers begin at the same seed always: equal runs give equal intervals.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_flops.schema.comparison import NoiseInterval

CONFIDENCE = 0.99
"""A step has some thirty parts and causes: at 95% one or two of them would seem to differ in any two runs."""

LEAST_STEPS = 4
"""Timed steps of each run, below which nothing is said of noise."""

_DRAWS = 4_000
_SEED = 20_240_229
_MOST_AT_ONCE = 4_000_000
_MOST_PAIRED = 500

Floats = npt.NDArray[np.float64]


def too_few(source: str, steps: str) -> str:
    """The sentence on a run whose steps are fewer than ``LEAST_STEPS``.

    Args:
        source: where the run is from.
        steps: how many steps it has, in words.
    """
    return f"What is noise is not known: {source} has {steps}, and less than {LEAST_STEPS} say nothing of their spread."


class MeanDraws:
    """Means of the parts of a step, drawn again from the timed steps of two runs.

    Args:
        a: seconds of each timed step of run A: one row a step, one column a part.
        b: the same of run B, with the same columns.
    """

    def __init__(self, a: Floats, b: Floats) -> None:
        random = np.random.RandomState(_SEED)  # whose numbers are the same in every version of numpy
        self.a, self.b = a.mean(axis=0), b.mean(axis=0)
        widening = _widening(min(len(a) // _block(len(a)), len(b) // _block(len(b))))
        self._off_a = (_drawn_means(a, random) - self.a) * widening
        self._off_b = (_drawn_means(b, random) - self.b) * widening

    def interval(self, of_a: Floats, of_b: Floats, *, value_ns: int) -> NoiseInterval:
        """The noise of *value_ns*, which is linear in the means: ``of_a · means of A + of_b · means of B``.

        Args:
            of_a: a factor for each part of A.
            of_b: a factor for each part of B.
            value_ns: the value itself.
        """
        return _around(value_ns, self._off_a @ of_a + self._off_b @ of_b)

    def interval_of_part(self, part: int, *, value_ns: int) -> NoiseInterval:
        """The noise of *value_ns*, the difference of one part.

        Args:
            part: its column.
            value_ns: the value itself.
        """
        return _around(value_ns, self._off_b[:, part] - self._off_a[:, part])

    def ratio_ends(self, part: Floats, over: Floats | None = None) -> tuple[float, float] | None:
        """Factors from the ratio B / A of a figure to the two ends of its noise.

        Args:
            part: which parts of a step the figure is the sum of, 1 or 0 for each.
            over: of a figure that is a share, those it is divided by.

        Returns:
            None if the figure is 0 in one of the runs, or in a draw.
        """
        logs = self._log_ratio(part)
        below = None if over is None else self._log_ratio(over)
        if logs is None or (over is not None and below is None):
            return None
        low, high = _ends(logs if below is None else logs - below)
        return math.exp(low), math.exp(high)

    def _log_ratio(self, part: Floats) -> Floats | None:
        """Logarithm of B / A in each draw, less that of the means themselves."""
        a, b = float(self.a @ part), float(self.b @ part)
        drawn_a, drawn_b = a + self._off_a @ part, b + self._off_b @ part
        if a <= 0 or b <= 0 or drawn_a.min() <= 0 or drawn_b.min() <= 0:
            return None
        logs: Floats = np.log(drawn_b / b) - np.log(drawn_a / a)
        return logs


def single_step_noise_ns(a: Sequence[float], b: Sequence[float]) -> int:
    """How far one step of B less one of A strays from the difference of their means, in all but 1% of the pairs.

    Args:
        a: seconds of each timed step of run A.
        b: the same of run B.
    """
    one, other = (np.asarray(values, dtype=np.float64) for values in (a, b))
    off = np.abs(np.subtract.outer(_at_most(other - other.mean()), _at_most(one - one.mean())))
    noise_sec: float = np.quantile(off, CONFIDENCE).item()
    return math.ceil(1e9 * noise_sec)


def _at_most(values: Floats) -> Floats:
    if len(values) <= _MOST_PAIRED:
        return values
    return values[np.linspace(0, len(values) - 1, _MOST_PAIRED).astype(np.int64)]


def _block(steps: int) -> int:
    """Length of the blocks that are drawn: at least five of them."""
    return max(1, min(round(math.pow(steps, 1 / 3)), steps // 5))


def _drawn_means(steps: Floats, random: np.random.RandomState) -> Floats:
    """The mean of each column in each draw."""
    count, length = len(steps), _block(len(steps))
    blocks = -(-count // length)
    drawn = []
    chunk = max(1, _MOST_AT_ONCE // (count * max(1, steps.shape[1])))
    for first in range(0, _DRAWS, chunk):
        starts = random.randint(0, count, size=(min(chunk, _DRAWS - first), blocks, 1))
        rows = ((starts + np.arange(length)) % count).reshape(len(starts), -1)[:, :count]
        drawn.append(steps[rows].mean(axis=1))
    return np.concatenate(drawn)


def _around(value_ns: int, off: Floats) -> NoiseInterval:
    """The interval around *value_ns* whose draws stray by so many seconds."""
    low, high = _ends(off)
    low_ns, high_ns = value_ns + round(low * 1e9), value_ns + round(high * 1e9)
    return NoiseInterval(low_ns=low_ns, high_ns=high_ns, beyond=low_ns > 0 or high_ns < 0)


def _ends(values: Floats) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _widening(blocks: int) -> float:
    """What an interval of *blocks* draws is widened by."""
    normal = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return students_t(normal, freedom=blocks - 1) / normal * math.sqrt(blocks / (blocks - 1))


def students_t(normal: float, *, freedom: int) -> float:
    """The quantile of Student's t where the normal distribution has *normal*.

    M. Abramowitz and I. Stegun, "Handbook of Mathematical Functions", 26.7.5: within 1% from three degrees of freedom
    on.
    """
    z = normal
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / math.pow(freedom, power) for power, term in enumerate(terms, start=1))
