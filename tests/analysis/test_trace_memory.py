"""Who allocates memory in a trace, and when; all bytes are added up by hand from the events above them."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from lightning_flops.schema.tables import MemoryCurve, MemoryRow
from lightning_flops.trace.counters import counter_tracks
from lightning_flops.trace.memory import MOST_SPANS, memory_curves, module_memory_table
from tests.analysis.in_memory import known
from tests.analysis.trace_events import (
    Event,
    data_loader,
    kernel,
    made,
    memory,
    module,
    node,
    operator,
    phase,
    step,
    trace,
)


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


# ---- figures over a trace's clock: worked out by hand from what ran when


def tracks(*events: Event) -> dict[str, list[tuple[int, float]]]:
    """Times in microseconds and values of each track, by its name."""
    found = counter_tracks(trace(*events))
    assert all(list(one.times_ns) == sorted(set(one.times_ns)) for one in found)
    return {
        one.name: [(time // 1000, value) for time, value in zip(one.times_ns, one.values, strict=True)] for one in found
    }


def test_a_device_is_used_while_a_kernel_runs_and_its_multiprocessors_as_far_as_blocks_fill_them() -> None:
    half: dict[str, Any] = {"blocks per SM": 0.5}
    full: dict[str, Any] = {"blocks per SM": 4}
    found = tracks(
        operator("aten::relu", 0, 1),
        kernel(1, 10, 10, **half),
        kernel(2, 30, 20, **half),
        kernel(3, 40, 20, stream=8, **full),
    )
    assert found == {
        "GPU utilization, device 0": [(10, 100), (20, 0), (30, 100), (60, 0)],
        "est. SM efficiency, device 0": [(10, 50), (20, 0), (30, 50), (40, 100), (60, 0)],
    }


def test_memory_has_what_is_allocated_and_reserved_of_each_device() -> None:
    def at(start: float, size: int, total: int, reserved: int, device: int | None = 0) -> Event:
        more: dict[str, Any] = {"Total Allocated": total, "Total Reserved": reserved}
        return memory(start, size, device=device, **more)

    found = tracks(
        operator("aten::relu", 0, 1),
        *(at(3, -20, 10, 200), at(1, 10, 30, 100), at(5, 10, 20, 200)),
        at(2, 5, 5, 0, device=None),
    )
    assert found == {
        "memory allocated, host": [(2, 5)],
        "memory allocated, device 0": [(1, 30), (3, 10), (5, 20)],
        "memory reserved, device 0": [(1, 100), (3, 200)],
    }
    old = tracks(operator("aten::mm", 0, 1), memory(1, 100), memory(3, 50), memory(3, -120))
    assert old == {"memory allocated since the trace began, host": [(1, 100), (3, 30)]}
