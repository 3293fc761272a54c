"""The tables of a trace as frozen records: what ``lightning_flops.analysis.trace`` finds, and a report shows.

Times are in microseconds, as in the file; what a trace does not contain is None. Needs the standard library alone, so
that a profile that holds such tables is read and shown where numpy is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_flops.analysis.advice import Advice
from lightning_flops.schema import dataclass_json

KERNEL_GAP_LIMIT_US = 30
"""A pause between two events that were both launched in time is a kernel gap below this: HTA's value."""
SHORT_KERNEL_LIMIT_US = 10
LONG_DELAY_US = 100

PhaseSource = Literal["scopes", "operators"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Lengths of several events; min <= mean <= max, and total = calls × mean."""

    total_us: float
    """All of them together."""
    mean_us: float
    """Of one of them."""
    max_us: float
    """Of the longest."""
    min_us: float
    """Of the shortest."""
    ratio: float | None
    """Total over the whole that the table names; None where that whole is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Microseconds of a step by what filled them; the parts add up to the step's wall time.

    A moment that several kinds of events share belongs to the first of them in the order of the fields, the priority
    of the PyTorch profiler's step-time breakdown: so ``communication_us`` is only what no kernel or copy hides, and
    ``data_loader_us`` only what the device and its launches leave.
    """

    number: int | None
    """The profiler's number of the step; None for the mean of several, and where the whole trace stands as one."""
    wall_us: float
    """Of the whole step."""
    kernel_us: float | None
    """Kernels other than collectives'. None, like the next two and the runtime's, when the trace has no device."""
    memcpy_us: float | None
    """Copies to, from and on the device that no kernel hides."""
    memset_us: float | None
    """Memory filled on the device."""
    communication_us: float | None
    """None when the trace has no collectives at all."""
    runtime_us: float | None
    """Calls on the host that launch work or wait for it."""
    data_loader_us: float | None
    """None when the trace shows no ``DataLoader``."""
    cpu_us: float | None
    """Operators on the host; None when none was recorded."""
    other_us: float
    """What is left: no event of these kinds ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Every step's breakdown, and their mean."""

    marked: bool
    """False when the trace has no profiler steps: the whole trace then stands as one step."""
    steps: tuple[StepTime, ...]
    """In the order of the trace."""
    mean: StepTime
    """Part by part over all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMetrics:
    """One device over all steps; ratios are of the steps' wall time."""

    device: int
    """Its number."""
    name: str | None
    """As the driver has it; None where the trace does not say."""
    sm_count: int | None
    """Streaming multiprocessors; None where the trace does not say."""
    utilization: float
    """Union of the kernels within the steps ÷ steps."""
    sm_efficiency: float | None
    """Estimated: ∫ min(1, Σ blocks per SM of the kernels then running) dt ÷ steps; None if a kernel lacks them."""
    occupancy_percent: float | None
    """Estimated achieved occupancy, averaged over the kernels with their durations as weights."""
    blocks_per_sm: float | None
    """Averaged in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """How long one device ran kernels while the trace was taken."""

    device: int
    """Its number."""
    utilization: float
    """Union of kernels ÷ elapsed time of the whole trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSummary:
    """How busy processors were from the first event of the trace to the last."""

    elapsed_us: float
    """From the first event to the last."""
    cpu_process_ratio: float | None
    """The process's CPU time ÷ elapsed; up to the number of cores. None when the trace does not say, like the next."""
    cpu_system_ratio: float | None
    """Busy ÷ (busy + idle) time of all cores."""
    devices: tuple[DeviceUse, ...] | None
    """Each device that ran a kernel; None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewRow:
    """All events of one kind inside the steps; moments that several of them share count once."""

    kind: str
    """Of the events, such as ``Kernel`` or ``Operator``."""
    side: Literal["host", "device"]
    """Where they ran."""
    calls: int
    """How many events there are."""
    time_us: float
    """Union of the events."""
    ratio: float | None
    """Of the steps; kinds overlap and contain one another, so these add up to no whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """One phase over all steps; ratios are of the steps."""

    calls: int
    """How often the phase was entered."""
    host: Durations
    """The optimizer's without what of other phases runs inside it, as in Lightning, whose closure runs there."""
    device: Durations | None
    """Kernels, copies and memsets launched in the phase; None without a device."""
    source: PhaseSource
    """``scopes``: named in the trace. ``operators``: from the operators that ran with gradients and in autograd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remainder:
    """What of the steps is in no phase."""

    host_us: float
    """On the host's clock."""
    host_ratio: float | None
    """Of the steps."""
    device_us: float | None
    """Device work launched there; None without a device."""
    device_ratio: float | None
    """Of the steps; None without a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """Phases of the steps, on the host's clock and by the device work they launched.

    A phase that the trace does not show is None; its time is then in ``others``.
    """

    step: PhaseRow
    """The steps themselves."""
    data_loader: PhaseRow | None
    """Fetching batches."""
    forward: PhaseRow | None
    """The forward."""
    backward: PhaseRow | None
    """The backward."""
    optimizer: PhaseRow | None
    """The optimizer's step."""
    others: Remainder
    """What is in none of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The steps' wall time by computation and communication, overlapping events merged.

    ``computation_us - overlap_us``, ``overlap_us``, ``communication_us - overlap_us`` and ``other_us`` add up to it.
    """

    wall_us: float
    """Of all steps together."""
    computation_us: float
    """Kernels that do not communicate; without a device, operators on the host that neither start nor await any."""
    communication_us: float
    """Collectives and what goes from one rank to another."""
    overlap_us: float
    """In which both went on."""
    other_us: float
    """In which neither did."""
    overlap_ratio: float | None
    """Overlap ÷ communication; None without communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPart:
    """One part of a traced step, mean over the traced steps; the parts add up to the step."""

    name: str
    """As in ``records.TimePhase``; also what the run does in the middle of a step that is none of these."""
    wall_sec: float
    """Without the parts inside it. Where a device took part, on the device's clock, up to its last kernel."""
    exposed_sec: float
    """Of it communication that no computation hides: here this rank may have waited for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """All calls of one collective in one trace."""

    name: str
    """Of the collective."""
    calls: int
    """How often it was called."""
    bytes: int | None
    """Of the larger side of each call, summed; None where the trace does not say."""
    latency: Durations
    """Ratio: of all collectives' durations."""


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
class ChildRow:
    """What one operator called, or launched, itself: all such children of one name."""

    name: str
    """Of the operator or the device event."""
    kind: Literal["operator", "device"]
    """``device``: a kernel, copy or memset."""
    calls: int
    """How often the parent called it."""
    host: Durations | None
    """Ratio: of the parent's total; None for a device event."""
    device: Durations | None
    """Ratio: of the parent's total; None without a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """All calls of one operator.

    As in torch's own tables, *total* includes what the operator called, so a total counts again under its caller.
    """

    name: str
    """As in torch's tables, such as ``aten::mm``."""
    calls: int
    """How often it ran."""
    host: Durations
    """Ratio: of the host self times of all operators. Above 1 is possible only for an operator that calls itself."""
    host_self: Durations
    """Without the operators it called; the ratios of all operators add up to 1."""
    device: Durations | None
    """Kernels, copies and memsets launched in it and in what it called. None without a device, like the next."""
    device_self: Durations | None
    """Launched in it itself, without what it called."""
    tensor_cores_eligible: bool
    """Whether it is a matrix product, convolution, attention or recurrent layer."""
    children: tuple[ChildRow, ...] = ()
    """What it called and launched itself, the longest first."""


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
    long_delays: int
    """Device events that began over ``LONG_DELAY_US`` after their call returned: they waited in the stream's queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCollectiveRow:
    """All calls of one collective on one rank, matched call by call with the ranks that took part."""

    name: str
    """Of the collective."""
    calls: int
    """How often this rank called it."""
    matched_calls: int
    """Calls whose counterparts are in the other ranks' traces."""
    bytes: int | None
    """Of the larger side of each call, summed; None where the trace does not say."""
    latency_us: float
    """From start to end, all calls together."""
    transfer_us: float | None
    """For each matched call the shortest of the ranks, summed: time in which data can have moved. None unmatched."""
    wait_us: float | None
    """The rest of the matched calls: waiting for the other ranks to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank over its steps."""

    rank: int | None
    """None where its trace does not say; then it goes by its source."""
    source: str
    """The trace's file or URL."""
    steps: int
    """How many steps its trace has."""
    overlap: Overlap
    """Its computation and communication."""
    transfer_us: float | None
    """Of its matched calls, time in which data can have moved; None without matched calls."""
    wait_us: float | None
    """Of its matched calls, waiting for other ranks to come; None without matched calls."""
    compute_over_median: float | None
    """Its computation per step ÷ the median of the ranks'; above 1, others wait for it."""
    collectives: tuple[RankCollectiveRow, ...]
    """Each collective that it called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """All ranks whose traces are at hand, by rank."""

    ranks: tuple[RankRow, ...]
    """By number."""
    computes_longest_source: str | None
    """Where the trace came from of the rank that computes longest per step."""
    computes_longest: int | None
    """The rank that computes longest per step, overlap included; None for one rank, or if several tie. Whether it holds
    the others up is for the advice to say. None, too, if its trace names no rank."""
    notes: tuple[str, ...]
    """What could not be compared, in sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One module over all steps of a trace; totals are with the modules below it, own times without."""

    name: str
    """Qualified name; the root is ``""``."""
    calls: int
    """Forward calls; those that a backward repeats are none."""
    forward_us: float
    """All of its forward calls together."""
    own_forward_us: float
    """Without the modules below it."""
    backward_us: float
    """With what the backward repeats of the forward (activation checkpointing)."""
    own_backward_us: float
    """Without the modules below it."""
    forward_kernels: int | None
    """With the modules below it; None without a device."""
    backward_kernels: int | None
    """With the modules below it; None without a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTable:
    """Where the time of forward and backward went, module by module; there when the trace's modules are marked."""

    clock: Literal["host", "device"]
    """``device``: time in which work that was launched there ran, overlaps counted once. ``host``: without a device."""
    steps: int
    """All times and counts are of so many steps together."""
    rows: tuple[ModuleRow, ...]
    """By name, the root first."""
    forward_us: float
    """All of the forward; its own work outside every module's call is the root's."""
    backward_us: float
    """All of the backward: the modules', gradient accumulation, and what is unattributed."""
    optimizer_us: float
    """The optimizer, without forward and backward in its closure."""
    gradient_accumulation_us: float
    """Adding gradients to parameters, and the hooks that run there."""
    backward_communication_us: float
    """Collectives in the backward that no module's node waits for. They may run beside gradient accumulation."""
    backward_outside_nodes_us: float
    """Operators that ran in the backward outside of autograd's nodes: what wrappers put off to the backward's end."""
    unattributed_forward_us: float
    """Work in the forward that no module's call accounts for."""
    unattributed_backward_us: float
    """The autograd engine between nodes, hooks in Python there, and nodes whose forward is not in the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """Every table of one trace; a table that the trace has nothing for is None."""

    source: str
    """The trace's file or URL."""
    rank: int | None
    """None where the trace does not say."""
    events: int
    """How many there are."""
    step_times: StepTimes
    """Every step by what filled it."""
    modules: ModuleTable | None
    """Forward and backward of each module; None where the trace's modules are not marked."""
    device_metrics: tuple[DeviceMetrics, ...] | None
    """How well each device was used over the steps; None without a device."""
    device_summary: DeviceSummary
    """How busy the processors were."""
    overview: tuple[OverviewRow, ...]
    """All events by kind."""
    model_summary: ModelSummary
    """The phases of the steps."""
    overlap: Overlap | None
    """None when the trace has no collectives, or is of a run of one rank."""
    collectives: tuple[CollectiveRow, ...] | None
    """Each collective; None when the trace has none."""
    kernel_summary: KernelSummary | None
    """All kernels together; None without a device."""
    kernels: tuple[KernelRow, ...] | None
    """Each kernel, the longest first; None without a device."""
    operators: tuple[OperatorRow, ...] | None
    """Each operator, the longest first; None when none was recorded."""
    memory: tuple[MemoryRow, ...] | None
    """What each operator allocated and freed; None where memory was not recorded."""
    module_memory: tuple[ModuleMemoryRow, ...] | None
    """What each module allocated and freed; None where memory or modules were not recorded."""
    transfers: tuple[TransferRow, ...] | None
    """Copies and memsets by kind; None without a device."""
    user_scopes: tuple[UserScopeRow, ...] | None
    """Each ``record_function`` scope; None when there is none."""
    idle: tuple[IdleTime, ...] | None
    """Pauses of each device and stream, by cause; None without a device."""
    launches: tuple[LaunchRow, ...] | None
    """Launches by kind; None when none is known."""
    notes: tuple[str, ...]
    """What is missing or degraded, in sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracesReport:
    """The reports of one trace for each rank, and the ranks side by side."""

    schema_version: int
    """Of the JSON; another one has other fields."""
    traces: tuple[TraceReport, ...]
    """By rank."""
    ranks: RankComparison | None
    """None for a single trace."""
    advice: tuple[Advice, ...]
    """What the traces show that holds the run back, the most at stake first."""

    def to_json(self) -> str:
        """Indented JSON; the field names are the keys."""
        return dataclass_json.dump(self)
