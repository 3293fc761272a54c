"""Tables that are described once: how their numbers are drawn, as text and for the page."""

from __future__ import annotations

import json
from operator import itemgetter
from typing import Any

import pytest

from lightning_flops.report.document import Column, Section, Table, View, as_data, draw, share, short

ROWS = [("a", 0.02, 0.5), ("b", 0.000123456, None), ("c", None, 0.0)]
COLUMNS = [
    Column("name", lambda row: row[0], str, "name"),
    Column("mean", lambda row: row[1], unit="s"),
    share("share", lambda row: row[2]),
]


def lines(*items: Any, width: int | None = None, rows: int | None = None) -> list[str]:
    return list(draw(Section("Title", "", items), View(rows=rows, width=width)))[2:]


@pytest.mark.parametrize(
    ("values", "unit", "drawn"),
    [
        ((1.5e12, 2e9), "FLOPs", ["TFLOPs", "1.50", "0.002"]),
        ((999.6, 1.0), "B", ["B", "1,000", "1.00"]),
        ((0.0, None), "s", ["s", "0", "n/a"]),
        ((2e6, 100.0), "us", ["s", "2.00", "<0.001"]),
        ((None,), "FLOPs", ["FLOPs", "n/a"]),
        ((-0.5e-3, 0.25e-3), "s", ["us", "-500", "250"]),
    ],
)
def test_the_prefix_is_that_of_the_largest_number(
    values: tuple[float | None, ...], unit: str, drawn: list[str]
) -> None:
    column = Column("", lambda value: value, unit=unit)
    assert [line.strip() for line in lines(Table(values, [column], True))] == drawn


def test_the_first_column_of_a_group_gives_the_others_its_prefix() -> None:
    groups = {"total": "total", "mean": "", "max": ""}
    columns = [Column(one, itemgetter(at), unit="us", group=groups[one]) for at, one in enumerate(groups)]
    laid = Table([(80_760.0, 498.49, 1_017.0)], columns).lay(most=None)
    assert [(label, *texts) for label, _, texts in laid] == [
        ("total, ms", "80.8"),
        ("mean, us", "498"),
        ("max, us", "1,017"),
    ]


def test_the_page_gets_every_text_with_the_number_that_it_is_sorted_by() -> None:
    data = as_data(Section("Title", "\x1b", [Table(ROWS, COLUMNS, True), "words", {"a": "b"}]))
    made, words, figure = data["items"]
    assert made["rows"] == [
        [["a"], ["20.0", 0.02], ["50.0%", 0.5]],
        [["b"], ["0.123", 0.000123456], ["n/a"]],
        [["c"], ["n/a"], ["0%", 0.0]],
    ]
    assert [one["bar"] for one in made["head"]] == [False, False, True]
    assert (words, figure, data["note"]) == ({"text": "words"}, {"label": "a", "value": "b"}, "\\x1b")


def test_numbers_that_no_page_can_hold_are_text_alone() -> None:
    columns = [Column("x", lambda value: value, str)]
    (made,) = as_data(Section("Title", "", [Table([float("nan"), 10**400, 3], columns, True)]))["items"]
    assert [len(cell) for (cell,) in made["rows"]] == [1, 1, 2]
    assert json.dumps(made, allow_nan=False)


def test_long_tables_have_a_part_of_their_rows_and_say_how_many_there_are() -> None:
    long = Table(range(2_000), [Column("x", lambda value: value)])
    made, more = as_data(Section("Title", "", [long]))["items"]
    assert len(made["rows"]) == 1_000 and more == {"text": "(and 1,000 more)"}
    assert lines(long, rows=2)[-1] == "(and 1,998 more)"


def test_rows_go_by_what_was_asked_for_and_stay_where_a_table_has_no_such_key() -> None:
    rows = [("b", 1, None), ("c", 3, 7.0), ("a", 2, 9.0)]
    keys = {"name": 0, "calls": 1, "rate": 2}
    made = Table(rows, [Column(key, itemgetter(at), str, key) for key, at in keys.items()])
    orders = {"name": "abc", "calls": "cab", "rate": "acb", "bytes": "bca", None: "bca"}
    for sort, names in orders.items():
        assert "".join(next(made.lay(most=None, sort=sort))[1]) == names


def test_names_give_way_where_the_terminal_is_narrow() -> None:
    def drawn(width: int | None, *cells: str, left: tuple[int, ...] = (0,)) -> str:
        return View(rows=None, width=width).table(list("abcd")[: len(cells)], [list(cells)], left=left)[1]

    assert drawn(None, "x" * 60, "1") == f"{'x' * 60}  1"
    assert drawn(50, "x" * 60, "1") == f"{'x' * 23}…{'x' * 23}  1"
    # The widest text on the left is cut first.
    assert drawn(45, "a" * 30, "b" * 20, "1", left=(0, 1)) == f"{'a' * 10}…{'a' * 9}  {'b' * 20}  1"
    # Where figures leave no room for any more of it, a name keeps 16 characters, and none is cut until it looks like
    # another.
    assert drawn(30, "x" * 50, "1" * 20) == f"{'x' * 8}…{'x' * 7}  {'1' * 20}"
    names = ["n" * 9 + one + "n" * 14 for one in "ab"]
    for width in (23, 22):
        table = View(rows=None, width=width).table(["", ""], [[name, "1"] for name in names])
        assert table[1:] == [f"nnnnnnnnn{one}…nnnnnnnnn  1" for one in "ab"]


def test_columns_that_do_not_fit_stand_below_behind_the_first_one_again() -> None:
    head, rows = ["kernel", "of", "total", "mean"], [["gemm", "mm", "1" * 8, "2" * 8]]
    # 6 + 2 + 8 + 8 characters and three gaps of two are 30.
    whole = ["kernel  of     total      mean", "gemm    mm  11111111  22222222"]
    assert View(rows=None, width=30).table(head, rows, left=(0, 1)) == whole
    parts = ["kernel  of     total", "gemm    mm  11111111", "", "kernel      mean", "gemm    22222222"]
    assert View(rows=None, width=29).table(head, rows, left=(0, 1)) == parts


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("void relu<float>(float const*, float*)", "relu<float>"),
        ("apply<(kind)1, f(int)>(int, void (*)(int))", "apply<(kind)1, f(int)>"),
        ("Memcpy HtoD (Pageable memory -> Device 0)", "Memcpy H…evice 0)"),
    ],
)
def test_arguments_of_functions_go_first_and_then_the_middle(name: str, shown: str) -> None:
    assert short(name, len(shown)) == shown
