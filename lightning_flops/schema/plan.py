"""What is known before a step runs: the memory that it needs, its FLOPs as a formula, and the plan of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_flops.records import FlopRecord, MemoryKind, PhaseFlops, StepTensors
from lightning_flops.schema import codec


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMoment:
    """When most is held."""

    part: str  #: Of the step: ``forward``, ``backward`` or ``optimizer``.
    module: str  #: Whose code runs then; ``(outside)`` of none of the model's.
    operator: str  #: The operator that allocates the last of it.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """What one module's own code allocates, without the modules inside it."""

    name: str  #: Its qualified name.
    kept_bytes: int  #: Kept by one forward for its backward.
    #: Activations and temporary tensors that are held at the peak.
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointedBlocks:
    """What it saves to repeat equal blocks in the backward (``torch.utils.checkpoint``)."""

    names: tuple[str, ...]  #: Of the blocks.
    peak_bytes: int  #: Of the step with them.
    recompute_flops: int  #: What the backward then repeats.
    model_flops: int  #: Forward and backward of the step.


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch that fits, and the line that the peak follows there."""

    size: int  #: 0: not one sample fits.
    peak_bytes: int | None = None  #: With it; None where none fits, and of a step that ran.
    #: What a sample more adds to that, by a batch an eighth larger; None where none fits, no more can be run, and of a
    #: step that ran.
    bytes_per_sample: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport(codec.Json):
    """Peak memory of a training step, predicted or followed: what is held then, and who allocates it."""

    schema_version: int = 1  #: Version of the JSON; another one has other fields.
    peak_bytes: int  #: Most that tensors hold.
    batch_size: int | None  #: First axis of the batch's first tensor.
    at_peak: Mapping[MemoryKind, int]  #: Bytes of each kind at the peak, the most first.
    when: PeakMoment  #: When that is.
    modules: tuple[ModuleMemory, ...]  #: Those that keep most first.
    flops: int  #: Model FLOPs of the step.
    available_bytes: int | None  #: What may be held; None: it is not known.
    #: None: it was not asked for. Of a step that ran, as if all grew with the batch but parameters, gradients and
    #: what the optimizer holds, which is at most what fits.
    largest: LargestBatch | None
    checkpointed: CheckpointedBlocks | None  #: None: no blocks repeat, or it was not asked for.
    notes: tuple[str, ...]  #: What is not in it.


# The kind, as ``all_reduce``, and the ranks that take part, of the whole job.
Collective = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRank:
    """One training step of one rank of a job that does not run."""

    mesh: Mapping[str, int]  # size of each dimension; ranks count along the last one first
    rank: int
    flops: FlopRecord
    params: int  # of the whole model
    local_params: int  # that the rank holds
    collectives: Mapping[Collective, Sequence[int]]  # bytes of each call in a step, of its larger side
    tensors: StepTensors | None  # every allocation of the step; None where not all are seen


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """What one kind of collective moves along dimensions of the mesh, in one step of this rank."""

    kind: str  #: ``all_reduce``, ``all_gather``, ``reduce_scatter`` …
    dim: str  #: The dimensions in which its ranks differ, joined by ``+``; empty of one rank alone.
    size: int  #: How many ranks take part.
    calls: int  #: In one step.
    #: Of all calls: of the larger side, which is what an all-gather puts out, and what a reduce-scatter takes.
    bytes: int
    floor_sec: float | None  #: Of all calls, by a ring over the given link; None if its bandwidth was not given.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """What so many steps take of the job."""

    at: str  #: ``the floor``, or as if a step had an MFU of 40%.
    steps: int  #: Of the run.
    hours: float  #: That it lasts.
    device_hours: float  #: Times all devices.
    price: float | None  #: Times the price of a device hour; None if it was not given.


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(codec.Json, codec.Printed):
    """One rank of a job, counted in a process without the job: what its step computes and sends, and its floor.

    A floor is what no step of these operators can go below. It is not a forecast.
    """

    schema_version: int = 2  #: Version of the JSON; another one has other fields.
    mesh: Mapping[str, int]  #: Size of each dimension.
    rank: int  #: Whose figures these are.
    at: Mapping[str, int]  #: Sizes that the batch was brought to; empty: those that the function returned.
    flops: PhaseFlops  #: Of one step of this rank, exact; a multiply-add is two.
    lower_bound: bool  #: An operator that may have FLOPs could not be counted.
    params: int  #: Of the whole model.
    local_params: int  #: That this rank holds.
    memory: MemoryReport | None  #: What this rank's tensors hold at the peak of the step; None where not all are seen.
    collectives: tuple[PlannedCollective, ...]  #: Those that move most first.
    unused: tuple[str, ...]  #: Dimensions of several ranks along which nothing is sent, but for those of a pipeline.
    device: str  #: Whose figures the floor is by; empty if none was given.
    peaks_flops_per_sec: Mapping[str, float]  #: Dense peak of each dtype that the step computes in.
    memory_bytes_per_sec: float | None  #: Bandwidth of the device's memory.
    arithmetic_sec: float | None = None  #: FLOPs that kernels execute ÷ peak: nothing that computes them is faster.
    #: Sum over operators that have FLOPs of the longer of FLOPs ÷ peak and bytes ÷ bandwidth of the memory.
    operators_sec: float | None = None
    communication_sec: float | None = None  #: Of all collectives, one after the other.
    floor_sec: float | None = None  #: Of the step, with all communication hidden behind operators, or these behind it.
    exposed_floor_sec: float | None = None  #: Of the step, with nothing hidden: operators, then communication.
    #: MFU of a step that takes ``floor_sec``, by the FLOPs that kernels execute: of causal attention those unmasked.
    mfu_at_most: float | None = None
    stages: tuple[PhaseFlops, ...]  #: FLOPs of each stage of this rank's pipeline in a step; empty without one.
    bubble: float | None  #: Share of a step in which a stage waits, if all take equally long; None of no pipeline.
    runs: tuple[PlannedRun, ...]  #: If a number of steps was given, and there is a floor; none that is below it.
    unavailable: Mapping[str, str]  #: Why a figure is None.
    notes: tuple[str, ...]  #: What the figures leave out.


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaSize:
    """A size that the FLOPs depend on."""

    name: str  #: Such as ``batch`` or ``sequence``.
    least: int  #: The least that was counted.
    greatest: int  #: The greatest that was counted.
    apart: int  #: Greatest common distance of the counted values; sizes between them are not covered by the formula.


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaTerm:
    """One product of a bucket's sum: numerator / denominator x each size to its power."""

    bucket: str  #: The phase whose sum it is part of.
    dtype: str  #: Dtype of the arithmetic.
    numerator: int  #: Numerator of the exact coefficient.
    denominator: int  #: Denominator of the coefficient, mostly 1.
    powers: Mapping[str, int]  #: Power of each size in the product.


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedFlops(PhaseFlops):
    """FLOPs of one forward and backward on a batch of these sizes, exact; a multiply-add is two."""

    sizes: Mapping[str, int]  #: Sizes of the batch by name.
    source: Literal["formula", "counted"]  #: Whether the formula gave them, or a count of these very sizes.

    @property
    def model_flops(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def hardware_flops(self) -> int:
        """Forward, backward and recompute."""
        return self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaReport(codec.Json):
    """The formula, what it rests on, and the FLOPs of the sizes that were asked for."""

    schema_version: int = 5  #: Version of the JSON; another one has other fields.
    reason: str | None  #: Why there is no formula, and every size is counted by itself; None if there is one.
    sizes: tuple[FormulaSize, ...]  #: Empty without a formula.
    #: By bucket and dtype, whose FLOPs are the sum of their terms. Empty without a formula.
    terms: tuple[FormulaTerm, ...]
    counted: int  #: Batches of different sizes that were counted.
    checks: int  #: Of these, how many more than the formula needs to be determined.
    lower_bound: bool  #: An operator that may have FLOPs could not be counted.
    asked: tuple[SizedFlops, ...]  #: The latest sizes that were asked for, each once.
