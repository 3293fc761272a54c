"""The traces of two runs compared: what in their steps takes longer, and what of it is noise.

All times are means over the traced steps, and over the ranks if each run has several. The mean over the ranks is taken
first, in each step, because ranks that wait for one another are no independent measurements. The parts of a step add up
to it. The rows of other tables are sums of events, which may overlap.

The difference of what is called many times is shared out between more calls and longer calls by the formula of
``compare_split``, calls being the work. What is noise, ``compare_noise`` says, as for profiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lightning_flops.analysis.compare_figures import EXACT, NO_NOISE, TOO_WIDE, figure_difference
from lightning_flops.analysis.compare_noise import CONFIDENCE, LEAST_STEPS, Floats, MeanDraws, too_few
from lightning_flops.analysis.compare_split import Work, split
from lightning_flops.analysis.no_mfu import why_no_flops, why_no_mfu
from lightning_flops.errors import ComparisonError
from lightning_flops.schema.comparison import FigureDifference, NoiseInterval, SettingDifference
from lightning_flops.schema.trace import TraceReport
from lightning_flops.schema.trace_comparison import (
    SCHEMA_VERSION,
    ComparedTraces,
    TableName,
    TimeDifference,
    TimeTable,
    TraceComparison,
)
from lightning_flops.schema.trace_events import MemoryCurve
from lightning_flops.schema.trace_flops import TracedStepFlops
from lightning_flops.schema.trace_steps import STEP_PARTS
from lightning_flops.trace.intervals import NS_PER_US
from lightning_flops.trace.ranks import refuse_mixed_ranks
from lightning_flops.trace.report import AnalyzedTrace
from lightning_flops.trace.step_sums import OTHERS, Clock, StepSums, TraceBySteps
from lightning_flops.units import plural

_Sums = dict[str, tuple[Floats, Floats]]
"""Nanoseconds and calls in each step, by name."""

_NS_PER_SEC = 1e9
_TABLES: tuple[tuple[TableName, Clock], ...] = (
    ("phases", "host"),
    ("phases", "device"),
    ("modules", "device"),
    ("modules", "host"),
    ("kernels", "device"),
    ("operators", "device"),
    ("operators", "host"),
    ("collectives", "device"),
    ("collectives", "host"),
)


def compare_traces(
    a: Sequence[AnalyzedTrace], b: Sequence[AnalyzedTrace], *, sources: tuple[str, str] = ("A", "B")
) -> TraceComparison:
    """What the traced steps of run *b* take longer than those of run *a*.

    Args:
        a: a trace of each rank of the run that is compared with, analyzed step by step.
        b: the same of the run that is compared.
        sources: what the user calls them.

    Raises:
        ComparisonError: a run's traces are not of one run, have no step that all ranks have, or only one run's traces
            have marks of steps.
        RanksError: two traces of a run are of the same rank, or some do not say theirs.
    """
    run_a, run_b = _Run.of(a, sources[0]), _Run.of(b, sources[1])
    if run_a.marked != run_b.marked:
        without, other = (run_b, run_a) if run_a.marked else (run_a, run_b)
        raise ComparisonError(
            f"the steps cannot be compared: {without.source} has no marks of steps, which profiler.step() makes, and "
            f"{other.source} has {len(other.steps)}"
        )
    return _Comparing(run_a, run_b).result()


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """The traces of one run, and the steps that all of them have."""

    source: str
    traces: tuple[tuple[AnalyzedTrace, TraceBySteps], ...]
    """By rank."""
    steps: tuple[tuple[int, ...], ...]
    """For each step that is compared, its place in each of the traces."""
    odd: tuple[str, ...]
    """Marks that are no steps, or may be none, in sentences."""

    @classmethod
    def of(cls, analyzed: Sequence[AnalyzedTrace], source: str) -> _Run:
        reports = [one.report for one in analyzed]
        refuse_mixed_ranks(reports)
        if len(reports) > 1 and all(report.rank is None for report in reports):
            raise ComparisonError(
                f"{source} has {len(reports)} traces that do not say their ranks, so they are of separate runs: give "
                "one of them"
            )
        by_rank = sorted(analyzed, key=lambda one: -1 if one.report.rank is None else one.report.rank)
        traces = tuple((one, one.by_steps) for one in by_rank if one.by_steps is not None)
        if len({steps.marked for _, steps in traces}) > 1:
            raise ComparisonError(f"the ranks of {source} cannot be compared: some traces have no marks of steps")
        alone = len(traces) == 1
        notes = tuple(mark.words(source if alone else one.report.source) for one, steps in traces for mark in steps.odd)
        if alone:
            return cls(source, traces, tuple((place,) for place in range(len(traces[0][1].numbers))), notes)
        places = [{number: place for place, number in enumerate(steps.numbers)} for _, steps in traces]
        common = [number for number in places[0] if all(number in known for known in places)]
        if not common:
            raise ComparisonError(f"the ranks of {source} cannot be compared: no step is in all of their traces")
        return cls(source, traces, tuple(tuple(known[number] for known in places) for number in common), notes)

    @property
    def marked(self) -> bool:
        return self.traces[0][1].marked

    @property
    def reports(self) -> list[TraceReport]:
        return [one.report for one, _ in self.traces]

    @property
    def first(self) -> TraceReport:
        """What the traces of a run have in common is told by the first."""
        return self.traces[0][0].report

    def each(self, values: Callable[[TraceReport], Sequence[float | None]]) -> Floats:
        """One number of each step: the mean of the ranks'; NaN where one of these is not known."""
        per_rank = [np.array(values(report), dtype=np.float64) for report in self.reports]
        columns = zip(*self.steps, strict=True)
        means: Floats = np.mean([column[list(at)] for column, at in zip(per_rank, columns, strict=True)], axis=0)
        return means

    def sums(self, table: tuple[TableName, Clock]) -> _Sums | None:
        """Nanoseconds and calls of each name in each step, means of the ranks; None if no trace has the table."""
        found: _Sums = {}
        some = False
        for at, (_, steps) in enumerate(self.traces):
            mine: StepSums | None = steps.tables.get(table)
            if mine is None:
                continue
            some = True
            places = [step[at] for step in self.steps]
            for column, name in enumerate(mine.names):
                nothing = np.zeros(len(places))
                ns, calls = found.get(name, (nothing, nothing))
                share = 1 / len(self.traces)
                found[name] = (
                    ns + mine.ns[places, column] * share,
                    calls + mine.calls[places, column] * share,
                )
        return found if some else None

    def flops(self, of_step: Callable[[TracedStepFlops], float | None]) -> Floats | None:
        """One number of each step's FLOPs; None if it is not known of all steps of all ranks."""
        if any(report.flops is None for report in self.reports):
            return None
        values = self.each(lambda report: [of_step(step) for step in report.flops.steps] if report.flops else [])
        return None if np.isnan(values).any() else values

    def identity(self) -> ComparedTraces:
        return ComparedTraces(
            sources=tuple(report.source for report in self.reports),
            ranks=len(self.traces),
            steps=len(self.steps),
            marked=self.marked,
            device=_device(self.first),
        )


