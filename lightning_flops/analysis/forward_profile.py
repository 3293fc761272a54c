"""The forwards of one model as a profile of one step: FLOPs that were counted and seconds that were measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace

from lightning_flops.analysis.flop_counts import flops_by_phase
from lightning_flops.analysis.module_names import parent_name
from lightning_flops.analysis.profile import build_profile
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import (
    OUTSIDE,
    FlopRecord,
    ModuleRecord,
    PhaseSeconds,
    RunContext,
    StepRecord,
    StepSignature,
    WindowRecord,
)
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import TracedStep


def build_forward_profile(
    *,
    records: tuple[ModuleRecord, ...],
    flops: FlopRecord,
    own_sec: Mapping[str, float] | None,
    calls: tuple[int, int],
    timed_while_counted: bool,
    calls_sec: tuple[float, ...],
    context: RunContext,
    recompute_fwd_factor: float = 0.0,
    engine_sec: PhaseSeconds | None = None,
    ignored: Collection[str] = (),
) -> Profile:
    """The profile of a model whose modules are *records*; all calls together stand for one step.

    Args:
        records: every module of the model.
        flops: of the calls that were counted.
        own_sec: seconds of each module without those below it; None if the device's time cannot be read.
        calls: how many outermost calls were counted, and timed.
        timed_while_counted: the timed calls are the counted ones, which take longer than others.
        calls_sec: seconds of calls to which nothing listened, each like all counted ones together.
        context: the run around the model; its micro_batch_size is how many samples the counted calls have.
        recompute_fwd_factor: forwards that a backward repeats, for estimated figures.
        engine_sec: seconds of the backward and the optimizer in the same step, if an engine knows them.
        ignored: modules whose work counts for the module around them; the root cannot be ignored.
    """
    notes = []
    if own_sec is None:
        notes.append("Latencies are n/a: this package has no clock for this device, or for these devices together.")
    elif calls[0] != calls[1]:
        own_sec = None
        notes.append(f"Latencies are n/a: {calls[0]} calls of the model were counted and {calls[1]} were timed.")
    elif timed_while_counted:
        notes.append(
            "Latencies were taken while counting, and counting takes time: they are upper bounds, and FLOPS are lower "
            "bounds. get_model_profile() times a forward of its own; in a loop, start_profile(count=False) times the "
            "forwards up to stop_profile() and keeps the counts."
        )
    outside = flops_by_phase([cell for cell in flops.cells if cell.module == OUTSIDE])
    cells = tuple(
        replace(cell, module=_not_ignored(cell.module, ignored)) for cell in flops.cells if cell.module != OUTSIDE
    )
    step = StepRecord(
        index=0,
        signature=StepSignature(batches=(), forwards=1, backwards=0, updates=0),
        micro_steps=1,
        samples=context.micro_batch_size,
    )
    forward_sec = () if own_sec is None else calls_sec or (math.fsum(own_sec.values()),)
    known = engine_sec or PhaseSeconds()
    window = WindowRecord(
        profile_step=0,
        context=context,
        modules=records,
        flops=replace(flops, cells=cells),
        counted_steps=(step,),
        timed_steps=tuple(replace(step, seconds=replace(known, forward=seconds)) for seconds in forward_sec),
        timing_steps=len(forward_sec),
        notes=tuple(notes),
    )
    traced = None
    if own_sec is not None:
        by_owner: defaultdict[str, float] = defaultdict(float)
        for name, seconds in own_sec.items():
            by_owner[_not_ignored(name, ignored)] += seconds
        traced = TracedStep(index=0, like_counted=True, files=(), tables=None, own_forward_sec=by_owner)
    config = ProfilerConfig(recompute_fwd_factor=recompute_fwd_factor)
    return replace(build_profile(window, config=config, traced=traced), outside=outside)


def _not_ignored(name: str, ignored: Collection[str]) -> str:
    """The innermost module at or around *name* that is not ignored."""
    while name and name in ignored:
        name = parent_name(name)
    return name
