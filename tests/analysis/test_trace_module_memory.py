"""Who allocates memory in a marked trace; all bytes are added up by hand from the events above them."""

from __future__ import annotations

from lightning_flops.schema.trace_events import MemoryRow
from lightning_flops.trace.memory import module_memory_table
from tests.analysis.trace_events import made, memory, module, node, operator, phase, step, trace

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
