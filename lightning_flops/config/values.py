"""Names that users write in settings, and the settings that are more than one value."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = "flops_profiler"
"""Name of the block in a DeepSpeed config, and of the settings in every message."""

DTYPE_NAMES = ("bfloat16", "float16", "tf32", "float32", "float64", "float8", "int8")
"""Names by which ``peak_flops_per_sec`` may be given for each dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceThresholds:
    """From where on something is worth a word of advice; ``advice_thresholds`` may set each.

    Shares are of the step, 1 being all of it. The values are those of the sources that ``analysis.advice`` names, or
    this project's own.
    """

    data_wait: float = 0.05
    """Waiting for data above this share."""
    exposed_communication: float = 0.10
    """Communication that no computation hides above this share."""
    overlap: float = 0.50
    """Less than this share of the communication hidden."""
    gpu_utilization: float = 0.50
    """Kernels running less than this share."""
    blocks_per_sm: float = 1.0
    """Kernels with fewer blocks per SM ..."""
    blocks_per_sm_share: float = 0.10
    """... holding more than this share of the kernels' time."""
    occupancy: float = 0.15
    """Estimated achieved occupancy below this."""
    tensor_core_eligible: float = 0.05
    """No tensor cores in use, though more than this share of the kernels' time could use them."""
    memory_high: float = 0.90
    """Peak memory above this share of the device's."""
    memory_low: float = 0.50
    """Peak memory below this share ..."""
    memory_low_utilization: float = 0.80
    """... with a GPU utilization below this."""
    float32: float = 0.05
    """float32 products, TF32 off, above this share of the model FLOPs."""
    misaligned: float = 0.05
    """16-bit products with a dimension that is no multiple of 8 above this share of the FLOPs."""
    optimizer: float = 0.15
    """Optimizer that updates tensor by tensor above this share."""
    idle: float = 0.20
    """Idle device above this share, most of it for want of launches."""
    short_kernels: float = 0.50
    """Kernels under 10 us above this share of all kernels ..."""
    short_kernels_idle: float = 0.10
    """... with the device idle above this share."""
    straggler: float = 1.1
    """The slowest rank's own time above this many times the median ..."""
    straggler_sec: float = 0.001
    """... and longer by more than so many seconds a step."""
    waiting: float = 0.10
    """Waiting for other ranks above this share, though none of them is a straggler."""
    mfu: float = 0.30
    """MFU below this."""
    pageable_copies: float = 0.05
    """Copies from pageable host memory above this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSchedule:
    """Which steps after the timed ones are traced, in the terms of ``torch.profiler.schedule``."""

    wait: int = 0
    """Steps left alone before each cycle."""
    warmup: int = 1
    """Steps that run under the profiler and are thrown away."""
    active: int = 1
    """Steps that are kept."""
    repeat: int = 1
    """Cycles of the three."""
