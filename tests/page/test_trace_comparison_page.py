"""The page of two traces compared, opened from disk in a browser: the figures that are worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_flops.analysis.compare_traces import compare_traces
from lightning_flops.report.html_page import render_trace_comparison_page
from tests.analysis.test_trace_compare import A, run
from tests.analysis.trace_events import kernel, launch
from tests.page.browser import Opened, browser, needs_browser

pytestmark = needs_browser

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    with browser() as made:
        yield made


@pytest.fixture()
def opened(started: Any, tmp_path: Path) -> Iterator[Opened]:
    hostile = (launch(999, 1040), kernel(999, 1130, 4, name=HOSTILE))
    comparison = compare_traces([A], [run(80, 80, 80, 80, relus=(16, 16), more=hostile)])
    path = tmp_path / "difference.html"
    path.write_text(render_trace_comparison_page(comparison, sources=("before", "after")), encoding="utf-8")
    page = Opened(started, path)
    yield page
    page.assert_quiet()
    page.context.close()


def test_the_answer_and_the_parts_come_first(opened: Opened) -> None:
    # gemm ends at 110 us; two relus of 16 end at 144, and 4 us of a kernel in one step of four run beside the second.
    cards = dict(zip(opened.texts(".card-word"), opened.texts(".card-figure"), strict=True))
    assert cards == {"one step of A": "100 µs", "one step of B": "144 µs", "difference B − A": "+44 µs"}
    rows = ["".join(row.split()) for row in opened.texts("#parts tbody tr")]
    assert rows[0].startswith("kernel48µs112µs+64µs")
    assert rows[-1].startswith("step100µs144µs+44µs")


def test_kernels_have_their_cause_and_names_are_text(opened: Opened) -> None:
    names = opened.texts("#kernels-device tbody td:first-child")
    assert names[:2] == ["gemm", "relu"]
    cells = opened.texts("#kernels-device tbody tr:nth-child(2) td")
    assert "1 → 2" in cells
    assert opened.page.locator("main img, main script, [onerror]").count() == 0
    assert opened.page.title() == "before and after compared"
    assert names[2] == HOSTILE
