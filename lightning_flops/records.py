"""What was measured: frozen records that measure/ makes and analysis reads.

Nothing here knows torch or a training framework. Counts are ints, seconds are floats, what could not be known is None.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

#: The bucket a counted operator falls in; ``PhaseAmounts`` has one field for each.
FlopPhase = Literal["forward", "backward", "recompute", "optimizer", "outside"]

#: FLOPs of a step by bucket and dtype. A bucket is a phase.
BucketFlops = Mapping[tuple[str, str], int]

Shapes = tuple[tuple[int, ...], ...]  # shapes of a batch's tensors, with what else describes the batch

#: The part of a step a moment belongs to; ``PhaseSeconds`` has one field for each.
TimePhase = Literal["data_wait", "transfer", "forward", "backward", "bubble", "optimizer", "other"]

Loop = Literal["training", "predict", "test", "validate"]  # all but the first only run the model forward

#: Phases of a step of reinforcement learning or distillation; a loop may name others.
ROLLOUT, SCORING, TRAINING, REST = "rollout", "scoring", "training", "rest"

OUTSIDE = "(outside)"  # the module name under which work outside the profiled root module is listed
METADATA_KEY = "lightning_flops"  # key at the top of a trace for what this package adds to it

MODULE_MARK, PHASE_MARK, _ROOT = "module: ", "phase: ", "(root)"  # behind the first stands the qualified name
MARKS = (MODULE_MARK, PHASE_MARK)  # how the name of every mark of ours in a trace begins; no operator's name does


def marked_module(mark: str) -> str | None:
    """The module's qualified name, ``""`` for the root; None if *mark* is not a module's."""
    name = mark[len(MODULE_MARK) :]
    return None if not mark.startswith(MODULE_MARK) else "" if name == _ROOT else name


def marked_phase(mark: str) -> str | None:
    """The part of the step; None if *mark* is not a part's."""
    return mark[len(PHASE_MARK) :] if mark.startswith(PHASE_MARK) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseAmounts:
    """What was counted, by phase."""

    forward: int = 0  #: Every forward that runs inside a step, and the loss.
    backward: int = 0  #: What autograd ran, without what it repeated of the forward.
    recompute: int = 0  #: What the backward repeated of the forward: checkpoints, fused attention's score matrix.
    optimizer: int = 0  #: Everything inside optimizer steps.
    outside: int = 0  #: What ran outside the model: in a callback, a metric, an augmentation of the batch.

    @property
    def total(self) -> int:
        """All phases added up."""
        return self.forward + self.backward + self.recompute + self.optimizer + self.outside

    def __add__(self, other: Self) -> Self:
        return type(self)(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFlops(PhaseAmounts):
    """FLOPs by phase; a multiply-add is two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBytes(PhaseAmounts):
    """Bytes by phase: the inputs and outputs of every operator that ran, views left out."""


Key = TypeVar("Key", bound=Hashable)
Amount = TypeVar("Amount", int, float, PhaseFlops, PhaseBytes)


def summed(amounts: Iterable[tuple[Key, Amount]], nothing: Amount) -> dict[Key, Amount]:
    """The *amounts* of each key added up, beginning with *nothing*."""
    sums: dict[Key, Amount] = {}
    for key, amount in amounts:
        sums[key] = sums.get(key, nothing) + amount
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCell:
    """What one operator did in one module, phase and dtype, over all counted steps."""

    module: str  # qualified name of the module that owns the work: ``""`` is the root, ``OUTSIDE`` what no module owns
    phase: FlopPhase
    operator: str  # name without overload, such as ``aten.mm``
    dtype: str  # effective dtype of the arithmetic: ``float32``, ``tf32``, ``bfloat16``, ``float8``, ``int8`` …
    calls: int = 0
    flops: int = 0  # model FLOPs: full score matrix for attention unless ``causal_attention="half"``
    skipped: int = 0  # of *flops*, what fused attention does not execute; < 0 where it executes more than "half" counts
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UncountedOperator:
    """An operator that ran, has no FLOP formula and is not known to be free, or whose formula failed."""

    calls: int  #: How often it ran.
    modules: tuple[str, ...]  #: Sorted names of the modules it ran in.
    #: Whether it may have FLOPs, as it takes or makes floating tensors, so that totals without it are lower bounds.
    may_have_flops: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopRecord:
    """Everything the FLOP counter saw over the counted steps."""

    cells: tuple[OperatorCell, ...] = ()
    module_calls: Mapping[str, int] = field(default_factory=dict)  # entries into each forward, recomputation left out
    uncounted: Mapping[str, UncountedOperator] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what the counter could not do, in sentences for the report
    unused_calls: Mapping[str, int] = field(default_factory=dict)  # with gradients, of whose graph no backward ran
    asked: tuple[str, ...] = ()  # models that the loop called without gradients; OUTSIDE: one that is not of the root

    def by_bucket(self) -> Counter[tuple[str, str]]:
        """FLOPs by bucket and dtype; what is zero is left out."""
        buckets: Iterable[tuple[tuple[str, str], int]] = (((one.phase, one.dtype), one.flops) for one in self.cells)
        return +Counter(summed(buckets, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedModule:
    """One module of the model, and what it says of itself."""

    name: str  #: Qualified name; the root is ``""``.
    type_name: str  #: Class of the module; ``""`` if it did work but the model does not list it.
    extra_repr: str = ""  #: What the module says of itself, such as ``in_features=8, out_features=4``.
    #: Unique logical parameters of the module and all below it: ties once, shards by their full size.
    params: int = 0
    alias_of: str | None = None  #: Name under which the same module object stands earlier in the tree.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRecord(DescribedModule):
    """One module of the profiled model, as it was when its step was counted; wrappers' prefixes are not in its name."""

    trainable_params: int = 0
    local_params: int = 0  # parameters that this rank holds in memory
    parameter_bytes: Mapping[str, int] = field(default_factory=dict)  # of ``params``, by the dtype they are kept in
    weight_sizes: tuple[int, ...] = ()  # the first two dimensions of each parameter of its own that has two
    parameter_shapes: tuple[tuple[int, ...], ...] = ()  # of its own, whole where ranks hold shards; a lazy one has none


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSeconds:
    """Exclusive seconds of one rank in each part of one step; they add up to the step's wall time."""

    data_wait: float = 0.0
    transfer: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    bubble: float = 0.0  # sending to, receiving from and waiting for the other stages of a pipeline
    optimizer: float = 0.0
    other: float = 0.0  # callbacks, logging, schedulers, and whatever else the loop does between the named parts

    @property
    def total(self) -> float:
        """Wall seconds of the step."""
        return self.data_wait + self.transfer + self.forward + self.backward + self.bubble + self.optimizer + self.other


def phase_of(part: str, name: str) -> str:
    """The phase that *part* of a step belongs to while the phase *name* runs, which is empty if none does."""
    return name or (TRAINING if part in ("forward", "backward", "optimizer") else REST)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSignature:
    """What makes two steps comparable: batch shapes and how often each phase ran."""

    batches: tuple[str, ...]  # shapes of each micro-batch, as text
    forwards: int
    backwards: int
    updates: int
    phases: tuple[str, ...] = ()  # rollout and those that the loop named: not every step need have them

    @property
    def elements(self) -> int:
        """Elements of all tensors of its batches whose shapes are known; at least 1."""
        shapes = re.findall(r"\[([\d, ]+)\]", " ".join(self.batches))
        return max(1, sum(math.prod(map(int, shape.split(","))) for shape in shapes))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One global step: what it was, and how long it took if it was timed."""

    index: int  # steps of this fit before it; the first is 0
    signature: StepSignature
    micro_steps: int
    samples: int | None  # samples this rank processed, all micro-steps together; None when the batch size is not known
    tokens: int | None = None
    flops: PhaseFlops | None = None  # FLOPs of this step alone; None for a step that was not counted
    seconds: PhaseSeconds | None = None  # None for a step that was counted: counting costs time
    reader_sec: float | None = None  # on the host, inside the data loader; on a GPU more than ``seconds.data_wait``
    excluded_sec: Mapping[str, float] = field(default_factory=dict)  # not the step's: validation, checkpointing …
    phase_sec: Mapping[str, float] = field(default_factory=dict)  # of each phase; they add up to the step's wall time
    rollouts: tuple[tuple[int, int], ...] = ()  # tokens of prompts and of completions that each made, by shape
    predicted: BucketFlops | None = None  # its FLOPs by the run's formula; None where no formula gives them
    is_beyond: bool = False  # its sizes lie beyond those that were counted, so what is predicted is an estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """Ranks along each way to share the work: ``world_size`` = dp x tp x pp x cp x sp; experts divide dp once more."""

    dp_size: int = 1  #: Ranks that see different data.
    tp_size: int = 1  #: Ranks that share each layer (tensor parallel).
    pp_size: int = 1  #: Stages of the pipeline.
    cp_size: int = 1  #: Ranks that share each sequence (context parallel).
    sp_size: int = 1  #: Ranks that hold different parts of the same sequences (Ulysses).
    ep_size: int = 1  #: Ranks that hold different experts, of the layer that spreads its experts most.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext(ParallelSizes):
    """Where a profile was taken."""

    framework: str  #: ``lightning.pytorch``, ``pytorch_lightning``, ``transformers``, ``deepspeed`` or ``torch``.
    framework_version: str  #: Installed version of that framework.
    torch_version: str  #: Version of torch in the run.
    device_type: str  #: ``cpu``, ``cuda`` …
    device_name: str  #: Name that the driver has for it; the processor's architecture on a CPU.
    precision: str  #: The framework's name for it, such as ``bf16-mixed``.
    host: str = ""  #: Name of the machine; empty if it was not read.
    rank: int = 0  #: Of the process whose profile this is.
    world_size: int = 1  #: Ranks of the run.
    #: This rank's stage of the pipeline, the first being 0; counts, times and parameters are those of the stage.
    pp_rank: int = 0
    micro_batch_size: int | None = None  #: Samples of one batch on this rank; None if not known.
    accumulate: int = 1  #: Batches whose gradients make one update.
    strategy: str = ""  #: The framework's class that spreads the work; empty without one.
    #: What ran. In a loop without training a step is one batch, and has no backward and no optimizer.
    loop: Loop = "training"

    @property
    def trains(self) -> bool:
        """Whether the run trains; if not, a step is one batch."""
        return self.loop == "training"

    @property
    def run_word(self) -> str:
        """What the framework's users call the run that steps are numbered in."""
        word = "fit" if "pytorch" in self.framework else "run"  # of Lightning's Trainer; Fabric runs no loop
        return word if self.trains else f"{self.loop} loop"

    @property
    def whose_loop(self) -> str:
        """What runs around the parts of a step, for people."""
        return "Lightning's own loop" if "pytorch" in self.framework else "the loop itself"

    @property
    def step_word(self) -> str:
        """What users call a step of this run."""
        return "step" if self.trains else "batch"

    @property
    def device_word(self) -> str:
        """What a figure of one rank is "per": an accelerator, or a process on the host."""
        return "process" if self.device_type == "cpu" else "device"

    @property
    def activity(self) -> str:
        """What the run does, as the subject of a sentence."""
        return "Training" if self.trains else f"The {self.loop} loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """How an optimizer updates its parameters."""

    type_name: str
    updates: str = ""  # how: "fused", "foreach" or "tensor by tensor"; empty where torch's optimizers do not show it
    faster_with: tuple[str, ...] = ()  # arguments with which it would update many tensors at once, if it does not


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """How a run is set up, as far as it bears on speed; None where it is unknown."""

    compute_capability: tuple[int, int] | None = None  # of the CUDA device
    data_parallel_devices: int = 0  # GPUs that torch.nn.DataParallel spreads the batch over; 0 for none
    process_group_backend: str | None = None  # of the default process group, for this device
    nccl: bool | None = None  # whether this torch has NCCL, which none has on Windows
    optimizers: tuple[OptimizerFacts, ...] | None = None
    loader_workers: int | None = None  # fewest worker processes of the training DataLoaders
    compiled: bool = False  # torch.compile was seen to wrap the model, or modules of it
    cores: int | None = None  # cores that this process may use
    graph_breaks: int = 0  # of torch.compile in this process so far
    graph_break_reason: str = ""  # of most of them
    recompilations: int = 0  # of what torch.compile had compiled, in this process so far; those of its latest 64
    recompilation_reason: str = ""  # of the latest
    padding_ratio: float | None = None  # share of padding in the tokens of the run's batches so far


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStepRecord:
    """Steps that ran under torch.profiler, in one trace file."""

    index: int  # steps of this fit before the first of them
    signatures: tuple[StepSignature, ...]  # of each
    path: str  # local trace file, plain JSON, there as long as what recorded it


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the user's program in one part of a step, by samples of the host's time."""

    file: str  #: Path of its file; empty where nothing of the user's was on the stack.
    line: int  #: Its number.
    function: str  #: Qualified name of its function.
    text: str  #: What stands there.
    hook: str  #: Hook of a framework's callback that was running, as ``Class.on_train_batch_end``; empty: none.
    part: str  #: The part of the step.
    samples: int  #: How many samples stand behind it.
    #: Whether it only calls the model, the backward, the update, the loader or the framework.
    only_enters: bool
    in_module: bool = False  #: Whether it runs inside a module's call.


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRecord(Line):
    """One line in the sampled steps; its part is a ``TimePhase``, or what belongs to no step."""

    callee: str  # the Python function that it had called, with "torch." before torch's; empty: none
    seconds: float  # in all sampled steps together
    long_sec: float = 0.0  # of these seconds, in operators that take milliseconds each


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesRecord:
    """What steps after the traced ones have shown of the user's lines."""

    steps: int  # how many were sampled
    lines: tuple[LineRecord, ...]  # the one with most time first
    why: str = ""  # why there are none, or not more, as the end of a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord:
    """Memory of this rank in the counted step, and what it is for, in bytes."""

    kind: Literal["allocated", "resident"]  #: By tensors on the device, or by the whole process on the host.
    #: Held when a phase of the counted step ended, by phase; the largest over its micro-steps.
    held_bytes: Mapping[str, int | None]
    #: Most that was held until the report, since the process began or the user reset the device's peak.
    run_peak_bytes: int | None
    #: Most that a caching allocator ever took from the device; None where there is none.
    run_reserved_peak_bytes: int | None
    parameter_bytes: int  #: Of this rank's shards.
    buffer_bytes: int  #: The model's buffers.
    gradient_bytes: int | None  #: Largest after a backward; None where gradients are not kept on the parameters.
    #: States, and copies of parameters that the optimizer keeps for itself; None if not known.
    optimizer_bytes: int | None
    #: Activations and outputs that a forward keeps for the backward; None on the host, which does not show it.
    kept_by_forward_bytes: int | None
    #: The part of the counted step in which the most that was held last grew; None: it had been as high before.
    peak_grew_in: str | None = None


#: What a tensor is for: buffers are with the parameters, and temporary is what no later part of the step uses.
MemoryKind = Literal["parameters", "gradients", "optimizer", "activations", "batch", "temporary"]


@dataclass(slots=True, kw_only=True, eq=False)  # the step that is followed fills it in
class TensorLife:
    """One allocation: its size, and between which events of the step it was held."""

    size: int  # bytes
    born: int  # number of the event that allocated it
    part: str  # of the step in which it was made: a phase, or "" of what was there before
    module: str  # whose code made it; ``OUTSIDE`` of none
    operator: str  # that made it; empty of what was there before
    kind: MemoryKind = "temporary"
    died: int | None = None  # number of the event that freed it; None: it was held at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """Every allocation of the steps that were followed, and the FLOPs of the last."""

    lives: Sequence[TensorLife]
    before_forward: int  # how many of them there were before the last forward
    flops: PhaseFlops
    batch_size: int | None  # None: no tensor of the batch has an axis
    notes: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...] = ()  # names of modules of one class that follow one another in a list
    available_bytes: int | None = None  # that tensors may take; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorLoss:
    """Processor time that was had while steps were timed, and what was asked for and not given; None: not known."""

    seconds: float  # wall time, from the first timed step to the end of the last
    batches_sec: tuple[float, ...]  # processor time of this process, all threads together, in each batch
    waited_share: float | None  # of the time that a thread was ready and had no processor: the one that waited most
    waits_share: float | None = None  # of the time, what all threads waited so, together; at most 1
    idle_cores: float | None = None  # cores of this machine that had nothing to do, on average
    busy_share: float | None = None  # of the processor time that this machine has, what anything used
    heat_share: float | None = None  # of the time, how long heat held the GPU's clock down, by the driver's counter


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRecord:
    """One whole window, ready for analysis."""

    profile_step: int  # N: the counted step is the one that began after N steps of this fit
    context: RunContext
    modules: tuple[ModuleRecord, ...]
    flops: FlopRecord
    counted_steps: tuple[StepRecord, ...]  # one step; several where signatures keep changing
    timed_steps: tuple[StepRecord, ...]
    unhooked_sec: tuple[float, ...] = ()  # each of more such steps, of which nothing was heard but where they end
    plain_steps: tuple[StepRecord, ...] = ()  # more such steps, timed as a whole: only the sum of ``seconds`` is true
    timing_steps: int  # how many timed steps were asked for
    phases: Mapping[str, BucketFlops] = field(default_factory=dict)  # what of *flops* each phase of the steps did
    variable: bool = False  # signatures or FLOPs of steps kept changing: counted and timed ones are different samples
    traces: tuple[TracedStepRecord, ...] = ()  # one record of each traced cycle; if there is none, the notes say why
    lines: LinesRecord | None = None  # the user's lines in sampled steps; None where no loop was profiled
    memory: MemoryRecord | None = None  # None if it was not read
    tensors: StepTensors | None = None  # every allocation of the counted step; None where not all of them are seen
    facts: RunFacts | None = None  # how the run is set up; None if it was not read
    processor: ProcessorLoss | None = None  # over the timed steps; None if they were too short
    mixed_phases: tuple[TimePhase, ...] = ()  # their seconds cannot be separated: rates are n/a, the sum is still true
    notes: tuple[str, ...] = ()  # what is missing or degraded, in sentences for the report


