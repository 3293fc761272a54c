"""Everything a report says about one window: every count, time and rate, so that renderers only format.

``build_profile`` makes a ``Profile`` of what was measured; ``Profile.to_json`` and ``Profile.from_json`` keep it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_flops.analysis import dataclass_json
from lightning_flops.analysis.module_tree import ModuleProfile
from lightning_flops.analysis.timing import TimingProfile
from lightning_flops.records import PhaseFlops, RunContext, UncountedOperator, WindowRecord
from lightning_flops.config import ProfilerConfig

SCHEMA_VERSION = 1
"""Version of the JSON that ``Profile.to_json`` writes; another one is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """The settings that decide what was counted, how it was timed and what a report shows."""

    module_depth: int
    top_modules: int
    detailed: bool
    recompute_fwd_factor: float
    causal_attention: Literal["full", "half"]
    timing_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """FLOPs of one global step on this rank; a multiply-add is two."""

    forward: int
    backward: int
    recompute: int
    optimizer: int
    causal_skipped: int
    """Of the four phases' FLOPs, what fused causal attention does not execute."""
    without_backward: int
    """Of the forward's FLOPs, those that no backward can follow."""
    backward_estimated: int
    """(2 + recompute_fwd_factor) x (forward - without_backward): stands for backward and recompute together."""
    model: int
    """Forward + backward: the numerator of MFU."""
    hardware: int
    """All four phases - causal_skipped: what the kernels execute, the numerator of HFU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopSpread:
    """How far apart several counted steps lie, each phase for itself."""

    minimum: PhaseFlops
    maximum: PhaseFlops
    model_minimum: int
    model_maximum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeFlops:
    """FLOPs in one dtype of arithmetic, over all counted steps."""

    dtype: str
    model: int
    hardware: int
    peak_flops_per_sec: float | None
    """Dense peak of one device in this dtype; None if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """One operator in all modules, over all counted steps."""

    operator: str
    calls: int
    flops: PhaseFlops
    dtypes: tuple[str, ...]
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Every ratio of the profile, per step; None where numerator or denominator is not known (``unavailable`` says why).

    FLOP/s are this rank's; samples and tokens are those of all ranks that see different data.
    """

    forward_flops_per_sec: float | None
    """forward / forward_sec"""
    backward_flops_per_sec: float | None
    """(backward + recompute) / backward_sec"""
    backward_flops_per_sec_estimated: float | None
    """estimated backward / backward_sec"""
    forward_backward_flops_per_sec: float | None
    """(forward + backward + recompute) / (forward_sec + backward_sec)"""
    forward_backward_flops_per_sec_estimated: float | None
    """(forward + estimated backward) / (forward_sec + backward_sec)"""
    iter_flops_per_sec: float | None
    """hardware FLOPs / iter_sec"""
    iter_flops_per_sec_estimated: float | None
    """(forward + estimated backward) / iter_sec"""
    samples_per_sec: float | None
    """samples / global_step_sec"""
    iter_samples_per_sec: float | None
    """samples / iter_sec: DeepSpeed's figure"""
    tokens_per_sec: float | None
    """tokens / global_step_sec"""
    tokens_per_sec_per_device: float | None
    """tokens_per_sec / world_size"""
    mfu: float | None
    """sum over dtypes of model FLOPs / peak of that dtype, / global_step_sec; 1 is the peak"""
    hfu: float | None
    """the same of hardware FLOPs"""
    data_wait_ratio: float | None
    """data_wait_sec / global_step_sec"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One window of one rank, counted, timed and divided; immutable."""

    schema_version: int
    profile_step: int
    """N: the counted step is the one that began after N steps of the fit."""
    report_step: int
    """The run's own x-axis value when the report came out."""
    context: RunContext
    settings: ReportSettings
    counted_steps: tuple[int, ...]
    """Index of each counted step in the fit, the first step being 0."""
    timed_steps: tuple[int, ...]
    """Index of each timed step."""
    variable: bool
    """Signatures kept changing: counted and timed steps are different samples of the same run."""
    params: int | None
    """Unique logical parameters of the whole model; None if no model was described."""
    trainable_params: int | None
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
    dtypes: tuple[DtypeFlops, ...]
    """Most hardware FLOPs first."""
    model_flops_peak_sec: float | None
    """Seconds a step's model FLOPs would take at the peak: divided by a step's seconds it is MFU."""
    hardware_flops_peak_sec: float | None
    """The same of hardware FLOPs: HFU."""
    timing: TimingProfile | None
    """None if no step was timed."""
    rates: Rates
    unavailable: Mapping[str, str]
    """Why a rate (by its field's name) is None, in a few words."""
    lower_bound: bool
    """Work that looks like matmuls could not be counted: FLOPs, and every rate of FLOPs, are at least what they say."""
    modules: tuple[ModuleProfile, ...]
    """In tree order, the root first; sums over all counted steps."""
    outside: PhaseFlops
    """FLOPs that no module of the model owns (the optimizer's, for one), over all counted steps."""
    operators: tuple[OperatorProfile, ...]
    """Most FLOPs first."""
    uncounted: Mapping[str, UncountedOperator]
    """Operators that ran and are in no sum, over all counted steps."""
    notes: tuple[str, ...]
    """What is missing or degraded, in sentences."""

    def per_step(self, total: int) -> float:
        """*total* over all counted steps as a mean per step; exact when one step was counted."""
        return total / len(self.counted_steps) if len(self.counted_steps) > 1 else total

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


def build_profile(window: WindowRecord, *, config: ProfilerConfig) -> Profile:
    """Count, divide and look up: the profile of *window*.

    Args:
        window: what was measured.
        config: the profiler's settings; a ``peak_flops_per_sec`` in it wins over the table of devices.
    """
    # Building needs the classes above, so it lives beside them and is imported when it is needed.
    from lightning_flops.analysis.profile_builder import build

    return build(window, config=config)
