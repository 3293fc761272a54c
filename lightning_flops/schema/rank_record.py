"""What each rank sends to the rank that reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_flops.records import RunContext
from lightning_flops.schema.communication import CollectiveCalls, Integers, Overlap
from lightning_flops.schema.step import DtypeFlops, StepFlops, TimingProfile
from lightning_flops.schema.trace import TracedPart


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank's window in few numbers, those of one global step unless said."""

    context: RunContext
    profile_step: int
    counted_steps: int
    """How many steps were counted."""
    samples: float | None
    tokens: float | None
    params: int | None
    """Of the whole model; of a pipeline's stage."""
    trainable_params: int | None
    local_params: int | None
    """Parameters that this rank holds in memory."""
    flops: StepFlops
    dtypes: tuple[DtypeFlops, ...]
    """Over all counted steps."""
    peaks_flops_per_sec: Mapping[str, float]
    """Dense peak of the rank's device in every dtype for which it is known."""
    lower_bound: bool
    timing: TimingProfile | None
    """None if no step was timed."""
    peak_memory_bytes: int | None
    traced_step: int | None
    """Index of the step that was traced; None if none was."""
    traced_steps: int
    """How many steps the trace holds; 0 without one."""
    traced_parts: tuple[TracedPart, ...]
    """Where the time of the traced step went; empty without a trace."""
    overlap: Overlap | None
    """Of the traced step; None without collectives."""
    modules_clock: Literal["host", "device", "borders"] | None
    """Clock of the modules' times; None without such."""
    notes: int
    """How many notes the rank's own report has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank sends to the one that reports."""

    summary: RankSummary
    module_names: tuple[str, ...] = ()
    """Modules with times, in tree order."""
    own_forward_ns: Integers
    """Of each of them in the traced step, without the modules below it."""
    own_backward_ns: Integers
    """Of their backwards; empty if backwards were not timed."""
    collectives: tuple[CollectiveCalls, ...] = ()
    """Of the traced steps, call by call."""
    left_out: tuple[str, ...] = ()
    """What did not fit, in sentences."""

    @property
    def rank(self) -> int:
        """Number of the rank in the job."""
        return self.summary.context.rank
