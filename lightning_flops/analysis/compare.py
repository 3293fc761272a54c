"""Two profiles compared: every nanosecond of the difference of their steps has a cause, by part and by module.

The times of the parts of a step are means over the timed steps, which nothing slowed down. How a part is cut into
modules, waiting for other ranks and idle time comes from the traced step. ``compare_split`` has the mathematics of a
difference, ``compare_noise`` that of chance, ``compare_modules`` says which module is which.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from lightning_flops.analysis.advice_rules import STARVED
from lightning_flops.analysis.compare_checks import contradiction_in
from lightning_flops.analysis.compare_figures import EXACT, NO_NOISE, TOO_WIDE, figure_difference
from lightning_flops.analysis.compare_modules import Matches, match_modules
from lightning_flops.analysis.compare_split import FLOPS_PER_BYTE, NO_WORK, CauseSums, Work, shared_out, split
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
    NoiseInterval,
    PartDifference,
    SettingDifference,
)
from lightning_flops.schema.modules import ModuleProfile
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import PartTiming, TimingProfile

if TYPE_CHECKING:
    from lightning_flops.analysis.compare_noise import Floats, MeanDraws

_PHASES: tuple[TimePhase, ...] = get_args(TimePhase)
_COMPUTING: tuple[TimePhase, ...] = ("forward", "backward", "optimizer")
_WAITING: Mapping[TimePhase, str] = {
    "data_wait": "data",
    "transfer": "loop",
    "bubble": "communication",
    "other": "loop",
}
"""What a part of a step that computes nothing of the model is a wait for."""

_BY_MODULE: tuple[TimePhase, ...] = ("forward", "backward")


def compare_profiles(a: Profile, b: Profile, *, sources: tuple[str, str] = ("A", "B")) -> Comparison:
    """What the step of run *b* takes longer than that of run *a*, and why.

    Every nanosecond of the difference has one of three causes. *More work*: FLOPs or bytes changed, modules are new or
    gone. *Worse efficiency*: the same work, slower. *More waiting*: for data, communication, the host, or the loop
    around the model. A cause is below zero if there is less of it. The causes of all parts of a step, or of all
    modules, add up to the whole difference, to the nanosecond. ``analysis/compare_split.py`` states the formula, with
    its source.

    What the spread of the timed steps explains is marked as noise. It is the noise within the two runs.

    Args:
        a: the profile that is compared with.
        b: the profile that is compared.
        sources: where they are from, for the report.

    Raises:
        ComparisonError: the two cannot be compared: one has no timed step, contradicts itself or has figures that no
            float holds, or one run trains and the other does not.
    """
    run_a, run_b = _Run.of(a, sources[0]), _Run.of(b, sources[1])
    if a.context.loop != b.context.loop:
        raise ComparisonError(
            f"the steps cannot be compared: {sources[0]} is of a {a.context.loop} loop, {sources[1]} of a "
            f"{b.context.loop} loop"
        )
    try:
        return _Comparing(run_a, run_b).result()
    except ArithmeticError:
        raise ComparisonError("the steps cannot be compared: figures of theirs are beyond what floats hold") from None


@dataclass(frozen=True, slots=True)
class _Run:
    """One of the two runs."""

    profile: Profile
    timing: TimingProfile
    source: str

    @classmethod
    def of(cls, profile: Profile, source: str) -> _Run:
        """*profile*, which must have been timed."""
        if profile.timing is None:
            raise ComparisonError(f"the steps cannot be compared: {source} has no timed step")
        if contradiction := contradiction_in(profile, profile.timing):
            raise ComparisonError(f"{source} cannot be compared, because it contradicts itself: {contradiction}")
        return cls(profile, profile.timing, source)

    def identity(self) -> ComparedRun:
        """Which run it is."""
        modules = self.profile.modules
        return ComparedRun(
            source=self.source,
            profile_step=self.profile.profile_step,
            timed_steps=self.timing.timed_steps,
            model=modules[0].type_name if modules else "",
            device=self.profile.context.device_name,
            starved=next((one.evidence for one in self.profile.advice if one.rule == STARVED), ""),
        )

    def work_of_phase(self, phase: TimePhase) -> Work:
        """FLOPs and bytes of one step in *phase*."""
        flops, moved, per_step = self.profile.flops_total, self.profile.bytes_total, self.profile.per_step
        if phase == "backward":
            return Work(per_step(flops.backward + flops.recompute), per_step(moved.backward + moved.recompute))
        if phase in ("forward", "optimizer"):
            return Work(per_step(getattr(flops, phase)), per_step(getattr(moved, phase)))
        return NO_WORK

    def work_of_modules(self) -> dict[str, dict[TimePhase, Work]]:
        """FLOPs and bytes of one step, by module, without those below it."""
        own_bytes = {module.name: list(_sides(module.total_bytes)) for module in self.profile.modules}
        for module in self.profile.modules:
            around = own_bytes.get(parent_name(module.name)) if module.name else None
            if around is not None:
                for side, moved in enumerate(_sides(module.total_bytes)):
                    around[side] -= moved
        of_step = self.profile.per_step
        works: dict[str, dict[TimePhase, Work]] = {}
        for module in self.profile.modules:
            (forward, backward), (forward_bytes, backward_bytes) = _sides(module.own), own_bytes[module.name]
            works[module.name] = {
                "forward": Work(of_step(forward), of_step(forward_bytes)),
                "backward": Work(of_step(backward), of_step(backward_bytes)),
            }
        return works


def _sides(amounts: PhaseAmounts) -> tuple[int, int]:
    """Forward, and backward with what it repeats of the forward."""
    return amounts.forward, amounts.backward + amounts.recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """What filled one part of a traced step, in nanoseconds."""

    modules: Mapping[str, int]
    """Own time of each module; empty where modules have none."""
    outside: int
    """Computing that no module owns, or time of which nobody knows what filled it."""
    communication: int
    """Not hidden by computation."""
    idle: int
    """The device had nothing to run."""


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _traced_parts(run: _Run) -> tuple[dict[TimePhase, _Traced], str]:
    """What filled the computing parts of the run's traced step; empty, and why, if it cannot be said.

    On a device, idle is the time in which nothing runs there. Without a device the host's own time between operators is
    work as well: it is nobody's, or the module's that runs.
    """
    profile, traced = run.profile, run.profile.traced
    times = {module.name: module.times for module in profile.modules if module.times is not None}
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
        if phase == "forward":
            modules = {name: _ns(one.own_forward_sec) for name, one in times.items()}
        elif phase == "backward":
            backward = {name: one.own_backward_sec for name, one in times.items()}
            if any(seconds is None for seconds in backward.values()):
                continue  # a clock at module borders sees the forward alone
            modules = {name: _ns(seconds or 0.0) for name, seconds in backward.items()}
        else:
            modules = {}
        own = sum(modules.values())
        busy = own if table is None else max(own, round(1e3 * getattr(table, f"{phase}_us") / max(1, table.steps)))
        if phase not in walls:
            if table is None and phase == "forward":
                busy = max(own, _ns(run.timing.forward_sec or 0.0))  # of the same steps' length, as far as is known
            found[phase] = _Traced(modules=modules, outside=busy - own, communication=0, idle=0)
            continue
        communication = _ns(walls[phase].exposed_sec)
        computing, idle = max(0, _ns(walls[phase].wall_sec) - communication), 0
        if on_device and phase in fillings:
            idle = min(computing, fillings[phase].idle_ns)
        elif on_device:
            idle = max(0, computing - busy)
        computing -= idle
        if own > computing:  # a module's time has what ran at once on several streams, and its own communication
            modules = dict(zip(modules, shared_out(computing, list(modules.values())), strict=True))
            own = computing
        found[phase] = _Traced(modules=modules, outside=computing - own, communication=communication, idle=idle)
    return found, ""


def _phases_of(part: PartTiming) -> frozenset[TimePhase]:
    return frozenset(part.phases)


def _common_parts(a: TimingProfile, b: TimingProfile) -> list[tuple[TimePhase, ...]]:
    """The finest parts that both runs can tell apart."""
    groups: list[frozenset[TimePhase]] = []
    for one in (*map(_phases_of, a.parts), *map(_phases_of, b.parts)):
        joined = one.union(*(group for group in groups if group & one))
        groups = [group for group in groups if not group & one] + [joined]
    ordered = [tuple(phase for phase in _PHASES if phase in group) for group in groups]
    return sorted(ordered, key=lambda group: _PHASES.index(group[0]))


@dataclass(slots=True)
class _Row:
    """A module, or what no module owns, while its differences are added up."""

    a: str | None
    b: str | None
    forward: CauseSums = field(default_factory=CauseSums)
    backward: CauseSums = field(default_factory=CauseSums)
    elsewhere: CauseSums = field(default_factory=CauseSums)
    """Of what no module owns: parts that are neither forward nor backward."""

    def of(self, phases: tuple[TimePhase, ...]) -> CauseSums:
        """Where a difference in *phases* belongs."""
        if phases == ("forward",):
            return self.forward
        return self.backward if phases == ("backward",) else self.elsewhere


@dataclass(slots=True)
class _Part:
    """One part of a step while its differences are added up, and how its causes follow from its two mean times."""

    phases: tuple[TimePhase, ...]
    a_ns: int
    b_ns: int
    by_module: bool = False
    sums: CauseSums = field(default_factory=CauseSums)
    work: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Factors of A's and of B's time in its work; likewise the next."""
    waiting: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @property
    def name(self) -> str:
        """As reports have it."""
        return " + ".join(self.phases).replace("_", " ")


