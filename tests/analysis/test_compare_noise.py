"""The noise of a difference of means: widths by the books, and how often it is wrong where the truth is known."""

from __future__ import annotations

import math
import statistics
from random import Random

import numpy as np
import pytest

from lightning_flops.analysis.compare_noise import MeanDraws, single_step_noise_ns, students_t

WHOLE = np.ones(1)


def column(values: list[float]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.array(values, dtype=np.float64).reshape(-1, 1)


def steps(random: Random, *, mean: float, deviation: float, carried: float = 0.0, count: int = 20) -> list[float]:
    """Steps that stray around a mean; *carried* of how far one strays carries over to the next."""
    off, found = random.gauss(0, 1), []
    for _ in range(count):
        found.append(mean + deviation * off)
        off = carried * off + math.sqrt(1 - carried**2) * random.gauss(0, 1)
    return found


def seems_different(a: list[float], b: list[float]) -> bool:
    draws = MeanDraws(column(a), column(b))
    value_ns = round((statistics.fmean(b) - statistics.fmean(a)) * 1e9)
    return draws.interval(-WHOLE, WHOLE, value_ns=value_ns).beyond


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 5.841), (5, 4.032), (9, 3.250), (30, 2.750)])
def test_students_t_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    normal = statistics.NormalDist().inv_cdf(0.995)
    assert students_t(normal, freedom=freedom) == pytest.approx(quantile, rel=0.01)


def test_an_interval_is_as_wide_as_the_books_say() -> None:
    # 1,000 steps of deviation 1 in each run: the difference of means has sqrt(2 / 1000) = 0.0447, 99% within 2.576 of
    # it, 0.1152. The 100 blocks of ten widen it by t(99) / z = 2.626 / 2.576 and sqrt(100 / 99): 0.1180.
    random = Random(1)
    a, b = (steps(random, mean=10, deviation=1, count=1000) for _ in range(2))
    draws = MeanDraws(column(a), column(b))
    found = draws.interval(-WHOLE, WHOLE, value_ns=0)
    assert (found.high_ns - found.low_ns) / 2e9 == pytest.approx(0.1180, rel=0.1)


def test_steps_that_do_not_stray_have_no_noise() -> None:
    draws = MeanDraws(column([0.25] * 8), column([0.5] * 8))
    found = draws.interval(-WHOLE, WHOLE, value_ns=250_000_000)
    assert (found.low_ns, found.high_ns, found.beyond) == (250_000_000, 250_000_000, True)
    assert not draws.interval(0 * WHOLE, 0 * WHOLE, value_ns=0).beyond
    assert draws.ratio_ends(WHOLE) == (1.0, 1.0)


def test_equal_runs_give_equal_intervals() -> None:
    a, b = column(steps(Random(2), mean=1, deviation=0.1)), column(steps(Random(3), mean=1, deviation=0.1))
    first, second = (MeanDraws(a, b).interval(-WHOLE, WHOLE, value_ns=5) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(("carried", "most"), [(0.0, 4), (0.5, 8)])
def test_runs_of_one_program_hardly_ever_seem_to_differ(carried: float, most: int) -> None:
    # 1% of them would be 2; where half of how far a step strays carries over, twenty steps are few, and 2% were seen.
    random = Random(4)
    pairs = [[steps(random, mean=10, deviation=1, carried=carried) for _ in range(2)] for _ in range(200)]
    assert sum(seems_different(a, b) for a, b in pairs) <= most


def test_a_difference_of_three_times_the_spread_is_always_seen() -> None:
    random = Random(5)
    pairs = [(steps(random, mean=10, deviation=1), steps(random, mean=13, deviation=1)) for _ in range(100)]
    assert all(seems_different(a, b) for a, b in pairs)


def test_the_ends_of_a_ratio_lie_around_it() -> None:
    random = Random(6)
    a, b = column(steps(random, mean=10, deviation=1)), column(steps(random, mean=20, deviation=1))
    ends = MeanDraws(a, b).ratio_ends(WHOLE)
    assert ends is not None and 0.85 < ends[0] < 1 < ends[1] < 1.15
    assert MeanDraws(column([0.0] * 8), b).ratio_ends(WHOLE) is None


def test_single_steps_stray_as_far_as_their_pairs_do() -> None:
    # A strays by 1 and B by 2, each to both sides: of the four pairs two are 1 off and two are 3 off.
    assert single_step_noise_ns([9.0, 11.0], [18.0, 22.0]) == 3_000_000_000
    assert single_step_noise_ns([9.0] * 3, [18.0] * 3) == 0
    assert single_step_noise_ns([1.0, 3.0] * 2000, [5.0] * 4000) == 1_000_000_000