class _Columns:
    """What was timed in each step of both runs, a column for each: so that all are drawn together."""

    def __init__(self, steps_a: int, steps_b: int) -> None:
        self._steps = (steps_a, steps_b)
        self._a: list[Floats] = []
        self._b: list[Floats] = []
        self.draws: MeanDraws | None = None

    def __len__(self) -> int:
        return len(self._a)

    def add(self, a: Floats, b: Floats) -> int:
        """The place of a new column, in seconds."""
        self._a.append(a)
        self._b.append(b)
        return len(self._a) - 1

    def draw(self) -> None:
        """Draw all columns, if there are steps enough."""
        if min(self._steps) >= LEAST_STEPS:
            self.draws = MeanDraws(np.stack(self._a, axis=1), np.stack(self._b, axis=1))

    def noise_of(self, column: int, value_ns: int) -> NoiseInterval | None:
        """The noise of a difference of one column."""
        return None if self.draws is None else self.draws.interval_of_part(column, value_ns=value_ns)

    def chosen(self, columns: Sequence[int]) -> Floats:
        """1 for each of *columns*, 0 for all others."""
        found = np.zeros(len(self))
        found[list(columns)] = 1.0
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """One thing in both runs, while its noise is not yet known."""

    name: str
    a_ns: int
    b_ns: int
    calls_a: float
    calls_b: float
    column: int

    @classmethod
    def of(cls, columns: _Columns, name: str, a: tuple[Floats, Floats], b: tuple[Floats, Floats]) -> _Row:
        """Args: nanoseconds and calls of each step of A, and of B."""
        return cls(
            name,
            round(float(a[0].mean())),
            round(float(b[0].mean())),
            float(a[1].mean()),
            float(b[1].mean()),
            columns.add(a[0] / _NS_PER_SEC, b[0] / _NS_PER_SEC),
        )

    def difference(self, columns: _Columns) -> TimeDifference:
        difference = self.b_ns - self.a_ns
        called = bool(self.calls_a or self.calls_b)
        by_calls = split(
            a_ns=self.a_ns,
            b_ns=self.b_ns,
            a=Work(self.calls_a) if self.calls_a else None,
            b=Work(self.calls_b) if self.calls_b else None,
        )
        return TimeDifference(
            name=self.name,
            a_ns=self.a_ns,
            b_ns=self.b_ns,
            difference_ns=difference,
            calls_a=self.calls_a if called else None,
            calls_b=self.calls_b if called else None,
            calls_ns=difference - by_calls.efficiency_ns if called else None,
            length_ns=by_calls.efficiency_ns if called else None,
            noise=columns.noise_of(self.column, difference),
        )