class _Comparing:
    """Compares two runs, step by step: parts, then what fills them, then noise."""

    def __init__(self, a: _Run, b: _Run) -> None:
        self._a, self._b = a, b
        self._notes: list[str] = []
        self._matches = match_modules(a.profile.modules, b.profile.modules)
        self._rows, self._outside = _rows_of(self._matches, a.profile.modules, b.profile.modules)
        self._flops_per_byte = _flops_per_byte(a.profile, b.profile)
        self._work_a, self._work_b = a.work_of_modules(), b.work_of_modules()
        self._traced_a, self._traced_b = self._comparable_traces()

    def result(self) -> Comparison:
        """The comparison."""
        a, b = self._a, self._b
        parts = [
            _Part(phases, _part_ns(a.timing, phases), _part_ns(b.timing, phases))
            for phases in _common_parts(a.timing, b.timing)
        ]
        for part in parts:
            self._fill(part)
        draws = self._draws(parts)
        step = CauseSums()
        for part in parts:
            step.add(part.sums)
        self._note_limits()
        return Comparison(
            schema_version=SCHEMA_VERSION,
            a=a.identity(),
            b=b.identity(),
            step_name=b.profile.step_name,
            settings=_settings(a.profile, b.profile),
            figures=_figures(a.profile, b.profile, parts, draws),
            step=_part_difference("global step" if b.profile.context.trains else "batch", parts, None, step, draws),
            parts=tuple(_part_difference(part.name, parts, part, part.sums, draws) for part in parts),
            modules=self._modules(draws is not None),
            flops_per_byte=self._flops_per_byte,
            confidence=_confidence(),
            notes=tuple(self._notes),
        )

    def _comparable_traces(self) -> tuple[dict[TimePhase, _Traced], dict[TimePhase, _Traced]]:
        """What filled the parts in both runs; empty where one of them cannot tell."""
        (traced_a, why_a), (traced_b, why_b) = _traced_parts(self._a), _traced_parts(self._b)
        clocks = {one.times.clock for run in (self._a, self._b) for one in run.profile.modules if one.times is not None}
        if (why_a or why_b) or len(clocks) > 1:
            why = (
                " and ".join(filter(None, (why_a, why_b))) or "their clocks differ (" + ", ".join(sorted(clocks)) + ")"
            )
            self._notes.append(
                f"Differences by module are not known: {why}. What the trace tells of waiting inside a part is in its "
                "work and efficiency."
            )
            return {}, {}
        return traced_a, traced_b

    def _fill(self, part: _Part) -> None:
        """Give every nanosecond of *part* a cause."""
        computing = tuple(phase for phase in part.phases if phase in _COMPUTING)
        if not computing:
            self._wait(part, [(_WAITING[phase], phase) for phase in part.phases])
        elif len(part.phases) == 1 and computing[0] in self._traced_a and computing[0] in self._traced_b:
            self._fill_by_trace(part, computing[0])
        else:
            work_a = sum((self._a.work_of_phase(phase) for phase in part.phases), NO_WORK)
            work_b = sum((self._b.work_of_phase(phase) for phase in part.phases), NO_WORK)
            self._work(part, self._outside.of(part.phases), (part.a_ns, part.b_ns), (work_a, work_b))
            if len(computing) < len(part.phases):
                self._notes.append(
                    f"Waiting in {part.name} cannot be told from computing there: it is in its work and efficiency."
                )

    def _wait(self, part: _Part, kinds: Sequence[tuple[str, TimePhase]]) -> None:
        """All of *part* is waiting. If it is of several kinds, it counts as that of the loop."""
        names = {kind for kind, _ in kinds}
        kind = names.pop() if len(names) == 1 else "loop"
        self._add_wait(part, kind, part.a_ns, part.b_ns)
        part.waiting[0] -= 1.0
        part.waiting[1] += 1.0

    def _add_wait(self, part: _Part, kind: str, a_ns: int, b_ns: int) -> None:
        part.sums.add_waiting(kind, a_ns, b_ns)
        self._outside.of(part.phases).add_waiting(kind, a_ns, b_ns)

    def _work(
        self, part: _Part, row: CauseSums, times_ns: tuple[int, int], works: tuple[Work | None, Work | None]
    ) -> None:
        """A piece of *part* that works, in the books of the part and of *row*."""
        a_ns, b_ns = times_ns
        if not a_ns and not b_ns:
            return
        one = split(a_ns=a_ns, b_ns=b_ns, a=works[0], b=works[1], flops_per_byte=self._flops_per_byte)
        part.sums.add_work(a_ns, b_ns, one)
        row.add_work(a_ns, b_ns, one)
        part.work[0] += one.u * (a_ns / part.a_ns if part.a_ns else 0.0)
        part.work[1] += one.v * (b_ns / part.b_ns if part.b_ns else 0.0)

    def _fill_by_trace(self, part: _Part, phase: TimePhase) -> None:
        traced_a, traced_b = self._traced_a[phase], self._traced_b[phase]
        part.by_module = phase in _BY_MODULE
        rows = self._rows if part.by_module else []

        def weights(traced: _Traced, names: Iterable[str | None]) -> list[int]:
            own = [traced.modules.get(name, 0) if name is not None else 0 for name in names]
            return [*own, traced.communication, traced.idle, traced.outside]

        pieces_a = shared_out(part.a_ns, weights(traced_a, [row.a for row in rows]))
        pieces_b = shared_out(part.b_ns, weights(traced_b, [row.b for row in rows]))
        for row, a_ns, b_ns in zip(rows, pieces_a, pieces_b, strict=False):
            if a_ns or b_ns:
                work_a = None if row.a is None else self._work_a[row.a][phase]
                work_b = None if row.b is None else self._work_b[row.b][phase]
                self._work(part, row.of(part.phases), (a_ns, b_ns), (work_a, work_b))
        for place, kind in ((-3, "communication"), (-2, "idle")):
            a_ns, b_ns = pieces_a[place], pieces_b[place]
            self._add_wait(part, kind, a_ns, b_ns)
            part.waiting[0] -= a_ns / part.a_ns if part.a_ns else 0.0
            part.waiting[1] += b_ns / part.b_ns if part.b_ns else 0.0
        left_a, left_b = self._a.work_of_phase(phase), self._b.work_of_phase(phase)
        if part.by_module:
            left_a -= sum((work[phase] for work in self._work_a.values()), NO_WORK)
            left_b -= sum((work[phase] for work in self._work_b.values()), NO_WORK)
        self._work(part, self._outside.of(part.phases), (pieces_a[-1], pieces_b[-1]), (left_a, left_b))

    def _draws(self, parts: Sequence[_Part]) -> MeanDraws | None:
        """None if single steps are not known, or too few."""
        from lightning_flops.analysis.compare_noise import LEAST_STEPS, MeanDraws, too_few

        steps_a, steps_b = (_steps_of(run.timing, [part.phases for part in parts]) for run in (self._a, self._b))
        for run, steps in ((self._a, steps_a), (self._b, steps_b)):
            if steps is None:
                self._notes.append(
                    f"What is noise is not known: {run.source} keeps no single steps (it is of schema version 3)."
                )
            elif len(steps) < LEAST_STEPS:
                self._notes.append(too_few(run.source, f"{len(steps)} timed steps"))
        if steps_a is None or steps_b is None or min(len(steps_a), len(steps_b)) < LEAST_STEPS:
            return None
        return MeanDraws(steps_a, steps_b)

    def _modules(self, steps_known: bool) -> tuple[ModuleDifference, ...]:
        """Each row with what lies below it."""
        a = {module.name: module for module in self._a.profile.modules}
        b = {module.name: module for module in self._b.profile.modules}
        noise_ns = self._module_noise() if steps_known else None
        whole = [_sum_of(row.forward, row.backward) for row in self._rows]
        place_of_a = {row.a: place for place, row in enumerate(self._rows) if row.a is not None}
        place_of_b = {row.b: place for place, row in enumerate(self._rows) if row.b is not None}
        for place in range(len(self._rows) - 1, 0, -1):  # a row comes after the one around it
            row = self._rows[place]
            around = (
                place_of_b[parent_name(row.b)] if row.b is not None else place_of_a[parent_name(cast("str", row.a))]
            )
            if around < place:
                whole[around].add(whole[place])
        rows = []
        for row, with_below in zip(self._rows, whole, strict=True):
            own = _sum_of(row.forward, row.backward).causes()
            matched: Literal["name", "structure", "shape", "nothing"] = "nothing"
            if row.a is not None and row.b is not None:
                matched = self._matches.matched_by[row.b]
            rows.append(
                ModuleDifference(
                    a=_side(a, row.a, self._work_a),
                    b=_side(b, row.b, self._work_b),
                    matched_by=matched,
                    own=own,
                    forward=row.forward.causes(),
                    backward=row.backward.causes(),
                    whole=with_below.causes(),
                    noise_ns=noise_ns,
                    beyond_noise=None if noise_ns is None else abs(own.difference_ns) > noise_ns,
                )
            )
        outside = self._outside
        own = _sum_of(outside.forward, outside.backward, outside.elsewhere).causes()
        nobody = ModuleSide(name=OUTSIDE, type_name="", params=0, flops=0, bytes=0)
        rows.append(
            ModuleDifference(
                a=nobody,
                b=nobody,
                matched_by="name",
                own=own,
                forward=outside.forward.causes(),
                backward=outside.backward.causes(),
                whole=own,
                noise_ns=None,
                beyond_noise=None,
            )
        )
        return tuple(rows)

    def _module_noise(self) -> int | None:
        """How far single steps stray in the parts that modules are told in; None if there is no such part."""
        from lightning_flops.analysis.compare_noise import single_step_noise_ns

        phases = [phase for phase in _BY_MODULE if phase in self._traced_a and phase in self._traced_b]
        groups = [(phase,) for phase in phases]
        steps = [_steps_of(run.timing, groups) for run in (self._a, self._b)]
        if not phases or steps[0] is None or steps[1] is None:
            return None
        return single_step_noise_ns(steps[0].sum(axis=1).tolist(), steps[1].sum(axis=1).tolist())

    def _note_limits(self) -> None:
        for run in (self._a, self._b):
            if run.profile.lower_bound:
                self._notes.append(
                    f"FLOPs of {run.source} are lower bounds: what could not be counted is not in its work."
                )
            if run.profile.variable:
                self._notes.append(
                    f"Steps of {run.source} have many shapes: counted and timed steps are different samples of them."
                )
            if run.profile.context.world_size > 1:
                self._notes.append(
                    f"Times of {run.source} are those of rank {run.profile.context.rank} of "
                    f"{run.profile.context.world_size}."
                )
        notes_a, notes_b = self._a.profile.notes, self._b.profile.notes
        for note in dict.fromkeys((*notes_a, *notes_b)):
            whose = " and ".join(run.source for run, notes in ((self._a, notes_a), (self._b, notes_b)) if note in notes)
            self._notes.append(f"{whose}: {note}")


