"""The profile: everything a report says of one window; the throughput of a whole run; and the JSON of both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

from lightning_flops.records import MemoryRecord, PhaseBytes, PhaseFlops, RunContext, RunFlops, UncountedOperator
from lightning_flops.schema import codec
from lightning_flops.schema.plan import MemoryReport
from lightning_flops.schema.step import (
    Advice,
    Budget,
    DtypeFlops,
    JobRates,
    LinesProfile,
    ModuleProfile,
    OperatorProfile,
    PhaseProfile,
    Rates,
    StepFlops,
    TimingProfile,
)
from lightning_flops.schema.trace import RanksProfile, TracedStep

Origin = Literal["vendor", "given", "measured"]
FlopsOf = Literal["counted", "formula", "estimate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """The settings that decide what was counted, how it was timed and what a report shows."""

    module_depth: int  #: Deepest module level in the text report; -1 for all.
    top_modules: int  #: Modules listed at each level of the aggregated profile.
    detailed: bool  #: Whether the text report has the module tree.
    recompute_fwd_factor: float  #: Forwards repeated in the backward, for the estimated backward alone.
    causal_attention: Literal["full", "half"]  #: Whether causal attention counts its whole score matrix or half of it.
    #: Whose the peaks are: the user's ``peak_flops_per_sec``, or those that ``lightning-flops peak`` measured.
    peaks_from: Origin = "vendor"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profile(codec.Shown):
    """One window of one rank, counted, timed and divided; immutable."""

    schema_version: int = 17  #: Version of the JSON; another one has other fields.
    profile_step: int  #: N: the counted step is the one that began after N steps of the fit.
    report_step: int  #: The run's own x-axis value after the last step that is in a figure of it.
    context: RunContext  #: Where the profile was taken.
    settings: ReportSettings  #: What was asked for.
    #: How the run is set up, as far as it bears on speed: ``optimizer`` (its class, and how it updates), ``workers`` of
    #: the loader, ``cores`` that the process may use, and ``compiled`` where torch.compile was seen.
    set_up: Mapping[str, str] = field(default_factory=dict)
    counted_steps: tuple[int, ...]  #: Index of each counted step in the fit, the first step being 0.
    timed_steps: tuple[int, ...]  #: Index of each timed step.
    params: int | None  #: Unique logical parameters of the whole model; None if no model was described.
    trainable_params: int | None  #: Parameters that need a gradient.
    local_params: int | None  #: Parameters that this rank holds in memory.
    #: Bytes of ``params`` by the dtype in which the parameters are kept; empty if no model was described.
    parameter_bytes: Mapping[str, int] = field(default_factory=dict)
    micro_steps: float  #: Batches in one step, mean over the counted steps.
    #: Samples of this rank in one step, mean over the timed steps (the counted ones if none was timed).
    samples: float | None
    tokens: float | None  #: Tokens of this rank in one step, of the same steps as samples.
    flops: StepFlops  #: FLOPs of one step; if of several, their mean, rounded to whole FLOPs.
    #: Whose they and *dtypes* are: the ``counted`` steps', or the timed ones', by a ``formula`` of their sizes, or an
    #: ``estimate``, as some are beyond the sizes that were counted.
    flops_of: FlopsOf = "counted"
    typical_flops_ratio: float = 1.0  #: FLOPs of a typical step by those of the mean of the timed ones.
    bytes_total: PhaseBytes  #: Bytes read and written by all operators, elementwise ones too, over all counted steps.
    dtypes: tuple[DtypeFlops, ...]  #: FLOPs by dtype, most hardware FLOPs first.
    #: Dense peak of this rank's device in every dtype for which it is known, used here or not.
    peaks_flops_per_sec: Mapping[str, float]
    #: Phases of a step by name, in their order: ``rollout``, ``scoring``, ``training``, those that the loop named, and
    #: ``rest``. Empty where the step is all training.
    phases: Mapping[str, PhaseProfile] = field(default_factory=dict)
    timing: TimingProfile | None  #: Times of the parts of a step; None if no step was timed.
    #: Where peak x time went: rows that add up to a step's wall time. None if no step was timed.
    budget: Budget | None = None
    #: Bandwidth of the memory of this rank's device: given, its vendor's, or measured. None if it is not known.
    memory_bytes_per_sec: float | None = None
    rates: Rates  #: Every ratio, per step; FLOP/s are this rank's.
    unavailable: Mapping[str, str]  #: Why a rate (by its field's name) is None, in a few words.
    #: Whether FLOPs and their rates are lower bounds: work that may be matmul-like could not be counted.
    lower_bound: bool
    modules: tuple[ModuleProfile, ...]  #: Modules in tree order, the root first; sums over all counted steps.
    outside: PhaseFlops  #: FLOPs that no module of the model owns (the optimizer's, for one), over all counted steps.
    operators: tuple[OperatorProfile, ...]  #: Operators in all modules, most FLOPs first.
    uncounted: Mapping[str, UncountedOperator]  #: Operators that ran and are in no sum, over all counted steps.
    memory: MemoryRecord | None  #: Memory of this rank in the counted step; None if it was not looked at.
    #: What tensors held at the peak of the counted step, and who allocated it; None where not all of them are seen.
    tensors: MemoryReport | None = None
    traced: TracedStep | None  #: One more step, which ran under torch.profiler; None if there is none.
    #: The user's lines, sampled in other steps; None where no loop was profiled.
    lines: LinesProfile | None = None
    ranks: RanksProfile | None  #: All ranks of the job together; None where this rank's is the only profile at hand.
    starved: str = ""  #: A warning where the process waited for processors, in sentences; empty: none.
    unexplained: str = ""  #: A large part of the step that no rule explains, with its lines; empty: there is none.
    advice: tuple[Advice, ...]  #: What holds the run back, the largest possible saving first.
    notes: tuple[str, ...]  #: What is missing or degraded, in sentences.

    def per_step(self, total: int) -> float:
        """*total* over all counted steps as a mean per step; exact when one step was counted."""
        return total / len(self.counted_steps) if len(self.counted_steps) > 1 else total

    @property
    def has_backward(self) -> bool:
        """Whether there is anything to say of a backward and an optimizer: the run trains, or one of them ran in it."""
        return self.context.trains or self.flops.total > self.flops.forward

    @property
    def step_name(self) -> str:
        """What figures "per step" are of: a global step, or a batch in a run that does not train."""
        return "global step" if self.context.trains else "batch"

    @property
    def job_rates(self) -> JobRates:
        """The rates that are meant for the whole job: those of all ranks, or, where they are not known, this rank's."""
        return self.rates if self.ranks is None else self.ranks.rates

    @property
    def job_unavailable(self) -> Mapping[str, str]:
        """Why one of ``job_rates`` (by its field's name) is None, in a few words."""
        return self.unavailable if self.ranks is None else self.ranks.unavailable

    @property
    def job_params(self) -> int | None:
        """Parameters of the whole model, the stages of a pipeline added up where all ranks are known."""
        return self.params if self.ranks is None else self.ranks.params

    def summary(self) -> dict[str, float | dict[str, float | None] | None]:
        """The headline of the profile as a flat dict, for scripts; None is what could not be measured.

        Rates and ``params`` are of the whole job where its ranks are known, all else of a step on this rank.
        """
        return {
            "global_step_sec": None if self.timing is None else self.timing.global_step_sec,
            **{name: getattr(self.job_rates, name) for name in ("samples_per_sec", "tokens_per_sec", "mfu", "hfu")},
            **{f"{name}_flops": getattr(self.flops, name) for name in ("forward", "backward", "hardware")},
            "data_wait_ratio": self.rates.data_wait_ratio,
            "cpu_time_sec": None if self.timing is None else self.timing.cpu_time_sec,
            "params": self.job_params,
            "advice": {one.rule: one.saves for one in self.advice},
        }

    def to_html(self) -> str:
        """The profile as a page: one HTML file with everything in it, which needs no network and opens from disk."""
        return str(codec.above("report.html_page").render_page([ProfiledRun(name="this run", windows=(self,))]))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """The profile at *path*, a ``profile.json`` or a folder of logs, local or a URL; or a LightningFlopsError."""
        return cast("Profile", codec.above("sinks.profile_files").read_report(path, "profile")[0])


