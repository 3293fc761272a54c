"""Two profiles compared: every nanosecond of the difference of their steps has a cause, by part and by module.

The times of the parts of a step are means over the timed steps, which nothing slowed down. How a part is cut into
modules, waiting for other ranks and idle time comes from the traced steps. ``compare_split`` has the mathematics of a
difference, ``compare_noise`` that of chance, ``compare_modules`` says which module is which.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, cast, get_args

import numpy as np

from lightning_flops.analysis.compare_modules import match_modules
from lightning_flops.analysis.compare_noise import LEAST_STEPS, Floats, noise_ns, too_few
from lightning_flops.analysis.compare_rules import WALL, figure_difference, setting_differences
from lightning_flops.analysis.compare_split import Work, apportioned, split
from lightning_flops.analysis.module_names import parent_name
from lightning_flops.errors import ComparisonError
from lightning_flops.records import OUTSIDE, TimePhase
from lightning_flops.schema.comparison import (
    Cause,
    CausedDifference,
    ComparedRun,
    Comparison,
    FigureDifference,
    ModuleDifference,
    ModuleSide,
)
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import phases_text
from lightning_flops.units import percent, plural

_PHASES: tuple[TimePhase, ...] = get_args(TimePhase)
_COMPUTING: tuple[TimePhase, ...] = ("forward", "backward", "optimizer")
_BY_MODULE: tuple[TimePhase, ...] = ("forward", "backward")
_WAITS: Mapping[TimePhase, Cause] = {
    "data_wait": "data", "transfer": "loop", "bubble": "communication", "other": "loop"
}  # fmt: skip
"""What a part of a step that computes nothing of the model is a wait for."""
_STARVED = 0.05
"""From this share of lost processor time on, the times of a run say little of its program."""
_ERRORS = 4
"""So many standard errors of both runs together may separate a module's times by chance."""
_Phases = tuple[TimePhase, ...]
_Row = tuple[str | None, str | None]
"""Names of a module in A and in B; both None for what no module owns."""
_OUTSIDE: _Row = (None, None)
_Piece = tuple[_Row, Cause | None]
"""A piece of a part of a step: whose it is, and what it is a wait for."""
_Filled = tuple[Mapping[str, int], tuple[int, int, int]]
"""Own nanoseconds of each module in a part of a traced step; communication that computation does not hide, the device's
idle time, and what is no module's."""


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
    runs = _Run(a, sources[0]), _Run(b, sources[1])
    if a.context.loop != b.context.loop:
        raise ComparisonError(
            f"the steps cannot be compared: {sources[0]} is of a {a.context.loop} loop, {sources[1]} of a "
            f"{b.context.loop} loop"
        )
    try:
        return _compared(*runs)
    except (ArithmeticError, LookupError, ValueError) as error:
        raise ComparisonError(
            "the steps cannot be compared: a profile contradicts itself, or has figures beyond what floats hold"
        ) from error


