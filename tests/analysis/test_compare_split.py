"""A difference split by cause: numbers by hand, and what holds for any."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_flops.analysis.compare_split import Work, apportioned, logarithmic_mean, split

TIMES = st.integers(0, 10**12)
WORKS = st.builds(Work, st.integers(0, 10**18), st.integers(0, 10**15))


def causes(one: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(one.get(name, 0) for name in ("flops", "bytes", "modules", "efficiency"))


@pytest.mark.parametrize(
    ("a_ns", "b_ns", "a", "b", "expected"),
    [
        pytest.param(100, 130, Work(7, 5), Work(7, 5), (0, 0, 0, 30), id="the same work slower"),
        pytest.param(100, 200, Work(40), Work(80), (100, 0, 0, 0), id="twice the FLOPs at the same rate"),
        pytest.param(100, 200, Work(0, 4), Work(0, 8), (0, 100, 0, 0), id="twice the bytes at the same rate"),
        # 1000 ln 2 = 693.1
        pytest.param(1000, 1000, Work(40), Work(80), (693, 0, 0, -693), id="twice the work in the same time"),
        # 8 times the time by 4 times the work at half the rate: 2 of 3 doublings are work, of 700.
        pytest.param(100, 800, Work(3), Work(12), (467, 0, 0, 233), id="in proportion to the logarithms"),
        # 5900 ns / ln 60 x ln 1000 = 9954.
        pytest.param(100, 6000, Work(1), Work(1000), (9954, 0, 0, 5900 - 9954), id="a thousandfold work"),
        # W: 600 + 10 x 40 = 1000, then 1200 + 10 x 180 = 3000. At 1 ns a unit, 600 ns are FLOPs and 1400 bytes.
        pytest.param(1000, 3000, Work(600, 40), Work(1200, 180), (600, 1400, 0, 0), id="work of two kinds"),
        pytest.param(0, 30, None, Work(5), (0, 0, 30, 0), id="new"),
        pytest.param(30, 0, Work(5), None, (0, 0, -30, 0), id="gone"),
        # Units 100 + 10 x 30 = 400: a quarter of them FLOPs.
        pytest.param(10, 50, Work(), Work(100, 30), (10, 30, 0, 0), id="counted in B alone"),
        pytest.param(10, 50, Work(), Work(), (0, 0, 0, 40), id="counted in neither"),
        pytest.param(0, 30, Work(5), Work(10), (0, 0, 0, 30), id="what took no time has no rate"),
        # 100 FLOPs more, 10 bytes less: as much work as before, at 2 ns a unit.
        pytest.param(400, 400, Work(100, 10), Work(200, 0), (200, -200, 0, 0), id="they make up for each other"),
    ],
)
def test_a_difference_is_split_by_cause(
    a_ns: int, b_ns: int, a: Work | None, b: Work | None, expected: tuple[int, ...]
) -> None:
    assert causes(split(a_ns=a_ns, b_ns=b_ns, a=a, b=b)) == expected


@given(TIMES, TIMES, WORKS | st.none(), WORKS | st.none())
def test_the_causes_add_up_to_the_difference(a_ns: int, b_ns: int, a: Work | None, b: Work | None) -> None:
    assert sum(causes(split(a_ns=a_ns, b_ns=b_ns, a=a, b=b))) == b_ns - a_ns


@pytest.mark.parametrize(("x", "y", "mean"), [(1, math.e, math.e - 1), (2, 2, 2), (0, 5, 0), (4, 1, 3 / math.log(4))])
def test_the_logarithmic_mean(x: float, y: float, mean: float) -> None:
    assert logarithmic_mean(x, y) == pytest.approx(mean, rel=1e-14)


def test_the_logarithmic_mean_of_neighbours_is_exact() -> None:
    for off in (1e-9, 1e-5):
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
