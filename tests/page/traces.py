"""Traces for the page, written by hand: two steps on an A100, two ranks of them, long ones, and hostile names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_flops.instrument.counting.recorded_calls import recorded_work
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
from tests.page.samples import HOSTILE

A100: Mapping[str, Any] = {
    "deviceProperties": [
        {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108, "computeMajor": 8, "computeMinor": 0}
    ]
}
"""Dense peak in float32 19.5 TFLOP/s, memory 2.039 TB/s."""

THOUSAND = "[1000, 1000], [1000, 1000]"
"""Shapes of a product of 2 GFLOPs, which reads and writes 3 x 4 MB."""


def product(number: int, start: float, *, name: str = "aten::mm", runs_us: float = 500) -> list[Event]:
    """A product of two float32 matrices of 1000 x 1000: 20 us on the host, *runs_us* on the device."""
    shapes = {"Input Dims": [[1000, 1000], [1000, 1000]], "Input type": ["float", "float"]}
    more: dict[str, Any] = {**shapes, "Concrete Inputs": ["", ""], "Input Strides": [[1000, 1], [1000, 1]]}
    return [
        operator(name, start, 20, **more),
        launch(number, start + 5, 10),
        kernel(number, start + 20, runs_us, name="ampere_sgemm_128x64_nn", grid=[8, 16, 1], block=[128, 1, 1]),
    ]


def events(*, late_us: float = 0) -> list[Event]:
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
            *product(number, begin + 100, runs_us=500 + late_us),
            # 4 GB are there before the trace; at the peak a product's 2 GB stand beside them.
            _allocation(begin + 101, 2_000_000_000, address=number, in_all=6_000_000_000),
            _allocation(begin + 700, -2_000_000_000, address=number, in_all=4_000_000_000),
        ]
    return made


def _allocation(start: float, size: int, *, address: int, in_all: int) -> Event:
    more: dict[str, Any] = {"Addr": address, "Total Allocated": in_all}
    return memory(start, size, device=0, **more)


def report(*traces: list[Event], ranks: bool = False, device: Mapping[str, Any] = A100) -> TracesReport:
    """What *traces* say, on such a *device*; with *ranks* each says its own."""
    loaded = []
    for rank, one in enumerate(traces):
        info = {"distributedInfo": {"rank": rank, "world_size": len(traces), "backend": "nccl"}} if ranks else {}
        loaded.append(trace_from_events(one, metadata={**device, **info}, source=f"/runs/{rank}/step.pt.trace.json"))
    return analyze_traces(loaded, formulas=recorded_work)


def long(operators: int, steps: int) -> list[Event]:
    """So many operators, each of another name, in each of so many steps."""
    made: list[Event] = []
    for number in range(steps):
        begin = number * 10 * operators
        made.append(step(number, begin, 10 * operators))
        for place in range(operators):
            at, mark = begin + 10 * place, number * operators + place
            made += [
                operator(f"mine::operator_{place}", at, 8, **_of_shape([place])),
                launch(mark, at + 1, 1),
                kernel(mark, at + 2, 1 + place % 5, name=f"kernel_{place}"),
            ]
    return made


def _of_shape(sizes: list[int]) -> dict[str, Any]:
    return {"Input Dims": [sizes], "Input type": ["float"]}


def hostile() -> TracesReport:
    """A trace with markup in every name."""
    made: list[Event] = [step(0, 0, 1000)]
    for place, name in enumerate(HOSTILE):
        begin = 10 + 20 * place
        made += [
            module(f"net.{name}", begin, 15),
            operator(name, begin + 1, 10, **_of_shape([1])),
            launch(place, begin + 2, 1),
            kernel(place, begin + 4, 5, name=name),
            memory(begin + 5, 100),
        ]
    loaded = trace_from_events(made, metadata=A100, source=f"{HOSTILE[1]}.json")
    return analyze_traces([loaded], formulas=recorded_work)
