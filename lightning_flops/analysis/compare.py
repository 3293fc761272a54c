"""Two profiles compared: every nanosecond of the difference of their steps has a cause, by part and by module.

The times of the parts of a step are means over the timed steps, which nothing slowed down. How a part is cut into
modules, waiting for other ranks and idle time comes from the traced steps. ``compare_split`` has the mathematics of a
difference, ``compare_noise`` that of chance, ``compare_modules`` says which module is which.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

import numpy as np

from lightning_flops.analysis.compare_modules import match_modules
from lightning_flops.analysis.compare_noise import LEAST_STEPS, Floats, noise_interval, too_few
from lightning_flops.analysis.compare_rules import WALL, figure_difference, setting_differences
from lightning_flops.analysis.compare_split import CauseSums, Work, apportioned, split
from lightning_flops.analysis.module_names import parent_name
from lightning_flops.errors import ComparisonError
from lightning_flops.records import OUTSIDE, TimePhase
from lightning_flops.schema.comparison import (
    SCHEMA_VERSION,
    ComparedRun,
    Comparison,
    FigureDifference,
    ModuleDifference,
    ModuleSide,
    PartDifference,
)
from lightning_flops.schema.modules import ModuleProfile
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import TimingProfile, phases_text
from lightning_flops.units import percent, plural

_PHASES: tuple[TimePhase, ...] = get_args(TimePhase)
_COMPUTING: tuple[TimePhase, ...] = ("forward", "backward", "optimizer")
_BY_MODULE: tuple[TimePhase, ...] = ("forward", "backward")
_WAITING: Mapping[TimePhase, str] = {
    "data_wait": "data", "transfer": "loop", "bubble": "communication", "other": "loop"
}  # fmt: skip
"""What a part of a step that computes nothing of the model is a wait for."""
_STARVED = 0.05
"""From this share of lost processor time on, the times of a run say little of its program."""
_ERRORS = 4
"""So many standard errors of both runs together may separate a module's times by chance."""
_NOT_OWNED = -1
_Phases = tuple[TimePhase, ...]
_Row = tuple[ModuleProfile | None, ModuleProfile | None]
"""A module in A and in B."""


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
    runs = []
    for profile, source in zip((a, b), sources, strict=True):
        if profile.timing is None:
            raise ComparisonError(f"the steps cannot be compared: {source} has no timed step")
        runs.append(_Run(profile, profile.timing, source))
    if a.context.loop != b.context.loop:
        raise ComparisonError(
            f"the steps cannot be compared: {sources[0]} is of a {a.context.loop} loop, {sources[1]} of a "
            f"{b.context.loop} loop"
        )
    try:
        return _compared((runs[0], runs[1]))
    except (ArithmeticError, LookupError, ValueError) as error:
        raise ComparisonError(
            "the steps cannot be compared: a profile contradicts itself, or has figures beyond what floats hold"
        ) from error


