"""The noise of a difference of means: widths by the books, and how often it is wrong where the truth is known."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import numpy.typing as npt
import pytest

from lightning_flops.analysis.compare_noise import noise_ns


def steps(random: Random, *, mean: float, carried: float = 0.0) -> npt.NDArray[np.float64]:
    """Steps that stray by 1 s around a mean; *carried* of how far one strays carries over to the next."""
    off, found = random.gauss(0, 1), []
    for _ in range(20):
        found.append(mean + off)
        off = carried * off + math.sqrt(1 - carried**2) * random.gauss(0, 1)
    return np.array(found)


def test_an_interval_is_welchs() -> None:
    # Four steps of 8, 10, 12 and 10 s: variance 8 / 3, of the mean 2 / 3; the other run's is four times that, 8 / 3.
    # Freedom: (10 / 3)^2 / ((2 / 3)^2 / 3 + (8 / 3)^2 / 3) = 100 x 3 / 68 = 4.41; of four, t is 4.60.
    a, b = np.array([8.0, 10.0, 12.0, 10.0]), np.array([16.0, 20.0, 24.0, 20.0])
    found = noise_ns(a, b)
    assert found is not None and found / 1e9 == pytest.approx(4.60 * math.sqrt(10 / 3), rel=1e-9)
    assert noise_ns(a[:3], b) is None
