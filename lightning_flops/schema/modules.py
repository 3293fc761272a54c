"""The modules of the model: what each one is, its FLOPs and how long it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_flops.records import PhaseBytes, PhaseFlops


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTimes:
    """Seconds of one module in one step, with the modules below it, unless the name says *own*."""

    clock: Literal["host", "device", "borders"]
    """``device``: time that work launched in the module ran on the device. ``host``: on the host, without a device.
    ``borders``: a clock read in the module's hooks, on the device's stream, or on the host without a device."""
    forward_sec: float
    """All of its forward calls together."""
    own_forward_sec: float
    """Without the modules below it."""
    backward_sec: float | None
    """With what the backward repeats of the forward, without gradient accumulation. None without a trace."""
    own_backward_sec: float | None
    """Without the modules below it; None without a trace."""
    forward_flops_per_sec: float | None
    """Forward FLOPs of the counted step / seconds, an estimate where the traced step is not like it; None without."""
    backward_flops_per_sec: float | None
    """Backward and recomputed FLOPs / seconds."""
    forward_utilization: float | None
    """Share of the device's peak, for the dtypes it computes in; None if one of them has no known peak."""
    backward_utilization: float | None
    """Share of the device's peak that the backward reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleProfile:
    """One module of the model; its FLOPs, bytes and calls are sums over all counted steps."""

    name: str
    """Qualified name; the root is ``""``."""
    type_name: str
    """Class of the module; ``""`` if it did work but the model does not list it."""
    extra_repr: str
    """What the module says of itself, such as ``in_features=8, out_features=4``."""
    params: int
    """Unique logical parameters of the module and all below it."""
    calls: int
    """How often its forward was entered, recomputation left out."""
    own: PhaseFlops
    """Without the modules below it."""
    total: PhaseFlops
    """With the modules below it."""
    total_bytes: PhaseBytes
    """Read and written, with the modules below it."""
    alias_of: str | None = None
    """Name under which the same module object stands earlier in the tree."""
    times: ModuleTimes | None = None
    """Times in the traced step; None if no step was traced, or it was not called there."""

    @property
    def depth(self) -> int:
        """Levels below the root, which has 0."""
        return self.name.count(".") + 1 if self.name else 0

    @property
    def short_name(self) -> str:
        """Last part of the name: what its parent calls it."""
        return self.name.rpartition(".")[2]