def _flops_per_byte(a: Profile, b: Profile) -> int:
    """The ridge point of the devices' rooflines in the dtype that has most FLOPs; where two are known, their mean."""
    ridges = [
        one.dtypes[0].peak_flops_per_sec / one.memory_bytes_per_sec
        for one in (a, b)
        if one.dtypes and one.dtypes[0].peak_flops_per_sec and one.memory_bytes_per_sec
    ]
    return max(1, round(statistics.geometric_mean(ridges))) if ridges else FLOPS_PER_BYTE


def _confidence() -> float:
    from lightning_flops.analysis.compare_noise import CONFIDENCE

    return CONFIDENCE


def _sum_of(*sums: CauseSums) -> CauseSums:
    total = CauseSums()
    for one in sums:
        total.add(one)
    return total


def _rows_of(matches: Matches, a: Sequence[ModuleProfile], b: Sequence[ModuleProfile]) -> tuple[list[_Row], _Row]:
    """A row for each module: those of B in tree order, then those that are gone; and the row of what no module owns."""
    rows = [_Row(matches.a_of_b.get(module.name), module.name) for module in b]
    taken = {row.a for row in rows}
    rows += [_Row(module.name, None) for module in a if module.name not in taken]
    return rows, _Row(OUTSIDE, OUTSIDE)