@dataclass(frozen=True, slots=True)
class _Run:
    """One of the two runs."""

    profile: Profile
    timing: TimingProfile
    source: str

    def identity(self) -> ComparedRun:
        """Which run it is."""
        profile, steps, share = self.profile, self.timing.timed_steps, self.timing.starved_share or 0.0
        model = f"{profile.modules[0].type_name} on " if profile.modules else ""
        where = f"{model}{profile.context.device_name or 'unknown device'}"
        starved = f"for {percent(share)} of the time in which its steps were timed it was ready to run and had to wait"
        return ComparedRun(
            source=self.source,
            about=f"{where}, step {profile.profile_step} counted, {steps} timed {plural('step', steps)}",
            starved=f"{starved} for a processor." if share > _STARVED else "",
        )

    def ns(self, phases: _Phases) -> int:
        """Mean of *phases* together; zero where the run has none of them."""
        return sum(_ns(part.mean_sec) for part in self.timing.parts if set(part.phases) <= set(phases))

    def steps(self, phases: _Phases) -> Floats:
        """Seconds of each timed step in *phases*."""
        columns = [np.array(part.steps_sec) for part in self.timing.parts if set(part.phases) <= set(phases)]
        return sum(columns, start=np.zeros(len(self.timing.global_step.steps_sec)))

    def work(self, phases: _Phases) -> Work:
        """FLOPs and bytes of one step in *phases*."""
        flops, moved = (
            sum(_amount(one, phase) for phase in phases) for one in (self.profile.flops, self.profile.bytes_total)
        )
        return Work(flops, self.profile.per_step(moved))

    def works(self, phase: TimePhase) -> dict[str, Work]:
        """FLOPs and bytes of one step in *phase*, by module, without those below it."""
        modules, per_step = self.profile.modules, self.profile.per_step
        moved = {module.name: _amount(module.total_bytes, phase) for module in modules}
        for module in modules:
            if module.name:
                moved[parent_name(module.name)] -= _amount(module.total_bytes, phase)
        return {one.name: Work(per_step(_amount(one.own, phase)), per_step(moved[one.name])) for one in modules}

    def strays(self) -> dict[str, float]:
        """Standard error of each module's own time over the traced steps, divided by that time, where it is known."""
        traced = self.profile.traced
        table = None if traced is None or traced.tables is None else traced.tables.modules
        found = {}
        for row in () if table is None else table.rows:
            own_us = row.own_forward_us + row.own_backward_us
            if row.own_error_us is not None:
                found[row.name] = row.own_error_us / own_us if own_us else 0.0
        return found

    def doubt_ns(self) -> float:
        """How much of forward and backward may be a module's that was held up in the traced steps alone."""
        traced = self.profile.traced
        if traced is None or not traced.is_apart:
            return 0.0
        scales: dict[TimePhase, float] = {"forward": traced.forward_scale, "backward": traced.backward_scale}
        return sum(
            self.ns((phase,)) * (1 - alike) for phase, scale in scales.items() if (alike := min(scale, 1 / scale)) < 0.5
        )

    def filled(self) -> tuple[dict[TimePhase, _Filled], str]:
        """What filled the computing parts of its traced step; empty, and why, if it cannot be said.

        On a device, idle is the time in which nothing runs there. Without a device the host's own time between
        operators is work as well: it is no module's, or that of the module that runs.
        """
        traced = self.profile.traced
        times = {module.name: module.times for module in self.profile.modules if module.times is not None}
        if traced is None or not times:
            return {}, f"{self.source} has no times of modules"
        walls = {part.name: part for part in traced.parts}
        idles = {name: part.idle_ns for name, part in (traced.filling or {}).items()}
        on_device = next(iter(times.values())).clock == "device"
        found: dict[TimePhase, _Filled] = {}
        for phase in _COMPUTING:
            seconds = {name: getattr(one, f"own_{phase}_sec", 0.0) for name, one in times.items()}
            if phase not in walls or None in seconds.values():
                continue
            modules, scale = {name: _ns(sec) for name, sec in seconds.items()}, getattr(traced, f"{phase}_scale", 1.0)
            own, communication = sum(modules.values()), _ns(scale * walls[phase].exposed_sec)
            computing = max(0, _ns(scale * walls[phase].wall_sec) - communication)
            idle = min(computing, round(scale * idles.get(phase, 0))) if on_device else 0
            computing -= idle
            if own > computing:  # a module's time has what ran at once on several streams, and its own communication
                modules = dict(zip(modules, apportioned(computing, list(modules.values())), strict=True))
                own = computing
            found[phase] = modules, (communication, idle, computing - own)
        return found, ""


_Filled = tuple[Mapping[str, int], tuple[int, int, int]]
"""Own nanoseconds of each module in a part of a traced step; communication that computation does not hide, the device's
idle time, and what is no module's."""


