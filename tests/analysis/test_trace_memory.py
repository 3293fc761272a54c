"""Who allocates memory in a trace, and when; all bytes are added up by hand from the events above them."""

from __future__ import annotations

from typing import Any

from lightning_flops.schema.trace_events import MemoryCurve
from lightning_flops.trace.tables import counter_tracks, memory_curves
from tests.analysis.in_memory import known
from tests.analysis.trace_events import Event, kernel, memory, operator, step, trace


def at(start: float, size: int, total: int, device: int | None = 0) -> Event:
    """An allocation or a free, as torch has written it since 2.0."""
    more: dict[str, Any] = {"Total Allocated": total}
    return memory(start, size, device=device, **more)


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


# ---- figures over a trace's clock: worked out by hand from what ran when


def tracks(*events: Event) -> dict[str, list[tuple[int, float]]]:
    """Times in microseconds and values of each track, by its name."""
    found = tuple(counter_tracks(trace(*events)))
    assert all(one.times_ns == sorted(set(one.times_ns)) for one in found)
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


def test_memory_has_what_is_allocated_of_each_device() -> None:
    events = [*(at(3, -20, 10), at(1, 10, 30), at(5, 10, 20)), at(2, 5, 5, device=None)]
    assert tracks(operator("aten::relu", 0, 1), *events) == {
        "memory allocated, host": [(2, 5)],
        "memory allocated, device 0": [(1, 30), (3, 10), (5, 20)],
    }
    old = tracks(operator("aten::mm", 0, 1), memory(1, 100), memory(3, 50), memory(3, -120))
    assert old == {"memory allocated since the trace began, host": [(1, 100), (3, 30)]}
