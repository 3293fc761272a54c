"""Who allocates memory in a trace, and when; all bytes are added up by hand from the events above them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from lightning_flops.schema.trace_events import MemoryCurve, MemoryRow
from lightning_flops.trace.memory import MOST_SPANS, memory_curves, module_memory_table
from tests.analysis.in_memory import known
from tests.analysis.trace_events import Event, data_loader, made, memory, module, node, operator, phase, step, trace


def at(start: float, size: int, total: int) -> Event:
    """An allocation or a free, as torch has written it since 2.0."""
    more: dict[str, Any] = {"Total Allocated": total}
    return memory(start, size, device=0, **more)


def curve(*events: Event) -> MemoryCurve:
    (one,) = known(memory_curves(trace(*events)))
    return one


def test_curve_has_the_highest_point_of_each_stretch_and_the_peak() -> None:
    found = curve(
        step(4, 10, 50),
        step(5, 60, 60),
        at(22, 100, 1100),
        at(25, 50, 1150),
        at(72, -50, 1100),
        at(74, 700, 1800),
        at(90, 30, 1830),
        at(100, -700, 1130),
    )
    assert (found.device, found.absolute) == (0, True)
    assert (found.peak_bytes, found.peak_us) == (1830, 90 - 10)
    assert [*found.points] == [
        (12, 1100), (15, 1150), (62, 1100), (64, 1800), (80, 1830), (90, 1130)
    ]  # fmt: skip


def test_old_trace_without_totals_shows_the_change() -> None:
    found = curve(operator("aten::mm", 0, 5), memory(1, 100), memory(3, 50), memory(4, -100))
    assert (found.absolute, found.peak_bytes, found.device) == (False, 150, -1)


def test_curve_says_which_steps_and_phases_ran_meanwhile() -> None:
    events = [
        *(step(4, 10, 50), data_loader(10, 5), phase("forward", 20, 15), phase("backward", 40, 10)),
        *(phase("optimizer", 52, 6), operator("aten::mm", 21, 5), memory(22, 8)),
    ]
    assert [*curve(*events).spans] == [
        ("step 4", 0, 50),
        ("data loader", 0, 5),
        ("forward", 10, 25),
        ("backward", 30, 40),
        ("optimizer", 42, 48),
    ]
    many = [step(number, 10 * number, 10) for number in range(MOST_SPANS + 1)]
    assert curve(*many, memory(0, 8)).spans == ()
    assert curve(operator("aten::mm", 0, 1), memory(0, 8)).spans == ()


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
    figures = attrgetter("size_increase_bytes", "self_size_increase_bytes", "allocation_bytes", "self_allocation_bytes")
    return {row.name: figures(row) for row in known(rows)}


def test_memory_belongs_to_the_module_that_runs_forward() -> None:
    assert bytes_of(module_memory_table(trace(*STEP))) == {
        "": (64 - 16 + 128 + 8 + 4, 4, 64 + 128 + 8 + 4, 4),
        "first": (48, 48, 64, 64),
        "second": (128 + 8, 8, 128 + 8, 8),
        "second.inner": (128, 128, 128, 128),
    }