class _Comparing:
    def __init__(self, a: _Run, b: _Run) -> None:
        self._a, self._b = a, b
        self._notes: list[str] = []
        self._columns = _Columns(len(a.steps), len(b.steps))

    def result(self) -> TraceComparison:
        """The comparison."""
        parts = self._parts()
        columns_of_parts = {row.name: row.column for row in parts}
        ranks = self._ranks()
        tables = [(of, clock, self._rows((of, clock))) for of, clock in _TABLES]
        at_peak = {name: self._at_peak(name) for name in ("mfu", "hfu")}
        self._columns.draw()
        self._note_limits()
        step_a, step_b = sum(row.a_ns for row in parts), sum(row.b_ns for row in parts)
        return TraceComparison(
            schema_version=SCHEMA_VERSION,
            kind="traces",
            a=self._a.identity(),
            b=self._b.identity(),
            settings=_settings(self._a, self._b),
            step=TimeDifference(
                name="step" if self._a.marked else "whole trace",
                a_ns=step_a,
                b_ns=step_b,
                difference_ns=step_b - step_a,
                calls_a=None,
                calls_b=None,
                calls_ns=None,
                length_ns=None,
                noise=self._noise_of_step([*columns_of_parts.values()], step_b - step_a),
            ),
            parts=tuple(row.difference(self._columns) for row in parts),
            ranks=tuple(row.difference(self._columns) for row in ranks),
            tables=tuple(TimeTable(of=of, clock=clock, rows=self._sorted(rows)) for of, clock, rows in tables if rows),
            figures=self._figures(columns_of_parts, at_peak),
            confidence=CONFIDENCE,
            notes=tuple(self._notes),
        )

    def _parts(self) -> list[_Row]:
        """The parts of a step; one that neither run knows is left out, and is none of its time in a run without it."""
        rows = []
        for name, field in STEP_PARTS:
            known = [
                any(getattr(report.step_times.mean, field) is not None for report in run.reports)
                for run in (self._a, self._b)
            ]
            if any(known):
                a, b = (_part_ns(run, field) for run in (self._a, self._b))
                rows.append(_Row.of(self._columns, name, (a, np.zeros(len(a))), (b, np.zeros(len(b)))))
        return rows

    def _ranks(self) -> list[_Row]:
        """The step of each rank that both runs have."""
        places_a, places_b = _places_of_ranks(self._a), _places_of_ranks(self._b)
        both = [rank for rank in places_a if rank in places_b]
        if len(both) < 2:
            return []
        rows = []
        for rank in both:
            a = _walls_ns(self._a, places_a[rank])
            b = _walls_ns(self._b, places_b[rank])
            rows.append(_Row.of(self._columns, f"rank {rank}", (a, np.zeros(len(a))), (b, np.zeros(len(b)))))
        return rows

    def _rows(self, table: tuple[TableName, Clock]) -> list[_Row]:
        """The rows of a table that can be compared; none if it cannot."""
        a, b = self._a.sums(table), self._b.sums(table)
        if table[0] in ("kernels", "collectives") and _clock(self._a) == _clock(self._b) == table[1]:
            a, b = a or {}, b or {}  # none of them ran
        if a is None or b is None:
            return []
        if table[0] == "phases":
            a, b = _common_phases(a, b)
        nothing = tuple((np.zeros(len(run.steps)), np.zeros(len(run.steps))) for run in (self._a, self._b))
        names = [*a, *(name for name in b if name not in a)]
        rows = []
        for name in names:
            of_a, of_b = a.get(name, nothing[0]), b.get(name, nothing[1])
            if of_a[0].any() or of_b[0].any() or (of_a[1].any() or of_b[1].any()):
                rows.append(_Row.of(self._columns, name, of_a, of_b))
        return rows

    def _sorted(self, rows: Sequence[_Row]) -> tuple[TimeDifference, ...]:
        found = [row.difference(self._columns) for row in rows]
        return tuple(sorted(found, key=lambda row: (-abs(row.difference_ns), -max(row.a_ns, row.b_ns), row.name)))

    def _at_peak(self, name: str) -> int | None:
        """The column of the seconds that the FLOPs of each step take at peak; None if they are not known in both."""
        found: list[Floats] = []
        for run in (self._a, self._b):
            seconds = run.flops(partial(_seconds_at_peak, share=name))
            if seconds is None:
                return None
            found.append(seconds)
        return self._columns.add(found[0], found[1])

    def _noise_of_step(self, parts: Sequence[int], value_ns: int) -> NoiseInterval | None:
        if self._columns.draws is None:
            return None
        whole = self._columns.chosen(parts)
        return self._columns.draws.interval(-whole, whole, value_ns=value_ns)

    def _figures(self, parts: Mapping[str, int], at_peak: Mapping[str, int | None]) -> tuple[FigureDifference, ...]:
        """Step time and rates with the noise of the times that they are made of, counts, and the most memory."""
        a, b = self._a, self._b
        whole = self._columns.chosen([*parts.values()])
        figures = []

        def add(
            name: str,
            values: Sequence[float | None],
            *,
            of: Sequence[int] | None,
            share: bool = True,
            why: Callable[[_Run], str | None],
        ) -> None:
            """A figure made of the columns *of*, as a *share* of the step or as they are; None: of no time at all."""

            def noise() -> tuple[float, float] | str:
                if of is None:
                    return EXACT
                draws = self._columns.draws
                if draws is None:
                    return NO_NOISE
                return draws.ratio_ends(self._columns.chosen(of), whole if share else None) or TOO_WIDE

            reasons = {"A": partial(why, a), "B": partial(why, b)}
            figures.append(
                figure_difference(name, values[0], values[1], noise=noise, unknown=lambda which: reasons[which]())
            )

        add(
            "global_step_sec",
            [_step_sec(run) for run in (a, b)],
            of=[*parts.values()],
            share=False,
            why=partial(_words, words=None),
        )
        for name in ("mfu", "hfu"):
            column = at_peak[name]
            values = [_peak_share(run, name) for run in (a, b)]
            add(name, values, of=[] if column is None else [column], why=_why_no_mfu)
        for name, of_step in _COUNTS:
            add(name, [_mean_count(run, of_step) for run in (a, b)], of=None, why=_why_no_flops)
        for name, part, reason in (
            ("data_wait_ratio", "data loader", "the trace shows no DataLoader"),
            ("exposed_communication_ratio", "communication", "the trace has no collectives"),
        ):
            values = [_part_share(run, dict(STEP_PARTS)[part]) for run in (a, b)]
            if part == "communication" and part not in parts:
                continue  # neither run communicates
            add(name, values, of=[parts[part]] if part in parts else [], why=partial(_words, words=reason))
        for name, kind in (("device_memory_peak_bytes", "device"), ("host_memory_peak_bytes", "host")):
            values = [_most_memory(run, kind, other) for run, other in ((a, b), (b, a))]
            add(name, values, of=None, why=partial(_why_no_memory, kind=kind))
        return tuple(figures)

    def _note_limits(self) -> None:
        a, b = self._a, self._b
        self._notes += [*a.odd, *b.odd]
        if not a.marked:
            self._notes.append(
                "The traces have no marks of steps: each is compared as a whole, which says something only if both "
                "hold equally many steps. What is noise is not known."
            )
        else:
            for run in (a, b):
                if (count := len(run.steps)) < LEAST_STEPS:
                    self._notes.append(too_few(run.source, f"{count} traced {plural('step', count)}"))
        for run in (a, b):
            if len(run.traces) > 1:
                self._notes.append(f"Times of {run.source} are means over its {len(run.traces)} ranks.")
            if any(report.flops is not None and report.flops.lower_bound for report in run.reports):
                self._notes.append(f"FLOPs of {run.source} are lower bounds: what could not be counted is not in them.")
        self._note_tables()
        if _recorded(a.first) != _recorded(b.first):
            self._notes.append(
                "The two traces recorded different things. Recording shapes, memory and above all Python's calls slows "
                "the host down: record the same in both."
            )
        if any(_is_relative(run, kind) for run in (a, b) for kind in _MEMORY_KINDS):
            self._notes.append("Peaks of memory are what was allocated beyond what was there when the traces began.")

    def _note_tables(self) -> None:
        """Say which tables only one run has, and which phases."""
        a, b = self._a, self._b
        phases = [set(run.sums(("phases", "host")) or ()) for run in (a, b)]
        for run, mine, others in ((a, phases[0], phases[1]), (b, phases[1], phases[0])):
            if lacking := sorted(others - mine):
                names = " and ".join([", ".join(lacking[:-1])] * (len(lacking) > 1) + lacking[-1:])
                self._notes.append(f"{run.source} does not tell its {names}: in both, that is in others.")
        if _clock(a) != _clock(b):
            without = a if _clock(a) == "host" else b
            self._notes.append(
                f"Nothing ran on a device in {without.source}: kernels and modules are not compared, operators on the "
                "host alone."
            )
            return
        clock = _clock(a)
        shown = [run.sums(("modules", clock)) for run in (a, b)]
        if (shown[0] is None) != (shown[1] is None):
            without = a if shown[0] is None else b
            self._notes.append(f"Modules are not compared: {without.source} shows none. with_stack=True records them.")
        elif shown[0] is not None and shown[1] is not None and not (set(shown[0]) & set(shown[1])) - {""}:
            self._notes.append("No module of one run has the name of one of the other: they are of different models.")


