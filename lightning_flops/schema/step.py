"""One step of one rank: its FLOPs, times, rates, operators and modules, where its time went, and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_flops.records import DescribedModule, Line, PhaseBytes, PhaseFlops, TimePhase

FEW_STEPS = 8  # from fewer timed steps no advice is given: one hiccup would decide it


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing that holds the run back; docs/advice.md has all rules."""

    rule: str  #: Name of the rule.
    fact: str  #: What was measured, in a sentence: how much, of which rank, module or loader.
    remedy: str  #: What to do, in a sentence.
    #: Share of a typical step that following it saves: at most if ``at_least`` is false, and about so much if that is
    #: None. Pieces of advice may share time. None: not known.
    saves: float | None
    unless: str  #: When not to follow it, after "not": ``where a checkpoint fixes it``.
    threshold: str  #: Limit that the measured figure was held against, in words.
    source: str  #: Where the rule comes from.
    changes: bool = False  #: Whether following it changes what the model computes.
    #: Whether ``saves`` is the least, and not the most; None: neither, as of a starved run.
    at_least: bool | None = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops(PhaseFlops):
    """FLOPs of one global step on this rank; a multiply-add is two."""

    skipped: int  #: Part of all these FLOPs that fused masked attention does not execute.
    #: (2 + recompute_fwd_factor) x forward in training: stands for backward and recompute together.
    backward_estimated: int

    @property
    def model(self) -> int:
        """Forward + backward: the numerator of MFU."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """Model FLOPs, recompute and optimizer: the numerator of HFU."""
        return self.total - self.outside

    @property
    def executed(self) -> int:
        """All phases - skipped: what the kernels execute."""
        return self.total - self.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseProfile:
    """One phase of a step of reinforcement learning or distillation, on this rank."""

    #: Forward + backward; those of all phases add up to the step's, without estimated ones. None: not known.
    flops: int | None
    estimated: bool = False  #: Whether they are those of a training's forward over as many tokens: a server generated.
    dtype: str | None = None  #: Of the arithmetic of most of them.
    seconds: float | None  #: Mean over the timed steps; those of all phases add up to the step. None: none was timed.
    ratio: float | None  #: Share of the step's time.
    mfu: float | None  #: FLOPs / (peak of their dtypes x seconds); None of an estimate, whose device is another one.
    #: Prompts and completions of a rollout, by shape, so padding included; in training those of the batches.
    tokens: float | None = None
    completion_tokens: float | None = None  #: Part of them that a rollout made.
    tokens_per_sec: float | None = None  #: Completion tokens / seconds.


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeFlops:
    """FLOPs of one step in one dtype of arithmetic."""

    dtype: str  #: Effective dtype of the arithmetic, such as ``bfloat16`` or ``tf32``.
    model: int  #: Forward + backward.
    hardware: int  #: Model FLOPs, recompute and optimizer.
    executed: int  #: What the kernels execute of these: masked attention that they skip is left out.
    executed_model: int  #: What the kernels execute of forward + backward.


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """One operator in all modules, over all counted steps."""

    operator: str  #: Name without overload, such as ``aten.mm``.
    calls: int  #: How often it ran.
    flops: PhaseFlops  #: By phase; a multiply-add is two.
    dtypes: tuple[str, ...]  #: Dtypes of its arithmetic, sorted.
    bytes: int  #: Bytes of the inputs and outputs of its calls, each call by itself.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTimes:
    """Seconds of one module in one step, with the modules below it, unless the name says *own*."""

    #: ``device``: of work launched there; ``host``: without a device; ``hooks``: read in the module's hooks.
    clock: Literal["host", "device", "hooks"]
    forward_sec: float  #: All of its forward calls together.
    own_forward_sec: float  #: Forward without the modules below it.
    #: Backward and what it repeats of the forward, without gradient accumulation; None without a trace.
    backward_sec: float | None
    own_backward_sec: float | None  #: Backward without the modules below it; None without a trace.
    #: Forward FLOPs of the counted step / seconds, an estimate where the traced step is not like it; None without.
    forward_flops_per_sec: float | None = None
    backward_flops_per_sec: float | None = None  #: Backward and recomputed FLOPs / seconds.
    #: Share of the device's peak, for the dtypes it computes in; None if one of them has no known peak.
    forward_utilization: float | None = None
    backward_utilization: float | None = None  #: Share of the device's peak that the backward reaches.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleProfile(DescribedModule):
    """One module of the model; its FLOPs, bytes and calls are sums over all counted steps."""

    calls: int  #: How often its forward was entered, recomputation left out.
    own: PhaseFlops  #: FLOPs without the modules below it.
    total: PhaseFlops  #: FLOPs with the modules below it.
    total_bytes: PhaseBytes  #: Bytes read and written, with the modules below it.
    #: Times in the traced step; None if no step was traced, or it was not called there.
    times: ModuleTimes | None = None

    @property
    def depth(self) -> int:
        """Levels below the root, which has 0."""
        return self.name.count(".") + 1 if self.name else 0

    @property
    def short_name(self) -> str:
        """Last part of the name: what its parent calls it."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTiming:
    """Seconds of one part of a step, over the timed steps."""

    #: Phases of this part: several where they cannot be separated, none for the whole step.
    phases: tuple[TimePhase, ...]
    mean_sec: float  #: Total over the timed steps / their number.
    typical_sec: float  #: Mean over the typical steps: the middle half of the timed ones by their wall time.
    steps_sec: tuple[float, ...]  #: Seconds in each timed step, in the order of ``Profile.timed_steps``.

    @property
    def name(self) -> str:
        """The phases for people."""
        return phases_text(self.phases)


