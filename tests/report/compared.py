"""Pairs of runs whose differences can be worked out by hand.

All of them are the MLP of ``windows``: fc1 (400 M forward, 400 M backward), act, fc2 (200 M and 400 M). A step of the
first takes 22 ms: 2 waiting for data, 5 forward, 10 backward, 3 optimizer, 2 the loop's own. In its traced step the
forward is fc1 2 ms, act 0.5, fc2 1, the root 1.5; the backward fc1 3, act 1, fc2 4, and 2 of no module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from lightning_flops.analysis.counts import flops_by_phase, with_those_below
from lightning_flops.analysis.trace_report import analyze_trace
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import (
    FlopRecord,
    ModuleRecord,
    OperatorCell,
    PhaseSeconds,
    ProcessorLoss,
    RunContext,
    RunFacts,
    StepRecord,
    WindowRecord,
)
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.tables import ModuleRow, ModuleTable
from lightning_flops.schema.trace import PartFilling, TracedPart, TracedStep
from tests.analysis.trace_events import step as step_event, trace
from tests.report import windows
from tests.report.windows import build_profile, cell, step

MS = 1_000_000
"""Nanoseconds."""

STEP_MS: Mapping[str, float] = {"data_wait": 2, "forward": 5, "backward": 10, "optimizer": 3, "other": 2}
FORWARD_MS: Mapping[str, float] = {"": 1.5, "fc1": 2, "act": 0.5, "fc2": 1}
BACKWARD_MS: Mapping[str, float] = {"": 0, "fc1": 3, "act": 1, "fc2": 4}
CELLS = (
    cell("fc1", "forward", 400_000_000, operator="aten.addmm"),
    cell("fc2", "forward", 200_000_000, operator="aten.addmm"),
    cell("fc1", "backward", 400_000_000),
    cell("fc2", "backward", 400_000_000),
)
FC1_PARAMS = 2_002_000
STRAYING = (-0.02, 0.02, 0.01, -0.01, 0.02, -0.02, -0.01, 0.01)
"""By which share of its mean a part strays in each of the eight timed steps; they cancel out."""


def timed_steps(mean_ms: Mapping[str, float], straying: Sequence[float] = STRAYING) -> tuple[StepRecord, ...]:
    """Steps whose parts have these means."""
    seconds = [PhaseSeconds(**{name: ms / 1e3 * (1 + off) for name, ms in mean_ms.items()}) for off in straying]
    return tuple(step(5 + place, seconds=one) for place, one in enumerate(seconds))


def traced_step(
    forward_ms: Mapping[str, float],
    backward_ms: Mapping[str, float],
    *,
    backward_rest_ms: float = 2.0,
    clock: Literal["host", "device"] = "host",
    error: float | None = 0.01,
    **step: Any,
) -> TracedStep:
    """A traced step in which each module has this own time; *error* is the standard error of all, as a share of it."""

    own, own_backward = ({name: 1e3 * ms for name, ms in by.items()} for by in (forward_ms, backward_ms))
    whole, whole_backward = with_those_below(own, 0.0), with_those_below(own_backward, 0.0)
    rows = [
        ModuleRow(
            name=name,
            calls=1,
            forward_us=whole[name],
            own_forward_us=us,
            backward_us=whole_backward.get(name, 0.0),
            own_backward_us=own_backward.get(name, 0.0),
            own_error_us=None if error is None else error * (us + own_backward.get(name, 0.0)),
        )
        for name, us in own.items()
    ]
    table = ModuleTable(
        clock=clock,
        steps=1,
        rows=tuple(rows),
        forward_us=sum(own.values()),
        backward_us=sum(own_backward.values()) + 1e3 * backward_rest_ms,
        optimizer_us=3e3,
        gradient_accumulation_us=0.0,
        unattributed_forward_us=0.0,
        unattributed_backward_us=1e3 * backward_rest_ms,
    )
    tables = replace(analyze_trace(trace(step_event(8, 0, 22_000))), modules=table)
    walls_us = {"forward": table.forward_us, "backward": table.backward_us, "optimizer": 3e3}
    parts = tuple(TracedPart(name=name, wall_sec=us / 1e6, exposed_sec=0.0) for name, us in walls_us.items())
    return windows.traced(**{"parts": parts, **step}, tables=tables)


def on_device(
    *, forward_ms: float, busy_ms: float, exposed_ms: float, idle_ms: float, traced_ms: float | None = None
) -> Profile:
    """A run on a device, whose traced forward is so much work of fc1, communication that nothing hides, and idle."""
    traced = traced_step(
        {"": 0, "fc1": busy_ms, "act": 0, "fc2": 0},
        BACKWARD_MS,
        clock="device",
        parts=(
            TracedPart(name="forward", wall_sec=(traced_ms or forward_ms) / 1e3, exposed_sec=exposed_ms / 1e3),
            TracedPart(name="backward", wall_sec=0.01, exposed_sec=0.0),
            TracedPart(name="optimizer", wall_sec=0.003, exposed_sec=0.0),
        ),
        filling={"forward": PartFilling(idle_ns=round(idle_ms * MS))},
    )
    return run(mean_ms={"forward": forward_ms}, traced=traced, context=windows.A100)


def processor(steps: int, *, lost: float = 0.0) -> ProcessorLoss:
    """So many steps of 20 ms of processor time each, whose threads waited for a processor for this share of the time.

    That is more than each of two waited. Of 22 ms that is 45% of two cores, and nothing else runs.
    """
    return ProcessorLoss(
        seconds=0.022 * steps,
        batches_sec=(0.02,) * steps,
        waited_share=lost / 2,
        waits_share=lost,
        busy_share=0.45,
    )


def run(
    *,
    mean_ms: Mapping[str, float] | None = None,
    forward_ms: Mapping[str, float] | None = None,
    backward_ms: Mapping[str, float] | None = None,
    cells: Sequence[OperatorCell] = CELLS,
    modules: Sequence[ModuleRecord] | None = None,
    straying: Sequence[float] = STRAYING,
    context: RunContext | None = None,
    traced: TracedStep | Literal["host"] | None = "host",
    **window: Any,
) -> Profile:
    """The profile of such a run, on a device; what is given stands instead of that of the first."""
    mlp = windows.mlp_window()
    counted = flops_by_phase(cells)
    modules = tuple(modules or (one for one in mlp.modules if one.name != "drop"))
    record = WindowRecord(
        profile_step=3,
        context=context or replace(mlp.context, device_type="xpu", device_name="xpu"),
        modules=modules,
        flops=FlopRecord(cells=tuple(cells), module_calls={one.name: 1 for one in modules}),
        counted_steps=(step(3, flops=counted),),
        timed_steps=timed_steps({**STEP_MS, **(mean_ms or {})}, straying),
        timing_steps=len(straying),
        **{"processor": processor(len(straying)), "facts": RunFacts(cores=2), **window},
    )
    if traced == "host":
        traced = traced_step({**FORWARD_MS, **(forward_ms or {})}, {**BACKWARD_MS, **(backward_ms or {})})
    return build_profile(record, config=ProfilerConfig(peak_flops_per_sec=700e9), traced=traced)


def wider(*, data_wait_ms: float = 2, straying: Sequence[float] = STRAYING) -> Profile:
    """fc1 has twice the FLOPs: forward 4 ms (as fast as before), backward 5 ms (faster by a FLOP)."""
    cells = [replace(one, flops=2 * one.flops) if one.module == "fc1" else one for one in CELLS]
    modules = []
    for one in windows.mlp_window().modules:
        if one.name in ("", "fc1"):
            params, words = one.params + FC1_PARAMS, one.extra_repr.replace("2000", "4000")
            modules.append(replace(one, params=params, trainable_params=params, extra_repr=words))
        elif one.name != "drop":
            modules.append(one)
    return run(
        mean_ms={"data_wait": data_wait_ms, "forward": 7, "backward": 12},
        forward_ms={"fc1": 4},
        backward_ms={"fc1": 5},
        cells=cells,
        modules=modules,
        straying=straying,
    )


def slow_module() -> Profile:
    """Act takes 3 ms longer forward, for the same work."""
    return run(mean_ms={"forward": 8}, forward_ms={"act": 3.5})


def slow_loader() -> Profile:
    """Each batch comes 4 ms later."""
    return run(mean_ms={"data_wait": 6})
