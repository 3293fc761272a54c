"""Where each step's wall time went: one name for every moment of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace.columns import Trace
from lightning_flops.analysis.trace.durations import NS_PER_US
from lightning_flops.analysis.trace.intervals import Intervals, covered_within, union
from lightning_flops.analysis.trace.names import Kind, is_data_loader


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Microseconds of a step by what filled them; the parts add up to the step's wall time.

    A moment that several kinds of events share belongs to the first of them in the order of the fields, the priority
    of the PyTorch profiler's step-time breakdown: so ``communication_us`` is only what no kernel or copy hides, and
    ``data_loader_us`` only what the device and its launches leave.
    """

    number: int | None
    """The profiler's number of the step; None for the mean of several, and where the whole trace stands as one."""
    wall_us: float
    kernel_us: float | None
    """Kernels other than collectives'. None, like the next two and the runtime's, when the trace has no device."""
    memcpy_us: float | None
    memset_us: float | None
    communication_us: float | None
    """None when the trace has no collectives at all."""
    runtime_us: float | None
    data_loader_us: float | None
    """None when the trace shows no ``DataLoader``."""
    cpu_us: float | None
    """Operators on the host; None when none was recorded."""
    other_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Every step's breakdown, and their mean."""

    marked: bool
    """False when the trace has no profiler steps: the whole trace then stands as one step."""
    steps: tuple[StepTime, ...]
    mean: StepTime


def step_times(trace: Trace) -> StepTimes:
    """The breakdown of each step of *trace*."""
    steps = trace.steps
    wall = steps.end_ns - steps.start_ns
    covered = Intervals(wall[:0], wall[:0])
    before = np.zeros(len(steps), dtype=np.int64)
    parts = {}
    unknown = set() if trace.has_device else {"kernel_us", "memcpy_us", "memset_us", "runtime_us"}
    for name, rows in _parts(trace):
        if name in ("communication_us", "data_loader_us", "cpu_us") and not rows.any():
            unknown.add(name)
        covered = union(covered, trace.merged(rows))
        reached = covered_within(covered, steps.start_ns, steps.end_ns)
        parts[name] = (reached - before).tolist()
        before = reached
    parts["other_us"] = (wall - before).tolist()
    parts["wall_us"] = wall.tolist()

    def step(number: int | None, values: dict[str, int], count: int) -> StepTime:
        shown = {name: None if name in unknown else total / (NS_PER_US * count) for name, total in values.items()}
        return StepTime(number=number, **shown)  # type: ignore[arg-type]  # only the unknown may be None

    return StepTimes(
        marked=steps.marked,
        steps=tuple(
            step(number, {name: values[index] for name, values in parts.items()}, 1)
            for index, number in enumerate(steps.numbers)
        ),
        mean=step(None, {name: sum(values) for name, values in parts.items()}, len(steps)),
    )


def _parts(trace: Trace) -> list[tuple[str, npt.NDArray[np.bool_]]]:
    kind, collective = trace.kind, trace.is_collective
    return [
        ("kernel_us", (kind == Kind.KERNEL) & ~collective),
        ("memcpy_us", kind == Kind.MEMCPY),
        ("memset_us", kind == Kind.MEMSET),
        ("communication_us", collective),
        ("runtime_us", kind == Kind.RUNTIME),
        ("data_loader_us", (kind == Kind.ANNOTATION) & trace.names_where(is_data_loader)),
        ("cpu_us", kind == Kind.OPERATOR),
    ]
