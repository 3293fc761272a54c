"""What one trace, several traces and the traced step of a window say, and all ranks of a job together."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from lightning_flops.schema import codec
from lightning_flops.schema.step import Advice, DtypeFlops, JobRates, StepFlops
from lightning_flops.schema.tables import (
    ChildRow,
    DeviceMetrics,
    IdleTime,
    KernelRow,
    KernelSummary,
    KindTime,
    MemoryCurve,
    MemoryRow,
    ModuleTable,
    OperatorRow,
    Row,
    StepTimes,
    TraceFlops,
)
from lightning_flops.units import duration, percent, plural, run_text

if TYPE_CHECKING:
    Integers: TypeAlias = array[int]
else:
    Integers = array  # before Python 3.12 it takes no type of its items, and JSON is read by the types of fields

_Figure = TypeVar("_Figure", int, StepFlops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Wall time of the steps, split by computation and communication; overlapping events are merged.

    ``computation_us - overlap_us``, ``overlap_us``, ``communication_us - overlap_us`` and ``other_us`` add up to it.
    """

    wall_us: float  #: Wall time of all steps together.
    #: Kernels that do not communicate; without a device, operators on the host that neither start nor await any.
    computation_us: float
    communication_us: float  #: Collectives and what goes from one rank to another.
    overlap_us: float  #: Both at once.
    other_us: float  #: Neither.
    overlap_ratio: float | None  #: Overlap ÷ communication; None without communication.

    @property
    def exposed_us(self) -> float:
        """Communication that no computation hides."""
        return self.communication_us - self.overlap_us


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCalls:
    """The calls that one rank made of one collective in one process group and step, in the order of their starts."""

    name: str  #: Name of the collective.
    #: Text that the ranks of the group alone share; None if not known, and for what goes from one rank to another.
    group: str | None
    group_size: int | None  #: Ranks that take part; None where the trace does not say.
    step: int | None  #: The profiler's number of the step in which they were started; None in a trace without steps.
    calls: int  #: How often it was called.
    bytes: int | None  #: Bytes of the larger side of each call, all calls together; None where the trace does not say.
    total_ns: int  #: Latency of all calls together, added up by each rank, so that no rank adds up those of thousands.
    #: From start to end of each call, typecode ``q``; if there are fewer than *calls*, of the first calls.
    latency_ns: Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCollectiveRow:
    """All calls of one collective on one rank, matched call by call with the ranks that took part."""

    name: str  #: Name of the collective.
    calls: int  #: How often this rank called it.
    matched_calls: int  #: Calls whose counterparts are in the other ranks' traces.
    bytes: int | None  #: Bytes of the larger side of each call, summed; None where the trace does not say.
    latency_us: float  #: From start to end, all calls together.
    #: For each matched call the shortest of the ranks, summed: time in which data can have moved. None unmatched.
    transfer_us: float | None
    wait_us: float | None  #: The rest of the matched calls: waiting for the other ranks.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank over its steps."""

    rank: int | None  #: Number of the rank; None where its trace does not say.
    steps: int  #: How many steps its trace has.
    overlap: Overlap  #: Computation and communication of the rank.
    #: Time of the matched calls in which data can have moved, at most that of its communication; None without any.
    transfer_us: float | None
    #: Time of the matched calls in which they wait for other ranks, at most as long; None without matched calls.
    wait_us: float | None
    collectives: tuple[RankCollectiveRow, ...]  #: Each collective that it called.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """All ranks whose traces are at hand, by rank."""

    ranks: tuple[RankRow, ...]  #: By number.
    notes: tuple[str, ...]  #: What could not be compared, in sentences.


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """One rank in a few figures of one step."""

    rank: int  #: Number of the rank.
    model_flops: int  #: Forward + backward of one step on this rank.
    parts_sec: Mapping[str, float]  #: Mean of each part of a step, which add up to it; empty if no step was timed.
    local_params: int | None  #: Parameters that the rank holds in memory.
    #: Peak memory of tensors on its device, or of its process on the host; None if it was not looked at.
    peak_memory_bytes: int | None
    traced: bool  #: Whether its traced step separates its own work from waiting for other ranks.


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProfile:
    """One stage of a pipeline, of one copy of the model."""

    stage: int  #: Number of the stage in the pipeline, the first being 0.
    params: int | None  #: Unique logical parameters of the stage; None if not known.
    trainable_params: int | None  #: Parameters that need a gradient.
    #: FLOPs of one step: the sum over ranks that see the same data, the mean over those that see different data.
    flops: StepFlops


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that the others wait for; seconds are of one step."""

    rank: int  #: Number of the rank.
    late_sec: float  #: Time by which its own work takes longer than the others' median: so long they wait for it.
    share: float  #: ``late_sec`` ÷ the other ranks' median step.
    part: str | None  #: The part of a step, as in ``PartTiming``, that has most of it; None if no part has half of it.
    part_sec: float | None  #: How much longer that part takes than on the median of the other ranks.
    #: Qualified name of the module that has at least half of that, children left out; None if there is none.
    module: str | None
    #: Whether all modules together have less than half of that: it is what the rank does around them.
    outside_modules: bool = False

    @property
    def evidence(self) -> str:
        """Who waits for whom, how long, and where that comes from, in a sentence."""
        late = (
            f"The other ranks wait {duration(self.late_sec)} a step ({percent(self.share)} of it) for rank {self.rank}"
        )
        if self.part is None:
            return f"{late}: no part of its step stands out alone."
        part = "what is in no named part of its step" if self.part == "other" else f"its {self.part}"
        # Not by how much in the module: that is of the traced step, and the part's figure may be of all timed ones.
        module = "" if self.module is None else f", mostly in {self.module or 'the root module'}"
        if self.outside_modules:
            module = ", outside its modules"
        return f"{late}: {part} takes {duration(self.part_sec)} longer than theirs{module}."

    @property
    def action(self) -> str:
        """What to try, in a sentence."""
        if self.part == "data wait":
            return "Look at how that rank gets its data: its storage, its workers, the lengths of its samples."
        if self.module is not None:
            return f"Look at what {self.module or 'the root module'} is given there, and at that rank's device."
        if self.outside_modules:
            return f"Look at what that rank does around its modules in its {self.part}: losses, metrics, hooks."
        return "Balance the work between ranks, and look at that rank's device."


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksProfile:
    """All ranks of a job together; every figure is of those that answered, and of one global step."""

    absences: Mapping[str, tuple[int, ...]]  #: Ranks that did not answer, by the reason, which ends a sentence.
    flops: StepFlops  #: FLOPs of all ranks, added up.
    dtypes: tuple[DtypeFlops, ...]  #: The same by dtype.
    devices: Mapping[str, int]  #: Ranks by the name of their device, the most first.
    #: Dense peak of all these devices together for the dtypes of the job's model FLOPs; None if one is not known.
    peak_flops_per_sec: float | None
    rates: JobRates  #: Ratios of all ranks together.
    unavailable: Mapping[str, str]  #: Why a rate (by its field's name) is None, in a few words.
    pipeline_stages: int  #: Stages of the pipeline; 1 without one.
    #: Each stage of which a rank answered, by number; without a pipeline the whole model.
    stages: tuple[StageProfile, ...]
    #: Communication in the traced steps; None if fewer than two ranks' traces show any.
    communication: RankComparison | None
    #: Ranks that the others wait for, the one that they wait for longest first; empty where all keep pace.
    stragglers: tuple[Straggler, ...]
    #: How far a rank's own time may differ from the others' by chance, seconds of a step by part: four standard errors.
    chance_sec: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...]  #: What did not fit into the records, and whose FLOPs are lower bounds, in sentences.
    ranks: tuple[RankFigures, ...]  #: Each rank that answered, by number.

    @property
    def answered(self) -> int:
        """Ranks whose measurements are in here."""
        return len(self.ranks)

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return len(self.ranks) + sum(map(len, self.absences.values()))

    @property
    def flops_of_model(self) -> StepFlops | None:
        """FLOPs of one copy of the model; None if no rank of some stage answered."""
        return self._of_model([stage.flops for stage in self.stages])

    @property
    def params(self) -> int | None:
        """Unique logical parameters of the whole model; None if those of a stage are not known."""
        return self._of_model([stage.params for stage in self.stages])

    @property
    def trainable_params(self) -> int | None:
        """Parameters of the whole model that need a gradient."""
        return self._of_model([stage.trainable_params for stage in self.stages])

    def _of_model(self, figures: Sequence[_Figure | None]) -> _Figure | None:
        """The stages' *figures* added up; None if one is missing."""
        known = [one for one in figures if one is not None]
        return sum(known[1:], start=known[0]) if len(known) == self.pipeline_stages else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """Every table of one trace; a table that the trace has nothing for is None."""

    source: str  #: The trace's file or URL.
    rank: int | None  #: Rank that it is of; None where the trace does not say.
    events: int  #: How many events there are.
    step_times: StepTimes  #: Every step by what filled it.
    #: Forward and backward of each module; None where modules are neither marked nor recorded with ``with_stack``.
    modules: ModuleTable | None
    #: How well each device was used over the steps; None without a device.
    device_metrics: tuple[DeviceMetrics, ...] | None
    #: ``step``, then ``data loader``, ``forward``, ``backward`` and ``optimizer`` as far as scopes name them, and
    #: ``others``, what is in none of them; ratios are of the steps. The optimizer's is without other phases inside it,
    #: as in Lightning, whose closure runs there. None where no scope names a phase.
    phases: tuple[Row, ...] | None
    #: Computation and communication; None when the trace has no collectives, or is of a run of one rank.
    overlap: Overlap | None
    #: Each collective, on the device if there is one, and the bytes of its larger side; ratios are of all of them.
    collectives: tuple[Row, ...] | None
    kernel_summary: KernelSummary | None  #: All kernels together; None without a device.
    kernels: tuple[KernelRow, ...] | None  #: Each kernel, the longest first; None without a device.
    operators: tuple[OperatorRow, ...] | None  #: Each operator, the longest first; None when none was recorded.
    memory: tuple[MemoryRow, ...] | None  #: What each operator allocated and freed; None where memory was not recorded.
    #: Copies and memsets by kind, such as ``Memcpy HtoD (Pageable -> Device)``, and on the host the calls that launched
    #: them; None without a device. Ratios are of the steps' own marks on the host, and of all device work.
    transfers: tuple[Row, ...] | None
    #: Each ``record_function`` scope, and what any thread launched in it, once in a row; ratios as of *transfers*.
    user_scopes: tuple[Row, ...] | None
    idle: tuple[IdleTime, ...] | None  #: Pauses of each device, by cause; None without a device.
    notes: tuple[str, ...]  #: What is missing or degraded, in sentences.
    #: Memory of each device over time; None where memory was not recorded.
    memory_curves: tuple[MemoryCurve, ...] | None = None
    #: Each operator by the sizes of its inputs, the longest first; None where shapes were not recorded.
    operators_by_shape: tuple[OperatorRow, ...] | None = None
    #: What each operator called and launched itself, the longest first; None in a profile, and without operators.
    children: tuple[ChildRow, ...] | None = None
    kinds: tuple[KindTime, ...] = ()  #: Time by kind of event, overlaps counted once.
    #: FLOPs from the shapes in the trace; None where it has none, and for a step that the run itself counted.
    flops: TraceFlops | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracesReport(codec.Json):
    """The reports of one trace for each rank, and the ranks side by side."""

    schema_version: int = 13  #: Version of the JSON; another one has other fields.
    traces: tuple[TraceReport, ...]  #: Report of each trace, by rank.
    ranks: RankComparison | None  #: Ranks side by side; None for a single trace.
    advice: tuple[Advice, ...]  #: What the traces show that holds the run back, the largest possible saving first.


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPart:
    """One part of a traced step, mean over the traced steps; the parts add up to the step."""

    #: Name as in ``records.TimePhase``; also what the run does in the middle of a step that is none of these.
    name: str
    #: Without the parts inside it. Where a device took part, on the device's clock, up to its last kernel.
    wall_sec: float
    #: Of it communication that no computation and no copy hides: here this rank may have waited for others.
    exposed_sec: float
    own_steps_sec: tuple[float, ...] = ()  #: Of each traced step, without such communication; empty if not known.


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFilling:
    """What filled one part of a traced step, mean over the traced steps; the fields add up to the part's wall time.

    With a device these are kernels, each of the kind of the operator that launched it. A moment that several kinds of
    work share belongs to the first of them in the order of the fields.
    """

    matmul_ns: int = 0  #: Matmul-like operators: matrix products, convolutions, attention, recurrent layers.
    operators_ns: int = 0  #: All other operators.
    copies_ns: int = 0  #: Copies and memsets on the device.
    communication_ns: int = 0  #: Collectives, and what goes from one rank to another.
    idle_ns: int = 0  #: Nothing of these ran: a device waited for its host, or the host ran Python between operators.


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A step, or several in a row, that ran under torch.profiler.

    Times of modules and operators are medians over these steps. Where they are the host's, which torch.profiler slows,
    they are scaled to the forward and backward of a typical timed step.
    """

    index: int  #: Steps of the fit before the first of them.
    #: Whether it has the counted step's signature. If not, rates of modules and operators are estimates.
    like_counted: bool
    files: tuple[str, ...]  #: Paths or URLs where traces were kept; empty if none was to be.
    tables: TraceReport | None  #: Every table of the trace; None if there is none.
    #: Where the time went, and what of it was communication; empty if there is no trace.
    parts: tuple[TracedPart, ...] = ()
    #: What filled each of these parts; None if there is no trace, or if the trace does not show the device.
    filling: Mapping[str, PartFilling] | None = None
    steps: int = 1  #: How many steps there are.
    #: Typical seconds of the forward / the sum of what is in the traced one. Where times are the device's, or no step
    #: was timed, elements of the counted steps' batches / of the traced ones', which is 1 for traced steps like them.
    forward_scale: float = 1.0
    backward_scale: float = 1.0  #: Typical seconds of the backward, divided in the same way.
    #: Its forward or backward took over twice, or under half, of a typical one, so times of modules are rough.
    is_apart: bool = False
    #: Every call of every collective: what another rank's are matched with. Empty in a run of one rank.
    collectives: tuple[CollectiveCalls, ...] = ()

    @property
    def shows_device(self) -> bool:
        """Whether it shows how long a device works in a step such as the counted one."""
        modules = None if self.tables is None else self.tables.modules
        return self.like_counted and modules is not None and modules.clock == "device"

    def named(self, word: str) -> str:
        """These steps for people, each of them a *word*: "step 8", "steps 29-33"."""
        return f"{plural(word, self.steps)} {run_text(range(self.index, self.index + self.steps))}"
