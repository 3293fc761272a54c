"""What ran in a trace: kernels, operators, memory, copies, scopes and launches. Times are in microseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_flops.schema.trace_steps import Durations

KERNEL_GAP_LIMIT_US = 30
"""A pause between two events that were both launched in time is a kernel gap below this: HTA's value."""

SHORT_KERNEL_LIMIT_US = 10
"""A kernel under this is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLaunch:
    """Runs of one kernel with the same numbers of blocks and threads."""

    grid: tuple[int, int, int] | None
    """Blocks along each axis; None where the trace does not say, as the next three."""
    block: tuple[int, int, int] | None
    """Threads of a block along each axis."""
    registers: int | None
    """Of each thread."""
    shared_memory: int | None
    """Bytes of each block."""
    calls: int
    """How often it ran so."""
    device_us: float
    """In all these runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """All runs of one kernel."""

    name: str
    """As compiled."""
    calls: int
    """How often it ran."""
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
    launch_shapes: tuple[KernelLaunch, ...] = ()
    """How it was launched, the shape that took most time first; empty where the trace does not say."""


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
class CalledFrom:
    """A line of the user's code, and the calls of an operator that it made, those of their backward too."""

    place: str
    """File and line: ``net.py:7``. Where Python's calls were recorded, the line is its function's first."""
    calls: int
    """How many of the operator's calls."""
    host_us: float
    """Their time on the host."""
    device_us: float | None
    """That of what was launched in them; None without a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorShapeRow:
    """All calls of one operator with inputs of the same sizes and dtypes."""

    name: str
    """As in ``OperatorRow``."""
    inputs: str
    """Sizes of its tensors: ``[32, 3, 224, 224], [64, 3, 7, 7]``."""
    dtypes: str
    """Their dtypes, as C++ names them."""
    calls: int
    """How often it ran."""
    host: Durations
    """As in ``OperatorRow``, like the next three."""
    host_self: Durations
    """Without the operators it called."""
    device: Durations | None
    """What was launched in it and in what it called; None without a device."""
    device_self: Durations | None
    """What it launched itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """All calls of one operator.

    As in torch's own tables, *total* includes what the operator called, so a total counts again under its caller. A
    call inside a call of the same operator is a part of that call, and no call of its own.
    """

    name: str
    """As in torch's tables, such as ``aten::mm``."""
    calls: int
    """How often it ran."""
    host: Durations
    """Ratio: of the host self times of all operators."""
    host_self: Durations
    """Without the operators it called; the ratios of all operators add up to 1."""
    device: Durations | None
    """Kernels, copies and memsets launched in it and in what it called. None without a device, like the next."""
    device_self: Durations | None
    """Launched in it itself, without what it called."""
    tensor_cores_eligible: bool
    """Whether it is a matrix product, convolution, attention or recurrent layer."""
    called_from: tuple[CalledFrom, ...] = ()
    """By lines of the user's code, the longest first; empty where the trace was taken without ``with_stack``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """What one operator allocated and freed on one device."""

    name: str | None
    """None: outside any operator."""
    device_type: Literal["host", "device"]
    """Whose memory it is."""
    device: int
    """-1 for the host."""
    calls: int
    """Calls of the operator in which memory was allocated or freed; events, outside any operator."""
    size_increase_bytes: int
    """Allocated less freed, with what it called."""
    self_size_increase_bytes: int
    """Without what it called; the sum over all rows of a device is what the trace changed."""
    allocation_bytes: int
    """Allocated, frees left out."""
    self_allocation_bytes: int
    """Allocated without what it called, frees left out."""
    allocations: int = 0
    """How often memory was allocated, with what it called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """How much was allocated at a moment."""

    us: float
    """After the first event of the trace."""
    bytes: int
    """As ``MemoryCurve.peak_bytes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """Memory that was allocated in one place and not yet freed at the peak."""

    module: str | None
    """In whose forward or backward; None where that is not known."""
    operator: str | None
    """The outermost operator that was running; None outside of operators and, without allocations, before the trace."""
    bytes: int
    """All together."""
    allocations: int | None
    """How many there are; None for what was there before the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """A step, or a phase of one, on the host's clock, on which memory is allocated."""

    name: str
    """``step 5``, ``data loader``, ``forward``, ``backward`` or ``optimizer``."""
    start_us: float
    """After the first event of the trace."""
    end_us: float
    """Likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Memory of one device over time."""

    device_type: Literal["host", "device"]
    """Whose memory it is."""
    device: int
    """-1 for the host."""
    absolute: bool
    """Whether bytes are all that the allocator had given out; else the change since the trace began."""
    peak_bytes: int
    """The most at any moment."""
    peak_us: float
    """When that was, after the first event of the trace."""
    peak_step: int | None
    """In which step; None outside of steps, and where they are not marked."""
    held: tuple[HeldMemory, ...] | None
    """What held the memory then, the most first; None where the trace has no addresses, as before torch 2.0."""
    points: tuple[MemoryPoint, ...]
    """In order of time, some hundreds at most: of each stretch the highest."""
    spans: tuple[StepSpan, ...]
    """What ran meanwhile, in order of time: the marked steps and the phases in them. Of more than 1,000 the steps alone
    are kept, of more than 1,000 steps none."""


