"""The tables of a trace: times of steps, devices, kernels, operators and modules, memory, and FLOPs by shapes.

Times are in microseconds, as in the file; what a trace does not contain is None. A multiply-add is two FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from lightning_flops.records import PhaseFlops

#: A pause between two events that were both launched in time is a kernel gap below this: HTA's.
KERNEL_GAP_LIMIT_US = 30
SHORT_KERNEL_LIMIT_US = 10  #: A kernel under this is short.


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Lengths of several events; min <= mean <= max, and total = calls × mean."""

    total_us: float  #: All of them together.
    mean_us: float  #: Of one of them.
    max_us: float  #: Of the longest.
    min_us: float  #: Of the shortest.
    ratio: float | None  #: Total over the whole that the table names; None where that whole is empty.


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All events of one name; what its table has no figure for is None."""

    name: str  #: Name that they have in common.
    calls: int  #: How many there are.
    host: Durations | None = None  #: Time on the host.
    #: Time on the device: theirs there, or that of what they launched. None without a device.
    device: Durations | None = None
    bytes: int | None = None  #: Bytes that they moved; None where the trace does not say.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Microseconds of a step by what filled them; the parts add up to the step's wall time.

    A moment that several kinds of events share belongs to the first of them in the order of the fields, the priority
    of the PyTorch profiler's step-time breakdown: so ``communication_us`` is only what no kernel or copy hides.
    """

    #: The profiler's number of the step; None for the mean of several, and where the whole trace stands as one.
    number: int | None
    wall_us: float  #: Wall time of the whole step.
    #: Kernels other than collectives'. None, like the next two and the runtime's, when the trace has no device.
    kernel_us: float | None
    memcpy_us: float | None  #: Copies to, from and on the device that no kernel hides.
    memset_us: float | None  #: Memory filled on the device.
    communication_us: float | None  #: Collectives; None when the trace has none at all.
    runtime_us: float | None  #: Calls on the host that launch work or wait for it.
    data_loader_us: float | None  #: Waiting for the data loader; None when the trace shows no ``DataLoader``.
    cpu_us: float | None  #: Operators on the host; None when none was recorded.
    other_us: float  #: What is left: no event of these kinds ran.


