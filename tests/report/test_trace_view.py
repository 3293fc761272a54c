from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_flops import cli
from lightning_flops.analysis.trace import analyze_traces
from lightning_flops.report.trace_text import render_traces
from lightning_flops.report.trace_view import SORT_KEYS, View
from tests.analysis.trace_events import kernel, launch, operator, step, trace


def test_rows_go_by_what_was_asked_for_and_stay_where_a_table_has_no_such_key() -> None:
    rows = [("b", 1, None), ("c", 3, 7.0), ("a", 2, 9.0)]
    view = View(rows=None, sort="calls")
    assert view.sorted(rows, calls=lambda row: row[1]) == [rows[1], rows[2], rows[0]]
    assert replace(view, sort="name").sorted(rows, name=lambda row: row[0]) == [rows[2], rows[0], rows[1]]
    assert replace(view, sort="rate").sorted(rows, rate=lambda row: row[2]) == [rows[2], rows[1], rows[0]]
    assert replace(view, sort="bytes").sorted(rows, name=lambda row: row[0]) == rows
    assert replace(view, sort=None).sorted(rows, name=lambda row: row[0]) == rows


def test_names_give_way_where_the_terminal_is_narrow() -> None:
    rows = [["x" * 60, "1"], ["y" * 60, "2"]]
    wide = View(rows=None).table(["name", "calls"], rows)
    assert max(map(len, wide)) == 60 + 2 + 10
    narrow = View(rows=None, width=50).table(["name", "calls"], rows)
    assert max(map(len, narrow)) == 50
    assert narrow[1].split() == ["x" * 19 + "…" + "x" * 18, "1"]
    # What cannot be cut any more stays as it is.
    assert max(map(len, View(rows=None, width=5).table(["name", "calls"], rows))) == 16 + 2 + 10


def test_the_command_knows_the_keys_that_the_tables_know() -> None:
    assert cli._SORT_KEYS and set(cli._SORT_KEYS) == set(SORT_KEYS)


@pytest.mark.parametrize(("sort", "first"), [("max", "aten::add"), ("calls", "aten::mm"), ("name", "aten::add")])
def test_tables_of_a_report_are_sorted(sort: str, first: str) -> None:
    report = analyze_traces(
        [
            trace(
                step(1, 0, 100),
                operator("aten::mm", 0, 20),
                operator("aten::mm", 30, 25),
                operator("aten::add", 60, 30),
            )
        ]
    )
    text = render_traces(report, sort=sort)  # type: ignore[arg-type]
    lines = text.splitlines()
    place = next(index for index, line in enumerate(lines) if line.startswith("operator ") and "host self" in line)
    assert lines[place + 1].startswith(first)


def test_rows_cap_every_table() -> None:
    events = [step(number, 100 * number, 100) for number in range(9)]
    for number in range(9):
        events += [operator(f"aten::op{number}", 100 * number, 50), launch(number, 100 * number)]
        events += [kernel(number, 100 * number + 1, 5, name=f"k{number}", stream=number)]
    text = render_traces(analyze_traces([trace(*events)]), top_rows=2)
    assert "step 2 " not in text
    assert "op2" not in text
    assert "k2 " not in text
    assert "stream 2" not in text
    assert text.count("(and 7 more)") == 3  # steps, operators, kernels
    assert "(and 8 more)" in text  # of the device as a whole and nine streams, two are shown