def _amount(amounts: Any, phase: TimePhase) -> int:
    """FLOPs or bytes of one phase; the backward has what it repeats of the forward."""
    repeated: int = amounts.recompute if phase == "backward" else 0
    return repeated + getattr(amounts, phase) if phase in _COMPUTING else 0


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _compared(runs: tuple[_Run, _Run]) -> Comparison:
    def part(name: str, phases: _Phases, sums: CauseSums) -> PartDifference:
        causes = sums.causes()
        noise = noise_interval(a.steps(phases), b.steps(phases), value_ns=causes.difference_ns)
        return PartDifference(name=name, causes=causes, difference=noise)

    a, b = runs
    of_a, of_b = ({part.phases for part in run.timing.parts} for run in runs)
    rest = {phase for phases in of_a ^ of_b for phase in phases}  # what the two separate in other ways is one part
    joined = tuple(phase for phase in _PHASES if phase in rest)
    every = sorted([*(of_a & of_b), *([joined] if joined else [])], key=lambda phases: _PHASES.index(phases[0]))

    partners, in_a = match_modules(a.profile.modules, b.profile.modules), {one.name: one for one in a.profile.modules}
    rows: list[_Row] = [(in_a.get(partners.get(one.name, OUTSIDE)), one) for one in b.profile.modules]
    taken = set(partners.values())
    rows += [(module, None) for name, module in in_a.items() if name not in taken]

    filled, notes = _comparable_traces(runs)
    whole, parts = CauseSums(), []
    of_rows: defaultdict[int, CauseSums] = defaultdict(CauseSums)
    for phases in every:
        of_part = CauseSums()
        for row, wait, (a_ns, b_ns), (work_a, work_b) in _pieces(runs, phases, filled, rows):
            causes = {wait: b_ns - a_ns} if wait else split(a_ns=a_ns, b_ns=b_ns, a=work_a, b=work_b)
            for sums in (of_part, whole, of_rows[row]):
                sums.add(a_ns, b_ns, causes)
        parts.append(part(phases_text(phases), phases, of_part))
    step = tuple(phase for phases in every for phase in phases)
    return Comparison(
        schema_version=SCHEMA_VERSION,
        a=a.identity(),
        b=b.identity(),
        settings=setting_differences(a.profile, b.profile),
        figures=tuple(_figures(runs, step)),
        step=part(b.profile.step_name, step, whole),
        parts=tuple(parts),
        modules=tuple(_modules(runs, rows, of_rows)),
        notes=(*notes, *_limits(runs)),
    )


def _comparable_traces(runs: tuple[_Run, _Run]) -> tuple[list[dict[TimePhase, _Filled]], list[str]]:
    """What filled the parts in both runs; empty where one of them does not know, and a note on that."""
    found = [run.filled() for run in runs]
    clocks = {one.times.clock for run in runs for one in run.profile.modules if one.times is not None}
    why = " and ".join(why for _, why in found if why)
    if not why and len(clocks) > 1:
        why = f"their clocks differ ({', '.join(sorted(clocks))})"
    if not why:
        return [filled for filled, _ in found], []
    note = "What the trace shows of waiting inside a part is in its work and efficiency."
    return [{}, {}], [f"Differences by module are not known: {why}. {note}"]


_Piece = tuple[int, str, tuple[int, int], tuple[Work | None, Work | None]]
"""Of a part of the step: whose row, what it is a wait for or empty, its times, and the work in it."""


def _pieces(
    runs: tuple[_Run, _Run], phases: _Phases, filled: list[dict[TimePhase, _Filled]], rows: list[_Row]
) -> Iterator[_Piece]:
    """What a part of the step consists of; its pieces add up to it."""
    a, b = runs
    phase = phases[0]
    if len(phases) == 1 and all(phase in one for one in filled):
        if phase not in _BY_MODULE:
            rows = []
        pieces, works = [], []
        for side, run in enumerate(runs):
            own_ns, rest_ns = filled[side][phase]
            of_modules, names = run.works(phase), [one.name if (one := row[side]) else None for row in rows]
            pieces.append(apportioned(run.ns(phases), [*(own_ns.get(str(name), 0) for name in names), *rest_ns]))
            known = [None if name is None else of_modules[name] for name in names]
            owned = [sum(column) for column in zip(Work(), *(one for one in known if one is not None), strict=True)]
            left = Work(*(max(0, whole - own) for whole, own in zip(run.work(phases), owned, strict=True)))
            works.append([*known, None, None, left])
        owners, waits = [*range(len(rows)), *[_NOT_OWNED] * 3], [*[""] * len(rows), "communication", "idle", ""]
        yield from zip(owners, waits, zip(*pieces, strict=True), zip(*works, strict=True), strict=True)
    elif set(phases) <= set(_WAITING):  # of several kinds it counts as a wait for the loop
        kinds = {_WAITING[phase] for phase in phases}
        wait = kinds.pop() if len(kinds) == 1 else "loop"
        yield _NOT_OWNED, wait, (a.ns(phases), b.ns(phases)), (None, None)
    else:
        yield _NOT_OWNED, "", (a.ns(phases), b.ns(phases)), (a.work(phases), b.work(phases))


