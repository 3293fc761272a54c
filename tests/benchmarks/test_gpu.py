"""The program for a GPU: what it calls met or missed, its page, its processes, and a whole small run on the CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import page
from benchmarks.gpu.checks import Part, Row, exactly, not_here, reported, within
from benchmarks.gpu.nets import TINY, Size
from tests.forks import LIGHTNING, REPOSITORY, run_fork
from tests.golden_files import golden


def test_a_gpts_formula_is_the_sum_over_its_products() -> None:
    # One layer of width 2, one head, 3 tokens of a vocabulary of 5: queries, keys and values 2·3·2·6 = 72, projection
    # 2·3·2·2 = 24, up and down 2·3·2·8 = 96 each, head 2·3·2·5 = 60; scores and mixture 2·3·3·2 = 36 each.
    size = Size(layers=1, width=2, heads=1, vocabulary=5, batch=1, length=3)
    assert size.forward_flops == 72 + 24 + 2 * 96 + 60 + 2 * 36
    assert size.model_flops == 3 * size.forward_flops
    assert size.parameters == 3 * 4 + 4 + 2 * 16 + 10


def test_the_page_of_a_part_that_holds_one_that_does_not_and_one_that_broke_off_is_the_file_people_read() -> None:
    rows = (
        exactly("counts", 12, 12),
        within("forward", 0.021, 0.020, share=0.02, least=60e-6, unit="ms", scale=1e3),
        Row(
            claim="graphs",
            seen="raised",
            verdict="failed",
            note="Traceback (most recent call last):\nRuntimeError: no | graphs\n",
        ),
        reported("a figure", 1234),
        not_here("two ranks", "there is one device"),
    )
    parts = [
        Part(number=1, name="Counts", rows=rows[:1], seconds=1.5),
        Part(number=2, name="Times", rows=rows[1:], seconds=2.5),
        Part(number=3, name="Trace", rows=(), seconds=9.0, broken="no answer in 9 s\n"),
    ]
    golden("text/gpu_page.md", "\n".join(page(parts, date="2026-01-01")) + "\n")


_ROW = r"^\| (.*) \| (.*) \| .* ?\| \W*(met|missed|failed|reported|n/a)\W* \|$"
"""A row of the page's tables: the claim, what was seen, and the verdict."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_program_runs_small_on_a_cpu(tmp_path: Path) -> None:
    arguments = ["-m", "benchmarks.gpu", "--device", "cpu", "--small", "--output", str(tmp_path)]
    done = run_fork(arguments, imports=LIGHTNING, folder=REPOSITORY, timeout_sec=880)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    _, *parts = re.split(r"^## (?=\d)", (tmp_path / "gpu.md").read_text(), flags=re.MULTILINE)
    assert [int(part[0]) for part in parts] == list(range(10))
    rows = [(int(part[0]), row[2], row[1]) for part in parts for row in re.findall(_ROW, part, re.MULTILINE)]
    assert sum(verdict == "met" for _, verdict, _ in rows) >= 20
    assert all("(on a CPU: " in seen for _, verdict, seen in rows if verdict == "n/a")
    # Every part but those about the machine and its rates holds something to a truth even here.
    assert {number for number, verdict, _ in rows if verdict == "met"} == {1, 3, 4, 7, 9}
    assert f"{TINY.model_flops:,}" in (tmp_path / "gpu.md").read_text()
