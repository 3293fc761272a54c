"""The forwards of one model: what was heard of them, and what the report in DeepSpeed's layout is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_flops.records import FlopRecord, PhaseFlops, UncountedOperator
from lightning_flops.schema.modules import ModuleProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCalls:
    """Calls of the model that were timed as a whole, while nothing listened to its modules."""

    number: int
    mean_sec: float
    minimum_sec: float
    median_sec: float
    maximum_sec: float
    samples: int | None
    """Samples in each call; None if its input does not tell."""


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
    calls: TimedCalls | None = None
    """Calls to which nothing listened, if there were any, each like all of the counted ones together."""


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
    calls: TimedCalls | None = None
    """The same calls when nothing listened to the modules; None if there were no such calls."""
    engine: EngineRecord | None = None

    @property
    def root(self) -> ForwardModule:
        """The model itself, all of it."""
        return self.modules[0]

    @property
    def forward_sec(self) -> float | None:
        """Seconds of the model: those that no module was timed in, where they are known."""
        return self.root.seconds if self.calls is None else self.calls.mean_sec

    @property
    def flops(self) -> PhaseFlops:
        """FLOPs of the model by phase; DeepSpeed's total is ``forward``."""
        return self.root.module.total

    @property
    def lower_bound(self) -> bool:
        """Whether something that may have spent FLOPs could not be counted."""
        return any(operator.heavy for operator in self.uncounted.values())