MemoryPart = Literal["forward", "backward", "gradient accumulation", "optimizer", "elsewhere"]
"""Where in a step memory is allocated or freed; the last three are no module's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemoryRow:
    """What one module allocated and freed on one device in its forward, or in its backward, all steps together."""

    name: str | None
    """Qualified name, the root's ``""``; None for what is no module's."""
    part: MemoryPart
    """``backward``: with what it repeats of the forward."""
    device_type: Literal["host", "device"]
    """Whose memory it is."""
    device: int
    """-1 for the host."""
    size_increase_bytes: int
    """Allocated less freed, with the modules inside: what a forward keeps, what a backward leaves."""
    self_size_increase_bytes: int
    """Without them; the sum over all rows of a device is what the trace changed."""
    allocation_bytes: int
    """Allocated, frees left out."""
    self_allocation_bytes: int
    """Allocated without the modules inside, frees left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRow:
    """All copies or memsets of one kind, such as ``Memcpy HtoD (Pageable -> Device)``."""

    name: str
    """Kind of the copy or memset."""
    calls: int
    """How many there were."""
    bytes: int | None
    """All together; None where the trace does not say."""
    host: Durations | None
    """The calls that launched them. Ratio: of the steps' own marks on the host. None when no launch is known."""
    device: Durations
    """Ratio: of all device work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserScopeRow:
    """All runs of one ``record_function`` scope."""

    name: str
    """As the user named it."""
    calls: int
    """How often it ran."""
    host: Durations
    """Ratio: of the steps' own marks on the host."""
    device: Durations | None
    """Work launched in the scope, by its thread or by autograd's while it was open. Ratio: of all device work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTime:
    """Pauses between the first and the last event of a stream or of a whole device, by cause, as HTA names them."""

    device: int
    """Its number."""
    stream: int | None
    """None: all streams of the device as one."""
    busy_us: float
    """In which something ran."""
    host_wait_us: float
    """The event that ended the pause was launched after the pause had begun."""
    kernel_gap_us: float
    """Launched in time, and the pause is under ``KERNEL_GAP_LIMIT_US``."""
    other_us: float
    """Launched in time and a longer pause, or the launch is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRow:
    """Launches of one kind of device event; a CUDA graph launches many events with one call."""

    kind: Literal["kernel", "memcpy", "memset"]
    """Of what was launched."""
    launches: int
    """Calls."""
    events: int
    """What they launched."""
    host: Durations
    """Lengths of the calls on the host."""
    device: Durations
    """Lengths of what they launched."""
    delay: Durations
    """From the end of the call to the start on the device; 0 where the device began before the call returned.

    Delays overlap, so they have no ratio."""
    shorter_than_launch: int
    """Device events that took less time than the call that launched them."""
