"""The program for a GPU: what it calls met or missed, its page, its processes, and a whole small run on the CPU."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.gpu.__main__ import page, summary
from benchmarks.gpu.checks import (
    Check,
    Here,
    Part,
    Row,
    at_least,
    at_most,
    exactly,
    not_here,
    reported,
    rows_of,
    run_part,
    unjudged,
    within,
)
from benchmarks.gpu.nets import TINY, Size
from tests.forks import LIGHTNING, REPOSITORY, run_fork
from tests.golden_files import golden

# ---- judgement


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [(1.25, "met"), (0.75, "met"), (1.2501, "missed"), (0.7499, "missed"), (None, "missed"), (math.nan, "missed")],
)
def test_a_time_is_met_within_its_share_of_the_truth(seen: float | None, verdict: str) -> None:
    assert within("", seen, 1.0, share=0.25, least=0.125).verdict == verdict


@pytest.mark.parametrize(("seen", "verdict"), [(0.001059, "met"), (0.001061, "missed")])  # 2% would be 20 µs
def test_of_a_short_time_the_least_is_the_limit(seen: float, verdict: str) -> None:
    assert within("", seen, 0.001, share=0.02, least=60e-6).verdict == verdict


def test_figures_are_shown_in_their_unit_with_what_they_are_beside() -> None:
    row = within("a step", 0.0205, 0.02, share=0.02, unit="ms", scale=1e3)
    assert (row.seen, row.limit, row.verdict) == ("20.5 beside 20 ms (+2.50%)", "± 0.4 ms", "missed")


@pytest.mark.parametrize(
    ("seen", "most", "least"), [(2.0, "met", "met"), (2.1, "missed", "met"), (1.9, "met", "missed")]
)
def test_a_bound_holds_its_border(seen: float, most: str, least: str) -> None:
    assert at_most("", seen, 2.0).verdict == most
    assert at_least("", seen, 2.0).verdict == least


def test_a_figure_that_is_not_there_misses_every_bound() -> None:
    assert at_most("", None, 2.0).verdict == at_least("", None, 2.0).verdict == "missed"


def test_a_count_is_exact_or_missed_and_then_names_the_truth() -> None:
    assert exactly("", 1_000_000, 1_000_000).seen == "1,000,000"
    row = exactly("", 1_000_001, 1_000_000)
    assert (row.verdict, row.seen) == ("missed", "1,000,001, where 1,000,000 is right")


def here(tmp_path: Path, *, small: bool = True) -> Here:
    return Here(device_type="cpu", small=small, folder=tmp_path)


def failed(claim: str, note: str) -> Row:
    return Row(claim=claim, seen="raised", verdict="failed", note=note)


def test_on_a_machine_that_is_not_still_times_are_reported_and_nothing_is_hidden(tmp_path: Path) -> None:
    rows = [at_most("", 3.0, 2.0), reported("", 1), failed("", "boom"), not_here("", "why")]
    small, whole = (list(unjudged(here(tmp_path, small=small), *rows)) for small in (True, False))
    assert [row.verdict for row in small] == ["reported", "reported", "failed", "n/a"]
    assert [row.verdict for row in whole] == ["missed", "reported", "failed", "n/a"]
    assert small[0].seen == "3"


def test_a_gpts_formula_is_the_sum_over_its_products() -> None:
    # One layer of width 2, one head, 3 tokens of a vocabulary of 5: queries, keys and values 2·3·2·6 = 72, projection
    # 2·3·2·2 = 24, up and down 2·3·2·8 = 96 each, head 2·3·2·5 = 60; scores and mixture 2·3·3·2 = 36 each.
    size = Size(layers=1, width=2, heads=1, vocabulary=5, batch=1, length=3)
    assert size.forward_flops == 72 + 24 + 2 * 96 + 60 + 2 * 36
    assert size.model_flops == 3 * size.forward_flops
    assert size.parameters == 3 * 4 + 4 + 2 * 16 + 10


# ---- the report


def some_parts() -> list[Part]:
    """A part that holds, one that does not, and one that broke off."""
    rows = (
        exactly("counts", 12, 12),
        within("forward", 0.021, 0.020, share=0.02, least=60e-6, unit="ms", scale=1e3),
        failed("graphs", "Traceback (most recent call last):\nRuntimeError: no | graphs\n"),
        reported("a figure", 1234),
        not_here("two ranks", "there is one device"),
    )
    return [
        Part(number=1, name="Counts", rows=rows[:1], seconds=1.5),
        Part(number=2, name="Times", rows=rows[1:], seconds=2.5),
        Part(number=3, name="Trace", rows=(), seconds=9.0, broken="no answer in 9 s\n"),
    ]


def test_the_page_is_the_file_people_read() -> None:
    golden("text/gpu_page.md", "\n".join(page(some_parts(), date="2026-01-01")) + "\n")


def test_a_part_holds_if_nothing_in_it_is_missed_and_it_came_to_its_end() -> None:
    assert [part.holds for part in some_parts()] == [True, False, False]
    assert summary(some_parts()) == "1 met, 1 missed, 1 failed, 1 reported, 1 n/a in 13 s; broken off: part 3"


# ---- parts in processes of their own


def ones(here: Here) -> Iterator[Row]:
    yield exactly("one", 1, 1)


def raises(here: Here) -> Iterator[Row]:
    yield exactly("before", 1, 1)
    raise RuntimeError("broken on purpose")


def hangs(here: Here) -> Iterator[Row]:
    yield exactly("before", 1, 1)
    time.sleep(600)


def crashes(here: Here) -> Iterable[Row]:
    yield exactly("before", 1, 1)
    os.write(1, b"the last words")
    os._exit(7)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Part]:
    """Runs a part made of such functions."""

    def run(*looks: Callable[[Here], Iterable[Row]], **more: Any) -> Part:
        module = ModuleType("a_part")
        module.CHECKS = tuple(Check(look.__name__, look) for look in looks)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "a_part", module)
        return run_part(1, "A part", "a_part", 60.0, here(tmp_path), **more)

    return run


def test_a_check_that_raises_keeps_its_rows_and_the_next_one_runs(run: Callable[..., Part]) -> None:
    part = run(raises, ones)
    assert [(row.claim, row.verdict) for row in part.rows] == [("before", "met"), ("raises", "failed"), ("one", "met")]
    assert "RuntimeError: broken on purpose" in part.rows[1].note
    assert not part.broken and not part.holds


def test_a_part_that_hangs_is_ended_and_keeps_its_rows(run: Callable[..., Part]) -> None:
    seen: list[Row] = []
    began = time.monotonic()
    part = run(
        hangs, ones, notify=seen.append, clock=lambda: 59.9 * len(seen)
    )  # 0.1 s of its 60 are left when it hangs
    assert [row.claim for row in part.rows] == ["before"]
    assert part.broken.startswith("no answer in 60 s")
    assert time.monotonic() - began < 60.0


def test_a_part_that_crashes_keeps_its_rows_and_its_last_words(run: Callable[..., Part]) -> None:
    part = run(crashes, ones)
    assert [row.claim for row in part.rows] == ["before"]
    assert "exit code 7" in part.broken and "the last words" in part.broken


def test_a_part_that_cannot_be_imported_says_so(tmp_path: Path) -> None:
    part = run_part(1, "A part", "no_such_part", 60.0, here(tmp_path))
    assert part.rows == () and "ModuleNotFoundError" in part.broken


def test_what_only_a_gpu_can_show_says_why_on_a_cpu(tmp_path: Path) -> None:
    (row,) = rows_of(Check("graphs", ones, "it has no graphs"), here(tmp_path))
    assert (row.verdict, row.note) == ("n/a", "on a CPU: it has no graphs")


# ---- all of it


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_program_runs_small_on_a_cpu(tmp_path: Path) -> None:
    arguments = ["-m", "benchmarks.gpu", "--device", "cpu", "--small", "--output", str(tmp_path)]
    done = run_fork(arguments, imports=LIGHTNING, folder=REPOSITORY, timeout_sec=880)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    parts = json.loads((tmp_path / "gpu.json").read_text())
    rows = [(part["number"], row["verdict"], row["note"]) for part in parts for row in part["rows"]]
    assert [part["number"] for part in parts] == list(range(9))
    assert sum(verdict == "met" for _, verdict, _ in rows) >= 30
    assert all(note.startswith("on a CPU: ") for _, verdict, note in rows if verdict == "n/a")
    # Every part but those about the machine and its rates holds something to a truth even here.
    assert {number for number, verdict, _ in rows if verdict == "met"} == {1, 3, 4, 6, 7, 8}
    assert f"{TINY.model_flops:,}" in (tmp_path / "gpu.md").read_text()