class _Run:
    """One of the two runs."""

    def __init__(self, profile: Profile, source: str) -> None:
        if profile.timing is None:
            raise ComparisonError(f"the steps cannot be compared: {source} has no timed step")
        self.profile, self.timing, self.source = profile, profile.timing, source

    def identity(self) -> ComparedRun:
        """What the comparison says of it."""
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

    @cached_property
    def works(self) -> dict[TimePhase, dict[str, Work]]:
        """FLOPs and bytes of one step by phase and module, without those below it."""
        modules, per_step, found = self.profile.modules, self.profile.per_step, {}
        for phase in _BY_MODULE:
            moved = {module.name: _amount(module.total_bytes, phase) for module in modules}
            for module in modules:
                if module.name:
                    moved[parent_name(module.name)] -= _amount(module.total_bytes, phase)
            found[phase] = {
                one.name: Work(per_step(_amount(one.own, phase)), per_step(moved[one.name])) for one in modules
            }
        return found

    def side(self, name: str | None) -> ModuleSide | None:
        """What forward and backward of a module compute; None if it is not there."""
        if name is None:
            return None
        flops, moved = map(sum, zip(*(works[name] for works in self.works.values()), strict=True))
        return ModuleSide(name=name, flops=round(flops), bytes=round(moved))

    @cached_property
    def strays(self) -> dict[str | None, float]:
        """Standard error of each module's own time over the traced steps, divided by that time, where it is known."""
        traced = self.profile.traced
        table = traced and traced.tables and traced.tables.modules
        found: dict[str | None, float] = {None: 0.0}
        for row in table.rows if table else ():
            if row.own_error_us is not None:
                own_us = row.own_forward_us + row.own_backward_us
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

    def pieces(self, phases: _Phases, filled: _Filled | None, rows: Mapping[str, _Row]) -> dict[_Piece, _Amounts]:
        """What a part of the step, *filled* so in the traced one, consists of; its pieces add up to it."""
        whole_ns, work = self.ns(phases), self.work(phases)
        if filled is None:
            kinds = {_WAITS.get(one) for one in phases}  # waits of several kinds count as one for the loop
            wait = None if None in kinds else kinds.pop() if len(kinds) == 1 else "loop"
            return {(_OUTSIDE, wait): (whole_ns, work)}
        works = self.works.get(phases[0], {})
        owned = map(sum, zip(Work(), *works.values(), strict=True))
        left = Work(*(max(0, every - own) for every, own in zip(work, owned, strict=True)))
        ns = apportioned(whole_ns, [*(filled[0].get(name, 0) for name in works), *filled[1]])
        pieces: list[_Piece] = [(rows[name], None) for name in works]
        pieces += [(_OUTSIDE, "communication"), (_OUTSIDE, "idle"), (_OUTSIDE, None)]
        return dict(zip(pieces, zip(ns, [*works.values(), None, None, left], strict=True), strict=True))

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
            modules = {name: _ns(sec) for name, sec in seconds.items()}
            scale = getattr(traced, f"{phase}_scale", 1.0)
            own, communication = sum(modules.values()), _ns(scale * walls[phase].exposed_sec)
            computing = max(0, _ns(scale * walls[phase].wall_sec) - communication)
            idle = min(computing, round(scale * idles.get(phase, 0))) if on_device else 0
            computing -= idle
            if own > computing:  # a module's time has what ran at once on several streams, and its own communication
                modules = dict(zip(modules, apportioned(computing, list(modules.values())), strict=True))
                own = computing
            found[phase] = modules, (communication, idle, computing - own)
        return found, ""


def _amount(amounts: Any, phase: TimePhase) -> int:
    """FLOPs or bytes of one phase; the backward has what it repeats of the forward."""
    repeated: int = amounts.recompute if phase == "backward" else 0
    return repeated + getattr(amounts, phase) if phase in _COMPUTING else 0


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


_Amounts = tuple[int, Work | None]
"""The time of a piece, and the work in it."""


class _Sums(Counter[Cause | Literal["a", "b"]]):
    """Nanoseconds of both runs and, by cause, of their difference, added up over pieces."""

    def fields(self) -> dict[str, Any]:
        """The fields of a difference."""
        causes = {cause: self[cause] for cause in get_args(Cause) if self[cause]}
        return {"a_ns": self["a"], "b_ns": self["b"], "causes": causes}


