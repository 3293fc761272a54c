"""Two profiles compared: every nanosecond of the difference of their steps has a cause, by part and by module.

The times of the parts of a step are means over the timed steps, which nothing slowed down. How a part is cut into
modules, waiting for other ranks and idle time comes from the traced steps. ``compare_figures`` has the mathematics of
chance.

The time of a piece of work is ``t = W s``: an amount of work ``W = FLOPs + R x bytes``, by the seconds *s* that one
unit of it takes. *R* is how many FLOPs the device does while it moves a byte. The logarithms of their changes add up,
and apportion the difference ``t_B - t_A``:

    work        L(t_A, t_B) ln(W_B / W_A)
    efficiency  L(t_A, t_B) ln(s_B / s_A)          L(x, y) = (y - x) / ln(y / x), the logarithmic mean; L(x, x) = x

J. K. Montgomery (1937) and Y. Vartia (Scand. J. Statist. 3, 1976), known as LMDI (B. W. Ang, Energy Policy 33, 2005).
What only one run has, or where only one counted any work, is work; where neither counted any, it is efficiency. No
work explains more than the time that it is in, all of ``t_B`` or all of ``t_A``: counts that would were not seen in one
of the runs. Work is rounded to whole nanoseconds, and efficiency is the rest, so sums are exact.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any, NamedTuple, cast, get_args

import numpy as np

from lightning_flops.analysis import compare_figures as figures
from lightning_flops.analysis.counts import parent_name
from lightning_flops.analysis.rates import ratio
from lightning_flops.analysis.timing import apportioned, whole_ns
from lightning_flops.errors import ComparisonError
from lightning_flops.records import OUTSIDE, TimePhase
from lightning_flops.schema.comparison import (
    SHARED,
    STARTS,
    Cause,
    CausedDifference,
    ComparedRun,
    Comparison,
    ModuleDifference,
    ModuleSide,
)
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import ModuleProfile, phases_text
from lightning_flops.units import percent, plural

_PHASES: tuple[TimePhase, ...] = get_args(TimePhase)
_COMPUTING: tuple[TimePhase, ...] = ("forward", "backward", "optimizer")
_BY_MODULE: tuple[TimePhase, ...] = ("forward", "backward")
# What a part of a step that computes nothing of the model is a wait for.
_WAITS: dict[TimePhase, Cause] = {"data_wait": "data", "transfer": "loop", "bubble": "communication", "other": "loop"}
_STARVED = 0.05  # from this share of lost processor time on, the times of a run say little of its program
_OTHERS = 0.25  # from this share of the processors on, other programs slow a run without starving it
_ERRORS = 4  # so many standard errors of both runs together may separate a module's times by figures
_Phases = tuple[TimePhase, ...]
_Row = tuple[str | None, str | None]  # names of a module in A and in B; both None for what no module owns
_OUTSIDE: _Row = (None, None)


class Work(NamedTuple):
    """Counts of a piece of work in one step; whole numbers where one step was counted."""

    flops: float = 0
    bytes: float = 0


# Time and work of the pieces of a part of a step, by whose they are, and what they are a wait for.
_Pieces = dict[tuple[_Row, Cause | None], tuple[int, Work]]


def compare_profiles(
    a: Profile | Sequence[Profile],
    b: Profile | Sequence[Profile],
    *,
    sources: tuple[str | Sequence[str], str | Sequence[str]] = ("A", "B"),
) -> Comparison:
    """What the step of run *b* takes longer than that of run *a*, and why.

    Every nanosecond of the difference has one of three causes. *More work*: FLOPs or bytes changed, modules are new or
    gone. *Worse efficiency*: the same work, slower. *More waiting*: for data, communication, the host, or the loop
    around the model. A cause is below zero if there is less of it. The causes of all parts of a step, or of all
    modules, add up to the whole difference, to the nanosecond. What chance explains is marked as noise: of one run a
    side the spread of its timed steps, of two and more that of the runs.

    Args:
        a: the profile that is compared with, or several of runs of the same program: times are their means.
        b: the profile that is compared, or several.
        sources: where they are from, for the report.

    Raises:
        ComparisonError: one of them has no timed step, or one run trains and the other does not.
    """
    first, second = sides = _Side(a, sources[0]), _Side(b, sources[1])
    loop, other = first.profile.context.loop, second.profile.context.loop
    if loop != other:
        raise ComparisonError(
            f"the steps cannot be compared: {first.source} is of a {loop} loop, {second.source} of a {other} loop"
        )
    runs = [*first.runs, *second.runs]
    every, rows = _parts_of_both(runs), _rows_of_both(first.profile, second.profile)
    per_byte = figures.flops_per_byte([side.profile for side in sides])
    whole, of_parts, of_rows = _Sums(), defaultdict[_Phases, _Sums](_Sums), defaultdict[_Row, _Sums](_Sums)
    for phases in every:
        by_module = all(len(phases) == 1 and phases[0] in run.inside for run in runs)
        in_a, in_b = (side.pieces(phases, rows, place, by_module) for place, side in enumerate(sides))
        for piece in in_a | in_b:
            (a_ns, work_a), (b_ns, work_b) = in_a.get(piece, (0, None)), in_b.get(piece, (0, None))
            row, wait = piece
            amounts: dict[str, Any] = {"a_ns": a_ns, "b_ns": b_ns, "a": work_a, "b": work_b, "flops_per_byte": per_byte}
            causes = {wait: b_ns - a_ns} if wait else split(**amounts)
            for sums in (whole, of_parts[phases], of_rows[row]):
                sums.update(causes, a_ns=a_ns, b_ns=b_ns)

    def part(name: str, phases: _Phases, sums: _Sums) -> CausedDifference:
        return CausedDifference(
            name=name, **_times(sums), noise_ns=figures.noise_ns(first.steps(phases), second.steps(phases))
        )

    step = tuple(phase for phases in every for phase in phases)
    compared = Comparison(
        kind="profiles",
        a=first.identity(),
        b=second.identity(),
        settings=figures.setting_differences(first.profile, second.profile),
        figures=tuple(
            figures.differences(first.figures(step), second.figures(step), peaks=(first.peaks, second.peaks))
        ),
        step=part(second.profile.step_name, step, whole),
        parts=tuple(part(phases_text(phases), phases, of_parts[phases]) for phases in every),
        notes=tuple(_notes(sides, per_byte)),
    )
    return replace(compared, modules=tuple(_modules(sides, rows, of_rows, beyond_noise=compared.is_told)))


def split(
    *, a_ns: int, b_ns: int, a: Work | None, b: Work | None, flops_per_byte: float = figures.FLOPS_PER_BYTE
) -> dict[Cause, int]:
    """The difference ``b_ns - a_ns`` of one piece of work by cause; *a* or *b* is None in a run that has no such."""
    difference = b_ns - a_ns
    if a is None or b is None:
        return {"modules": difference}
    flops, moved = b.flops - a.flops, flops_per_byte * (b.bytes - a.bytes)
    if not flops and not moved:
        return {"efficiency": difference}
    units_a, units_b = (one.flops + flops_per_byte * one.bytes for one in (a, b))
    if not units_a or not units_b:
        flops_ns = round(difference * (flops / (flops + moved)))
        return {"flops": flops_ns, "bytes": difference - flops_ns}
    per_unit = _logarithmic_mean(a_ns, b_ns) / _logarithmic_mean(units_a, units_b)
    more = (flops + moved) * per_unit
    if more and not -a_ns <= more <= b_ns:
        per_unit *= (b_ns if more > 0 else -a_ns) / more
    flops_ns, bytes_ns = round(flops * per_unit), round(moved * per_unit)
    return {"flops": flops_ns, "bytes": bytes_ns, "efficiency": difference - flops_ns - bytes_ns}


def _logarithmic_mean(x: float, y: float) -> float:
    """``(y - x) / ln(y / x)`` of two numbers that are not below zero: between them; 0 if one of them is 0."""
    low, high = sorted((x, y))
    if low <= 0 or low == high:
        return max(0.0, low)
    return (high - low) / math.log1p((high - low) / low)


def _parts_of_both(runs: Sequence[_Run]) -> list[_Phases]:
    """The parts that all runs separate; what some separate in other ways is one part."""
    parts = [{part.phases for part in run.timing.parts} for run in runs]
    alike = set.intersection(*parts)
    rest = {phase for of in parts for phases in of - alike for phase in phases}
    joined = tuple(phase for phase in _PHASES if phase in rest)
    return sorted([*alike, *([joined] if joined else [])], key=lambda phases: _PHASES.index(phases[0]))


def _rows_of_both(a: Profile, b: Profile) -> list[_Row]:
    """The modules of B with their partners in A, then those that are gone."""
    partners = match_modules(a.modules, b.modules)
    rows: list[_Row] = [(partners.get(one.name), one.name) for one in b.modules]
    taken = set(partners.values())
    return [*rows, *((one.name, None) for one in a.modules if one.name not in taken)]


class _Side:
    """The runs of one side: times are their means, all else that of the first."""

    def __init__(self, profiles: Profile | Sequence[Profile], sources: str | Sequence[str]) -> None:
        each = [profiles] if isinstance(profiles, Profile) else list(profiles)
        names = [sources] * len(each) if isinstance(sources, str) else list(sources)
        self.runs = [_Run(profile, source) for profile, source in zip(each, names, strict=True)]
        self.profile, self.source, self.peaks = each[0], figures.name_of(names), figures.peaks_of(each[0])
        self.own_ns = [Counter[_Row]() for _ in self.runs]  # of each run, by row
        if len({tuple(module.name for module in profile.modules) for profile in each}) > 1:
            raise ComparisonError(
                f"{self.source} cannot be one side: their modules differ, so these are other programs"
            )

    def identity(self) -> ComparedRun:
        first, several = self.runs[0], len(self.runs) > 1
        share = statistics.median(run.timing.starved_share or 0.0 for run in self.runs)
        of = f"the steps of {len(self.runs)} runs were timed they were" if several else "its steps were timed it was"
        starved = f"for {percent(share)} of the time in which {of} ready to run and had to wait for a processor."
        return figures.identity(
            [run.source for run in self.runs],
            f"{first.about} in each" if several else first.about,
            starved=starved if share > _STARVED else "",
            starts_share=SHARED if first.others else STARTS,
            others=first.others,
        )

    def steps(self, phases: _Phases) -> figures.Runs:
        return [run.steps(phases) for run in self.runs]

    def module(self, name: str | None) -> ModuleSide | None:
        """What forward and backward of a module compute; None if it is not there."""
        if name is None:
            return None
        flops, moved = map(sum, zip(*(works[name] for works in self.runs[0].works.values()), strict=True))
        return ModuleSide(name=name, flops=round(flops), bytes=round(moved))

    def pieces(self, phases: _Phases, rows: Sequence[_Row], place: int, by_module: bool) -> _Pieces:
        """What a part of the step consists of, the mean of the runs', which have the same pieces."""
        of = {str(row[place]): row for row in rows if row[place] is not None}
        found = [run.pieces(phases, of, by_module) for run in self.runs]
        for own, pieces in zip(self.own_ns, found, strict=True):
            own.update({row: ns for (row, wait), (ns, _) in pieces.items() if not wait})
        of_runs = {piece: list(zip(*(one[piece] for one in found), strict=True)) for piece in found[0]}
        return {
            piece: (round(statistics.fmean(times)), Work(*map(statistics.fmean, zip(*works, strict=True))))
            for piece, (times, works) in of_runs.items()
        }

    def figures(self, step: _Phases) -> dict[str, figures.Figure]:
        """Each number of the summary, and why it is not known; *step* are the parts that both sides have."""
        why = {**self.profile.unavailable, **self.profile.job_unavailable}
        return figures.of_side([run.figures(step) for run in self.runs], why)


