"""A trace for the page, written by hand: two steps on an A100."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.schema.trace import TracesReport
from tests.analysis.in_memory import analyze_traces
from tests.analysis.trace_events import (
    Event,
    data_loader,
    kernel,
    launch,
    memory,
    module,
    operator,
    phase,
    step,
    trace_from_events,
)

A100: Mapping[str, Any] = {
    "deviceProperties": [
        {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108, "computeMajor": 8, "computeMinor": 0}
    ]
}
"""Dense peak in float32 19.5 TFLOP/s, memory 2.039 TB/s."""


def product(number: int, start: float) -> list[Event]:
    """A product of two float32 matrices of 1000 x 1000: 2 GFLOPs, 3 x 4 MB, 20 us on the host and 500 on the device."""
    shapes = {"Input Dims": [[1000, 1000], [1000, 1000]], "Input type": ["float", "float"]}
    more: dict[str, Any] = {**shapes, "Concrete Inputs": ["", ""], "Input Strides": [[1000, 1], [1000, 1]]}
    return [
        operator("aten::mm", start, 20, **more),
        launch(number, start + 5, 10),
        kernel(number, start + 20, 500, name="ampere_sgemm_128x64_nn", grid=[8, 16, 1], block=[128, 1, 1]),
    ]


def events() -> list[Event]:
    """Step 3 of 1000 us, step 4 of 2000, each with one product of the module ``first.linear``, after 50 us of data."""
    made: list[Event] = []
    for number, begin, length in ((3, 0, 1000), (4, 1000, 2000)):
        made += [
            step(number, begin, length),
            data_loader(begin, 50),
            phase("forward", begin + 90, 60),
            module("", begin + 92, 50),
            module("first", begin + 94, 40),
            module("first.linear", begin + 96, 30),
            *product(number, begin + 100),
            # 4 GB are there before the trace; at the peak a product's 2 GB stand beside them.
            _allocation(begin + 101, 2_000_000_000, address=number, in_all=6_000_000_000),
            _allocation(begin + 700, -2_000_000_000, address=number, in_all=4_000_000_000),
        ]
    return made


def _allocation(start: float, size: int, *, address: int, in_all: int) -> Event:
    more: dict[str, Any] = {"Addr": address, "Total Allocated": in_all}
    return memory(start, size, device=0, **more)


def report() -> TracesReport:
    """What the trace says."""
    loaded = trace_from_events(events(), metadata=A100, source="/runs/0/step.pt.trace.json")
    return analyze_traces([loaded], formulas=recorded_work)
