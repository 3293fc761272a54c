"""Two profiles compared: every nanosecond of the difference of their steps has a cause, by part and by module.

The times of the parts of a step are means over the timed steps, which nothing slowed down. How a part is cut into
modules, waiting for other ranks and idle time comes from the traced step. ``compare_split`` has the mathematics of a
difference, ``compare_noise`` that of chance, ``compare_modules`` says which module is which.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, get_args

import numpy as np

from lightning_flops.analysis.compare_modules import match_modules
from lightning_flops.analysis.compare_noise import (
    CONFIDENCE,
    LEAST_STEPS,
    Floats,
    noise_interval,
    ratio_ends,
    single_step_noise_ns,
    too_few,
)
from lightning_flops.analysis.compare_rules import (
    EXACT,
    NO_NOISE,
    TIMED,
    TOO_WIDE,
    figure_difference,
    setting_differences,
)
from lightning_flops.analysis.compare_split import FLOPS_PER_BYTE, CauseSums, Work, apportioned, split, sum_of
from lightning_flops.analysis.module_names import parent_name
from lightning_flops.errors import ComparisonError
from lightning_flops.records import OUTSIDE, PhaseAmounts, TimePhase
from lightning_flops.schema.comparison import (
    SCHEMA_VERSION,
    ComparedRun,
    Comparison,
    FigureDifference,
    ModuleDifference,
    ModuleSide,
    PartDifference,
)
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import TimingProfile, phases_text
from lightning_flops.units import percent

_PHASES: tuple[TimePhase, ...] = get_args(TimePhase)
_COMPUTING: tuple[TimePhase, ...] = ("forward", "backward", "optimizer")
_BY_MODULE: tuple[TimePhase, ...] = ("forward", "backward")
_WAITING: Mapping[TimePhase, str] = {
    "data_wait": "data", "transfer": "loop", "bubble": "communication", "other": "loop"
}  # fmt: skip
"""What a part of a step that computes nothing of the model is a wait for."""
_STARVED = 0.05
"""From this share of lost processor time on, the times of a run say little of its program."""
_ALIKE = 2.0
"""A traced step that took so many times as long as the timed ones, or as short, was held up in one place."""
_NOT_OWNED = -1
_Phases = tuple[TimePhase, ...]


def compare_profiles(a: Profile, b: Profile, *, sources: tuple[str, str] = ("A", "B")) -> Comparison:
    """What the step of run *b* takes longer than that of run *a*, and why.

    Every nanosecond of the difference has one of three causes. *More work*: FLOPs or bytes changed, modules are new or
    gone. *Worse efficiency*: the same work, slower. *More waiting*: for data, communication, the host, or the loop
    around the model. A cause is below zero if there is less of it. The causes of all parts of a step, or of all
    modules, add up to the whole difference, to the nanosecond. What the spread of the timed steps explains is marked as
    noise: that within the two runs.

    Args:
        a: the profile that is compared with.
        b: the profile that is compared.
        sources: where they are from, for the report.

    Raises:
        ComparisonError: the two cannot be compared: one has no timed step, contradicts itself or has figures that no
            float holds, or one run trains and the other does not.
    """
    for profile, source in zip((a, b), sources, strict=True):
        if profile.timing is None:
            raise ComparisonError(f"the steps cannot be compared: {source} has no timed step")
    if a.context.loop != b.context.loop:
        raise ComparisonError(
            f"the steps cannot be compared: {sources[0]} is of a {a.context.loop} loop, {sources[1]} of a "
            f"{b.context.loop} loop"
        )
    try:
        return _Comparing((_Run(a, sources[0]), _Run(b, sources[1]))).result()
    except (ArithmeticError, LookupError, ValueError) as error:
        raise ComparisonError(
            "the steps cannot be compared: a profile contradicts itself, or has figures beyond what floats hold"
        ) from error


@dataclass(frozen=True, slots=True)
class _Run:
    """One of the two runs."""

    profile: Profile
    source: str

    @property
    def timing(self) -> TimingProfile:
        """Its timed steps."""
        assert self.profile.timing is not None
        return self.profile.timing

    def identity(self) -> ComparedRun:
        """Which run it is."""
        modules, share = self.profile.modules, self.timing.starved_share or 0.0
        starved = f"for {percent(share)} of the time in which its steps were timed it was ready to run and had to wait"
        return ComparedRun(
            source=self.source,
            profile_step=self.profile.profile_step,
            timed_steps=self.timing.timed_steps,
            model=modules[0].type_name if modules else "",
            device=self.profile.context.device_name,
            starved=f"{starved} for a processor." if share > _STARVED else "",
        )

    def ns(self, phases: _Phases) -> int:
        """Mean of *phases* together; zero where the run has none of them."""
        return sum(_ns(part.mean_sec) for part in self.timing.parts if set(part.phases) <= set(phases))

    def steps(self, phases: _Phases) -> Floats:
        """Seconds of each timed step in *phases*."""
        columns = [np.array(part.steps_sec) for part in self.timing.parts if set(part.phases) <= set(phases)]
        return sum(columns, start=np.zeros(len(self.timing.global_step.steps_sec)))

    def work_of_phase(self, phase: TimePhase) -> Work:
        """FLOPs and bytes of one step in *phase*."""
        flops, moved, per_step = self.profile.flops, self.profile.bytes_total, self.profile.per_step
        if phase == "backward":
            return Work(flops.backward + flops.recompute, per_step(moved.backward + moved.recompute))
        if phase in _COMPUTING:
            return Work(getattr(flops, phase), per_step(getattr(moved, phase)))
        return Work()

    def work_of_modules(self) -> dict[str, dict[TimePhase, Work]]:
        """FLOPs and bytes of one step, by module, without those below it."""
        own_bytes = {module.name: list(_sides(module.total_bytes)) for module in self.profile.modules}
        for module in self.profile.modules:
            around = own_bytes[parent_name(module.name)] if module.name else [0, 0]
            for side, moved in enumerate(_sides(module.total_bytes)):
                around[side] -= moved
        per_step = self.profile.per_step
        return {
            module.name: {
                phase: Work(per_step(flops), per_step(moved))
                for phase, flops, moved in zip(_BY_MODULE, _sides(module.own), own_bytes[module.name], strict=True)
            }
            for module in self.profile.modules
        }


def _sides(amounts: PhaseAmounts) -> tuple[int, int]:
    """Forward, and backward with what it repeats of the forward."""
    return amounts.forward, amounts.backward + amounts.recompute


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """What filled one part of a traced step, in nanoseconds."""

    modules: Mapping[str, int]
    """Own time of each module; empty where modules have none."""
    outside: int
    """Computing that no module owns, or time that nothing known filled."""
    communication: int = 0
    """Not hidden by computation."""
    idle: int = 0
    """The device had nothing to run."""

    @property
    def whole(self) -> int:
        """All of it."""
        return sum(self.modules.values()) + self.outside + self.communication + self.idle


def _traced_parts(run: _Run) -> tuple[dict[TimePhase, _Traced], str]:
    """What filled the computing parts of the run's traced step; empty, and why, if it cannot be said.

    On a device, idle is the time in which nothing runs there. Without a device the host's own time between operators is
    work as well: it is no module's, or that of the module that runs.
    """
    traced = run.profile.traced
    times = {module.name: module.times for module in run.profile.modules if module.times is not None}
    if traced is None or not times:
        return {}, f"{run.source} has no times of modules"
    if not traced.like_counted:
        return {}, f"the traced step of {run.source} is not like its counted one"
    table = None if traced.tables is None else traced.tables.modules
    walls = {part.name: part for part in traced.parts}
    fillings = {} if traced.filling is None else {part.name: part for part in traced.filling.parts}
    on_device = next(iter(times.values())).clock == "device"
    found: dict[TimePhase, _Traced] = {}
    for phase in _COMPUTING:
        seconds = {name: getattr(one, f"own_{phase}_sec", 0.0) for name, one in times.items()}
        if any(sec is None for sec in seconds.values()):
            continue  # a clock at module hooks sees the forward alone
        modules = {name: _ns(sec) for name, sec in seconds.items()}
        own = sum(modules.values())
        scale = traced.backward_scale if phase == "backward" else traced.forward_scale if phase == "forward" else 1.0
        table_us = 0.0 if table is None else scale * getattr(table, f"{phase}_us") / max(1, table.steps)
        busy = max(own, round(1e3 * table_us))
        if phase not in walls:
            if table is None and phase == "forward":
                busy = max(own, _ns(run.timing.forward_sec or 0.0))  # of the same steps' length, as far as is known
            found[phase] = _Traced(modules=modules, outside=busy - own)
            continue
        communication = _ns(scale * walls[phase].exposed_sec)
        computing, idle = max(0, _ns(scale * walls[phase].wall_sec) - communication), 0
        if on_device:
            idle = min(computing, fillings[phase].idle_ns) if phase in fillings else max(0, computing - busy)
        computing -= idle
        if own > computing:  # a module's time has what ran at once on several streams, and its own communication
            modules = dict(zip(modules, apportioned(computing, list(modules.values())), strict=True))
            own = computing
        found[phase] = _Traced(modules=modules, outside=computing - own, communication=communication, idle=idle)
    return found, ""


def _common_parts(runs: Sequence[_Run]) -> list[_Phases]:
    """The finest parts that both runs can separate."""
    groups: list[frozenset[TimePhase]] = []
    for one in (frozenset(part.phases) for run in runs for part in run.timing.parts):
        joined = one.union(*(group for group in groups if group & one))
        groups = [group for group in groups if not group & one] + [joined]
    ordered = [tuple(phase for phase in _PHASES if phase in group) for group in groups]
    return sorted(ordered, key=lambda group: _PHASES.index(group[0]))


_Piece = tuple[int, str, tuple[int, int], tuple[Work | None, Work | None]]
"""Of a part of the step: whose row, what it is a wait for or empty, its times, and the work in it."""


class _Comparing:
    """Compares two runs, part by part: what fills them, then noise."""

    def __init__(self, runs: tuple[_Run, _Run]) -> None:
        self._runs = runs
        self._notes: list[str] = []
        a, b = (run.profile for run in runs)
        partners = match_modules(a.modules, b.modules)
        taken = set(partners.values())
        self._rows: list[tuple[str | None, str | None]] = [(partners.get(one.name), one.name) for one in b.modules]
        self._rows += [(module.name, None) for module in a.modules if module.name not in taken]
        self._sums: defaultdict[int, CauseSums] = defaultdict(CauseSums)
        """Of each module, by its row."""
        self._works = tuple(run.work_of_modules() for run in runs)
        self._traced = self._comparable_traces()
        self._flops_per_byte = _flops_per_byte(a, b)
        counts = [len(run.timing.global_step.steps_sec) for run in runs]
        self._with_noise = min(counts) >= LEAST_STEPS
        for run, count in zip(runs, counts, strict=True):
            if count < LEAST_STEPS:
                self._notes.append(too_few(run.source, f"{count} timed steps"))

    def result(self) -> Comparison:
        """The comparison."""
        a, b = self._runs
        whole, parts, every = CauseSums(), [], _common_parts(self._runs)
        for phases in every:
            sums = CauseSums()
            for row, wait, (a_ns, b_ns), works in self._pieces(phases):
                if a_ns or b_ns:
                    one = {wait: b_ns - a_ns} if wait else self._split(a_ns, b_ns, works)
                    for of in (sums, whole, self._sums[row]):
                        of.add(a_ns, b_ns, one)
            parts.append(self._part(phases_text(phases), phases, sums, self._is_by_module(phases)))
        step = tuple(phase for phases in every for phase in phases)
        self._note_limits()
        return Comparison(
            schema_version=SCHEMA_VERSION,
            a=a.identity(),
            b=b.identity(),
            step_name=b.profile.step_name,
            settings=setting_differences(a.profile, b.profile),
            figures=self._figures(step),
            step=self._part(b.profile.step_name, step, whole, any(one.by_module for one in parts)),
            parts=tuple(parts),
            modules=self._modules(),
            flops_per_byte=self._flops_per_byte,
            confidence=CONFIDENCE,
            notes=tuple(self._notes),
        )

    def _comparable_traces(self) -> tuple[dict[TimePhase, _Traced], ...]:
        """What filled the parts in both runs; empty where one of them does not know."""
        found = [_traced_parts(run) for run in self._runs]
        clocks = {one.times.clock for run in self._runs for one in run.profile.modules if one.times is not None}
        why = " and ".join(why for _, why in found if why)
        if not why and len(clocks) > 1:
            why = f"their clocks differ ({', '.join(sorted(clocks))})"
        if why:
            self._notes.append(
                f"Differences by module are not known: {why}. What the trace shows of waiting inside a part is in its "
                "work and efficiency."
            )
        return tuple({} if why else traced for traced, _ in found)

    def _is_by_module(self, phases: _Phases) -> bool:
        return len(phases) == 1 and phases[0] in _BY_MODULE and all(phases[0] in traced for traced in self._traced)

    def _split(self, a_ns: int, b_ns: int, works: tuple[Work | None, Work | None]) -> dict[str, int]:
        return split(a_ns=a_ns, b_ns=b_ns, a=works[0], b=works[1], flops_per_byte=self._flops_per_byte)

    def _pieces(self, phases: _Phases) -> Iterator[_Piece]:
        """What a part of the step consists of; its pieces add up to it."""
        times = (self._runs[0].ns(phases), self._runs[1].ns(phases))
        computing = [phase for phase in phases if phase in _COMPUTING]
        if not computing:  # a wait; of several kinds it counts as that of the loop
            kinds = {_WAITING[phase] for phase in phases}
            yield _NOT_OWNED, kinds.pop() if len(kinds) == 1 else "loop", times, (None, None)
        elif len(phases) == 1 and all(phases[0] in traced for traced in self._traced):
            yield from self._traced_pieces(phases[0], times)
        else:
            of_a, of_b = (sum_of([run.work_of_phase(phase) for phase in phases]) for run in self._runs)
            yield _NOT_OWNED, "", times, (of_a, of_b)
            if len(computing) < len(phases):
                name = phases_text(phases)
                self._notes.append(
                    f"Waiting in {name} cannot be separated from computing there: it is in its work and efficiency."
                )

    def _traced_pieces(self, phase: TimePhase, times: tuple[int, int]) -> Iterator[_Piece]:
        by_module = phase in _BY_MODULE
        rows = self._rows if by_module else []
        pieces, lefts = [], []
        for side, (run, traced, ns) in enumerate(zip(self._runs, self._traced, times, strict=True)):
            here, names = traced[phase], [row[side] for row in rows]
            own = [0 if name is None else here.modules.get(name, 0) for name in names]
            pieces.append(apportioned(ns, [*own, here.communication, here.idle, here.outside]))
            owned = sum_of([work[phase] for work in self._works[side].values()]) if by_module else Work()
            lefts.append(run.work_of_phase(phase).less(owned))
        *of_rows, communication, idle, outside = zip(*pieces, strict=True)
        for place, (names_of, ns_of) in enumerate(zip(rows, of_rows, strict=True)):
            works = [None if name is None else self._works[side][name][phase] for side, name in enumerate(names_of)]
            yield place, "", ns_of, (works[0], works[1])
        yield _NOT_OWNED, "communication", communication, (None, None)
        yield _NOT_OWNED, "idle", idle, (None, None)
        yield _NOT_OWNED, "", outside, (lefts[0], lefts[1])

    def _part(self, name: str, phases: _Phases, sums: CauseSums, by_module: bool) -> PartDifference:
        a, b = (run.steps(phases) for run in self._runs)
        causes = sums.causes()
        noise = noise_interval(a, b, value_ns=causes.difference_ns)
        return PartDifference(name=name, causes=causes, by_module=by_module, difference=noise)

    def _modules(self) -> tuple[ModuleDifference, ...]:
        """Each row, and last what no module owns."""
        sides = [_sides_of(run, works) for run, works in zip(self._runs, self._works, strict=True)]
        noise_of = self._module_noise()
        rows = []
        for place, (a, b) in enumerate(self._rows):
            own = self._sums[place].causes()
            noise_ns = noise_of(own.a_ns, own.b_ns)
            rows.append(
                ModuleDifference(
                    a=None if a is None else sides[0][a],
                    b=None if b is None else sides[1][b],
                    own=own,
                    noise_ns=noise_ns,
                    beyond_noise=None if noise_ns is None else abs(own.difference_ns) > noise_ns,
                )
            )
        outside = ModuleSide(name=OUTSIDE, type_name="", params=0, flops=0, bytes=0)
        rest = self._sums[_NOT_OWNED].causes()
        return (*rows, ModuleDifference(a=outside, b=outside, own=rest, noise_ns=None, beyond_noise=None))

    def _module_noise(self) -> Callable[[int, int], int | None]:
        """How far a module that takes so long in A and in B may stray, known from one traced step."""
        phases = [phase for phase in _BY_MODULE if self._is_by_module((phase,))]
        if not phases or not self._with_noise:
            return lambda a_ns, b_ns: None
        stray = single_step_noise_ns(*(run.steps(tuple(phases)) for run in self._runs))
        wholes = [max(1, run.ns(tuple(phases))) for run in self._runs]
        doubt_ns = 0
        for run, traced in zip(self._runs, self._traced, strict=True):
            for phase in phases:
                timed, seen = max(1, run.ns((phase,))), max(1, traced[phase].whole)
                if (times := max(timed, seen) / min(timed, seen)) > _ALIKE:
                    doubt_ns += round(timed * (1 - 1 / times))
                    self._notes.append(
                        f"The traced step of {run.source} took {seen / 1e6:.3g} ms in its {phase}, the timed ones "
                        f"{timed / 1e6:.3g} ms: which module a difference is in is uncertain."
                    )

        return lambda a_ns, b_ns: doubt_ns + stray(a_ns / wholes[0], b_ns / wholes[1])

    def _figures(self, step: _Phases) -> tuple[FigureDifference, ...]:
        """Each number of the summary, with the noise of the times that it is made of."""
        profiles = {"A": self._runs[0].profile, "B": self._runs[1].profile}

        def noise(name: str) -> tuple[float, float] | str:
            """Factors from a ratio to its ends, or why the noise is not known."""
            if name not in TIMED:
                return EXACT
            if name == "cpu_time_sec":
                spent = [np.array(run.timing.processor_steps_sec) for run in self._runs]
                return NO_NOISE if min(map(len, spent)) < LEAST_STEPS else ratio_ends(*spent) or TOO_WIDE
            if not self._with_noise:
                return NO_NOISE
            whole = (self._runs[0].steps(step), self._runs[1].steps(step))
            if name == "data_wait_ratio":
                waits = [run.steps(("data_wait",)) for run in self._runs]
                return ratio_ends(waits[0], waits[1], over=whole) or TOO_WIDE
            return ratio_ends(*whole) or TOO_WIDE

        def unknown(name: str, which: str) -> str | None:
            profile = profiles[which]
            return {**profile.unavailable, **(profile.ranks.unavailable if profile.ranks else {})}.get(name)

        of_a, of_b = (cast("dict[str, Any]", one.summary()) for one in profiles.values())
        return tuple(
            figure_difference(name, of_a[name], of_b[name], noise=partial(noise, name), unknown=partial(unknown, name))
            for name in of_a
            if name != "advice"
        )

    def _note_limits(self) -> None:
        for run in self._runs:
            profile, context = run.profile, run.profile.context
            if profile.lower_bound:
                self._notes.append(
                    f"FLOPs of {run.source} are lower bounds: what could not be counted is not in its work."
                )
            if profile.variable:
                self._notes.append(
                    f"Steps of {run.source} have many shapes: counted and timed steps are different samples of them."
                )
            if context.world_size > 1:
                self._notes.append(f"Times of {run.source} are those of rank {context.rank} of {context.world_size}.")
        for note in dict.fromkeys(note for run in self._runs for note in run.profile.notes):
            whose = " and ".join(run.source for run in self._runs if note in run.profile.notes)
            self._notes.append(f"{whose}: {note}")


def _flops_per_byte(a: Profile, b: Profile) -> int:
    """The ridge point of the devices' rooflines in the dtype that has most FLOPs; where two are known, their mean."""
    ridges = [
        peak / one.memory_bytes_per_sec
        for one in (a, b)
        if one.dtypes and one.memory_bytes_per_sec and (peak := one.peaks_flops_per_sec.get(one.dtypes[0].dtype))
    ]
    return max(1, round(statistics.geometric_mean(ridges))) if ridges else FLOPS_PER_BYTE


def _sides_of(run: _Run, works: Mapping[str, Mapping[TimePhase, Work]]) -> dict[str, ModuleSide]:
    found = {}
    for module in run.profile.modules:
        work = sum_of(list(works[module.name].values()))
        found[module.name] = ModuleSide(
            name=module.name,
            type_name=module.type_name,
            params=module.params,
            flops=round(work.flops),
            bytes=round(work.bytes),
        )
    return found
