"""All ranks of a job together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_flops.schema.communication import RankComparison
from lightning_flops.schema.step import JobRates, StepFlops


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Ranks whose devices are alike."""

    device_name: str
    """Name of the device, as the driver has it."""
    ranks: int
    """How many there are."""
    peak_flops_per_sec: float | None
    """Dense peak of one of them for the dtypes of the job's model FLOPs; None if that of one dtype is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """One rank in a few figures of one step."""

    rank: int
    """Number of the rank."""
    stage: int
    """Stage of the pipeline, the first being 0."""
    model_flops: int
    """Forward + backward of one step on this rank."""
    parts_sec: Mapping[str, float]
    """Mean of each part of a step, which add up to it; empty if no step was timed."""
    local_params: int | None
    """Parameters that the rank holds in memory."""
    peak_memory_bytes: int | None
    """Peak memory of tensors on its device, or of its process on the host; None if it was not looked at."""
    traced: bool
    """Whether its traced step separates its own work from waiting for other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProfile:
    """One stage of a pipeline, of one copy of the model."""

    stage: int
    """Number of the stage in the pipeline, the first being 0."""
    params: int | None
    """Unique logical parameters of the stage; None if not known."""
    trainable_params: int | None
    """Parameters that need a gradient."""
    flops: StepFlops
    """FLOPs of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that the others wait for; seconds are of one step."""

    rank: int
    """Number of the rank."""
    late_sec: float
    """How much longer its own work takes than the median of the other ranks': so long they wait for it."""
    share: float
    """``late_sec`` ÷ the other ranks' median step."""
    part: str | None
    """The part of a step, as in ``PartTiming``, that has most of it; None if no part has half of it."""
    part_sec: float | None
    """How much longer that part takes than on the median of the other ranks."""
    module: str | None
    """Qualified name of the module that has at least half of that, children left out; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAbsence:
    """A rank whose measurements are missing in the merged report."""

    rank: int
    """Number of the rank."""
    reason: str
    """Why, as the end of a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksProfile:
    """All ranks of a job together; every figure is of those that answered, and of one global step."""

    world_size: int
    """Ranks of the job."""
    absences: tuple[RankAbsence, ...]
    """Every other rank, by number."""
    flops: StepFlops
    """FLOPs of all ranks, added up."""
    flops_of_model: StepFlops | None
    """FLOPs of one copy of the model: summed over the ranks that see the same data, averaged over those that see
    different data, rounded to whole FLOPs. None if no rank of some stage of the pipeline answered."""
    lower_bound: bool
    """Whether these FLOPs are lower bounds, because those of some rank are."""
    params: int | None
    """Unique logical parameters of the whole model, the stages of a pipeline added up; None if a stage is missing."""
    trainable_params: int | None
    """Parameters that need a gradient."""
    devices: tuple[DeviceGroup, ...]
    """Most ranks first."""
    peak_flops_per_sec: float | None
    """Sum of the devices' peaks; None if one is not known."""
    rates: JobRates
    """Ratios of all ranks together."""
    unavailable: Mapping[str, str]
    """Why a rate (by its field's name) is None, in a few words."""
    stages: tuple[StageProfile, ...]
    """Stages of a pipeline; empty where there is none."""
    communication: RankComparison | None
    """In the traced steps; None if fewer than two ranks' traces show any."""
    stragglers: tuple[Straggler, ...]
    """Ranks that the others wait for, the one that they wait for longest first; empty where all keep pace."""
    left_out: tuple[str, ...]
    """What did not fit into the records, in sentences."""
    ranks: tuple[RankFigures, ...]
    """Each rank that answered, by number."""

    @property
    def answered(self) -> int:
        """Ranks whose measurements are in here."""
        return len(self.ranks)
