"""One rank of a job that does not run yet: what was counted of it, and its plan with its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_flops.records import FlopRecord, PhaseFlops, StepTensors
from lightning_flops.schema import codec
from lightning_flops.schema.memory import MemoryReport


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRecord:
    """What collectives of one kind between the same ranks moved in one step of one of these."""

    kind: str  # ``all_reduce``, ``all_gather`` …
    ranks: tuple[int, ...]  # of the whole job
    calls: int
    bytes: int  # of all calls, of the larger side of each


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRank:
    """One training step of one rank of a job that does not run."""

    mesh: Mapping[str, int]  # size of each dimension; ranks count along the last one first
    rank: int
    flops: FlopRecord
    params: int  # of the whole model
    local_params: int  # that the rank holds
    collectives: tuple[CollectiveRecord, ...]
    tensors: StepTensors | None  # every allocation of the step; None where not all are seen, as of FSDP's storages


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
    """What so many steps take of the job, at the least and at 40% of its devices' peak."""

    steps: int  #: Of the run.
    floor_hours: float | None  #: If every step took the floor.
    floor_device_hours: float | None  #: Times all devices.
    floor_price: float | None  #: Times the price of a device hour; None if it was not given.
    hours_at_40_percent: float | None  #: If a step had an MFU of 40%.
    device_hours_at_40_percent: float | None  #: Times all devices.
    price_at_40_percent: float | None  #: Times the price of a device hour.


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(codec.Json):
    """One rank of a job, counted in a process without the job: what its step computes and sends, and its floor.

    A floor is what no step of these operators can go below. It is not a forecast.
    """

    VERSION = 1
    schema_version: int = VERSION  #: Version of the JSON; another one has other fields.
    mesh: Mapping[str, int]  #: Size of each dimension.
    rank: int  #: Whose figures these are.
    at: Mapping[str, int]  #: Sizes that the batch was brought to; empty: those that the function returned.
    flops: PhaseFlops  #: Of one step of this rank, exact; a multiply-add is two.
    lower_bound: bool  #: An operator that may have FLOPs could not be counted.
    params: int  #: Of the whole model.
    local_params: int  #: That this rank holds.
    memory: MemoryReport | None  #: What this rank's tensors hold at the peak of the step; None under FSDP.
    collectives: tuple[PlannedCollective, ...]  #: Those that move most first.
    device: str  #: Whose figures the floor is by; empty if none was given.
    peaks_flops_per_sec: Mapping[str, float]  #: Dense peak of each dtype that the step computes in.
    memory_bytes_per_sec: float | None  #: Bandwidth of the device's memory.
    arithmetic_sec: float | None  #: FLOPs that kernels execute ÷ peak: nothing that computes them is faster.
    #: Sum over operators that have FLOPs of the longer of FLOPs ÷ peak and bytes ÷ bandwidth of the memory.
    operators_sec: float | None
    communication_sec: float | None  #: Of all collectives, one after the other.
    floor_sec: float | None  #: Of the step, with all communication hidden behind operators, or these behind it.
    exposed_floor_sec: float | None  #: Of the step, with nothing hidden: operators, then communication.
    mfu_at_most: float | None  #: MFU of a step that takes ``floor_sec``.
    stages: tuple[PhaseFlops, ...]  #: FLOPs of each stage of this rank's pipeline in a step; empty without one.
    bubble: float | None  #: Share of a step in which a stage waits, if all take equally long; None of no pipeline.
    run: PlannedRun | None  #: If a number of steps was given.
    unavailable: Mapping[str, str]  #: Why a figure is None.
    notes: tuple[str, ...]  #: What the figures leave out.

    def __str__(self) -> str:
        """The plan as text."""
        return str(codec.above("report.text").render_text(self))
