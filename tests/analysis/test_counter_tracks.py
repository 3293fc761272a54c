"""Figures over a trace's clock: worked out by hand from what ran when."""

from __future__ import annotations

from typing import Any

from lightning_flops.trace.counters import counter_tracks
from tests.analysis.trace_events import Event, kernel, memory, operator, trace


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
