"""Counts beside truths: only an equal integer is exact."""

from __future__ import annotations

import pytest

from benchmarks.accuracy import Row, ratio_table, ratio_text
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


ROWS = [
    Row(
        name="recurrent.lstm",
        forward_truth=1000,
        step_truth=3000,
        forward={"ours": counted(1000), "peer": counted(0), "other": RAISED},
        step={"ours": counted(3000), "peer": counted(4500)},
    ),
    Row(name="recurrent.gru", forward_truth=500, step_truth=1500, forward={"other": RAISED}),
]


def test_each_table_divides_by_its_truth() -> None:
    assert ratio_table(ROWS, ["ours", "peer", "other"], step=False) == [
        "| network | truth | ours | peer | other |",
        "|---|---:|---:|---:|---:|",
        "| recurrent.lstm | 1,000 | 1 | 0 | raised |",
        "| recurrent.gru | 500 | – | – | raised |",
    ]
    assert ratio_table(ROWS, ["ours", "peer"], step=True)[2] == "| recurrent.lstm | 3,000 | 1 | 1.5 |"