def _side(
    modules: Mapping[str, ModuleProfile], name: str | None, works: Mapping[str, Mapping[TimePhase, Work]]
) -> ModuleSide | None:
    if name is None:
        return None
    work = works[name]["forward"] + works[name]["backward"]
    module = modules[name]
    return ModuleSide(
        name=name,
        type_name=module.type_name,
        params=module.params,
        flops=round(work.flops),
        bytes=round(work.bytes),
    )


def _members(timing: TimingProfile, phases: Iterable[TimePhase]) -> list[PartTiming]:
    wanted = set(phases)
    return [part for part in timing.parts if _phases_of(part) <= wanted]


def _part_ns(timing: TimingProfile, phases: Iterable[TimePhase]) -> int:
    """Mean of *phases* together; zero where the run has none of them."""
    return sum(_ns(part.mean_sec) for part in _members(timing, phases))


def _steps_of(timing: TimingProfile, groups: Sequence[tuple[TimePhase, ...]]) -> Floats | None:
    """Seconds of each timed step in each of *groups*; None if single steps are not known."""
    import numpy as np

    count = len(timing.global_step.steps_sec)
    if not count:
        return None
    columns = np.zeros((count, len(groups)))
    for place, phases in enumerate(groups):
        for part in _members(timing, phases):
            columns[:, place] += part.steps_sec
    return columns


