"""Several trace files: read by one process or by several, the answer is the same."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_flops.errors import LightningFlopsError
from lightning_flops.trace import load_trace, many
from lightning_flops.trace.columns import TraceFormatError
from lightning_flops.trace.many import analyze_each, join_analyses
from lightning_flops.trace.report import AnalyzedTrace, analyze_file
from tests.analysis.in_memory import analyze_traces

TRACES = Path(__file__).parents[1] / "data" / "traces"
RANKS = [str(TRACES / f"two_ranks_known_answers.rank{rank}.pt.trace.json") for rank in (0, 1)]


@pytest.fixture
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the smallest files are read side by side."""
    monkeypatch.setattr(many, "WORTH_PROCESSES_BYTES", 0)


@pytest.mark.usefixtures("worth_it")
def test_processes_give_what_one_gives_in_any_order_of_the_files() -> None:
    alone = join_analyses(analyze_each(RANKS))
    assert alone == analyze_traces([load_trace(file) for file in RANKS])
    assert join_analyses(analyze_each(RANKS[::-1], processes=2)) == alone


@pytest.mark.usefixtures("worth_it")
def test_of_several_files_that_cannot_be_read_the_first_is_named(tmp_path: Path) -> None:
    bad = [tmp_path / "a.json", tmp_path / "b.json"]
    bad[0].write_text("{")
    bad[1].write_text("")
    for processes in (1, 2):
        with pytest.raises(TraceFormatError) as caught:
            analyze_each([RANKS[0], *map(str, bad)], processes=processes)
        assert str(caught.value).startswith(f"{bad[0]}: the file ends in the middle")


@pytest.mark.usefixtures("worth_it")
def test_a_process_that_is_killed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "analyze_file", _killed)
    with pytest.raises(LightningFlopsError, match="a process that read a trace was ended from outside"):
        analyze_each(RANKS, processes=2)


def _killed(file: str, **settings: Any) -> AnalyzedTrace:
    if multiprocessing.parent_process() is not None:
        os._exit(9)
    return analyze_file(file, **settings)