class _Run:
    def __init__(self, profile: Profile, source: str) -> None:
        if profile.timing is None:
            raise ComparisonError(f"the steps cannot be compared: {source} has no timed step")
        self.profile, self.timing, self.traced, self.source = profile, profile.timing, profile.traced, source
        parts = self.traced.parts if self.traced and any(one.times for one in profile.modules) else ()
        self.inside = {part.name: part for part in parts if part.name in _COMPUTING}  # what filled these is known

    @property
    def about(self) -> str:
        """Its model, device and steps, in words."""
        profile, steps = self.profile, self.timing.timed_steps
        model = f"{profile.modules[0].type_name} on " if profile.modules else ""
        device = profile.context.device_name or "unknown device"
        return f"{model}{device}, step {profile.profile_step} counted, {steps} timed {plural('step', steps)}"

    @property
    def others(self) -> str:
        timing, cores = self.timing, int(self.profile.set_up.get("cores", 0))
        own = ratio(part=timing.cpu_time_sec, whole=timing.global_step_sec)
        if self.profile.context.device_type != "cpu":
            return ""
        if timing.cpu_system_ratio is None or own is None or not cores:
            return "whether other programs ran beside it is not known"
        share = timing.cpu_system_ratio - own / cores
        return f"other programs had {percent(share)} of its processors" if share > _OTHERS else ""

    def steps(self, phases: _Phases) -> figures.Floats:
        """Seconds of each timed step in *phases*."""
        columns = [np.array(part.steps_sec) for part in self.timing.parts if set(part.phases) <= set(phases)]
        return sum(columns, start=np.zeros(self.timing.timed_steps))

    def figures(self, step: _Phases) -> dict[str, figures.OfRun]:
        """Each number of the summary, with what it is in each timed step."""
        wall, summary = self.steps(step), cast("dict[str, float | None]", self.profile.summary())
        waits, of_processor = self.steps(("data_wait",)) / wall, np.array(self.timing.processor_steps_sec)
        of_steps = dict.fromkeys(figures.WALL, wall) | {"data_wait_ratio": waits, "cpu_time_sec": of_processor}
        return {name: (value, of_steps.get(name)) for name, value in summary.items() if name != "advice"}

    @cached_property
    def works(self) -> dict[TimePhase, dict[str, Work]]:
        """FLOPs and bytes of one step by phase and module, without those below it."""
        modules, per_step, found = self.profile.modules, self.profile.per_step, {}
        for phase in _BY_MODULE:
            below: Counter[str] = Counter()
            for module in modules:
                below[parent_name(module.name)] += _amount(module.total_bytes, phase) if module.name else 0
            found[phase] = {
                one.name: Work(
                    per_step(_amount(one.own, phase)), per_step(_amount(one.total_bytes, phase) - below[one.name])
                )
                for one in modules
            }
        return found

    @cached_property
    def errors(self) -> dict[str | None, float]:
        """Standard error of each module's own time over the traced steps, divided by that time, where it is known."""
        table = self.traced and not self.traced.is_apart and self.traced.tables and self.traced.tables.modules
        found: dict[str | None, float] = {
            row.name: ratio(part=row.own_error_us, whole=row.own_forward_us + row.own_backward_us) or 0.0
            for row in (table.rows if table else ())
            if row.own_error_us is not None
        }
        return {None: 0.0, **found}

    def pieces(self, phases: _Phases, rows: Mapping[str, _Row], by_module: bool) -> _Pieces:
        """What a part of the step consists of; its pieces add up to it."""
        profile = self.profile
        ns = sum(whole_ns(part.mean_sec) for part in self.timing.parts if set(part.phases) <= set(phases))
        work = Work(
            sum(_amount(profile.flops, phase) for phase in phases),
            profile.per_step(sum(_amount(profile.bytes_total, phase) for phase in phases)),
        )
        if not by_module:
            waits = {_WAITS.get(one) for one in phases}  # several kinds of waiting count as one for the loop
            return {(_OUTSIDE, None if None in waits else waits.pop() if len(waits) == 1 else "loop"): (ns, work)}
        works = self.works.get(phases[0], {})
        owned = map(sum, zip(Work(), *works.values(), strict=True))
        left = Work(*(max(0, every - own) for every, own in zip(work, owned, strict=True)))
        weights = self._filling(phases[0], list(works), ns)
        keys = [*((rows[name], None) for name in works), *((_OUTSIDE, of) for of in ("communication", "idle", None))]
        every = zip(apportioned(ns, weights), [*works.values(), Work(), Work(), left], strict=True)
        return cast("_Pieces", dict(zip(keys, every, strict=True)))

    def _filling(self, phase: TimePhase, modules: Sequence[str], timed_ns: int) -> list[int]:
        """Nanoseconds that *modules*, communication, idle time of a device, and the rest fill of a traced part.

        A device waits less for its host in the timed part, which takes *timed_ns*, than in the traced one.
        """
        part, fillings = self.inside[phase], (self.traced and self.traced.filling) or {}
        scale = getattr(self.traced, f"{phase}_scale", 1.0)
        times = {one.name: one.times for one in self.profile.modules if one.times is not None}
        own = [whole_ns(getattr(times.get(name), f"own_{phase}_sec", None) or 0.0) for name in modules]
        wall_ns, communication, idle = whole_ns(scale * part.wall_sec), whole_ns(scale * part.exposed_sec), 0
        computing = max(0, wall_ns - communication)
        if phase in fillings and next(iter(times.values())).clock == "device":
            idle = min(computing, round(scale * fillings[phase].idle_ns))
        computing -= idle
        if self.traced and self.traced.shows_device:
            communication = communication * timed_ns // max(1, wall_ns)  # it waits for other hosts, and keeps its share
            idle = max(0, timed_ns - computing - communication)
        if sum(own) > computing:  # a module's time has what ran at once on several streams, and its own communication
            own = apportioned(computing, own)
        return [*own, communication, idle, computing - sum(own)]


