"""A difference split by cause: numbers by hand, and what holds for any."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_flops.analysis.compare_split import FLOPS_PER_BYTE, Work, apportioned, logarithmic_mean, split

TIMES = st.integers(0, 10**12)
WORKS = st.builds(Work, st.integers(0, 10**18), st.integers(0, 10**15))


def causes(one: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(one.get(name, 0) for name in ("flops", "bytes", "modules", "efficiency"))


def test_the_same_work_slower_is_efficiency() -> None:
    assert causes(split(a_ns=100, b_ns=130, a=Work(7, 5), b=Work(7, 5))) == (0, 0, 0, 30)


def test_twice_the_work_at_the_same_rate_is_work() -> None:
    assert causes(split(a_ns=100, b_ns=200, a=Work(40), b=Work(80))) == (100, 0, 0, 0)
    assert causes(split(a_ns=100, b_ns=200, a=Work(0, 4), b=Work(0, 8))) == (0, 100, 0, 0)


def test_twice_the_work_in_the_same_time_is_as_much_more_work_as_better_efficiency() -> None:
    # 1000 ln 2 = 693.1
    assert causes(split(a_ns=1000, b_ns=1000, a=Work(40), b=Work(80))) == (693, 0, 0, -693)


def test_a_difference_is_shared_out_in_proportion_to_the_logarithms() -> None:
    # 8 times the time by 4 times the work at half the rate: 2 of 3 doublings are work, of 700.
    assert causes(split(a_ns=100, b_ns=800, a=Work(3), b=Work(12))) == (467, 0, 0, 233)


def test_a_thousandfold_work_in_a_sixtyfold_time_is_not_blown_up() -> None:
    # 5900 ns / ln 60 x ln 1000 = 9954.
    assert causes(split(a_ns=100, b_ns=6000, a=Work(1), b=Work(1000))) == (9954, 0, 0, 5900 - 9954)


def test_work_of_two_kinds_is_split_in_proportion() -> None:
    # W: 600 + 10 x 40 = 1000, then 1200 + 10 x 180 = 3000. At 1 ns a unit, 600 ns are FLOPs and 1400 bytes.
    assert FLOPS_PER_BYTE == 10
    assert causes(split(a_ns=1000, b_ns=3000, a=Work(600, 40), b=Work(1200, 180))) == (600, 1400, 0, 0)


def test_what_only_one_run_has_is_work_of_its_modules() -> None:
    assert causes(split(a_ns=0, b_ns=30, a=None, b=Work(5))) == (0, 0, 30, 0)
    assert causes(split(a_ns=30, b_ns=0, a=Work(5), b=None)) == (0, 0, -30, 0)


def test_what_only_one_run_counted_is_work() -> None:
    # Units 100 + 10 x 30 = 400: a quarter of them FLOPs.
    assert causes(split(a_ns=10, b_ns=50, a=Work(), b=Work(100, 30))) == (10, 30, 0, 0)
    assert causes(split(a_ns=50, b_ns=10, a=Work(100, 30), b=Work())) == (-10, -30, 0, 0)


def test_without_any_count_the_work_is_taken_for_the_same() -> None:
    assert causes(split(a_ns=10, b_ns=50, a=Work(), b=Work())) == (0, 0, 0, 40)


@given(TIMES, TIMES, WORKS | st.none(), WORKS | st.none())
def test_the_causes_add_up_to_the_difference(a_ns: int, b_ns: int, a: Work | None, b: Work | None) -> None:
    assert sum(causes(split(a_ns=a_ns, b_ns=b_ns, a=a, b=b))) == b_ns - a_ns


def test_what_took_no_time_has_no_rate() -> None:
    assert causes(split(a_ns=0, b_ns=30, a=Work(5), b=Work(10))) == (0, 0, 0, 30)


def test_flops_and_bytes_that_make_up_for_each_other_are_told() -> None:
    # 100 FLOPs more, 10 bytes less: as much work as before, at 2 ns a unit.
    assert causes(split(a_ns=400, b_ns=400, a=Work(100, 10), b=Work(200, 0))) == (200, -200, 0, 0)


@pytest.mark.parametrize(("x", "y", "mean"), [(1, math.e, math.e - 1), (2, 2, 2), (0, 5, 0), (4, 1, 3 / math.log(4))])
def test_the_logarithmic_mean(x: float, y: float, mean: float) -> None:
    assert logarithmic_mean(x, y) == pytest.approx(mean, rel=1e-14)


def test_the_logarithmic_mean_of_neighbours_is_exact_on_both_sides_of_the_series() -> None:
    for off in (9e-5, 1.1e-4):
        # With r for off: 1 - r^2 / 3, and nothing that counts beyond.
        assert logarithmic_mean(1 - off, 1 + off) == pytest.approx(1 - off**2 / 3, rel=1e-15)


@given(TIMES, TIMES, WORKS | st.none(), WORKS | st.none())
def test_with_a_and_b_swapped_every_cause_changes_its_sign(
    a_ns: int, b_ns: int, a: Work | None, b: Work | None
) -> None:
    there, back = split(a_ns=a_ns, b_ns=b_ns, a=a, b=b), split(a_ns=b_ns, b_ns=a_ns, a=b, b=a)
    # What is rounded half to even has the same size in both directions; what is left may be one off for each rounding.
    assert all(abs(one + other) <= 2 for one, other in zip(causes(there), causes(back), strict=True))


@given(TIMES, st.lists(st.integers(0, 10**12), min_size=1, max_size=50))
def test_pieces_are_in_proportion_and_add_up(total_ns: int, weights: list[int]) -> None:
    pieces = apportioned(total_ns, weights)
    assert sum(pieces) == total_ns and len(pieces) == len(weights) and min(pieces) >= 0
    whole = sum(weights)
    if whole:
        # Exact, in whole numbers: each piece is within a nanosecond of its share.
        assert all(
            abs(piece * whole - total_ns * weight) <= whole for piece, weight in zip(pieces, weights, strict=True)
        )
    else:
        assert pieces[-1] == total_ns


def test_three_equal_pieces_of_ten() -> None:
    assert apportioned(10, [1, 1, 1]) == [3, 4, 3]
    assert apportioned(10, []) == []
