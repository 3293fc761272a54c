"""FLOPs of a trace, from the shapes that stand in it: by step, operator and kernel. A multiply-add is two FLOPs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStepFlops:
    """FLOPs of one step on this rank, and how well it used the peak of its device."""

    step: int | None
    """The profiler's number; None where the whole trace is one step."""
    forward: int
    """Model FLOPs of what no autograd node ran; attention over the full score matrix."""
    backward: int
    """Model FLOPs of what autograd's nodes ran."""
    recompute: int
    """What checkpointing ran again, and what a fused attention's backward repeats of its forward."""
    optimizer: int
    """What ran in an optimizer's step, or where a gradient was accumulated."""
    skipped: int
    """Of all these, what fused attention leaves out because its mask rules it out."""
    wall_us: float
    """The step's wall time, as in the table of step times."""
    mfu: float | None
    """(forward + backward) ÷ (peak × wall time), each dtype with its own peak; None where a peak is not known."""
    hfu: float | None
    """The same of what the kernels executed: all four, less what was skipped."""
    lower_bound: bool
    """Something in the step was not counted, so that all its figures are at least these."""

    @property
    def hardware(self) -> int:
        """What the kernels executed: the numerator of HFU."""
        return self.forward + self.backward + self.recompute + self.optimizer - self.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFlops:
    """All counted calls of one operator in one dtype."""

    operator: str
    """Name as the counter has it: ``aten.mm``."""
    dtype: str
    """Of the arithmetic; ``tf32`` where a float32 operator launched a kernel whose name says tensor cores."""
    calls: int
    """How often it ran."""
    forward: int
    """Model FLOPs of the forward."""
    backward: int
    """Model FLOPs of the backward."""
    recompute: int
    """What was run again."""
    optimizer: int
    """What optimizers ran."""
    skipped: int
    """Of all these, what a mask let the kernel leave out."""
    bytes: int | None
    """Of all tensors that it read and wrote, by shapes and dtypes; None where a result's shape is not known."""
    time_us: float | None
    """On the device: its kernels, copies and memsets, added up. On the host, in a trace without a device: its calls.
    None where nothing of it is in the trace."""
    flops_per_sec: float | None
    """Executed FLOPs ÷ time, of the calls whose time is known."""
    peak_share: float | None
    """That ÷ the peak of the device in this dtype; None where the peak is not known."""
    flops_per_byte: float | None
    """Arithmetic intensity: executed FLOPs ÷ bytes."""
    attainable_flops_per_sec: float | None
    """Its roof: the lower of the peak and intensity × the memory's bandwidth; None where one of them is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeFlops:
    """All counted calls of one operator with inputs of the same sizes and dtypes."""

    name: str
    """As in ``OperatorShapeRow``, like the next two."""
    inputs: str
    """Sizes of its tensors."""
    dtypes: str
    """Their dtypes."""
    calls: int
    """How often it ran and was counted."""
    forward: int
    """As in ``OperatorFlops``, like the next four."""
    backward: int
    """Model FLOPs of the backward."""
    recompute: int
    """What was run again."""
    optimizer: int
    """What optimizers ran."""
    skipped: int
    """Of all these, what a mask let the kernel leave out."""
    flops_per_sec: float | None
    """Executed FLOPs ÷ time, of the calls whose time is known."""
    peak_share: float | None
    """What part of that time they take at the peak of their dtypes; None where a peak is not known."""

    @property
    def counted(self) -> int:
        """All four buckets together."""
        return self.forward + self.backward + self.recompute + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFlops:
    """All runs of one kernel that computed counted FLOPs."""

    name: str
    """As compiled."""
    calls: int
    """How often it ran for a counted operator."""
    flops: int
    """Executed FLOPs of the operators in which no other kernel multiplied."""
    shared_flops: int
    """Of operators in which several kernels multiplied: divided among these by their time, an estimate."""
    time_us: float
    """Of these runs."""
    flops_per_sec: float | None
    """Both ÷ time."""
    peak_share: float | None
    """That ÷ the peak; None where it is not known, or where the runs were in several dtypes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModuleFlops:
    """FLOPs of one module over the whole trace, with the modules below it."""

    name: str
    """As in the table of modules; the root's is ``""``."""
    forward: int
    """Model FLOPs of its forward."""
    backward: int
    """Model FLOPs of its backward."""
    recompute: int
    """What its backward ran again."""
    own: int
    """Of all three, what the modules below it did not spend."""
    flops_per_sec: float | None
    """Executed FLOPs ÷ its forward and backward time in the table of modules."""
    peak_share: float | None
    """What part of that time its FLOPs take at the peak of their dtypes; None where a peak is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UncountedRow:
    """What may have spent FLOPs and was not counted."""

    name: str
    """Of the operator, or of a kernel that no counted operator launched."""
    calls: int
    """How often it ran."""
    reason: str
    """Why it was not counted, without a full stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFlops:
    """FLOPs of one trace, which is of one rank."""

    device: str | None
    """The device that ran the kernels; None without one, or where several kinds took part."""
    devices: int
    """How many of them took part."""
    peaks: Mapping[str, float]
    """Dense peak of one of them in FLOP/s, by the dtypes that ran; one that is not known is left out."""
    memory_bytes_per_sec: float | None
    """Bandwidth of its memory; None where it is not known."""
    steps: tuple[TracedStepFlops, ...]
    """In order of time."""
    outside_steps: int
    """FLOPs of what ran outside of every step."""
    operators: tuple[OperatorFlops, ...]
    """Over the whole trace, the one that took most time first."""
    shapes: tuple[ShapeFlops, ...]
    """The same operators by the shapes of their inputs."""
    kernels: tuple[KernelFlops, ...] | None
    """The same of kernels; None without a device."""
    modules: tuple[TracedModuleFlops, ...] | None
    """Those that spent FLOPs, by name; None where the trace does not show modules."""
    uncounted: tuple[UncountedRow, ...]
    """What may have spent FLOPs: all that depends on it is a lower bound."""
    lower_bound: bool
    """Whether there is any."""

    @property
    def mfu(self) -> float | None:
        """Of all steps together, as if they were one; None where that of one of them is not known."""
        return _mfu_of_all(self.steps)

    @property
    def hfu(self) -> float | None:
        """Likewise."""
        return _hfu_of_all(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStepFlops:
    """FLOPs of one step of a job: those of all its ranks, added up."""

    step: int
    """The profiler's number."""
    forward: int
    """As in ``TracedStepFlops``, like the next four."""
    backward: int
    """Model FLOPs of what autograd's nodes ran."""
    recompute: int
    """What was run again."""
    optimizer: int
    """What optimizers ran."""
    skipped: int
    """Of all these, what fused attention leaves out."""
    wall_us: float
    """Mean of the ranks' wall times."""
    mfu: float | None
    """(forward + backward) of all ranks ÷ (peak × wall time of each, added up); None where one is not known."""
    hfu: float | None
    """The same of what the kernels executed."""
    lower_bound: bool
    """On one of the ranks something was not counted."""

    @property
    def hardware(self) -> int:
        """What the kernels of all ranks executed: the numerator of HFU."""
        return self.forward + self.backward + self.recompute + self.optimizer - self.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFlops:
    """FLOPs of all ranks of a job together."""

    ranks: int | None
    """Ranks that the job has; None where its traces do not say."""
    steps: tuple[JobStepFlops, ...]
    """Those that are in the traces of all ranks; empty if the job's FLOPs are not known."""
    reason: str | None
    """Why they are not known, without a full stop."""

    @property
    def mfu(self) -> float | None:
        """Of all steps together, as if they were one; None where that of one of them is not known."""
        return _mfu_of_all(self.steps)

    @property
    def hfu(self) -> float | None:
        """Likewise."""
        return _hfu_of_all(self.steps)


def _mfu_of_all(steps: Sequence[TracedStepFlops] | Sequence[JobStepFlops]) -> float | None:
    return of_all([(step.mfu, step.wall_us) for step in steps])


def _hfu_of_all(steps: Sequence[TracedStepFlops] | Sequence[JobStepFlops]) -> float | None:
    return of_all([(step.hfu, step.wall_us) for step in steps])


def of_all(shares: Sequence[tuple[float | None, float]]) -> float | None:
    """Shares of the peak, each over its own wall time, as one over the time of all."""
    known = [(share, wall_us) for share, wall_us in shares if share is not None]
    whole_us = math.fsum(wall_us for _, wall_us in known)
    if len(known) < len(shares) or not whole_us:
        return None
    return math.fsum(share * wall_us for share, wall_us in known) / whole_us