def _amount(amounts: Any, phase: TimePhase) -> int:
    """FLOPs or bytes of one phase; the backward has what it repeats of the forward."""
    repeated: int = amounts.recompute if phase == "backward" else 0
    return repeated + getattr(amounts, phase) if phase in _COMPUTING else 0


_Sums = Counter[str]  # nanoseconds of both runs, and of each cause of their difference, added up over pieces


def _times(sums: _Sums) -> dict[str, Any]:
    causes = {cause: sums[cause] for cause in get_args(Cause) if sums[cause]}
    return {"a_ns": sums["a_ns"], "b_ns": sums["b_ns"], "causes": causes}


def _modules(
    sides: tuple[_Side, _Side], rows: Sequence[_Row], of_rows: Mapping[_Row, _Sums], *, beyond_noise: bool
) -> Iterator[ModuleDifference]:
    """Each row, and last what no module owns; with what may be chance, where the step's is *beyond_noise*."""
    for row in rows:
        own = of_rows.get(row, _Sums())
        noise = _noise_of_module(sides, row, own) if beyond_noise and (own["a_ns"] or own["b_ns"]) else None
        name = str(row[0] if row[1] is None else row[1])
        yield ModuleDifference(
            name=name, a=sides[0].module(row[0]), b=sides[1].module(row[1]), **_times(own), noise_ns=noise
        )
    outside = ModuleSide(name=OUTSIDE, flops=0, bytes=0)
    yield ModuleDifference(name=OUTSIDE, a=outside, b=outside, **_times(of_rows[_OUTSIDE]), noise_ns=None)


