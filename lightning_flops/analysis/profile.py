"""Everything a report says about one window: every count, time and rate, so that renderers only format.

``build_profile`` makes a ``Profile`` of what was measured; ``Profile.to_json`` and ``Profile.from_json`` keep it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_flops.analysis.advice import Advice, advise
from lightning_flops.analysis.evidence import gather_evidence
from lightning_flops.analysis.flop_counts import FlopCounts, bytes_by_phase
from lightning_flops.analysis.job_rates import JobRates
from lightning_flops.analysis.module_tree import ModuleProfile, build_modules
from lightning_flops.analysis.peak_flops import peak_for
from lightning_flops.analysis.ranks import RanksProfile
from lightning_flops.analysis.rates import mean
from lightning_flops.analysis.step_flops import (
    DtypeFlops,
    FlopSpread,
    OperatorProfile,
    StepFlops,
    flop_spread,
    flops_by_dtype,
    flops_by_operator,
    mean_flops,
    total_flops,
)
from lightning_flops.analysis.step_rates import Rates, build_rates, hardware_peak_seconds, model_peak_seconds
from lightning_flops.analysis.timing import TimingProfile, build_timing, is_timed
from lightning_flops.analysis.traced_step import TracedStep, module_times
from lightning_flops.config import DTYPE_NAMES, ProfilerConfig
from lightning_flops.records import (
    OUTSIDE,
    MemoryRecord,
    ModuleRecord,
    PhaseBytes,
    PhaseFlops,
    RunContext,
    UncountedOperator,
    WindowRecord,
)
from lightning_flops.schema import dataclass_json

SCHEMA_VERSION = 3
"""Version of the JSON that ``Profile.to_json`` writes; another one is not read.

