"""All ranks of a job together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TypeVar

from lightning_flops.schema.communication import RankComparison
from lightning_flops.schema.step import JobRates, StepFlops

_Figure = TypeVar("_Figure", int, StepFlops)


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
    """FLOPs of one step: summed over the ranks that see the same data, averaged over those that see different data,
    rounded to whole FLOPs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that the others wait for; seconds are of one step."""

    rank: int
    """Number of the rank."""
    late_sec: float
    """Time by which its own work takes longer than the others' median: so long they wait for it."""
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

    absences: tuple[RankAbsence, ...]
    """Every rank of the job that did not answer, by number."""
    flops: StepFlops
    """FLOPs of all ranks, added up."""
    devices: tuple[DeviceGroup, ...]
    """Most ranks first."""
    rates: JobRates
    """Ratios of all ranks together."""
    unavailable: Mapping[str, str]
    """Why a rate (by its field's name) is None, in a few words."""
    pipeline_stages: int
    """Stages of the pipeline; 1 without one."""
    stages: tuple[StageProfile, ...]
    """Each stage of which a rank answered, by number; without a pipeline the whole model."""
    communication: RankComparison | None
    """In the traced steps; None if fewer than two ranks' traces show any."""
    stragglers: tuple[Straggler, ...]
    """Ranks that the others wait for, the one that they wait for longest first; empty where all keep pace."""
    notes: tuple[str, ...]
    """What did not fit into the records, and whose FLOPs are lower bounds, in sentences."""
    ranks: tuple[RankFigures, ...]
    """Each rank that answered, by number."""

    @property
    def answered(self) -> int:
        """Ranks whose measurements are in here."""
        return len(self.ranks)

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return len(self.ranks) + len(self.absences)

    @property
    def peak_flops_per_sec(self) -> float | None:
        """Sum of the devices' peaks; None if one is not known."""
        peaks = [(one.ranks, one.peak_flops_per_sec) for one in self.devices]
        known = [ranks * peak for ranks, peak in peaks if peak is not None]
        return sum(known) if len(known) == len(peaks) else None

    @property
    def flops_of_model(self) -> StepFlops | None:
        """FLOPs of one copy of the model; None if no rank of some stage answered."""
        return self._of_model([stage.flops for stage in self.stages])

    @property
    def params(self) -> int | None:
        """Unique logical parameters of the whole model; None if those of a stage are not known."""
        return self._of_model([stage.params for stage in self.stages])

    @property
    def trainable_params(self) -> int | None:
        """Parameters of the whole model that need a gradient."""
        return self._of_model([stage.trainable_params for stage in self.stages])

    def _of_model(self, figures: Sequence[_Figure | None]) -> _Figure | None:
        """The stages' *figures* added up; None if one is missing."""
        known = [one for one in figures if one is not None]
        return reduce(add, known) if len(known) == self.pipeline_stages else None