#: What fills a step, as reports call it, by priority; and the field of ``StepTime`` that holds it.
STEP_PARTS = tuple((one.name.removesuffix("_us").replace("_", " "), one.name) for one in fields(StepTime)[2:])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Every step's breakdown, and their mean."""

    marked: bool  #: False when the trace has no profiler steps; the whole trace is then one step.
    steps: tuple[StepTime, ...]  #: Each step, in the order of the trace.
    mean: StepTime  #: Part by part over all steps.


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMetrics:
    """One device over all steps; ratios are of the steps' wall time."""

    device: int  #: Number of the device.
    name: str | None  #: Name that the driver has for it; None where the trace does not say.
    sm_count: int | None  #: Streaming multiprocessors; None where the trace does not say.
    utilization: float  #: Union of the kernels within the steps ÷ steps.
    #: Estimated: ∫ min(1, Σ blocks per SM of the kernels then running) dt ÷ steps; None if a kernel lacks them.
    sm_efficiency: float | None
    #: Estimated achieved occupancy, averaged over the kernels with their durations as weights.
    occupancy_percent: float | None
    blocks_per_sm: float | None  #: Blocks per multiprocessor, averaged in the same way.


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTime:
    """Pauses between the first and the last event of a device, by cause, as HTA names them."""

    device: int  #: Number of the device.
    busy_us: float  #: Time in which something ran.
    host_wait_us: float  #: Pauses whose end was launched after they had begun.
    kernel_gap_us: float  #: Pauses under ``KERNEL_GAP_LIMIT_US`` whose end was launched in time.
    other_us: float  #: Longer pauses, and those of which no launch is known.


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops(PhaseFlops):
    """FLOPs of what a row stands for, as far as they were counted; attention over the full score matrix.

    Recompute is what checkpointing ran again and what a fused attention's backward repeats of its forward, optimizer
    also what ran where a gradient was accumulated.
    """

    skipped: int = 0  #: FLOPs of all these that fused attention leaves out because its mask rules them out.
    #: Executed FLOPs ÷ time, of the calls whose time is known: on the device, or on the host without one.
    flops_per_sec: float | None = None
    #: Share of that time that they take at the peak of their dtypes; None where a peak is not known.
    of_peak: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow(Row):
    """All runs of one kernel, by its name as compiled."""

    device: Durations  #: Time on the device; ratio: of all kernels' durations.
    operator: str  #: Operator that launched it, of several the one with most of its time; empty: not known.
    tensor_cores: bool  #: Whether its name says that it runs on tensor cores.
    tensor_cores_eligible: bool  #: Whether an operator that can use tensor cores launched it at least once.
    collective: bool  #: Whether it communicates.
    #: Blocks per multiprocessor, averaged over its runs with their durations as weights; None where not known.
    blocks_per_sm: float | None
    occupancy_percent: float | None  #: Estimated achieved occupancy, averaged in the same way.
    #: FLOPs of the operators that launched it, divided by time where several kernels of one multiply; None without.
    flops: Flops | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSummary:
    """All kernels together."""

    calls: int  #: How many kernels ran.
    total_us: float  #: Time in all of them, added up.
    tensor_core_ratio: float | None  #: Time in kernels on tensor cores ÷ time in all kernels but collectives'.
    tensor_core_eligible_ratio: float | None  #: Time in kernels whose operators can use tensor cores ÷ the same.
    short_calls_ratio: float | None  #: Kernels shorter than ``SHORT_KERNEL_LIMIT_US`` ÷ kernels.
    short_time_ratio: float | None  #: Their time ÷ the time of all kernels.


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow(Row):
    """All calls of one operator.

    As in torch's own tables, *host* and *device* include what the operator called. A call inside a call of the same
    operator is a part of that call. Ratios are of the self times of all operators.
    """

    host: Durations  #: Time on the host, with what it called.
    host_self: Durations  #: Time on the host without the operators it called; the ratios of all operators add up to 1.
    device_self: Durations | None  #: Device time launched in it itself, without what it called.
    #: First line of the user's function that called it first, ``net.py:7``; empty without one, or without stacks.
    called_from: str = ""
    #: Sizes of the tensors it got, ``[32, 256, 14, 14], [1024, 256, 1, 1]``; empty in a table by name alone.
    inputs: str = ""
    flops: Flops | None = None  #: FLOPs of its calls that count; None without, and in a table by name alone.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRow(Row):
    """What the calls of one operator called and launched themselves, of one name; ratios are of that operator."""

    operator: str  #: Name of the operator that called or launched it.


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTime:
    """All events of one kind that begin in the steps, overlaps counted once; kinds overlap one another."""

    name: str  #: Kind of the events.
    calls: int  #: How many there are.
    time_us: float  #: Time in which at least one of them ran.
    ratio: float | None  #: That ÷ wall time of the steps.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """What one operator allocated and freed on one device."""

    name: str | None  #: Name of the operator; None: outside any operator.
    device: int  #: Number of the device, -1 for the host.
    calls: int  #: Calls of the operator in which memory was allocated or freed; outside of any such events.
    size_increase_bytes: int  #: Allocated less freed, with what it called.
    #: The same without what it called; the sum over all rows of a device is what the trace changed.
    self_size_increase_bytes: int
    allocation_bytes: int  #: Allocated, frees left out.
    self_allocation_bytes: int  #: Allocated without what it called, frees left out.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Memory of one device over time."""

    device: int  #: Number of the device, -1 for the host.
    absolute: bool  #: Whether bytes are all that the allocator had given out; else the change since the trace began.
    peak_bytes: int  #: The most at any moment.
    peak_us: float  #: When that was, after the first event of the trace.
    #: Microseconds after the first event, and bytes as *peak_bytes*: some hundreds, each the most until the next.
    points: tuple[tuple[float, int], ...]
    peak_phase: str | None = None  #: The phase that ran on the host at the peak; None if no phase is known then.
    #: Name, begin and end of each stretch of a phase, in the order of time; empty where there are over 500.
    phases: tuple[tuple[str, float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One module over all steps of a trace; totals are with the modules below it, own times without."""

    name: str  #: Qualified name; the root is ``""``.
    calls: int  #: Forward calls; those that a backward repeats are none.
    forward_us: float  #: All of its forward calls together.
    own_forward_us: float  #: Forward without the modules below it.
    backward_us: float  #: Backward, with what it repeats of the forward (activation checkpointing).
    own_backward_us: float  #: Backward without the modules below it.
    #: Standard error of the own times together, over the middle half of a run's traced steps; None for under four.
    own_error_us: float | None = None
    #: FLOPs of its calls that were counted, with the modules below it, over its forward and backward; None without.
    flops: Flops | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTable:
    """Where the time of forward and backward went, module by module; there when the trace shows modules' calls."""

    #: ``device``: time in which work that was launched there ran, overlaps counted once. ``host``: without a device.
    clock: Literal["host", "device"]
    #: All times and counts are of so many steps together; 1 for medians over the steps of a run's own trace.
    steps: int
    rows: tuple[ModuleRow, ...]  #: Each module by name, the root first.
    forward_us: float  #: All of the forward; its own work outside every module's call is the root's.
    backward_us: float  #: All of the backward: the modules', gradient accumulation, and what is unattributed.
    optimizer_us: float  #: The optimizer, without forward and backward in its closure.
    gradient_accumulation_us: float  #: Adding gradients to parameters, and the hooks that run there.
    unattributed_forward_us: float  #: Work in the forward that no module's call accounts for.
    #: The engine between nodes, hooks, collectives that no node waits for, and nodes whose forward is not known.
    unattributed_backward_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStepFlops(Flops):
    """FLOPs of one step on this rank, and how well it used the peak of its device; rates are over its wall time."""

    step: int | None  #: The profiler's number; None where the whole trace is one step.
    wall_us: float  #: Wall time of the step, as in the table of step times.
    #: (forward + backward) ÷ (peak × wall time), each dtype with its own peak; None without a peak or a counted call.
    mfu: float | None
    hfu: float | None  #: The same of model FLOPs, recompute and optimizer.
    lower_bound: bool  #: Something in the step was not counted, so that all its figures are at least these.


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFlops(Flops):
    """FLOPs of the counted calls of one operator in one dtype."""

    name: str  #: Name that the counter has for it: ``aten.mm``.
    #: Dtype of its arithmetic; ``tf32`` where a float32 operator launched a kernel whose name says tensor cores.
    dtype: str
    calls: int  #: How often it counted.
    #: Time of its kernels, copies and memsets, or on the host without a device; None where none is there.
    time_us: float | None
    #: Bytes of all tensors that it read and wrote, by shapes and dtypes; None where a result's shape is not known.
    bytes: int | None
    flops_per_byte: float | None  #: Arithmetic intensity: executed FLOPs ÷ bytes.
    #: The roof: the lower of the peak and intensity × the memory's bandwidth; None where one is not known.
    attainable_flops_per_sec: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UncountedRow:
    """What may have FLOPs and was not counted."""

    name: str  #: Name of the operator, or of a kernel that no counted operator launched.
    calls: int  #: How often it ran.
    reason: str  #: Why it was not counted, without a full stop.


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFlops:
    """FLOPs of one trace, which is of one rank; those of kernels, shapes and modules stand in their own tables."""

    device: str | None  #: The device that ran the kernels; None without one, or where several kinds took part.
    devices: int  #: How many of them took part.
    #: Dense peak of one of them in FLOP/s, by the dtypes that ran; one that is not known is left out.
    peaks: Mapping[str, float]
    memory_bytes_per_sec: float | None  #: Bandwidth of its memory; None where it is not known.
    steps: tuple[TracedStepFlops, ...]  #: FLOPs of each step, in order of time.
    mfu: float | None  #: MFU of all steps together, as if they were one; None where that of one of them is not known.
    hfu: float | None  #: HFU of all steps together; None as for MFU.
    operators: tuple[OperatorFlops, ...]  #: Operators over the whole trace, the one that took most time first.
    #: What may have FLOPs: where there is any, all that depends on it is a lower bound.
    uncounted: tuple[UncountedRow, ...]
