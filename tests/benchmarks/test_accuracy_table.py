from __future__ import annotations

import pytest

from benchmarks.accuracy_table import NetworkRow, ToolSummary, failures_table, ratio_table, ratio_text, summarize
from benchmarks.accuracy_table import summary_table as table_of_summaries
from benchmarks.isolation import Outcome


def counted(flops: int) -> Outcome:
    return Outcome(kind="counted", flops=flops)


RAISED = Outcome(kind="raised", message="TypeError: a | b")


@pytest.mark.parametrize(
    ("outcome", "truth", "text"),
    [
        (counted(210), 210, "1"),
        (counted(252), 210, "1.2"),
        (counted(0), 210, "0"),
        (counted(4), 3, "1.33"),
        (counted(1_000_001), 1_000_000, "1.000001"),
        (counted(999_999), 1_000_000, "0.999999"),
        (counted(0), 0, "1"),
        (counted(7), 0, "∞"),
        (RAISED, 210, "raised"),
        (Outcome(kind="timed out"), 210, "timed out"),
        (None, 210, "–"),
        (counted(210), None, "–"),
    ],
)
def test_only_an_equal_integer_is_one(outcome: Outcome | None, truth: int | None, text: str) -> None:
    assert ratio_text(outcome, truth) == text


def test_a_difference_too_small_for_a_float_is_not_exact_either() -> None:
    assert ratio_text(counted(10**18 + 1), 10**18) == "≈1"


def test_a_summary_counts_exact_wrong_and_failed_apart() -> None:
    outcomes: list[tuple[Outcome | None, int | None]] = [
        (counted(10), 10),
        (counted(20), 10),
        (counted(5), 10),
        (RAISED, 10),
        (Outcome(kind="timed out"), 10),
        (None, 10),
        (counted(10), None),
    ]
    summary = summarize("peer", outcomes)
    assert summary == ToolSummary(
        tool="peer", asked=5, exact=1, too_low=1, too_high=1, raised=2, lowest=0.5, highest=2.0
    )
    assert table_of_summaries([summary])[-1] == "| peer | 1 of 5 | 1 | 1 | 2 | 0.5 … 2 |"


def test_a_tool_that_never_answers_has_no_ratios() -> None:
    summary = summarize("peer", [(RAISED, 10)])
    assert (summary.lowest, summary.highest) == (None, None)
    assert table_of_summaries([summary])[-1] == "| peer | 0 of 1 | 0 | 0 | 1 | – … – |"


ROWS = [
    NetworkRow(
        name="lstm",
        family="recurrent",
        forward_truth=1000,
        step_truth=3000,
        has_backward=True,
        forward={"ours": counted(1000), "peer": counted(0), "other": RAISED},
        step={"ours": counted(3000), "peer": counted(4500)},
    ),
    NetworkRow(
        name="gru",
        family="recurrent",
        forward_truth=500,
        step_truth=1500,
        has_backward=True,
        forward={"other": RAISED},
    ),
]


def test_the_forward_table_divides_by_the_forward_truth() -> None:
    lines = ratio_table(ROWS, ["ours", "peer", "other"], step=False)
    assert lines == [
        "| network | truth | ours | peer | other |",
        "|---|---:|---:|---:|---:|",
        "| recurrent.lstm | 1,000 | 1 | 0 | raised |",
        "| recurrent.gru | 500 | – | – | raised |",
    ]


def test_the_step_table_divides_by_the_truth_of_the_whole_step() -> None:
    assert ratio_table(ROWS, ["ours", "peer"], step=True)[2] == "| recurrent.lstm | 3,000 | 1 | 1.5 |"


def test_reasons_for_not_answering_are_grouped_and_kept_inside_their_cell() -> None:
    assert failures_table(ROWS, ["ours", "other"])[2:] == ["| other | 2 | raised: TypeError: a \\| b |"]