_COUNTS: tuple[tuple[str, Callable[[TracedStepFlops], int]], ...] = (
    ("forward_flops", lambda step: step.forward),
    ("backward_flops", lambda step: step.backward),
    (
        "hardware_flops",
        lambda step: step.forward + step.backward + step.recompute + step.optimizer - step.causal_skipped,
    ),
)

_MEMORY_KINDS = ("device", "host")


def _common_phases(a: _Sums, b: _Sums) -> tuple[_Sums, _Sums]:
    """Phases that both runs can tell; in each the time of its other phases is part of what is in none."""

    def joined(mine: _Sums, other: _Sums) -> _Sums:
        rest = [ns for name, (ns, _) in mine.items() if name not in other or name == OTHERS]
        common = {name: sums for name, sums in mine.items() if name in other and name != OTHERS}
        return common | {OTHERS: (np.sum(rest, axis=0), np.zeros(len(rest[0])))}

    return joined(a, b), joined(b, a)


def _clock(run: _Run) -> Clock:
    return "host" if all(report.kernels is None for report in run.reports) else "device"


def _part_ns(run: _Run, field: str) -> Floats:
    """Nanoseconds of a part in each step; 0 where it is not known."""
    return run.each(
        lambda report: [round((getattr(step, field) or 0.0) * NS_PER_US) for step in report.step_times.steps]
    )


