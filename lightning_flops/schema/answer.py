"""What a reader wants to know first, picked from a profile: every place that shows a headline takes it from here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_flops.schema.advice import Advice
    from lightning_flops.schema.modules import ModuleProfile
    from lightning_flops.schema.profile import Profile
    from lightning_flops.schema.step import Stalls
    from lightning_flops.schema.trace import TraceReport

_MODULES = 3
_ADVICE = 3
_SEC_PER_US = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LongModule:
    """One of the modules that weigh most, without the modules inside it."""

    name: str
    """Qualified name; the root is ``""``."""
    share: float
    """Of what ``Answer.longest_of`` names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The headline of a profile; None is what could not be measured."""

    global_step_sec: float | None
    """Wall seconds of a step on this rank, mean over the timed ones."""
    typical_step_sec: float | None
    """Of a typical step: see ``TimingProfile``."""
    stalls: Stalls | None
    """Steps that took much longer than that."""
    few_steps: bool
    """Too few were timed to advise on."""
    parts: tuple[tuple[str, float], ...]
    """Seconds of each part of a typical step that took any, the longest first; they add up to it."""
    samples_per_sec: float | None
    """Over the wall clock; of the whole job where its ranks are known, as the next three."""
    tokens_per_sec: float | None
    mfu: float | None
    hfu: float | None
    unavailable: Mapping[str, str]
    """Why a rate is None, by its name."""
    forward_flops: int
    """Of one step on this rank, as the next two."""
    backward_flops: int
    hardware_flops: int
    data_wait_ratio: float | None
    """Of this rank's step."""
    params: int | None
    """Of the whole model."""
    longest: tuple[LongModule, ...]
    """The modules with most time, or with most FLOPs where no step was traced."""
    longest_of: Literal["step", "forward", "FLOPs"]
    """The whole of their shares: a typical step, all modules' forwards as a clock at their borders timed them, or all
    FLOPs."""
    is_rough: bool
    """The traced steps, of which the shares are, took over twice, or under half, of a typical one."""
    advice: tuple[Advice, ...]
    """The first pieces."""


def answer_of(profile: Profile) -> Answer:
    """The headline of *profile*."""
    job, ranks, timing = profile.job_rates, profile.ranks, profile.timing
    longest, longest_of = longest_modules(profile, most=_MODULES)
    parts = () if timing is None else timing.parts
    return Answer(
        global_step_sec=None if timing is None else timing.global_step_sec,
        typical_step_sec=None if timing is None else timing.global_step.typical_sec,
        stalls=None if timing is None else timing.stalls,
        few_steps=timing is not None and timing.few_steps,
        parts=tuple(
            sorted(((one.name, one.typical_sec) for one in parts if one.typical_sec > 0), key=lambda one: -one[1])
        ),
        samples_per_sec=job.samples_per_sec,
        tokens_per_sec=job.tokens_per_sec,
        mfu=job.mfu,
        hfu=job.hfu,
        unavailable=profile.unavailable if ranks is None else ranks.unavailable,
        forward_flops=profile.flops.forward,
        backward_flops=profile.flops.backward,
        hardware_flops=profile.flops.hardware,
        data_wait_ratio=profile.rates.data_wait_ratio,
        params=profile.params if ranks is None else ranks.params,
        longest=longest,
        longest_of=longest_of,
        is_rough=profile.traced is not None and profile.traced.is_apart,
        advice=profile.advice[:_ADVICE],
    )


def longest_modules(
    profile: Profile, *, most: int
) -> tuple[tuple[LongModule, ...], Literal["step", "forward", "FLOPs"]]:
    """The *most* modules that weigh most, and what their shares are of: see ``Answer.longest_of``."""
    modules = [module for module in profile.modules if module.alias_of is None]
    tables = None if profile.traced is None else profile.traced.tables
    timed = {module.name: _own_sec(module) for module in modules if _own_sec(module)}
    if timed and tables is not None:
        return _heaviest(timed, whole=whole_step_sec(profile, tables), most=most), "step"
    if timed:
        return _heaviest(timed, whole=math.fsum(timed.values()), most=most), "forward"
    flops = {module.name: module.own.total for module in modules}  # no float may hold them
    return _heaviest(flops, whole=sum(flops.values()) + profile.outside.total, most=most), "FLOPs"


def whole_step_sec(profile: Profile, tables: TraceReport) -> float:
    """What modules' times are shares of: a typical step, or the traced one where no step was timed."""
    timing = profile.timing
    return tables.step_times.mean.wall_us * _SEC_PER_US if timing is None else timing.global_step.typical_sec


def _heaviest(weights: Mapping[str, float] | Mapping[str, int], *, whole: float, most: int) -> tuple[LongModule, ...]:
    ordered = sorted((name for name, weight in weights.items() if weight), key=lambda name: -weights[name])
    return tuple(LongModule(name=name, share=weights[name] / whole) for name in ordered[:most] if whole)


def _own_sec(module: ModuleProfile) -> float:
    return 0.0 if module.times is None else module.times.own_forward_sec + (module.times.own_backward_sec or 0.0)
