"""What ran in a trace: kernels, operators, memory and idle time. Times are in microseconds."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_flops.schema.trace_flops import Flops
from lightning_flops.schema.trace_steps import Durations, Row

KERNEL_GAP_LIMIT_US = 30
"""A pause between two events that were both launched in time is a kernel gap below this: HTA's value."""

SHORT_KERNEL_LIMIT_US = 10
"""A kernel under this is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow(Row):
    """All runs of one kernel, by its name as compiled."""

    device: Durations
    """Ratio: of all kernels' durations."""
    tensor_cores: bool
    """Whether its name says that it runs on tensor cores."""
    tensor_cores_eligible: bool
    """Whether an operator that can use tensor cores launched it at least once."""
    collective: bool
    """Whether it communicates."""
    blocks_per_sm: float | None
    """Averaged over its runs with their durations as weights; None where the trace does not say."""
    occupancy_percent: float | None
    """Estimated achieved occupancy, averaged in the same way."""
    flops: Flops | None = None
    """Of the operators that launched it; where several kernels of one multiply, divided by their time. None without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSummary:
    """All kernels together."""

    calls: int
    """How many kernels ran."""
    total_us: float
    """Time in all of them, added up."""
    tensor_core_ratio: float | None
    """Time in kernels on tensor cores ÷ time in all kernels but collectives'."""
    tensor_core_eligible_ratio: float | None
    """Time in kernels whose operators can use tensor cores ÷ the same."""
    short_calls_ratio: float | None
    """Kernels shorter than ``SHORT_KERNEL_LIMIT_US`` ÷ kernels."""
    short_time_ratio: float | None
    """Their time ÷ the time of all kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow(Row):
    """All calls of one operator.

    As in torch's own tables, *host* and *device* include what the operator called, so they count again under its
    caller. A call inside a call of the same operator is a part of that call, and no call of its own. Ratios are of the
    self times of all operators.
    """

    host: Durations
    """With what it called."""
    host_self: Durations
    """Without the operators it called; the ratios of all operators add up to 1."""
    device_self: Durations | None
    """Launched in it itself, without what it called."""
    tensor_cores_eligible: bool
    """Whether it is a matrix product, convolution, attention or recurrent layer."""
    called_from: str = ""
    """The user's function that called it first, by its first line, ``net.py:7``. Empty where no function of the user's
    did, and where the trace was taken without ``with_stack``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """What one operator allocated and freed on one device."""

    name: str | None
    """None: outside any operator."""
    device: int
    """-1 for the host."""
    calls: int
    """Calls of the operator in which memory was allocated or freed; outside of any such events."""
    size_increase_bytes: int
    """Allocated less freed, with what it called."""
    self_size_increase_bytes: int
    """Without what it called; the sum over all rows of a device is what the trace changed."""
    allocation_bytes: int
    """Allocated, frees left out."""
    self_allocation_bytes: int
    """Allocated without what it called, frees left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Memory of one device over time."""

    device: int
    """-1 for the host."""
    absolute: bool
    """Whether bytes are all that the allocator had given out; else the change since the trace began."""
    peak_bytes: int
    """The most at any moment."""
    peak_us: float
    """When that was, after the first event of the trace."""
    points: tuple[tuple[float, int], ...]
    """Microseconds after the first event, and bytes as *peak_bytes*: some hundreds, each the most until the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTime:
    """Pauses between the first and the last event of a device, by cause, as HTA names them."""

    device: int
    """Its number."""
    busy_us: float
    """In which something ran."""
    host_wait_us: float
    """The event that ended the pause was launched after the pause had begun."""
    kernel_gap_us: float
    """Launched in time, and the pause is under ``KERNEL_GAP_LIMIT_US``."""
    other_us: float
    """Launched in time and a longer pause, or the launch is not known."""
