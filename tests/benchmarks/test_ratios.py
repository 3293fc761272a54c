from __future__ import annotations

import pytest

from benchmarks.ratios import Estimate, Target, median_with_interval, ratio


def test_a_median_of_equal_values_has_an_interval_of_no_width() -> None:
    assert median_with_interval([2.5, 2.5, 2.5]) == Estimate(value=2.5, low=2.5, high=2.5)


def test_the_interval_holds_the_median_and_stays_within_the_values() -> None:
    estimate = median_with_interval([1.0, 2.0, 3.0, 4.0, 100.0])
    assert estimate.value == 3.0
    assert 1.0 <= estimate.low < 3.0 < estimate.high <= 100.0


def test_the_same_values_give_the_same_interval() -> None:
    values = [1.0, 5.0, 2.0, 8.0, 3.0, 9.0, 4.0]
    assert median_with_interval(values) == median_with_interval(values)


def test_a_median_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one value, got none"):
        median_with_interval([])


def test_ratios_are_taken_round_by_round_so_a_slow_spell_cancels() -> None:
    # In the second round everything took ten times as long.
    assert ratio([2.2, 22.0, 2.2], [2.0, 20.0, 2.0]).value == pytest.approx(1.1, rel=1e-12)


def test_ratios_need_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="got 2, 1"):
        ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (Estimate(value=1.04, low=1.03, high=1.049), "≤ 1.05 × plain: met"),
        (Estimate(value=1.05, low=1.04, high=1.05), "≤ 1.05 × plain: met"),
        (Estimate(value=1.04, low=1.03, high=1.06), "≤ 1.05 × plain: met, the limit is inside the interval"),
        (Estimate(value=1.06, low=1.04, high=1.07), "≤ 1.05 × plain: **missed**, the limit is inside the interval"),
        (Estimate(value=1.08, low=1.06, high=1.09), "≤ 1.05 × plain: **missed**"),
    ],
)
def test_a_target_is_met_or_missed_by_the_median(value: Estimate, verdict: str) -> None:
    assert Target(limit=1.05, unit="× plain").verdict(value) == verdict


def test_an_estimate_prints_its_interval() -> None:
    assert Estimate(value=1.0386, low=1.0331, high=1.0464).text(3) == "1.039 [1.033–1.046]"
