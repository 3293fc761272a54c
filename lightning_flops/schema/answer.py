"""What a reader wants to know first, picked from a profile: every place that shows a headline takes it from here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_flops.schema.advice import Advice
    from lightning_flops.schema.modules import ModuleProfile
    from lightning_flops.schema.profile import Profile

_MODULES = 3
_ADVICE = 3
_POINTS_AT_OTHERS = "mfu"
"""A rule that has nothing to try of its own while there are others."""

_SEC_PER_US = 1e-6

_NUMBERS = re.compile(r"(?<![^.])\d+(?![^.])")
"""The parts of a qualified name that are numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongModule:
    """One of the modules that weigh most, without the modules inside it."""

    name: str
    """Qualified name; the root is ``""``; of repeated layers "12 x layers.*.mlp"."""
    share: float
    """Of what ``Answer.longest_of`` names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The headline of a profile; None is what could not be measured."""

    global_step_sec: float | None
    """Wall seconds of a step on this rank."""
    parts: tuple[tuple[str, float], ...]
    """Seconds of each part of a step that took any, the longest first; they add up to it."""
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
    longest_of: Literal["traced step", "forward", "FLOPs"]
    """The whole of their shares. ``forward``: of all modules' forwards, timed at their borders."""
    advice: tuple[Advice, ...]
    """The first pieces."""


def answer_of(profile: Profile) -> Answer:
    """The headline of *profile*."""
    job, ranks, timing = profile.job_rates, profile.ranks, profile.timing
    longest, longest_of = longest_modules(profile, most=_MODULES)
    parts = () if timing is None else timing.parts
    advice = [one for one in profile.advice if one.rule != _POINTS_AT_OTHERS]
    return Answer(
        global_step_sec=None if timing is None else timing.global_step_sec,
        parts=tuple(sorted(((one.name, one.mean_sec) for one in parts if one.mean_sec > 0), key=lambda one: -one[1])),
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
        advice=tuple(advice[:_ADVICE]) or profile.advice[:1],
    )


def longest_modules(
    profile: Profile, *, most: int
) -> tuple[tuple[LongModule, ...], Literal["traced step", "forward", "FLOPs"]]:
    """The *most* modules that weigh most, and what their shares are of: see ``Answer.longest_of``."""
    modules = [module for module in profile.modules if module.alias_of is None]
    tables = None if profile.traced is None else profile.traced.tables
    timed = {module.name: _own_sec(module) for module in modules if _own_sec(module)}
    if timed and tables is not None:
        return _heaviest(modules, timed, whole=tables.step_times.mean.wall_us * _SEC_PER_US, most=most), "traced step"
    if timed:
        return _heaviest(modules, timed, whole=math.fsum(timed.values()), most=most), "forward"
    flops = {module.name: module.own.total for module in modules}  # no float may hold them
    return _heaviest(modules, flops, whole=sum(flops.values()) + profile.outside.total, most=most), "FLOPs"


def _heaviest(
    modules: Sequence[ModuleProfile], weights: Mapping[str, float] | Mapping[str, int], *, whole: float, most: int
) -> tuple[LongModule, ...]:
    """The heaviest by *weights*; repeated layers, equal but for the numbers in their names, are one."""
    layers: dict[tuple[str, str, str], list[str]] = {}
    for one in modules:
        if weights.get(one.name):
            key = (_NUMBERS.sub("*", one.name), one.type_name, one.extra_repr)
            layers.setdefault(key, []).append(one.name)
    sums = {
        names[0] if len(names) == 1 else f"{len(names)} x {pattern}": sum(weights[name] for name in names)
        for (pattern, _, _), names in layers.items()
    }
    ordered = sorted(sums, key=lambda name: -sums[name])
    return tuple(LongModule(name=name, share=sums[name] / whole) for name in ordered[:most] if whole)


def _own_sec(module: ModuleProfile) -> float:
    return 0.0 if module.times is None else module.times.own_forward_sec + (module.times.own_backward_sec or 0.0)
