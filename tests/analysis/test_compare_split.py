"""A difference split by cause, and its noise, by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from lightning_flops.analysis.compare_noise import noise_ns
from lightning_flops.analysis.compare_split import Work, split
from lightning_flops.schema.comparison import WORK, Cause


def causes(one: Mapping[Cause, int]) -> tuple[int, ...]:
    return tuple(one.get(name, 0) for name in (*WORK, "efficiency"))


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


def test_an_interval_is_welchs() -> None:
    # Four steps of 8, 10, 12 and 10 s: variance 8 / 3, of the mean 2 / 3; the other run's is four times that, 8 / 3.
    # Freedom: (10 / 3)^2 / ((2 / 3)^2 / 3 + (8 / 3)^2 / 3) = 100 x 3 / 68 = 4.41; of four, t is 4.60.
    a, b = np.array([8.0, 10.0, 12.0, 10.0]), np.array([16.0, 20.0, 24.0, 20.0])
    found = noise_ns(a, b)
    assert found is not None and found / 1e9 == pytest.approx(4.60 * math.sqrt(10 / 3), rel=1e-9)
    assert noise_ns(a[:3], b) is None