def _noise_of_module(sides: tuple[_Side, _Side], row: _Row, own: _Sums) -> int | None:
    """How far the difference of a module may be chance; None if it is not known."""
    a, b = sides
    if min(len(a.runs), len(b.runs)) > 1:
        return figures.noise_ns(*([np.array([1e-9 * one[row]]) for one in side.own_ns] for side in sides))
    errors = own["a_ns"] * a.runs[0].errors.get(row[0], math.nan), own["b_ns"] * b.runs[0].errors.get(row[1], math.nan)
    noise = _ERRORS * math.hypot(*errors)
    return None if math.isnan(noise) else math.ceil(noise)


def _notes(sides: Sequence[_Side], per_byte: float) -> Iterator[str]:
    """What limits the comparison, in sentences."""
    runs = [run for side in sides for run in side.runs]
    if untimed := [run.source for run in runs if not run.inside]:
        yield (
            f"Differences by module are not known without times of modules in {' and '.join(untimed)}. What the trace "
            "shows of waiting inside a part is in its work and efficiency."
        )
    else:
        yield f"Where FLOPs and bytes changed differently, a byte weighs as much as {per_byte:.3g} FLOPs."
    for run in runs:
        context, steps = run.profile.context, run.timing.timed_steps
        yield from figures.too_few(run.source, steps, "timed steps")
        if run.traced is not None and run.traced.is_apart:
            yield (
                f"The traced steps of {run.source} took over twice or under half as long as its timed ones: which "
                "module a difference is in is uncertain."
            )
        if run.profile.lower_bound:
            yield f"FLOPs of {run.source} are lower bounds: what could not be counted is not in its work."
        if context.world_size > 1:
            yield f"Times of {run.source} are those of rank {context.rank} of {context.world_size}."
    for note in dict.fromkeys(note for run in runs for note in run.profile.notes):
        yield f"{' and '.join(run.source for run in runs if note in run.profile.notes)}: {note}"


