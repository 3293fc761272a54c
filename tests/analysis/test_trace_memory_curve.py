from __future__ import annotations

from typing import Any

from lightning_flops.schema.trace_events import MemoryCurve
from lightning_flops.trace.memory import MOST_POINTS, MOST_SPANS, memory_curves
from tests.analysis.trace_events import Event, data_loader, memory, module, operator, phase, step, trace


def at(start: float, size: int, address: int, total: int) -> Event:
    """An allocation or a free, as torch has written it since 2.0."""
    more: dict[str, Any] = {"Addr": address, "Total Allocated": total}
    return memory(start, size, device=0, **more)


def curve(*events: Event) -> MemoryCurve:
    curves = memory_curves(trace(*events))
    assert curves is not None
    (one,) = curves
    return one


def test_peak_is_held_by_what_was_not_freed_before_it() -> None:
    found = curve(
        step(4, 10, 50),
        step(5, 60, 60),
        module("net.first", 15, 20),
        operator("aten::conv2d", 20, 10),
        operator("aten::empty", 21, 2),
        at(22, 100, 0xA, 1100),
        at(25, 50, 0xB, 1150),
        operator("aten::relu", 70, 10),
        at(72, -50, 0xB, 1100),
        at(74, 700, 0xC, 1800),
        at(90, 30, 0xD, 1830),  # outside of every operator
        at(100, -700, 0xC, 1130),
    )
    assert (found.device, found.absolute) == (0, True)
    assert (found.peak_bytes, found.peak_us) == (1830, 90 - 10)
    assert found.held is not None
    assert [(one.name, one.bytes, one.allocations) for one in found.held] == [
        (None, 1000, None),  # before the trace
        ("aten::relu", 700, 1),
        ("net.first", 100, 1),
        (None, 30, 1),
    ]
    assert [*found.points] == [
        (12, 1100), (15, 1150), (62, 1100), (64, 1800), (80, 1830), (90, 1130)
    ]  # fmt: skip


def test_old_trace_without_totals_shows_the_change_and_not_who_held_it() -> None:
    found = curve(operator("aten::mm", 0, 5), memory(1, 100), memory(3, 50), memory(4, -100))
    assert (found.absolute, found.peak_bytes, found.held, found.device) == (False, 150, None, -1)


def test_long_curve_keeps_its_peaks() -> None:
    events = [memory(2 * number, 1 if number % 2 == 0 else -1) for number in range(5000)]
    events[2345] = memory(2 * 2345, 1000)
    found = curve(operator("aten::mm", 0, 1), *events)
    assert len(found.points) == MOST_POINTS
    assert max(size for _, size in found.points) == found.peak_bytes
    assert memory_curves(trace(operator("aten::mm", 0, 1))) is None


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