def _walls_ns(run: _Run, place: int) -> Floats:
    """Wall time of each step of one of the run's ranks."""
    steps = run.reports[place].step_times.steps
    return np.array([round(steps[at[place]].wall_us * NS_PER_US) for at in run.steps], dtype=np.float64)


def _places_of_ranks(run: _Run) -> dict[int, int]:
    return {report.rank: place for place, report in enumerate(run.reports) if report.rank is not None}


def _step_sec(run: _Run) -> float:
    return float(run.each(lambda report: [step.wall_us for step in report.step_times.steps]).mean()) / 1e6


def _seconds_at_peak(step: TracedStepFlops, *, share: str) -> float | None:
    used: float | None = getattr(step, share)
    return None if used is None else used * step.wall_us / 1e6


def _peak_share(run: _Run, name: str) -> float | None:
    at_peak, walls = run.flops(partial(_seconds_at_peak, share=name)), run.flops(lambda step: step.wall_us / 1e6)
    if at_peak is None or walls is None or not walls.any():
        return None
    return float(at_peak.mean() / walls.mean())


def _mean_count(run: _Run, of_step: Callable[[TracedStepFlops], int]) -> float | None:
    """Of one step; an integer where all steps and ranks together are a multiple of their number."""
    if any(report.flops is None for report in run.reports):
        return None
    steps = [report.flops.steps for report in run.reports if report.flops is not None]
    total = sum(of_step(rank[place]) for at in run.steps for rank, place in zip(steps, at, strict=True))
    number = len(run.steps) * len(steps)
    return total // number if total % number == 0 else total / number


