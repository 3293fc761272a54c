"""Tables that are described once: how their numbers are drawn, as text and for the page."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_flops.report.document import (
    Column,
    Figure,
    Section,
    as_data,
    draw,
    quantity,
    share,
    table,
)
from lightning_flops.report.layout import View

ROWS = [("a", 0.02, 0.5), ("b", 0.000123456, None), ("c", None, 0.0)]
COLUMNS = [
    Column("name", lambda row: row[0], str, "name"),
    quantity("mean", lambda row: row[1], "s"),
    share("share", lambda row: row[2]),
]


def lines(*items: Any, width: int | None = None, rows: int | None = None) -> list[str]:
    return list(draw(Section("Title", "", items), View(rows=rows, width=width)))[2:]


def test_a_column_has_one_unit_and_three_significant_digits() -> None:
    assert lines(table(ROWS, COLUMNS, whole=True, least_width=0)) == [
        "name  mean, ms  share",
        "a         20.0  50.0%",
        "b        0.123    n/a",
        "c          n/a   0.0%",
    ]


@pytest.mark.parametrize(
    ("values", "unit", "drawn"),
    [
        ((1.5e12, 2e9), "FLOPs", ["TFLOPs", "1.50", "0.002"]),
        ((999.6, 1.0), "B", ["B", "1,000", "1.00"]),
        ((0.0, None), "s", ["s", "0", "n/a"]),
        ((None,), "FLOPs", ["FLOPs", "n/a"]),
        ((-0.5e-3, 0.25e-3), "s", ["us", "-500", "250"]),
    ],
)
def test_the_prefix_is_that_of_the_largest_number(
    values: tuple[float | None, ...], unit: str, drawn: list[str]
) -> None:
    column = quantity("", lambda value: value, unit)
    assert [line.strip() for line in lines(table(values, [column], whole=True, least_width=0))] == drawn


def test_columns_of_one_unit_share_their_prefix() -> None:
    columns = [quantity("x", lambda row: row[0], "s"), quantity("y", lambda row: row[1], "s")]
    assert lines(table([(2.0, 0.004)], columns, whole=True, least_width=0)) == ["x, s   y, s", "2.00  0.004"]


def test_points_of_a_list_hang_and_figures_stand_in_one_column() -> None:
    drawn = lines(f"1. {12 * 'word '}", "- four", Figure("label", "value"), width=60)
    assert drawn == [f"1. {11 * 'word '}".rstrip(), "   word", "- four", f"{'label:':<30}  value"]


def test_the_page_gets_every_text_with_the_number_that_it_is_sorted_by() -> None:
    data = as_data(Section("Title", "\x1b", [table(ROWS, COLUMNS, whole=True), "words", Figure("a", "b")]))
    made, words, figure = data["items"]
    assert made["rows"] == [
        [["a"], ["20.0", 0.02], ["50.0%", 0.5]],
        [["b"], ["0.123", 0.000123456], ["n/a"]],
        [["c"], ["n/a"], ["0.0%", 0.0]],
    ]
    assert [one["bar"] for one in made["head"]] == [False, False, True]
    assert (words, figure, data["note"]) == ({"text": "words"}, {"label": "a", "value": "b"}, "\\x1b")


def test_numbers_that_no_page_can_hold_are_text_alone() -> None:
    columns = [Column("x", lambda value: value, str)]
    (made,) = as_data(Section("Title", "", [table([float("nan"), 10**400, 3], columns, whole=True)]))["items"]
    assert [len(cell) for (cell,) in made["rows"]] == [1, 1, 2]
    assert json.dumps(made, allow_nan=False)


def test_long_tables_have_a_part_of_their_rows_and_say_how_many_there_are() -> None:
    long = table(range(2_000), [Column("x", lambda value: value)])
    (made,) = as_data(Section("Title", "", [long]))["items"]
    assert len(made["rows"]) == 1_000 and made["after"] == ["(and 1,000 more)"]
    assert lines(long, rows=2)[-1] == "(and 1,998 more)"
