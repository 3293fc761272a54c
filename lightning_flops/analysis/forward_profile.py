"""What the forwards of one model spent: FLOPs that were counted and seconds that were measured, module by module."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.analysis.module_names import parent_name
from lightning_flops.analysis.module_tree import build_modules
from lightning_flops.analysis.rates import per_second
from lightning_flops.records import OUTSIDE, FlopRecord, ModuleRecord, PhaseFlops, UncountedOperator
from lightning_flops.schema.modules import ModuleProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardMeasurement:
    """What was heard of one model's forwards, some of which were counted and some timed."""

    flops: FlopRecord
    own_sec: Mapping[str, float] | None
    """Seconds of each module without those below it; None if the device's time cannot be read."""
    counted_calls: int
    """Outermost calls that were counted."""
    timed_calls: int
    """Outermost calls that were timed."""
    timed_while_counted: bool
    """The timed calls are the counted ones, which take longer than others."""
    whole_sec: float | None = None
    """Seconds of as many calls to which nothing listened, if there were any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """What a training engine knows of the run around the model; the seconds are of its last step."""

    world_size: int
    dp_size: int
    """Ranks that see different data."""
    tp_size: int
    micro_batch_size: int
    backward_sec: float | None = None
    """None unless the engine times its steps."""
    optimizer_sec: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardModule:
    """One module with everything below it."""

    module: ModuleProfile
    seconds: float | None

    @property
    def macs(self) -> int:
        """Multiply-adds of the forward."""
        return self.module.total.forward // 2

    @property
    def flops_per_sec(self) -> float | None:
        """Forward FLOP/s."""
        return per_second(amount=self.module.total.forward, seconds=self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardProfile:
    """The forwards of one model, ready for a report."""

    modules: tuple[ForwardModule, ...]
    """In tree order; the first is the root."""
    outside: PhaseFlops
    """FLOPs of what no module of the model owns."""
    uncounted: Mapping[str, UncountedOperator]
    notes: tuple[str, ...]
    timed_while_counted: bool
    """The seconds are upper bounds and the rates lower bounds: counting takes time."""
    whole_sec: float | None = None
    """Seconds of the same calls when nothing listened to the modules; None if there were no such calls."""
    engine: EngineRecord | None = None

    @property
    def root(self) -> ForwardModule:
        """The model itself, all of it."""
        return self.modules[0]

    @property
    def forward_sec(self) -> float | None:
        """Seconds of the model: those that no module was timed in, where they are known."""
        return self.root.seconds if self.whole_sec is None else self.whole_sec

    @property
    def flops(self) -> PhaseFlops:
        """FLOPs of the model by phase; DeepSpeed's total is ``forward``."""
        return self.root.module.total

    @property
    def lower_bound(self) -> bool:
        """Whether something that may have spent FLOPs could not be counted."""
        return any(operator.heavy for operator in self.uncounted.values())


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
        ignored: names of modules that get nothing of their own: their work is that of the module around them. The
            root cannot be ignored.
        engine: the run around the model, if an engine drives it.
    """
    flops = measurement.flops
    notes = list(flops.notes)
    own_sec = measurement.own_sec
    if own_sec is None:
        notes.append("Latencies are n/a: no clock of ours reads this device, or these devices together.")
    elif measurement.counted_calls != measurement.timed_calls:
        own_sec = None
        notes.append(
            f"Latencies are n/a: {measurement.counted_calls} calls of the model were counted and "
            f"{measurement.timed_calls} were timed."
        )
    elif measurement.timed_while_counted:
        notes.append(
            "Latencies were taken while counting, which takes time itself: they are upper bounds, and FLOPS are lower "
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
        whole_sec=measurement.whole_sec,
        engine=engine,
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
    total = dict.fromkeys((module.name for module in modules), 0.0)
    for name, spent in own_sec.items():
        owner = _not_ignored(name, ignored)
        while owner not in total:  # timed in a later call than the one that was described
            owner = parent_name(owner)
        total[owner] += spent
    for module in reversed(modules):  # those below a module come after it
        if module.name:
            total[parent_name(module.name)] += total[module.name]
    return total
