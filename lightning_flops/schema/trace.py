"""What one trace, several traces and the traced step of a window say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_flops.schema import codec
from lightning_flops.schema.ranks import CollectiveCalls, Overlap, RankComparison
from lightning_flops.schema.step import Advice
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
from lightning_flops.units import plural, run_text


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

    VERSION = 11
    schema_version: int = VERSION  #: Version of the JSON; another one has other fields.
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
    """A step, or several in a row, that ran under torch.profiler, or whose modules a clock timed in its place.

    Times of modules and operators are medians over these steps. Where they are the host's, which torch.profiler slows,
    they are scaled to the forward and backward of a typical timed step.
    """

    index: int  #: Steps of the fit before the first of them.
    #: Whether it has the counted step's signature. If not, rates of modules and operators are estimates.
    like_counted: bool
    files: tuple[str, ...]  #: Paths or URLs where traces were kept; empty if none was to be.
    tables: TraceReport | None  #: Every table of the trace; None if there is none.
    #: Own seconds of each module's forward by a clock at module hooks, of ``get_model_profile`` alone.
    own_forward_sec: Mapping[str, float] | None
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
