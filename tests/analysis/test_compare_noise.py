"""The noise of a difference of means: widths by the books, and how often it is wrong where the truth is known."""

from __future__ import annotations

import math
import statistics
from random import Random

import numpy as np
import pytest

from lightning_flops.analysis.compare_noise import noise_interval, ratio_ends, single_step_noise_ns, students_t


def steps(random: Random, *, mean: float, deviation: float, carried: float = 0.0, count: int = 20) -> list[float]:
    """Steps that stray around a mean; *carried* of how far one strays carries over to the next."""
    off, found = random.gauss(0, 1), []
    for _ in range(count):
        found.append(mean + deviation * off)
        off = carried * off + math.sqrt(1 - carried**2) * random.gauss(0, 1)
    return found


def seems_different(a: list[float], b: list[float]) -> bool:
    value_ns = round((statistics.fmean(b) - statistics.fmean(a)) * 1e9)
    found = noise_interval(np.array(a), np.array(b), value_ns=value_ns)
    assert found is not None
    return found.beyond


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 5.841), (5, 4.032), (9, 3.250), (30, 2.750)])
def test_students_t_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert students_t(freedom=freedom) == pytest.approx(quantile, rel=0.01)


def test_an_interval_is_welchs() -> None:
    # Four steps of 8, 10, 12 and 10 s: variance 8 / 3, of the mean 2 / 3; the other run's is four times that, 8 / 3.
    # Freedom: (10 / 3)^2 / ((2 / 3)^2 / 3 + (8 / 3)^2 / 3) = 100 x 3 / 68 = 4.41, and t there is 4.34.
    a, b = np.array([8.0, 10.0, 12.0, 10.0]), np.array([16.0, 20.0, 24.0, 20.0])
    found = noise_interval(a, b, value_ns=10 * 10**9)
    assert found is not None and found.beyond
    half = (found.high_ns - found.low_ns) / 2e9
    assert half == pytest.approx(students_t(freedom=300 / 68) * math.sqrt(10 / 3), rel=1e-9)
    assert students_t(freedom=300 / 68) == pytest.approx(4.34, rel=0.01)
    assert found.low_ns + found.high_ns == 20 * 10**9
    assert noise_interval(a[:3], b, value_ns=0) is None


def test_steps_that_do_not_stray_have_no_noise() -> None:
    a, b = np.full(8, 0.25), np.full(8, 0.5)
    found = noise_interval(a, b, value_ns=250_000_000)
    assert found is not None
    assert (found.low_ns, found.high_ns, found.beyond) == (250_000_000, 250_000_000, True)
    assert ratio_ends(a, b) == (1.0, 1.0)


@pytest.mark.parametrize(("carried", "most"), [(0.0, 4), (0.5, 10)])
def test_runs_of_one_program_hardly_ever_seem_to_differ(carried: float, most: int) -> None:
    # 1% of them would be 2; where half of how far a step strays carries over, twenty steps are few, and 3% were seen.
    random = Random(4)
    pairs = [[steps(random, mean=10, deviation=1, carried=carried) for _ in range(2)] for _ in range(200)]
    assert sum(seems_different(a, b) for a, b in pairs) <= most


def test_a_difference_of_three_times_the_spread_is_always_seen() -> None:
    random = Random(5)
    pairs = [(steps(random, mean=10, deviation=1), steps(random, mean=13, deviation=1)) for _ in range(100)]
    assert all(seems_different(a, b) for a, b in pairs)


def test_the_ends_of_a_ratio_lie_around_it() -> None:
    random = Random(6)
    a, b = np.array(steps(random, mean=10, deviation=1)), np.array(steps(random, mean=20, deviation=1))
    ends = ratio_ends(a, b)
    assert ends is not None and 0.85 < ends[0] < 1 < ends[1] < 1.15
    assert ratio_ends(np.zeros(8), b) is None
    # A share of what it strays with does not stray.
    assert ratio_ends(a / 4, b / 2, over=(a, b)) == (1.0, 1.0)


def test_single_steps_stray_by_both_spreads() -> None:
    # Quartiles 2 and 4 s apart, 1.349 deviations of a normal distribution: a step that takes a minute moves neither.
    a, b = np.array([8.0, 9.0, 10.0, 11.0, 60.0]), np.array([17.0, 18.0, 20.0, 22.0, 60.0])
    found = single_step_noise_ns(a, b)
    assert found(1, 1) == pytest.approx(2.5758293 / 1.3489795 * math.sqrt(4 + 16) * 1e9, rel=1e-6)
    # A quarter of a step strays half as far.
    assert found(0.25, 0.25) == pytest.approx(found(1, 1) / 2)
    assert single_step_noise_ns(np.full(3, 9.0), np.full(3, 18.0))(1, 1) == 0