It goes up whenever a field of ``Profile``, or of a record in it, comes, goes or means something else.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """The settings that decide what was counted, how it was timed and what a report shows."""

    module_depth: int
    """Deepest module level in the text report; -1 for all."""
    top_modules: int
    """Modules listed at each level of the aggregated profile."""
    detailed: bool
    """Whether the text report has the module tree."""
    recompute_fwd_factor: float
    """Forwards repeated in the backward, for the estimated backward alone."""
    causal_attention: Literal["full", "half"]
    """Whether causal attention counts its whole score matrix or half of it."""
    timing_steps: int
    """How many timed steps were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One window of one rank, counted, timed and divided; immutable."""

    schema_version: int
    """Of the JSON: ``SCHEMA_VERSION``."""
    profile_step: int
    """N: the counted step is the one that began after N steps of the fit."""
    report_step: int
    """The run's own x-axis value when the report came out."""
    context: RunContext
    """Where the profile was taken."""
    settings: ReportSettings
    """What was asked for."""
    counted_steps: tuple[int, ...]
    """Index of each counted step in the fit, the first step being 0."""
    timed_steps: tuple[int, ...]
    """Index of each timed step."""
    variable: bool
    """Signatures kept changing: counted and timed steps are different samples of the same run."""
    params: int | None
    """Unique logical parameters of the whole model; None if no model was described."""
    trainable_params: int | None
    """Of ``params``, those that need a gradient."""
    local_params: int | None
    """Parameters that this rank holds in memory."""
    micro_steps: float
    """Batches in one step, mean over the counted steps."""
    samples: float | None
    """Samples of this rank in one step, mean over the timed steps (the counted ones if none was timed)."""
    tokens: float | None
    """Tokens of this rank in one step, likewise."""
    flops: StepFlops
    """Of one step; of several counted steps the mean, to the nearest whole FLOP."""
    flops_total: StepFlops
    """Of all counted steps together, exact."""
    flops_spread: FlopSpread | None
    """None if one step was counted, or if the steps were not counted apart."""
    bytes_total: PhaseBytes
    """Read and written by all operators, elementwise ones too, over all counted steps."""
    dtypes: tuple[DtypeFlops, ...]
    """Most hardware FLOPs first."""
    peaks_flops_per_sec: Mapping[str, float]
    """Dense peak of this rank's device in every dtype for which it is known, used here or not."""
    model_flops_peak_sec: float | None
    """Seconds a step's model FLOPs would take at the peak: divided by a step's seconds it is MFU."""
    hardware_flops_peak_sec: float | None
    """The same of hardware FLOPs: HFU."""
    timing: TimingProfile | None
    """None if no step was timed."""
    rates: Rates
    """Every ratio, per step; FLOP/s are this rank's."""
    unavailable: Mapping[str, str]
    """Why a rate (by its field's name) is None, in a few words."""
    lower_bound: bool
    """Work that may be matmul-like could not be counted: FLOPs, and every rate of FLOPs, are at least what they say."""
    modules: tuple[ModuleProfile, ...]
    """In tree order, the root first; sums over all counted steps."""
    outside: PhaseFlops
    """FLOPs that no module of the model owns (the optimizer's, for one), over all counted steps."""
    operators: tuple[OperatorProfile, ...]
    """Most FLOPs first."""
    uncounted: Mapping[str, UncountedOperator]
    """Operators that ran and are in no sum, over all counted steps."""
    memory: MemoryRecord | None
    """Of this rank in the counted step; None if nobody looked."""
    traced: TracedStep | None
    """One more step, which ran under torch.profiler; None if there is none."""
    ranks: RanksProfile | None
    """All ranks of the job together; None where this rank's is the only profile at hand."""
    advice: tuple[Advice, ...]
    """What holds the run back, the most at stake first."""
    notes: tuple[str, ...]
    """What is missing or degraded, in sentences."""

    def per_step(self, total: int) -> float:
        """*total* over all counted steps as a mean per step; exact when one step was counted."""
        steps = max(1, len(self.counted_steps))
        per_step = mean(total=total, steps=steps)
        return total // steps if per_step is None else per_step

    @property
    def job_rates(self) -> Rates | JobRates:
        """The rates that are meant for the whole job: those of all ranks, or, where they are not known, this rank's."""
        return self.rates if self.ranks is None else self.ranks.rates

    def summary(self) -> dict[str, float | dict[str, float | None] | None]:
        """The headline of the profile as a flat dict, for scripts; None is what could not be measured.

        ``global_step_sec`` (wall seconds of a step on this rank), ``samples_per_sec``, ``tokens_per_sec``, ``mfu`` and
        ``hfu`` (of the whole job where its ranks are known; 1 is the peak), ``data_wait_ratio`` (of this rank's step),
        ``forward_flops``, ``backward_flops`` and ``hardware_flops`` (of one step on this rank, exact), ``params`` (of
        the whole model), and ``advice``: the share of the step at stake, or None, by the rule's name, the most first.
        """
        return {
            "global_step_sec": None if self.timing is None else self.timing.global_step_sec,
            "samples_per_sec": self.job_rates.samples_per_sec,
            "tokens_per_sec": self.job_rates.tokens_per_sec,
            "mfu": self.job_rates.mfu,
            "hfu": self.job_rates.hfu,
            "data_wait_ratio": self.rates.data_wait_ratio,
            "forward_flops": self.flops.forward,
            "backward_flops": self.flops.backward,
            "hardware_flops": self.flops.hardware,
            "params": self.params if self.ranks is None else self.ranks.params,
            "advice": {one.rule: one.stake for one in self.advice},
        }

    def to_json(self) -> str:
        """The profile as indented JSON, the same text for equal profiles.

        Raises:
            ProfileFormatError: a number of the profile is not finite.
        """
        return dataclass_json.dump(self)

    @staticmethod
    def from_json(text: str) -> Profile:
        """The profile that ``to_json`` wrote as *text*.

        Raises:
            ProfileFormatError: *text* is no JSON, has another schema version, or a field is missing, unknown or wrong.
        """
        return dataclass_json.load(Profile, text, version_field="schema_version", version=SCHEMA_VERSION)