def phases_text(phases: Iterable[str]) -> str:
    """*phases* for people: "data wait", "forward + backward", or "global step" without any."""
    return " + ".join(phase.replace("_", " ") for phase in phases) or "global step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Steps that are no typical ones and took over a tenth longer."""

    steps: int  #: How many of the timed steps.
    seconds: float  #: By how much they took longer than as many typical ones, together.
    part: str  #: Name of the part with most of that.


_CHARS = 60  # of a line's text in a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class LineProfile(Line):
    """One line of the user's program in one part of the step, by samples of the host's time."""

    seconds: float  #: Of a typical step: the part's time, divided by its samples; on a device the host's time.
    share: float | None  #: Share of a typical step; on a device of the sampled one.
    #: Whether most of its time is in many short calls, as in a loop of Python's, and not one call's of torch.
    in_pieces: bool = False
    #: Whether most of its time is in operators of milliseconds each: Python hears of the signal when one is over, and
    #: after ``a @ b`` only at the next call, so that it may be of one just before.
    is_long: bool = False

    @property
    def where(self) -> str:
        """Hook, function, file and number for people."""
        name, function = os.path.basename(self.file), self.function.replace("<module>", "")
        hook = "" if self.hook == function else self.hook
        return " ".join(filter(None, (hook, function, f"{name}:{self.line}" if name else "")))

    @property
    def start(self) -> str:
        """The first characters of what stands there."""
        return self.text if len(self.text) <= _CHARS else f"{self.text[: _CHARS - 1]}…"

    @property
    def link(self) -> str:
        """Address under which an editor opens it; empty where there is no such file."""
        return f"vscode://file/{self.file.lstrip('/')}:{self.line}" if os.path.isabs(self.file) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesProfile:
    """The user's lines in steps that were sampled for them, and are in no other figure."""

    steps: int  #: How many steps were sampled.
    rows: tuple[LineProfile, ...]  #: The line with most time first.
    why: str = ""  #: Why there are none, or not more, as the end of a sentence; empty: there are enough.