def _modules(runs: tuple[_Run, _Run], rows: list[_Row], of_rows: Mapping[int, CauseSums]) -> Iterator[ModuleDifference]:
    """Each row, and last what no module owns."""
    strays, doubt_ns = [run.strays() for run in runs], sum(run.doubt_ns() for run in runs)
    works = [[run.works(phase) for phase in _BY_MODULE] for run in runs]
    for place, row in enumerate(rows):
        own = of_rows.get(place, CauseSums()).causes()
        noise = 0.0 if own.a_ns or own.b_ns else math.nan
        sides: list[ModuleSide | None] = []
        for module, of, ns, by_phase in zip(row, strays, (own.a_ns, own.b_ns), works, strict=True):
            if module is None:
                sides.append(None)
                continue
            noise = math.hypot(noise, _ERRORS * ns * of.get(module.name, math.nan))
            flops, moved = (round(sum(one[module.name][kind] for one in by_phase)) for kind in (0, 1))
            sides.append(ModuleSide(name=module.name, flops=flops, bytes=moved))
        noise += doubt_ns
        yield ModuleDifference(
            a=sides[0],
            b=sides[1],
            own=own,
            noise_ns=None if math.isnan(noise) else math.ceil(noise),
            beyond_noise=None if math.isnan(noise) else abs(own.difference_ns) > noise,
        )
    outside = ModuleSide(name=OUTSIDE, flops=0, bytes=0)
    yield ModuleDifference(a=outside, b=outside, own=of_rows[_NOT_OWNED].causes(), noise_ns=None, beyond_noise=None)


def _figures(runs: tuple[_Run, _Run], step: _Phases) -> Iterator[FigureDifference]:
    """Each number of the summary, with the noise of the times that it is made of."""

    def steps(run: _Run, name: str) -> Floats:
        if name == "cpu_time_sec":
            return np.array(run.timing.processor_steps_sec)
        whole = run.steps(step)
        return run.steps(("data_wait",)) / whole if name == "data_wait_ratio" else whole

    def unknown(run: _Run, name: str) -> str | None:
        ranks = run.profile.ranks
        return {**run.profile.unavailable, **(ranks.unavailable if ranks else {})}.get(name)

    a, b = runs
    of_a, of_b = (cast("dict[str, Any]", run.profile.summary()) for run in runs)
    for name in of_a:
        if name != "advice":
            yield figure_difference(
                name,
                (of_a[name], of_b[name]),
                unknown=(unknown(a, name), unknown(b, name)),
                steps=(steps(a, name), steps(b, name)) if name in (*WALL, "cpu_time_sec") else None,
            )


def _limits(runs: tuple[_Run, _Run]) -> Iterator[str]:
    """What limits the comparison, in sentences."""
    for run in runs:
        profile, context, steps = run.profile, run.profile.context, len(run.timing.global_step.steps_sec)
        if steps < LEAST_STEPS:
            yield too_few(run.source, f"{steps} timed steps")
        if profile.traced is not None and profile.traced.is_apart:
            yield (
                f"The traced steps of {run.source} took over twice or under half as long as its timed ones: which "
                "module a difference is in is uncertain."
            )
        if profile.lower_bound:
            yield f"FLOPs of {run.source} are lower bounds: what could not be counted is not in its work."
        if context.world_size > 1:
            yield f"Times of {run.source} are those of rank {context.rank} of {context.world_size}."
    for note in dict.fromkeys(note for run in runs for note in run.profile.notes):
        yield f"{' and '.join(run.source for run in runs if note in run.profile.notes)}: {note}"