def build_profile(window: WindowRecord, *, config: ProfilerConfig, traced: TracedStep | None = None) -> Profile:
    """Count, divide and look up: the profile of *window*.

    Args:
        window: what was measured.
        config: the profiler's settings; a ``peak_flops_per_sec`` in it wins over the table of devices.
        traced: the window's traced step, analysed.
    """

    def peak_of(dtype: str) -> float | None:
        return peak_for(device_name=window.context.device_name, dtype=dtype, given=config.peak_flops_per_sec)

    counts = FlopCounts(window.flops)
    timed = [step for step in window.timed_steps if is_timed(step)]
    steps = max(1, len(window.counted_steps))
    total = total_flops(counts, recompute_fwd_factor=config.recompute_fwd_factor)
    timing = build_timing(timed, mixed_phases=window.mixed_phases)
    dtypes = flops_by_dtype(window.flops.cells, peak_of=peak_of)
    samples = _mean_amount([step.samples for step in timed or window.counted_steps])
    tokens = _mean_amount([step.tokens for step in timed or window.counted_steps])
    rates, unavailable = build_rates(
        flops=total,
        counted_steps=steps,
        dtypes=dtypes,
        timing=timing,
        samples=samples,
        tokens=tokens,
        context=window.context,
    )
    root = _root(window.modules)
    lower_bound = counts.is_lower_bound
    evidence = gather_evidence(
        rates=rates,
        timing=timing,
        dtypes=dtypes,
        cells=window.flops.cells,
        modules=window.modules,
        context=window.context,
        facts=window.facts,
        trace=None if traced is None else traced.tables,
        peak_memory_bytes=_device_peak_bytes(window.memory),
        lower_bound=lower_bound,
        thresholds=config.thresholds,
    )
    return Profile(
        schema_version=SCHEMA_VERSION,
        profile_step=window.profile_step,
        report_step=window.report_step,
        context=window.context,
        settings=ReportSettings(
            module_depth=config.module_depth,
            top_modules=config.top_modules,
            detailed=config.detailed,
            recompute_fwd_factor=float(config.recompute_fwd_factor),
            causal_attention=config.causal_attention,
            timing_steps=window.timing_steps,
        ),
        counted_steps=tuple(step.index for step in window.counted_steps),
        timed_steps=tuple(step.index for step in timed),
        variable=window.variable,
        params=None if root is None else root.params,
        trainable_params=None if root is None else root.trainable_params,
        local_params=None if root is None else root.local_params,
        micro_steps=sum(step.micro_steps for step in window.counted_steps) / steps,
        samples=samples,
        tokens=tokens,
        flops=mean_flops(total, steps=steps),
        flops_total=total,
        flops_spread=flop_spread(window.counted_steps),
        bytes_total=bytes_by_phase(window.flops.cells),
        dtypes=dtypes,
        peaks_flops_per_sec={
            dtype: peak
            for dtype in dict.fromkeys((*DTYPE_NAMES, *(one.dtype for one in dtypes)))
            if (peak := peak_of(dtype)) is not None
        },
        model_flops_peak_sec=mean(total=model_peak_seconds(dtypes), steps=steps),
        hardware_flops_peak_sec=mean(total=hardware_peak_seconds(dtypes), steps=steps),
        timing=timing,
        rates=rates,
        unavailable=unavailable,
        lower_bound=lower_bound,
        modules=build_modules(
            window.modules,
            counts,
            {} if traced is None else module_times(traced, counts, counted_steps=steps, peak_of=peak_of),
        ),
        outside=counts.own_by_module().get(OUTSIDE, PhaseFlops()),
        operators=flops_by_operator(window.flops.cells),
        uncounted=dict(window.flops.uncounted),
        memory=window.memory,
        traced=traced,
        ranks=None,
        advice=advise(evidence, config.thresholds),
        notes=_notes(window, timed=len(timed), rates=rates),
    )


def _root(modules: Sequence[ModuleRecord]) -> ModuleRecord | None:
    return next((module for module in modules if module.name == ""), None)


def _device_peak_bytes(memory: MemoryRecord | None) -> int | None:
    """Most that tensors took of the device; what the allocator holds in reserve it gives back when memory is short."""
    return memory.run_peak_bytes if memory is not None and memory.kind == "allocated" else None


def _mean_amount(amounts: Sequence[int | None]) -> float | None:
    """Mean of samples or tokens; None if one of them is not known or cannot be right."""
    known = [amount for amount in amounts if amount is not None and amount > 0]
    return sum(known) / len(known) if known and len(known) == len(amounts) else None


def _notes(window: WindowRecord, *, timed: int, rates: Rates) -> tuple[str, ...]:
    notes = [*window.notes, *window.flops.notes]
    if not window.counted_steps:
        notes.append("No step was counted to its end: the FLOPs are those of whatever ran while the counter was on.")
    wrong = sum(step.seconds is not None for step in window.timed_steps) - timed
    if wrong:
        notes.append(f"{wrong} timed steps were left out: their clock showed times that cannot be right.")
    for name, value in (("MFU", rates.mfu), ("HFU", rates.hfu)):
        if value is not None and value > 1:
            notes.append(
                f"{name} is above 100%, which cannot be: the peak it is divided by is too low, or the clock did not "
                "wait for the device."
            )
    return tuple(dict.fromkeys(notes))


__all__ = [
    "SCHEMA_VERSION",
    "DtypeFlops",
    "FlopSpread",
    "ModuleProfile",
    "OperatorProfile",
    "Profile",
    "Rates",
    "ReportSettings",
    "StepFlops",
    "TimingProfile",
    "build_profile",
]