class Extremes(NamedTuple):
    """How many values there are, their sum, the least and the greatest."""

    number: int
    total: float
    least: float
    greatest: float


class BatchTokens(NamedTuple):
    """Tokens of a batch, or of several; None where they are not known of one."""

    processed: int | None  # by shape, padding included
    real: int | None  # without padding
    squares: int | None  # the squares of the sequences' lengths, added up: what attention between their tokens goes by

    def plus(self, *others: BatchTokens | None) -> BatchTokens:
        """All of them together; None is a batch that does not show its tokens."""
        if None in others:
            return UNKNOWN_TOKENS
        columns = zip(self, *others, strict=True)
        return BatchTokens._make([None if None in column else sum(filter(None, column)) for column in columns])


NO_TOKENS = BatchTokens(0, 0, 0)
UNKNOWN_TOKENS = BatchTokens(None, None, None)  # of a batch that does not show them


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTotals:
    """What batches took on one rank, of a whole run or since a reading; those that counting slowed down left out."""

    batches: int = 0
    seconds: Extremes | None = None  # from the end of a batch to the end of the next, less what is excluded
    reader_sec: Extremes | None = None  # host seconds of each batch inside the data loader; None if no wait was seen
    samples: int | None = 0  # None if the size of a batch was not known
    samples_per_sec: Extremes | None = None  # samples of each batch / its seconds; None if none is known
    tokens: BatchTokens = NO_TOKENS
    #: Mean seconds of a batch, and of its wait, in stretches of equally many batches in a row: how much they vary.
    stretches_sec: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlops:
    """FLOPs of all steps of a run on one rank, but those that ran without hooks, of which a note says how many."""

    model_flops: int | None = None  #: Forward and backward; None if no step was counted.
    hardware_flops: int | None = None  #: Model FLOPs, recompute and optimizer of the same steps.
    #: Half of the 95% interval of model FLOPs and MFU, as a share. 0.0: every step was counted, or a formula covers it.
    #: None: all *checks* agreed, which proves nothing of steps that none of them met, or there were under three.
    flops_error: float | None = None
    lower_bound: bool = False  #: FLOPs and MFU are lower bounds: an operator that may have FLOPs could not be counted.
    steps_counted: int = 0  #: Steps that were counted, and all others of the same shapes where these counts agreed.
    steps_by_formula: int = 0  #: Steps whose FLOPs follow from an exact formula of the batch's sizes.
    steps_estimated: int = 0  #: All other steps: estimated by counted ones.
    checks: int = 0  #: Steps that were counted at random and compared with what was predicted.
    checks_seed: int = 0  #: Seed of the schedule that drew them, which differs from run to run.
