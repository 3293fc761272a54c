from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.report.trace_document import render_traces
from lightning_flops.schema.trace import TracesReport
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.read import load_trace
from tests.analysis.in_memory import analyze_traces
from tests.analysis.trace_events import (
    RANKS,
    RESNET,
    Event,
    data_loader,
    kernel,
    launch,
    memory,
    operator,
    product,
    scope,
    shapes,
    step,
    trace,
)
from tests.golden_files import golden


def loaded(*files: Path) -> TracesReport:
    """The report of shared traces, under their bare names."""
    report = analyze_traces([load_trace(file) for file in files], formulas=recorded_work)
    return replace(report, traces=tuple(replace(one, source=Path(one.source).name) for one in report.traces))


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


@pytest.mark.parametrize(("name", "files", "rows"), [("resnet50", [RESNET], 5), ("two_ranks", RANKS, 20)])
def test_traces_of_gpus_read_like_their_golden_files(name: str, files: Sequence[Path], rows: int) -> None:
    golden(f"trace/{name}.txt", render_traces(loaded(*files), top_rows=rows, width=200))


@pytest.mark.parametrize("files", [[RESNET], RANKS], ids=["resnet50", "two_ranks"])
def test_no_line_is_wider_than_the_terminal_and_every_column_is_there(files: Sequence[Path]) -> None:
    report = loaded(*files)
    heads = set(" ".join(render_traces(report, children=True).split("\n")).split())
    for width in (80, 100, 120):
        text = render_traces(report, children=True, width=width)
        assert max(map(len, text.split("\n"))) <= width
        assert {"occupancy,", "blocks/SM", "GB/s", "ratio", "max"} & heads <= set(text.split())


def test_a_cpu_trace_reads_like_its_golden_file() -> None:
    golden("trace/cpu.txt", render_traces(cpu_only()))
    golden("trace/cpu.json", cpu_only().to_json())


# ---- what a report of traces begins with; every figure is worked out by hand

A100 = "NVIDIA A100-SXM4-40GB"


# An A100 does 19.5 TFLOP/s in float32: 1.95 GFLOPs in a step of 100 us.
STEP = (step(1, 0, 100), data_loader(0, 8), *product(1, 10, rows=3_900_000, kernel_us=50))


def of(*events: Event, device: str | None = A100, rank: int | None = None, world_size: int = 2) -> Trace:
    more: dict[str, Any] = {} if device is None else {"deviceProperties": [{"id": 0, "name": device}]}
    if rank is not None:
        more["distributedInfo"] = {"rank": rank, "world_size": world_size}
    return trace(*events, **more)


def summary_of(*traces: Trace) -> list[str]:
    """The sentences of the first section, without advice."""
    text = render_traces(analyze_traces(traces, formulas=recorded_work))
    section = text[text.index("\n- ") : text.index("\n\n")].replace("\n  ", " ").split("\n- ")[1:]
    tried = next(place for place, line in enumerate(section) if line.startswith(("Try first: ", "Nothing that was ")))
    return section[:tried]


def test_one_step() -> None:
    # 780 MFLOPs of 1,950. The kernel runs for 50 us of 100 and the loader for 8; before the kernel there are 5 us of
    # the operator, of which 1 us is the launch; nothing ran in the 37 us that are left.
    assert summary_of(of(*STEP)) == [
        "The step takes 100 us: kernel 50.0%, other 37.0%, data loader 8.00%, cpu 4.00%.",
        "MFU is 40.0%, HFU 40.0% of the device's dense peak, 19.5 TFLOP/s in float32.",
        "Most kernel time: gemm of aten::mm 100% (at 80.0% of the peak).",
    ]


def test_what_was_not_counted_makes_it_a_lower_bound() -> None:
    uncounted = operator("mine::matmul_of_mine", 80, 5, **shapes([4, 4]))
    assert summary_of(of(*STEP, uncounted))[1].startswith("MFU is at least 40.0%, HFU at least 40.0% of the ")


def test_without_marks_the_whole_trace() -> None:
    # From the operator's begin at 10 us to the kernel's end at 70.
    assert summary_of(of(*product(1, 10, rows=3_900_000, kernel_us=50)))[0].startswith(
        "The whole trace takes 60 us: kernel 83.3%, "
    )


UNSHAPED = (step(1, 0, 100), operator("aten::mm", 10, 5), launch(1, 11), kernel(1, 20, 50))
GIVE = "; its peak can be given: --peak float32=FLOPS"
NOTHING = "no call with FLOPs was counted in it"
ALONE = "a kernel that multiplies, launched by no operator that was counted"
MISSING = "its time at the peak, so time is missing"
ON_THE_HOST = (step(1, 0, 100), STEP[2])


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (of(*UNSHAPED), "the trace was taken without record_shapes=True"),
        (of(*ON_THE_HOST, device=None), "no device is in the trace"),
        (of(*STEP, device="NVIDIA X1"), f"no figure is known for a device called NVIDIA X1{GIVE}"),
        (of(*STEP, device=None), f"no device of one known name ran the kernels{GIVE}"),
        (of(operator("aten::add", 10, 5, **shapes([4], [4])), *UNSHAPED[2:]), f"{NOTHING} ({ALONE})"),
        # 1.56 GFLOPs take 80 us of the 50.
        (of(*product(1, 10, rows=7_800_000, kernel_us=40)), f"its FLOPs take 1.6 times {MISSING}"),
    ],
)
def test_without_mfu_there_is_its_reason(found: Trace, reason: str) -> None:
    assert summary_of(found)[1] == f"MFU is n/a: {reason}."
    flops: Any = analyze_traces((found,), formulas=recorded_work).traces[0].flops
    assert MISSING not in reason or flops.steps[0].flops_per_sec is None  # it would be above the peak


def test_of_several_ranks_the_first_are_named_and_the_others_counted() -> None:
    lines = summary_of(*(of(*STEP, rank=rank, world_size=6) for rank in range(6)))
    assert [line.split(":")[0] for line in lines] == ["rank 0", "rank 1", "rank 2", "rank 3", "And 2 more traces."]