def _seconds(*phases: TimePhase) -> property:
    """Mean seconds of *phases* together; None if they are mixed up with others, or there are none."""
    return property(lambda timing: timing.seconds_of(*phases))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingProfile:
    """Where the time of a step goes on this rank, over the timed steps."""

    stalls: Stalls | None  #: Steps that took much longer than a typical one; None if none did.
    #: Parts that tile the step: their means add up to the step's, and so do their typical times.
    parts: tuple[PartTiming, ...]
    global_step: PartTiming  #: The whole step.
    reader_sec: float | None  #: Host seconds a step inside the data loader, hidden behind device work or not.
    #: Wall time between the steps, timed by parts or as a whole, that belongs to none of them, summed, by cause.
    excluded_sec: Mapping[str, float]
    #: How many steps more were timed as a whole. How long steps are is of these: each of the timed ones, and its parts
    #: alike, is scaled to the one of these that has its place by length. 0: there are none, and nothing is scaled.
    whole_steps: int = 0
    #: How many short ones after these ran without hooks, and are in no other figure. If they took less, those timed as
    #: a whole are scaled to them first.
    unhooked_steps: int = 0
    longer: float = 1.0  #: How many times as long as these the timed steps took, for the marks between their parts.
    #: Whether there is some in each of them: then the loop's own seconds a step are more than these.
    excludes_in_each: bool = False
    #: Processor time of this process in each timed step, all its threads together; empty if it is not known, as where
    #: ``excluded_sec`` has some of between these steps.
    processor_steps_sec: tuple[float, ...] = ()
    #: Share of these steps in which a thread was ready and had no processor; None if the system does not count it.
    starved_share: float | None = None
    #: What all threads waited so, together, as a share of the time, at most 1: others may wait for each of them.
    waits_share: float | None = None
    #: Share of the machine's processor time that anything on it used during these steps; None if not known.
    cpu_system_ratio: float | None = None
    #: Share of these steps in which heat held the GPU's clock down; None without NVML (the extra ``nvidia``).
    heat_limited_share: float | None = None

    @property
    def cpu_time_sec(self) -> float | None:
        """Processor time of a step: other work on the machine, which lengthens a step, hardly moves it."""
        steps = self.processor_steps_sec
        return sum(steps) / len(steps) if steps else None

    def seconds_of(self, *phases: TimePhase, typical: bool = False) -> float | None:
        """Seconds of *phases* together, mean or typical; None if they are mixed up with others, or there are none."""
        inside = [part for part in self.parts if not set(phases).isdisjoint(part.phases)]
        known = bool(inside) and all(set(part.phases) <= set(phases) for part in inside)
        return sum(part.typical_sec if typical else part.mean_sec for part in inside) if known else None

    @property
    def timed_steps(self) -> int:
        """Number of steps that the means are over."""
        return len(self.global_step.steps_sec)

    @property
    def few_steps(self) -> bool:
        """Whether too few steps were timed to advise on."""
        return self.timed_steps < FEW_STEPS

    data_wait_sec = _seconds("data_wait")
    forward_sec = _seconds("forward")
    backward_sec = _seconds("backward")
    optimizer_sec = _seconds("optimizer")  #: DeepSpeed's "step latency".
    forward_backward_sec = _seconds("forward", "backward")  #: Known also where the two cannot be separated.
    iter_sec = _seconds("forward", "backward", "optimizer")  #: DeepSpeed's "iter latency".

    @property
    def global_step_sec(self) -> float:
        """Wall time of a step: the sum of all parts."""
        return self.global_step.mean_sec


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRates:
    """Ratios of a step, of one rank or of all together; None where numerator or denominator is not known."""

    #: Model FLOPs / (peak of their dtypes x global_step_sec), sums over dtypes and ranks; 1 is the peak.
    mfu: float | None
    hfu: float | None  #: The same of hardware FLOPs, which add recompute and optimizer: never below MFU.
    samples_per_sec: float | None  #: Of all ranks that see different data: samples / global_step_sec
    iter_samples_per_sec: float | None  #: The same over iter_sec instead: DeepSpeed's figure.
    tokens_per_sec: float | None  #: Of all ranks that see different data: tokens / global_step_sec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates(JobRates):
    """Every ratio of a profile, per step; FLOP/s are this rank's."""

    forward_flops_per_sec: float | None  #: forward / forward_sec
    backward_flops_per_sec: float | None  #: (backward + recompute) / backward_sec
    backward_flops_per_sec_estimated: float | None  #: estimated backward / backward_sec
    forward_backward_flops_per_sec: float | None  #: (forward + backward + recompute) / (forward_sec + backward_sec)
    iter_flops_per_sec: float | None  #: hardware FLOPs / iter_sec
    data_wait_ratio: float | None  #: data_wait_sec / global_step_sec


#: The eight rows of the breakdown, in their order.
BudgetKey = Literal["model", "other_flops", "compute", "operators", "communication", "idle", "data", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One account of a typical step of this rank: its rows add up to ``wall_ns`` exactly."""

    wall_ns: int  #: Wall time of a typical step: that of its parts, each to the nearest nanosecond.
    #: Nanoseconds by row; None: the peak, or what filled the phases, is not known. ``model``: executed model FLOPs at
    #: the peak; where no mask lets a kernel skip any, their share is the step's MFU. ``other_flops``: executed FLOPs of
    #: recompute and optimizer at the peak. ``compute``: what matmul-like operators take beyond these; without a trace
    #: forward, backward and optimizer beyond them. ``operators``: all others. ``communication``: what no computation
    #: hides. ``idle``: nothing computes, or copies run. ``data``: data wait and transfer. ``other``: callbacks,
    #: logging, schedulers, a pipeline's bubble, and phases that cannot be separated from these.
    rows_ns: Mapping[BudgetKey, int | None]
    notes: tuple[str, ...]  #: Why rows are not known, in sentences.
