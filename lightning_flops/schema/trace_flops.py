"""FLOPs of a trace, from the shapes that stand in it. A multiply-add is two FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_flops.records import PhaseFlops


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops(PhaseFlops):
    """FLOPs of what a row stands for, as far as they were counted; attention over the full score matrix.

    Backward is what autograd's nodes ran, recompute what checkpointing ran again and what a fused attention's backward
    repeats of its forward, optimizer also what ran where a gradient was accumulated.
    """

    skipped: int = 0
    """Of all these, what fused attention leaves out because its mask rules it out."""
    flops_per_sec: float | None = None
    """Executed FLOPs ÷ time, of the calls whose time is known: on the device, or on the host without one."""
    hfu: float | None = None
    """What part of that time they take at the peak of their dtypes; None where a peak is not known."""

    @property
    def hardware(self) -> int:
        """What the kernels executed: the numerator of HFU."""
        return self.total - self.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStepFlops(Flops):
    """FLOPs of one step on this rank, and how well it used the peak of its device; rates are over its wall time."""

    step: int | None
    """The profiler's number; None where the whole trace is one step."""
    wall_us: float
    """The step's wall time, as in the table of step times."""
    mfu: float | None
    """(forward + backward) ÷ (peak × wall time), each dtype with its own peak; None where a peak is not known."""
    lower_bound: bool
    """Something in the step was not counted, so that all its figures are at least these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFlops(Flops):
    """FLOPs of the counted calls of one operator in one dtype."""

    name: str
    """As the counter has it: ``aten.mm``."""
    dtype: str
    """Of its arithmetic; ``tf32`` where a float32 operator launched a kernel whose name says tensor cores."""
    calls: int
    """How often it counted."""
    time_us: float | None
    """Of its kernels, copies and memsets, added up, or on the host without a device; None where none is there."""
    bytes: int | None
    """Of all tensors that it read and wrote, by shapes and dtypes; None where a result's shape is not known."""
    flops_per_byte: float | None
    """Arithmetic intensity: executed FLOPs ÷ bytes."""
    attainable_flops_per_sec: float | None
    """The roof: the lower of the peak and intensity × the memory's bandwidth; None where one is not known."""


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
    """FLOPs of one trace, which is of one rank; those of kernels, shapes and modules stand in their own tables."""

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
    mfu: float | None
    """MFU of all steps together, as if they were one; None where that of one of them is not known."""
    hfu: float | None
    """HFU of all steps together; None as for MFU."""
    operators: tuple[OperatorFlops, ...]
    """Over the whole trace, the one that took most time first."""
    uncounted: tuple[UncountedRow, ...]
    """What may have FLOPs: where there is any, all that depends on it is a lower bound."""