def _part_difference(
    name: str, parts: Sequence[_Part], only: _Part | None, sums: CauseSums, draws: MeanDraws | None
) -> PartDifference:
    """The part *only*, or all *parts* together.

    Of a part with factors ``(u, v)`` of work and ``(x, y)`` of waiting, efficiency has ``(-1 - u - x, 1 - v - y)``.
    """
    causes = sums.causes()

    def interval(kind: str, value_ns: int) -> NoiseInterval | None:
        if draws is None:
            return None
        import numpy as np

        of_a, of_b = np.zeros(len(parts)), np.zeros(len(parts))
        for place, part in enumerate(parts):
            if only is not None and part is not only:
                continue
            whole = [-1.0, 1.0]
            factors = {
                "difference": whole,
                "work": part.work,
                "waiting": part.waiting,
                "efficiency": [each - u - x for each, u, x in zip(whole, part.work, part.waiting, strict=True)],
            }[kind]
            of_a[place], of_b[place] = factors
        return draws.interval(of_a, of_b, value_ns=value_ns)

    return PartDifference(
        name=name,
        causes=causes,
        by_module=any(part.by_module for part in parts) if only is None else only.by_module,
        difference=interval("difference", causes.difference_ns),
        work=interval("work", causes.work_ns),
        efficiency=interval("efficiency", causes.efficiency_ns),
        waiting=interval("waiting", causes.waiting_ns),
    )