class ProfiledRun(NamedTuple):
    """The profiles of one run, as its files have them."""

    #: The folder of its logs below the one that was searched; with the loop and the rank, if files name them.
    name: str
    windows: tuple[Profile, ...]  #: In the order in which they were written.
    problems: tuple[str, ...] = ()  #: Files that could not be read, in sentences.


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A mean between the least and the greatest of what it is the mean of."""

    average: float  #: Total over total.
    maximum: float  #: Of a single batch.
    minimum: float  #: Of a single batch.


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ThroughputSummary(codec.Shown, RunFlops):
    """Throughput of a run over all its batches, counted and traced ones left out.

    The names and the table are those of the benchmark summary of Paddle's profiler; its averages are not, which divide
    sums over some batches by the number of others. Here every average is a total over a total.
    """

    schema_version: int = 5  #: Version of the JSON; another one has other fields.
    batches: int  #: Batches of this rank.
    reader_ratio: float | None  #: Share of the batches' time inside the data loader; None if no wait was seen.
    reader_cost_sec: Spread | None  #: Host seconds of a batch inside the data loader.
    #: Wall time of a batch, the wait for it included; validation, checkpoints and epoch restarts are not.
    batch_cost_sec: Spread
    #: Items per second of this rank, times the ranks that see different data; None if no batch took any time.
    ips: Spread | None
    ips_unit: Literal["samples/s", "batches/s"]  #: Batches where the number of samples was not known.
    #: Sentences on these FLOPs, and what became known of the run when its windows had been reported.
    notes: tuple[str, ...] = ()
    #: Model FLOPs over the batches' time, over the device's peak, each dtype by its own; without profiled steps.
    mfu: float | None = None
    #: MFU of the model FLOPs that these steps would have without padding, by the formula.
    useful_mfu: float | None = None
    tokens: int | None = None  #: Tokens that this rank processed in all steps of the run, padding included.
    #: Tokens that are no padding, as attention masks and offsets of packed sequences show.
    real_tokens: int | None = None
    padding_ratio: float | None = None  #: (tokens - real_tokens) / tokens
    #: Real tokens per second (or by tokens_per_sample) of unprofiled steps, times the ranks with different data.
    tokens_per_sec: float | None = None
    #: Why ``mfu`` or ``useful_mfu`` is None, in a few words.
    unavailable: Mapping[str, str] = field(default_factory=dict)
    #: Mean batch cost in each of at most 63 stretches of equally many batches in a row: what of a difference is noise.
    batch_stretches_sec: tuple[float, ...] = ()
    reader_stretches_sec: tuple[float, ...] = ()  #: Mean reader cost in these stretches; empty if no wait was seen.
