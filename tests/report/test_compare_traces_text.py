from __future__ import annotations

from pathlib import Path

import pytest

from lightning_flops.analysis.compare_traces import compare_traces
from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.report import compare_text
from lightning_flops.report.compare_text import render_comparison
from lightning_flops.schema.comparison import Comparison
from lightning_flops.trace.many import analyze_each
from tests.analysis.slowed import slowed
from tests.analysis.test_trace_compare import A, run
from tests.analysis.trace_events import kernel, launch
from tests.golden_files import golden
from tests.pages import REPOSITORY, blocks

RESNET = Path(__file__).parents[1] / "data" / "traces" / "resnet50_num_workers_0.pt.trace.json.gz"
GOLDEN = Path(__file__).parents[1] / "golden" / "trace" / "compare_slow_kernel.txt"


@pytest.fixture(scope="module")
def slow_kernel(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """The real trace, and a copy of it in which one kernel of the backward of batch norm takes twice as long."""
    folder = tmp_path_factory.mktemp("traces")
    (folder / "before.pt.trace.json.gz").symlink_to(RESNET)
    slowed(RESNET, folder / "after.pt.trace.json.gz", kernel="void cudnn::bn_bw_1C11_kernel_new", times=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        names = ("before.pt.trace.json.gz", "after.pt.trace.json.gz")
        a, b = analyze_each(names, stepwise=True, formulas=recorded_work)
    return compare_traces([a], [b], sources=names)


def test_a_slow_kernel_reads_like_its_golden_file(slow_kernel: Comparison) -> None:
    golden("trace/compare_slow_kernel.txt", render_comparison(slow_kernel))


def test_page_on_comparing_shows_what_the_command_prints() -> None:
    found = blocks(REPOSITORY / "docs" / "compare.md", "text")
    assert len(found) == 2
    assert found[1].text.strip() in GOLDEN.read_text(encoding="utf-8")


def lines_of(comparison: Comparison) -> list[str]:
    return [" ".join(line.split()) for line in render_comparison(comparison).splitlines()]


def test_calls_and_their_length_are_told_apart() -> None:
    lines = lines_of(compare_traces([A], [run(40, 40, 40, 40, relus=(16, 16))]))
    assert "relu 8.00 32.0 24.0 1 -> 2 more calls, longer calls" in lines
    lines = lines_of(compare_traces([A], [run(40, 40, 40, 40, relus=(8, 8))]))
    assert "relu 8.00 16.0 8.00 1 -> 2 more calls" in lines
    lines = lines_of(compare_traces([A], [run(40, 40, 40, 40, relus=())]))
    assert "relu 8.00 0 -8.00 1 -> 0 gone" in lines


def test_rows_are_capped_and_those_without_a_difference_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = compare_traces([A], [run(50, 50, 50, 50, relus=(16,))])
    monkeypatch.setattr(compare_text, "_ROWS_SHOWN", 1)
    lines = lines_of(comparison)
    begin = next(place for place, line in enumerate(lines) if "By kernel" in line)
    assert lines[begin + 2].split()[0] == "gemm"
    assert lines[begin + 3] == "(and 1 more)"
    assert "No difference in any of 2." in lines_of(compare_traces([A], [A]))


def test_what_only_one_run_has_is_not_called_noise() -> None:
    some = tuple(
        event
        for number, length in ((1, 1), (2, 90), (3, 1), (4, 2))
        for event in (
            launch(10 * number + 5, 1000 * number + 40),
            kernel(10 * number + 5, 1000 * number + 50, length, name="odd"),
        )
    )
    comparison = compare_traces([A], [run(40, 40, 40, 40, more=some)])
    odd = next(row for one in comparison.tables if one.of == "kernels" for row in one.rows if row.name == "odd")
    assert odd.beyond_noise is False
    assert "odd 0 23.5 23.5 0 -> 1 new" in lines_of(comparison)


def test_names_of_files_and_events_are_printable() -> None:
    name = "a\x1b[31m\u202eb\nc"
    hostile = (launch(999, 1040), kernel(999, 1130, 4, name=name))
    text = render_comparison(compare_traces([A], [run(80, 80, 80, device=name, more=hostile)], sources=(name, name)))
    assert text.count("a\\x1b[31m\\u202eb\\nc") >= 3  # the device, the kernel, the note on its steps
    assert all(line.isprintable() for line in text.splitlines())
