from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.report.layout import shortened_apart, shortened_inside
from lightning_flops.report.trace_text import render_traces
from lightning_flops.schema.trace import TracesReport
from lightning_flops.trace import load_trace
from tests.analysis.in_memory import analyze_traces
from tests.analysis.trace_events import data_loader, memory, operator, scope, step, trace
from tests.golden_files import golden
from tests.pages import REPOSITORY, blocks

TRACES = Path(__file__).parents[1] / "data" / "traces"


def loaded(*names: str) -> TracesReport:
    """The report of shared traces, under their bare names."""
    report = analyze_traces([load_trace(TRACES / name) for name in names], formulas=recorded_work)
    ranks = report.ranks and replace(
        report.ranks, ranks=tuple(replace(row, source=Path(row.source).name) for row in report.ranks.ranks)
    )
    return replace(
        report, traces=tuple(replace(one, source=Path(one.source).name) for one in report.traces), ranks=ranks
    )


def cpu_only() -> TracesReport:
    """A trace without a device, a loader or gradients, and with memory."""
    return analyze_traces(
        [
            trace(
                step(7, 0, 100),
                data_loader(0, 20),
                scope("tokenize", 5, 10),
                operator("aten::linear", 30, 50),
                operator("aten::addmm", 35, 40),
                memory(40, 4096),
                memory(90, -1024),
                {"ph": "X", "cat": "blink", "name": "paint", "pid": 1, "tid": 1, "ts": 0, "dur": 1},
            )
        ]
    )


def test_a_gpu_trace_reads_like_its_golden_file() -> None:
    report = loaded("resnet50_num_workers_0.pt.trace.json.gz")
    golden("trace/resnet50.txt", render_traces(report, top_rows=5))


def test_page_on_traces_shows_what_the_command_prints() -> None:
    printed = (Path(__file__).parents[1] / "golden" / "trace" / "resnet50.txt").read_text(encoding="utf-8")
    found = blocks(REPOSITORY / "docs" / "traces.md", "text")
    assert len(found) == 4
    for block in found:
        assert block.text.strip() in printed, block


def test_two_ranks_read_like_their_golden_file() -> None:
    report = loaded(*(f"two_ranks_known_answers.rank{rank}.pt.trace.json" for rank in (0, 1)))
    golden("trace/two_ranks.txt", render_traces(report))


def test_a_cpu_trace_reads_like_its_golden_file() -> None:
    golden("trace/cpu.txt", render_traces(cpu_only()))
    golden("trace/cpu.json", cpu_only().to_json())


def test_kernels_that_differ_in_the_middle_alone_still_differ() -> None:
    names = [f"void sgemm<{'float, ' * 9}{tile}{', true' * 9}>(float const*, int)" for tile in (1024, 128)]
    shown = shortened_apart([*names, "relu", names[0]], chars=40)
    assert shown[0] != shown[1]
    assert "1024" in shown[0]
    assert "128" in shown[1]
    assert max(map(len, shown)) <= 40
    assert (shown[2], shown[3]) == ("relu", shown[0])


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("void relu<float>(float const*, float*)", "relu<float>"),
        ("apply<(kind)1, f(int)>(int, void (*)(int))", "apply<(kind)1, f(int)>"),
        ("Memcpy HtoD (Pageable -> Device), of a page", "Memcpy HtoD (Pagea…Device), of a page"),
        ("Memcpy HtoD (Pageable memory -> Device 0)", "Memcpy H…evice 0)"),
        (")" * 50, "))))…))))"),
    ],
)
def test_arguments_of_functions_go_first(name: str, shown: str) -> None:
    assert shortened_inside(name, chars=len(shown)) == shown
