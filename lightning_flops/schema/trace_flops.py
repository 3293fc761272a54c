"""FLOPs of a trace, from the shapes that stand in it: by step, operator and kernel. A multiply-add is two FLOPs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """FLOPs by what they are for."""

    forward: int = 0
    """Model FLOPs of what no autograd node ran; attention over the full score matrix."""
    backward: int = 0
    """Model FLOPs of what autograd's nodes ran."""
    recompute: int = 0
    """What checkpointing ran again, and what a fused attention's backward repeats of its forward."""
    optimizer: int = 0
    """What ran in an optimizer's step, or where a gradient was accumulated."""
    skipped: int = 0
    """Of all these, what fused attention leaves out because its mask rules it out."""

    @property
    def counted(self) -> int:
        """All four buckets together."""
        return self.forward + self.backward + self.recompute + self.optimizer

    @property
    def hardware(self) -> int:
        """What the kernels executed: the numerator of HFU."""
        return self.counted - self.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStepFlops(Buckets):
    """FLOPs of one step on this rank, and how well it used the peak of its device."""

    step: int | None
    """The profiler's number; None where the whole trace is one step."""
    wall_us: float
    """The step's wall time, as in the table of step times."""
    mfu: float | None
    """(forward + backward) ÷ (peak × wall time), each dtype with its own peak; None where a peak is not known."""
    hfu: float | None
    """HFU, of what the kernels executed: all four, less what was skipped."""
    lower_bound: bool
    """Something in the step was not counted, so that all its figures are at least these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopRow(Buckets):
    """FLOPs of the counted calls of an operator in a dtype, of a shape, of a kernel, or of a module and those below.

    A kernel is not separated by phase: its five buckets are 0.
    """

    name: str
    """Of an operator as the counter has it, ``aten.mm``; else as in the table of operators, kernels or modules."""
    calls: int
    """How often it ran."""
    flops: int
    """What kernels executed: all four, less what was skipped."""
    time_us: float | None
    """On the device: kernels, copies and memsets, added up. On the host, in a trace without a device: its calls.
    A module's is that of its forward and backward. None where nothing of it is in the trace."""
    flops_per_sec: float | None
    """Executed FLOPs ÷ time, of the calls whose time is known."""
    peak_share: float | None
    """What part of that time they take at the peak of their dtypes; None where a peak is not known."""
    estimated: bool = False
    """Whether several kernels multiplied in an operator: its FLOPs are divided among these by their time."""
    own: int = 0
    """Of a module's FLOPs, those outside of the modules below it."""
    dtype: str = ""
    """Of an operator's arithmetic; ``tf32`` where a float32 operator launched a kernel whose name says tensor cores."""
    inputs: str = ""
    """Of a shape, as in ``OperatorRow``, like the next."""
    dtypes: str = ""
    """Of its tensors."""
    bytes: int | None = None
    """Of all tensors that it read and wrote, by shapes and dtypes; None where a result's shape is not known."""
    flops_per_byte: float | None = None
    """Arithmetic intensity: executed FLOPs ÷ bytes."""
    attainable_flops_per_sec: float | None = None
    """An operator's roof: the lower of the peak and intensity × the memory's bandwidth; None where one is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UncountedRow:
    """What may have FLOPs and was not counted."""

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
    operators: tuple[FlopRow, ...]
    """Over the whole trace, the one that took most time first."""
    shapes: tuple[FlopRow, ...]
    """Operators by the shapes of their inputs."""
    kernels: tuple[FlopRow, ...] | None
    """FLOPs of kernels; None without a device."""
    modules: tuple[FlopRow, ...] | None
    """Modules with FLOPs, by name; None where the trace does not show modules."""
    uncounted: tuple[UncountedRow, ...]
    """What may have FLOPs: all that depends on it is a lower bound."""
    lower_bound: bool
    """Whether there is any."""

    @property
    def mfu(self) -> float | None:
        """MFU of all steps together, as if they were one; None where that of one of them is not known."""
        return _of_all([(step.mfu, step.wall_us) for step in self.steps])

    @property
    def hfu(self) -> float | None:
        """HFU of all steps together, as if they were one; None where that of one of them is not known."""
        return _of_all([(step.hfu, step.wall_us) for step in self.steps])


def _of_all(shares: Sequence[tuple[float | None, float]]) -> float | None:
    """Shares of the peak, each over its own wall time, as one over the time of all."""
    at_peak = [share * wall_us for share, wall_us in shares if share is not None]
    whole_us = math.fsum(wall_us for _, wall_us in shares)
    return math.fsum(at_peak) / whole_us if whole_us and len(at_peak) == len(shares) else None
