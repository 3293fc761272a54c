"""Counts beside truths: only an equal integer is exact."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import ratio_text
from benchmarks.runner import Answer


def counted(flops: int) -> Answer:
    return Answer(value=flops)


RAISED, LATE = Answer(kind="raised", words="TypeError: a | b"), Answer(kind="timed out")


@pytest.mark.parametrize(
    ("answer", "truth", "text"),
    [
        (counted(210), 210, "1"),
        (counted(252), 210, "1.2"),
        (counted(0), 210, "0"),
        (counted(4), 3, "1.33"),
        (counted(1_000_001), 1_000_000, "1.000001"),
        (counted(999_999), 1_000_000, "0.999999"),
        (counted(10**18 + 1), 10**18, "≈1"),  # too small a difference for a float
        (counted(0), 0, "1"),
        (counted(7), 0, "∞"),
        (RAISED, 210, "raised"),
        (LATE, 210, "timed out"),
        (None, 210, "–"),
        (counted(210), None, "–"),
    ],
)
def test_only_an_equal_integer_is_one(answer: Answer | None, truth: int | None, text: str) -> None:
    assert ratio_text(answer, truth) == text