_FIGURES_OF_TIME: Mapping[str, int] = {
    "global_step_sec": 1,
    "samples_per_sec": -1,
    "tokens_per_sec": -1,
    "mfu": -1,
    "hfu": -1,
}
"""Figures that have the noise of a step's time, and whether they grow with it."""


def _figures(a: Profile, b: Profile, parts: Sequence[_Part], draws: MeanDraws | None) -> tuple[FigureDifference, ...]:
    """Each number of the summary, with the noise of the times that it is made of."""

    def noise(name: str) -> tuple[float, float] | str:
        """Factors from a ratio to its ends, or why the noise is not known."""
        if name not in _FIGURES_OF_TIME and name != "data_wait_ratio":
            return EXACT
        if draws is None:
            return NO_NOISE
        import numpy as np

        step = np.ones(len(parts))
        if name == "data_wait_ratio":
            waits = np.array([float("data_wait" in part.phases) for part in parts])
            return draws.ratio_ends(waits, over=step) or TOO_WIDE
        ends = draws.ratio_ends(step)
        if ends is None:
            return TOO_WIDE
        if _FIGURES_OF_TIME[name] > 0:
            return ends
        return 1 / ends[1], 1 / ends[0]

    def unknown(name: str, which: str) -> str | None:
        profile = a if which == "A" else b
        known = profile.unavailable if profile.ranks is None else {**profile.unavailable, **profile.ranks.unavailable}
        return known.get(name)

    summary_a, summary_b = a.summary(), b.summary()
    return tuple(
        figure_difference(
            name,
            cast("float | None", summary_a[name]),
            cast("float | None", summary_b[name]),
            noise=partial(noise, name),
            unknown=partial(unknown, name),
        )
        for name in summary_a
        if name != "advice"
    )


