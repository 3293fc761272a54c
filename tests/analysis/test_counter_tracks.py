"""Figures over a trace's clock: worked out by hand from what ran when."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_flops.analysis.trace.counters import counter_tracks, flops_by_part
from lightning_flops.instrument.counting.recorded_calls import recorded_work
from lightning_flops.records import CounterTrack, OperatorCell
from tests.analysis.trace_events import Event, kernel, launch, memory, operator, phase, step, trace

PEAKS = {"float32": 1e12}


def mm(start: float, length: float, **more: Any) -> Event:
    """A product of 10 x 10 matrices: 2000 FLOPs."""
    shapes: dict[str, Any] = {
        "Input Dims": [[10, 10], [10, 10]],
        "Input type": ["float", "float"],
        "Concrete Inputs": ["", ""],
        "Input Strides": [[10, 1], [10, 1]],
    }
    return operator("aten::mm", start, length, **shapes, **more)


def tracks(
    *events: Event, parts: Any = None, peaks: dict[str, float] | None = None, shapes: bool = True
) -> dict[str, list[tuple[int, float]]]:
    """Times in microseconds and values of each track, by its name."""
    found = counter_tracks(
        trace(*events),
        parts=parts or {},
        formulas=recorded_work if shapes else None,
        peaks=PEAKS if peaks is None else peaks,
    )
    assert all(list(one.times_ns) == sorted(set(one.times_ns)) for one in found)
    return {one.name: points(one) for one in found}


def points(track: CounterTrack) -> list[tuple[int, float]]:
    return [(time // 1000, value) for time, value in zip(track.times_ns, track.values, strict=True)]


def test_on_the_host_a_call_has_its_flops_over_its_own_time() -> None:
    found = tracks(step(1, 0, 100), mm(10, 20), mm(30, 5), operator("aten::relu", 50, 10))
    # 2000 FLOPs in 20 and in 5 us, of 1 TFLOP/s.
    assert found == {
        "FLOP/s by operator": [(10, 1e8), (30, 4e8), (35, 0.0)],
        "share of peak by operator": [
            (10, pytest.approx(0.01)), (30, pytest.approx(0.04)), (35, 0.0)
        ],
    }  # fmt: skip


def test_on_a_device_a_call_has_its_flops_over_the_time_of_its_kernels() -> None:
    found = tracks(
        step(1, 0, 100),
        mm(0, 10),
        *(launch(1, 1), kernel(1, 20, 10), launch(2, 3), kernel(2, 40, 30)),  # 2000 FLOPs in 40 us
        mm(12, 4),
        *(launch(3, 13), kernel(3, 60, 20, stream=8)),  # 2000 in 20 us, beside the other
        *(operator("aten::relu", 17, 2), launch(4, 17), kernel(4, 82, 5)),
    )
    assert found["FLOP/s by operator"] == [
        *((20, 5e7), (30, 0.0), (40, 5e7), (60, pytest.approx(1.5e8)), (70, pytest.approx(1e8)), (80, 0.0)),
    ]
    area = sum(
        value * (later[0] - time) * 1e-6
        for (time, value), later in zip(found["FLOP/s by operator"], found["FLOP/s by operator"][1:], strict=False)
    )
    assert area == pytest.approx(4000)


def test_a_part_of_a_step_has_the_counted_flops_over_its_time() -> None:
    parts = {"forward": {"float32": 3000.0}, "backward": {"float32": 4000.0, "float16": 2000.0}}
    events = [
        *(step(1, 0, 100), phase("forward", 10, 20), phase("backward", 40, 20), phase("forward", 70, 10)),
        operator("aten::relu", 11, 1),
        *(step(2, 100, 100), phase("forward", 100, 50), operator("aten::relu", 101, 1)),
    ]
    found = tracks(*events, parts=parts)
    # The two forwards of step 1 take 30 us together, the one of step 2 takes 50.
    assert found == {
        "FLOP/s by part of the step": [
            *((10, 1e8), (30, 0.0), (40, 3e8), (60, 0.0), (70, 1e8), (80, 0.0), (100, 6e7), (150, 0.0)),
        ]
    }  # and no share of the peak, as that of float16 is not known
    both = tracks(*events, parts=parts, peaks={"float32": 1e12, "float16": 2e12})["share of peak by part of the step"]
    # 4000 / 1e12 + 2000 / 2e12 are 5 ns, of 20 us.
    assert both[2][0] == 40 and both[2][1] == pytest.approx(0.025)


def test_memory_has_what_is_allocated_and_reserved_of_each_device() -> None:
    def at(start: float, size: int, total: int, reserved: int, device: int | None = 0) -> Event:
        more: dict[str, Any] = {"Addr": 1, "Total Allocated": total, "Total Reserved": reserved}
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


def test_there_is_no_track_without_a_figure() -> None:
    assert tracks(step(1, 0, 10), operator("aten::relu", 1, 2)) == {}
    assert tracks(step(1, 0, 100), mm(10, 20), shapes=False) == {}
    assert tracks(step(1, 0, 100), mm(10, 20), peaks={}).keys() == {"FLOP/s by operator"}
    assert (
        tracks(step(1, 0, 10), phase("forward", 1, 0), operator("aten::relu", 5, 1), parts={"forward": {"f": 1.0}})
        == {}
    )


def test_counted_cells_are_added_up_by_part_as_a_mean_of_steps() -> None:
    def cell(phase: Any, flops: int, dtype: str = "float32", skipped: int = 0) -> OperatorCell:
        return OperatorCell(
            module="", phase=phase, operator="aten.mm", dtype=dtype, flops=flops, causal_skipped=skipped
        )

    cells = [cell("forward", 10), cell("forward", 30, skipped=10), cell("backward", 40), cell("recompute", 20)]
    assert flops_by_part([*cells, cell("backward", 2, "float16"), cell("optimizer", 0)], steps=2) == {
        "forward": {"float32": 15.0},
        "backward": {"float32": 30.0, "float16": 1.0},
    }
