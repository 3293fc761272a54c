"""What the forwards of one model spent: FLOPs that were counted and seconds that were measured, module by module."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.analysis.module_names import parent_name, with_those_below
from lightning_flops.analysis.module_tree import build_modules
from lightning_flops.records import OUTSIDE, ModuleRecord, PhaseFlops
from lightning_flops.schema.forward import (
    EngineRecord,
    ForwardMeasurement,
    ForwardModule,
    ForwardProfile,
    TimedCalls,
)
from lightning_flops.schema.modules import ModuleProfile


def build_forward_profile(
    *,
    records: tuple[ModuleRecord, ...],
    measurement: ForwardMeasurement,
    ignored: Collection[str] = (),
    engine: EngineRecord | None = None,
) -> ForwardProfile:
    """The profile of a model whose modules are *records*.

    Args:
        records: every module of the model.
        measurement: what was counted and timed.
        ignored: names of modules that get nothing of their own: their work counts for the module around them. The
            root cannot be ignored.
        engine: the run around the model, if an engine drives it.
    """
    flops = measurement.flops
    notes = list(flops.notes)
    own_sec = measurement.own_sec
    if own_sec is None:
        notes.append("Latencies are n/a: this package has no clock for this device, or for these devices together.")
    elif measurement.counted_calls != measurement.timed_calls:
        own_sec = None
        notes.append(
            f"Latencies are n/a: {measurement.counted_calls} calls of the model were counted and "
            f"{measurement.timed_calls} were timed."
        )
    elif measurement.timed_while_counted:
        notes.append(
            "Latencies were taken while counting, and counting takes time: they are upper bounds, and FLOPS are lower "
            "bounds. get_model_profile() times a forward of its own; in a loop, start_profile(count=False) times the "
            "forwards up to stop_profile() and keeps the counts."
        )
    if ignored:
        cells = tuple(replace(cell, module=_not_ignored(cell.module, ignored)) for cell in flops.cells)
        flops = replace(flops, cells=cells)
    counts = FlopCounts(flops)
    modules = build_modules(records, counts)
    seconds = _total_seconds(modules, own_sec, ignored)
    return ForwardProfile(
        modules=tuple(
            ForwardModule(module=module, seconds=None if seconds is None else seconds[module.name])
            for module in modules
        ),
        outside=counts.own_by_module().get(OUTSIDE, PhaseFlops()),
        uncounted=flops.uncounted,
        notes=tuple(notes),
        timed_while_counted=measurement.timed_while_counted and seconds is not None,
        calls=measurement.calls,
        engine=engine,
    )


def build_timed_calls(seconds: Sequence[float], *, samples: int | None) -> TimedCalls | None:
    """Mean and spread of calls that took these *seconds*, with so many *samples* in each; None without calls."""
    if not seconds:
        return None
    return TimedCalls(
        number=len(seconds),
        mean_sec=math.fsum(seconds) / len(seconds),
        minimum_sec=min(seconds),
        median_sec=statistics.median(seconds),
        maximum_sec=max(seconds),
        samples=samples,
    )


def _not_ignored(name: str, ignored: Collection[str]) -> str:
    """The innermost module at or around *name* that is not ignored."""
    while name and name in ignored:
        name = parent_name(name)
    return name


def _total_seconds(
    modules: tuple[ModuleProfile, ...], own_sec: Mapping[str, float] | None, ignored: Collection[str]
) -> dict[str, float] | None:
    """Seconds of each module with those below it, so that a parent's are its own and its children's."""
    if own_sec is None:
        return None
    known = {module.name for module in modules}
    own: defaultdict[str, float] = defaultdict(float)
    for name, spent in own_sec.items():
        owner = _not_ignored(name, ignored)
        while owner not in known:  # timed in a later call than the one that was described
            owner = parent_name(owner)
        own[owner] += spent
    total = with_those_below(own, 0.0)
    return {name: total.get(name, 0.0) for name in known}