_SETTINGS_FIRST = (
    "context.device_type",
    "context.device_name",
    "context.world_size",
    "context.micro_batch_size",
    "context.accumulate",
    "micro_steps",
    "samples",
    "tokens",
    "context.precision",
    "dtypes",
    "context.torch_version",
    "context.framework",
    "context.framework_version",
    "params",
    "trainable_params",
)
"""What bears most on speed; whatever else of the context and the settings differs comes after these."""


def _settings(a: Profile, b: Profile) -> tuple[SettingDifference, ...]:
    """What is set up differently."""
    of_a, of_b = _set_up(a), _set_up(b)
    names = (*_SETTINGS_FIRST, *(name for name in of_b if name not in _SETTINGS_FIRST))
    return tuple(
        SettingDifference(name=name, a=_as_text(of_a[name]), b=_as_text(of_b[name]))
        for name in names
        if of_a[name] != of_b[name]
    )


def _set_up(profile: Profile) -> dict[str, Any]:
    found: dict[str, Any] = {
        "micro_steps": profile.micro_steps,
        "samples": profile.samples,
        "tokens": profile.tokens,
        "dtypes": ", ".join(one.dtype for one in profile.dtypes),
        "params": profile.params,
        "trainable_params": profile.trainable_params,
    }
    for above, record in (("context", profile.context), ("settings", profile.settings)):
        found |= {f"{above}.{one.name}": getattr(record, one.name) for one in fields(record)}
    return found


def _as_text(value: Any) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, float):
        return f"{value:,.10g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value) or "(none)"
