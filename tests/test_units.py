from __future__ import annotations

import math

import pytest

from lightning_flops.units import duration, percent, plain, run_text, runs_of, si


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (336_230_000, "336.23 M"),
        (6_279_860_000_000, "6.28 T"),
        (0, "0"),
        (999, "999"),
        (1_000, "1 K"),
        (12_600_000, "12.6 M"),
        (2**60, "1.15 E"),
        (10**21, "1 Z"),
        (-5_000_000, "-5 M"),
        (0.5, "0.5"),
        (0.0123, "0.0123"),
    ],
)
def test_count_has_two_decimals_and_its_prefix(value: float, text: str) -> None:
    assert si(value) == text


def test_rounding_moves_on_to_the_next_prefix() -> None:
    assert si(999_994) == "999.99 K"
    assert si(999_995) == "1 M"
    assert duration(0.000_994_9) == "994.9 us"
    assert duration(0.000_999_999) == "1 ms"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.07667, "76.67 ms"),
        (34.09e-6, "34.09 us"),
        (1.89, "1.89 s"),
        (90.0, "90 s"),
        (0.0, "0 s"),
        (2e-9, "2 ns"),
        (1e-12, "0.001 ns"),
    ],
)
def test_duration_keeps_the_number_above_one(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_percent_has_two_decimals() -> None:
    assert percent(0.4125) == "41.25%"
    assert percent(1) == "100.00%"
    assert percent(0) == "0.00%"


def test_plain_number_has_its_thousands_apart_and_ints_in_full() -> None:
    assert plain(6_279_860_000_001) == "6,279,860,000,001"
    assert plain(433.0712) == "433.07"
    assert plain(31.5) == "31.5"
    assert plain(32.0) == "32"


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_not_known_is_not_available(value: float | None) -> None:
    assert [si(value, "FLOPS"), duration(value), percent(value), plain(value)] == ["n/a"] * 4


def test_numbers_that_follow_one_another_are_drawn_together() -> None:
    assert [run_text(run) for run in runs_of([9, 3, 5, 4])] == ["3-5", "9"]
    assert [len(run) for run in runs_of([9, 3, 5, 4])] == [3, 1]
    assert runs_of([]) == []
