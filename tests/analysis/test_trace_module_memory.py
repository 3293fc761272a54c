"""Who allocates memory in a marked trace; all bytes are added up by hand from the events above them."""

from __future__ import annotations

from dataclasses import replace

from lightning_flops.config import ProfilerConfig
from lightning_flops.records import MemoryRecord
from lightning_flops.report.device_document import memory_section
from lightning_flops.report.document import Figure
from lightning_flops.schema.trace import TracedStep
from lightning_flops.schema.trace_events import MemoryRow
from lightning_flops.trace import analyze_trace
from lightning_flops.trace.memory import module_memory_table
from tests.analysis.trace_events import made, memory, module, node, operator, phase, step, trace
from tests.report import windows
from tests.report.windows import build_profile

STEP = (
    step(4, 0, 400),
    memory(10, 32),  # a batch, before any phase
    phase("forward", 20, 100),
    module("", 30, 80),
    module("first", 35, 20),
    made(7, 40, 10),
    memory(41, 64),
    memory(44, -16),
    module("second", 60, 40),
    module("second.inner", 70, 10),
    made(8, 72, 3),
    memory(73, 128),
    memory(90, 8),
    memory(115, 4),  # the loss, after the root's call
    phase("backward", 130, 200),
    node(8, 140, 40),
    memory(150, 256),
    phase("optimizer", 340, 50),
    memory(350, 1024),
)

Bytes = tuple[int, int, int, int]


def bytes_of(rows: tuple[MemoryRow, ...] | None) -> dict[str | None, Bytes]:
    assert rows is not None
    return {
        row.name: (
            row.size_increase_bytes,
            row.self_size_increase_bytes,
            row.allocation_bytes,
            row.self_allocation_bytes,
        )
        for row in rows
    }


def test_memory_belongs_to_the_module_that_runs_forward() -> None:
    assert bytes_of(module_memory_table(trace(*STEP))) == {
        "": (64 - 16 + 128 + 8 + 4, 4, 64 + 128 + 8 + 4, 4),
        "first": (48, 48, 64, 64),
        "second": (128 + 8, 8, 128 + 8, 8),
        "second.inner": (128, 128, 128, 128),
    }


def test_without_marked_modules_or_without_allocations_there_is_no_table() -> None:
    assert module_memory_table(trace(operator("aten::mm", 0, 5), memory(2, 16))) is None
    assert module_memory_table(trace(step(0, 0, 9), module("fc", 1, 5))) is None


def test_on_the_host_a_traced_step_tells_what_a_forward_keeps() -> None:
    record = MemoryRecord(
        kind="resident",
        phases=(),
        run_peak_bytes=1,
        run_reserved_peak_bytes=None,
        parameter_bytes=1,
        buffer_bytes=0,
        gradient_bytes=1,
        optimizer_bytes=1,
        kept_by_forward_bytes=None,
    )
    events = (step(0, 0, 50), module("", 1, 5), memory(2, 3000), module("", 21, 5), memory(22, 1000))
    tables = analyze_trace(trace(*events))
    traced = TracedStep(index=0, like_counted=True, files=(), tables=tables, own_forward_sec=None)
    # Two micro-steps.
    profile = replace(build_profile(windows.mlp_window(), config=ProfilerConfig()), memory=record)
    for one, said in ((traced, "2 KB (of the traced step)"), (None, "n/a (set profile_memory to know it)")):
        section = memory_section(replace(profile, traced=one))
        assert section is not None and isinstance(section.items[-1], Figure) and section.items[-1].value == said