def _part_share(run: _Run, field: str) -> float | None:
    if all(getattr(report.step_times.mean, field) is None for report in run.reports):
        return None
    walls = run.each(lambda report: [step.wall_us for step in report.step_times.steps])
    return float(_part_ns(run, field).mean() / NS_PER_US / walls.mean()) if walls.any() else None


def _curves(run: _Run, kind: str) -> list[MemoryCurve]:
    return [one for report in run.reports for one in report.memory_curves or () if one.device_type == kind]


def _is_relative(run: _Run, kind: str) -> bool:
    return any(not one.absolute for one in _curves(run, kind))


def _most_memory(run: _Run, kind: str, other: _Run) -> int | None:
    """The most that was allocated on one device; None if not recorded, or known from the trace's beginning on only."""
    curves = _curves(run, kind)
    if not curves or (_is_relative(run, kind) and _curves(other, kind) and not _is_relative(other, kind)):
        return None
    return max(one.peak_bytes for one in curves)


def _why_no_memory(run: _Run, *, kind: str) -> str:
    if _curves(run, kind):
        return "the trace tells the change since its beginning alone"
    if any(report.memory_curves for report in run.reports):
        return f"nothing was allocated on the {kind}"
    return "the trace was taken without profile_memory=True"


def _words(run: _Run, *, words: str | None) -> str | None:
    """The same for every run."""
    return words


def _why_no_flops(run: _Run) -> str | None:
    return why_no_flops(run.reports)


def _why_no_mfu(run: _Run) -> str | None:
    return why_no_mfu(run.reports)


def _device(report: TraceReport) -> str:
    names = dict.fromkeys(one.name or "unknown" for one in report.device_metrics or ())
    return ", ".join(names)


def _recorded(report: TraceReport) -> str:
    """What stands in a trace beside names and times."""
    found = {
        "shapes": report.operators_by_shape is not None,
        "memory": report.memory_curves is not None,
        "stacks": any(row.called_from for row in report.operators or ()),
    }
    return ", ".join(name for name, there in found.items() if there) or "times alone"


def _settings(a: _Run, b: _Run) -> tuple[SettingDifference, ...]:
    """What is set up differently, as far as traces tell."""

    def told(run: _Run) -> dict[str, str]:  # empty: not known
        flops = run.first.flops
        return {
            "device": _device(run.first) or "none",
            "ranks": f"{len(run.traces):,}",
            "dtypes": "" if flops is None else ", ".join(sorted({row.dtype for row in flops.operators})),
            "recorded": _recorded(run.first),
        }

    of_a, of_b = told(a), told(b)
    return tuple(
        SettingDifference(name=name, a=of_a[name], b=of_b[name])
        for name in of_a
        if of_a[name] != of_b[name] and of_a[name] and of_b[name]
    )