def _compared(a: _Run, b: _Run) -> Comparison:
    of_a, of_b = ({part.phases for part in run.timing.parts} for run in (a, b))
    rest = {phase for phases in of_a ^ of_b for phase in phases}  # what the two separate in other ways is one part
    joined = tuple(phase for phase in _PHASES if phase in rest)
    every = sorted([*(of_a & of_b), *([joined] if joined else [])], key=lambda phases: _PHASES.index(phases[0]))

    partners = match_modules(a.profile.modules, b.profile.modules)
    rows: list[_Row] = [(partners.get(one.name), one.name) for one in b.profile.modules]
    taken = set(partners.values())
    rows += [(one.name, None) for one in a.profile.modules if one.name not in taken]
    rows_a, rows_b = ({str(row[side]): row for row in rows if row[side] is not None} for side in (0, 1))

    filled_a, filled_b, notes = _comparable_traces(a, b)
    whole, of_parts, of_rows = _Sums(), defaultdict[_Phases, _Sums](_Sums), defaultdict[_Row, _Sums](_Sums)
    for phases in every:
        known = len(phases) == 1 and phases[0] in filled_a and phases[0] in filled_b
        in_a = a.pieces(phases, filled_a[phases[0]] if known else None, rows_a)
        in_b = b.pieces(phases, filled_b[phases[0]] if known else None, rows_b)
        for piece in in_a | in_b:
            (a_ns, work_a), (b_ns, work_b) = in_a.get(piece, (0, None)), in_b.get(piece, (0, None))
            row, wait = piece
            causes = {wait: b_ns - a_ns} if wait else split(a_ns=a_ns, b_ns=b_ns, a=work_a, b=work_b)
            for sums in (whole, of_parts[phases], of_rows[row]):
                sums.update(causes, a=a_ns, b=b_ns)

    def part(name: str, phases: _Phases, sums: _Sums) -> CausedDifference:
        return CausedDifference(name=name, **sums.fields(), noise_ns=noise_ns(a.steps(phases), b.steps(phases)))

    step = tuple(phase for phases in every for phase in phases)
    return Comparison(
        kind="profiles",
        a=a.identity(),
        b=b.identity(),
        settings=setting_differences(a.profile, b.profile),
        figures=tuple(_figures(a, b, step)),
        step=part(b.profile.step_name, step, whole),
        parts=tuple(part(phases_text(phases), phases, of_parts[phases]) for phases in every),
        modules=tuple(_modules(a, b, rows, of_rows)),
        notes=(*notes, *_limits((a, b))),
    )


def _comparable_traces(a: _Run, b: _Run) -> tuple[dict[TimePhase, _Filled], dict[TimePhase, _Filled], list[str]]:
    """What filled the parts in both runs; empty where one of them does not know, and a note on that."""
    (filled_a, why_a), (filled_b, why_b) = a.filled(), b.filled()
    clocks = {one.times.clock for run in (a, b) for one in run.profile.modules if one.times is not None}
    why = " and ".join(filter(None, (why_a, why_b)))
    if not why and len(clocks) > 1:
        why = f"their clocks differ ({', '.join(sorted(clocks))})"
    if not why:
        return filled_a, filled_b, []
    note = "What the trace shows of waiting inside a part is in its work and efficiency."
    return {}, {}, [f"Differences by module are not known: {why}. {note}"]


def _modules(a: _Run, b: _Run, rows: Sequence[_Row], of_rows: Mapping[_Row, _Sums]) -> Iterator[ModuleDifference]:
    """Each row, and last what no module owns."""
    for row in rows:
        own = of_rows.get(row, _Sums())
        strays = own["a"] * a.strays.get(row[0], math.nan), own["b"] * b.strays.get(row[1], math.nan)
        noise = _ERRORS * math.hypot(*strays) + a.doubt_ns() + b.doubt_ns()
        known = (own["a"] or own["b"]) and not math.isnan(noise)
        yield ModuleDifference(
            name=str(row[0] if row[1] is None else row[1]),
            a=a.side(row[0]),
            b=b.side(row[1]),
            **own.fields(),
            noise_ns=math.ceil(noise) if known else None,
        )
    outside = ModuleSide(name=OUTSIDE, flops=0, bytes=0)
    yield ModuleDifference(name=OUTSIDE, a=outside, b=outside, **of_rows[_OUTSIDE].fields(), noise_ns=None)


def _figures(a: _Run, b: _Run, step: _Phases) -> Iterator[FigureDifference]:
    """Each number of the summary, with the noise of the times that it is made of."""

    def steps(run: _Run, name: str) -> Floats:
        if name == "cpu_time_sec":
            return np.array(run.timing.processor_steps_sec)
        whole = run.steps(step)
        return run.steps(("data_wait",)) / whole if name == "data_wait_ratio" else whole

    of_a, of_b = (cast("dict[str, Any]", run.profile.summary()) for run in (a, b))
    why_a, why_b = ({**run.profile.unavailable, **run.profile.job_unavailable} for run in (a, b))
    for name in (one for one in of_a if one != "advice"):
        yield figure_difference(
            name,
            (of_a[name], of_b[name]),
            unknown=(why_a.get(name), why_b.get(name)),
            steps=(steps(a, name), steps(b, name)) if name in (*WALL, "cpu_time_sec") else None,
        )


def _limits(runs: Sequence[_Run]) -> Iterator[str]:
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
