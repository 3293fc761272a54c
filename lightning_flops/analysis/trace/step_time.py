"""Where each step's wall time went: one name for every moment of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace.columns import Trace
from lightning_flops.analysis.trace.durations import NS_PER_US
from lightning_flops.analysis.trace.event_names import Kind, is_data_loader
from lightning_flops.analysis.trace.intervals import Intervals, covered_within, union
from lightning_flops.schema.trace_steps import StepTime, StepTimes


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