def match_modules(a: Sequence[ModuleProfile], b: Sequence[ModuleProfile]) -> dict[str, str]:
    """Partners among the modules *a* and *b*, the name in A by the name in B; each has at most one.

    Both are in tree order, the root first. First the same name and class: the root and most modules. Then renamed ones:
    the longest runs of the same classes, settings, parameters and FLOPs, where a module without parameters goes with
    its parent alone. Last the same name, whatever the class.
    """
    class_a = {one.name: one.type_name for one in a}
    found = {one.name: one.name for one in b if not one.name or class_a.get(one.name) == one.type_name}
    taken = set(found.values())
    left_a, left_b = [one for one in a if one.name not in taken], [one for one in b if one.name not in found]
    kinds_a, kinds_b = (
        [(one.type_name, one.extra_repr, one.params, one.total) for one in left] for left in (left_a, left_b)
    )
    for place_a, place_b, length in SequenceMatcher(None, kinds_a, kinds_b, autojunk=False).get_matching_blocks():
        for mine, other in zip(left_a[place_a : place_a + length], left_b[place_b : place_b + length], strict=True):
            if mine.params or found.get(parent_name(other.name)) == parent_name(mine.name):
                found[other.name] = mine.name
                taken.add(mine.name)
    for module in b:
        if module.name in class_a and module.name not in taken:
            found.setdefault(module.name, module.name)
    return found
