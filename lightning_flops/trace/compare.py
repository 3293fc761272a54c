"""The traces of two runs compared: what in their steps takes longer, and what of it is noise.

All times are means over the traced steps, and over the ranks if each run has several. The mean over the ranks is taken
first, in each step, because ranks that wait for one another are no independent measurements. The parts of a step add up
to it. The rows of other tables are sums of events, which may overlap.

The difference of what is called many times is shared out between more calls and longer calls by the formula of
``compare_split``, calls being the work. What is noise, ``compare_noise`` says, as for profiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lightning_flops.analysis.compare_figures import EXACT, NO_NOISE, TOO_WIDE, figure_difference
from lightning_flops.analysis.compare_noise import CONFIDENCE, LEAST_STEPS, Floats, MeanDraws, too_few
from lightning_flops.analysis.compare_split import Work, split
from lightning_flops.analysis.no_mfu import why_no_flops, why_no_mfu
from lightning_flops.errors import ComparisonError
from lightning_flops.schema.comparison import FigureDifference, NoiseInterval, SettingDifference
from lightning_flops.schema.trace_comparison import (
    SCHEMA_VERSION,
    TableName,
    TimeDifference,
    TimeTable,
    TraceComparison,
)
from lightning_flops.schema.trace_flops import TracedStepFlops
from lightning_flops.schema.trace_steps import STEP_PARTS
from lightning_flops.trace.compared import ComparedRun, Sums
from lightning_flops.trace.intervals import NS_PER_SEC, NS_PER_US
from lightning_flops.trace.report import AnalyzedTrace
from lightning_flops.trace.step_sums import OTHERS, Clock
from lightning_flops.units import plural

_TABLES: tuple[tuple[TableName, Clock], ...] = (
    ("phases", "host"), ("phases", "device"), ("modules", "device"), ("modules", "host"), ("kernels", "device"),
    ("operators", "device"), ("operators", "host"), ("collectives", "device"), ("collectives", "host"),
)  # fmt: skip

_COUNTS: tuple[tuple[str, Callable[[TracedStepFlops], int]], ...] = (
    ("forward_flops", lambda step: step.forward),
    ("backward_flops", lambda step: step.backward),
    ("hardware_flops", lambda step: step.hardware),
)

_SHARES = (
    ("data_wait_ratio", "data loader", "the trace shows no DataLoader"),
    ("exposed_communication_ratio", "communication", "the trace has no collectives"),
)

_MEMORY = (("device_memory_peak_bytes", "device"), ("host_memory_peak_bytes", "host"))


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
    run_a, run_b = ComparedRun.of(a, sources[0]), ComparedRun.of(b, sources[1])
    if run_a.marked != run_b.marked:
        without, other = (run_b, run_a) if run_a.marked else (run_a, run_b)
        raise ComparisonError(
            f"the steps cannot be compared: {without.source} has no marks of steps, which profiler.step() makes, and "
            f"{other.source} has {len(other.steps)}"
        )
    return _Comparing(run_a, run_b).result()


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """One thing in both runs, while its noise is not yet known."""

    name: str
    a: tuple[Floats, Floats]
    """Nanoseconds and calls of each step of A; then of B."""
    b: tuple[Floats, Floats]
    column: int
    """Its place among all that was timed."""

    @property
    def ns(self) -> tuple[int, int]:
        return round(float(self.a[0].mean())), round(float(self.b[0].mean()))

    def difference(self, noise: Callable[[int, int], NoiseInterval | None]) -> TimeDifference:
        (a_ns, b_ns), calls = self.ns, (float(self.a[1].mean()), float(self.b[1].mean()))
        work = [Work(one) if one else None for one in calls]
        longer = split(a_ns=a_ns, b_ns=b_ns, a=work[0], b=work[1]).efficiency_ns if any(calls) else None
        return TimeDifference(
            name=self.name,
            a_ns=a_ns,
            b_ns=b_ns,
            difference_ns=b_ns - a_ns,
            calls_a=calls[0] if any(calls) else None,
            calls_b=calls[1] if any(calls) else None,
            calls_ns=None if longer is None else b_ns - a_ns - longer,
            length_ns=longer,
            noise=noise(self.column, b_ns - a_ns),
        )


class _Comparing:
    """Two runs; all that was timed in each of their steps is a column, so that the noise of all is drawn once."""

    def __init__(self, a: ComparedRun, b: ComparedRun) -> None:
        self._runs = self._a, self._b = a, b
        self._columns: list[tuple[Floats, Floats]] = []
        self._draws: MeanDraws | None = None

    def result(self) -> TraceComparison:
        """The comparison."""
        a, b = self._runs
        parts, ranks = self._parts(), self._ranks()
        tables = [(of, clock, self._rows((of, clock))) for of, clock in _TABLES]
        at_peak = {name: self._at_peak(name) for name in ("mfu", "hfu")}
        if min(len(a.steps), len(b.steps)) >= LEAST_STEPS:
            in_a, in_b = (np.stack(side, axis=1) for side in zip(*self._columns, strict=True))
            self._draws = MeanDraws(in_a, in_b)
        ends = [sum(row.ns[side] for row in parts) for side in (0, 1)]
        whole = self._chosen([row.column for row in parts])
        return TraceComparison(
            schema_version=SCHEMA_VERSION,
            kind="traces",
            a=a.identity(),
            b=b.identity(),
            settings=_settings(a, b),
            step=TimeDifference(
                name="step" if a.marked else "whole trace",
                a_ns=ends[0],
                b_ns=ends[1],
                difference_ns=ends[1] - ends[0],
                calls_a=None,
                calls_b=None,
                calls_ns=None,
                length_ns=None,
                noise=None if self._draws is None else self._draws.interval(-whole, whole, value_ns=ends[1] - ends[0]),
            ),
            parts=tuple(row.difference(self._noise) for row in parts),
            ranks=tuple(row.difference(self._noise) for row in ranks),
            tables=tuple(TimeTable(of=of, clock=clock, rows=self._sorted(rows)) for of, clock, rows in tables if rows),
            figures=tuple(self._figures({row.name: row.column for row in parts}, at_peak)),
            confidence=CONFIDENCE,
            notes=tuple(_notes(a, b)),
        )

    def _row(self, name: str, a: tuple[Floats, Floats], b: tuple[Floats, Floats]) -> _Row:
        self._columns.append((a[0] / NS_PER_SEC, b[0] / NS_PER_SEC))
        return _Row(name, a, b, len(self._columns) - 1)

    def _noise(self, column: int, value_ns: int) -> NoiseInterval | None:
        return None if self._draws is None else self._draws.interval_of_part(column, value_ns=value_ns)

    def _chosen(self, columns: Sequence[int]) -> Floats:
        """1 for each of *columns*, 0 for all others."""
        found = np.zeros(len(self._columns))
        found[list(columns)] = 1.0
        return found

    def _parts(self) -> list[_Row]:
        """The parts of a step; one that neither run knows is left out, and is none of its time in a run without it."""
        return [
            self._row(name, *((ns := run.part_ns(field), np.zeros(len(ns))) for run in self._runs))
            for name, field in STEP_PARTS
            if any(run.knows(field) for run in self._runs)
        ]

    def _ranks(self) -> list[_Row]:
        """The step of each rank that both runs have."""
        places = [{report.rank: at for at, report in enumerate(run.reports)} for run in self._runs]
        both = [rank for rank in places[0] if rank is not None and rank in places[1]]

        def walls(run: ComparedRun, place: int) -> tuple[Floats, Floats]:
            steps = run.reports[place].step_times.steps
            ns = np.array([round(steps[at[place]].wall_us * NS_PER_US) for at in run.steps], dtype=np.float64)
            return ns, np.zeros(len(ns))

        return [
            self._row(f"rank {rank}", walls(self._a, places[0][rank]), walls(self._b, places[1][rank]))
            for rank in both
            if len(both) > 1
        ]

    def _rows(self, table: tuple[TableName, Clock]) -> list[_Row]:
        """The rows of a table that can be compared; none if it cannot."""
        a, b = (run.sums(table) for run in self._runs)
        if table[0] in ("kernels", "collectives") and self._a.clock == self._b.clock == table[1]:
            a, b = a or {}, b or {}  # none of them ran
        if a is None or b is None:
            return []
        if table[0] == "phases":
            a, b = _joined(a, b), _joined(b, a)
        nothing = [(np.zeros(len(run.steps)), np.zeros(len(run.steps))) for run in self._runs]
        found = [(name, a.get(name, nothing[0]), b.get(name, nothing[1])) for name in dict.fromkeys((*a, *b))]
        return [self._row(*one) for one in found if any(column.any() for side in one[1:] for column in side)]

    def _sorted(self, rows: Sequence[_Row]) -> tuple[TimeDifference, ...]:
        found = [row.difference(self._noise) for row in rows]
        return tuple(sorted(found, key=lambda row: (-abs(row.difference_ns), -max(row.a_ns, row.b_ns), row.name)))

    def _at_peak(self, name: str) -> int | None:
        """The column of the seconds that the FLOPs of each step take at peak; None if they are not known in both."""
        a, b = (run.flops(partial(_seconds_at_peak, share=name)) for run in self._runs)
        if a is None or b is None:
            return None
        self._columns.append((a, b))
        return len(self._columns) - 1

    def _figures(self, parts: dict[str, int], at_peak: dict[str, int | None]) -> list[FigureDifference]:
        """Step time and rates with the noise of the times that they are made of, counts, and the most memory."""
        figures, whole = [], self._chosen([*parts.values()])

        def add(
            name: str,
            value: Callable[[ComparedRun], float | None],
            why: Callable[[ComparedRun], str | None],
            *,
            of: Sequence[int] | None = None,
            share: bool = True,
        ) -> None:
            """A figure made of the columns *of*, as a *share* of the step or as they are; None: of no time at all."""

            def noise() -> tuple[float, float] | str:
                if of is None:
                    return EXACT
                if self._draws is None:
                    return NO_NOISE
                return self._draws.ratio_ends(self._chosen(of), whole if share else None) or TOO_WIDE

            runs = dict(zip("AB", self._runs, strict=True))
            values = [value(run) for run in self._runs]
            figures.append(figure_difference(name, *values, noise=noise, unknown=lambda which: why(runs[which])))

        add("global_step_sec", _step_sec, lambda run: None, of=[*parts.values()], share=False)
        for name, column in at_peak.items():
            add(name, partial(_peak_share, name=name), _why_no_mfu, of=[] if column is None else [column])
        for name, of_step in _COUNTS:
            add(name, partial(ComparedRun.count, of_step=of_step), _why_no_flops)
        for name, part, reason in _SHARES:
            if part in parts or part != "communication":  # that neither run communicates is no figure
                mine = [parts[part]] if part in parts else []
                add(name, partial(_part_share, field=dict(STEP_PARTS)[part]), partial(_said, words=reason), of=mine)
        for name, kind in _MEMORY:
            add(name, partial(_most_memory, runs=self._runs, kind=kind), partial(_why_no_memory, kind=kind))
        return figures


def _joined(mine: Sums, other: Sums) -> Sums:
    """The phases that both runs can tell; the time of other phases is part of what is in none."""
    rest = [ns for name, (ns, _) in mine.items() if name not in other or name == OTHERS]
    common = {name: sums for name, sums in mine.items() if name in other and name != OTHERS}
    return common | {OTHERS: (np.sum(rest, axis=0), np.zeros(len(rest[0])))}


def _step_sec(run: ComparedRun) -> float:
    return float(run.walls_us().mean()) / 1e6


def _seconds_at_peak(step: TracedStepFlops, *, share: str) -> float | None:
    used: float | None = getattr(step, share)
    return None if used is None else used * step.wall_us / 1e6


def _peak_share(run: ComparedRun, *, name: str) -> float | None:
    at_peak, walls = run.flops(partial(_seconds_at_peak, share=name)), run.flops(lambda step: step.wall_us / 1e6)
    if at_peak is None or walls is None or not walls.any():
        return None
    return float(at_peak.mean() / walls.mean())


def _part_share(run: ComparedRun, *, field: str) -> float | None:
    walls = run.walls_us()
    return float(run.part_ns(field).mean() / NS_PER_US / walls.mean()) if run.knows(field) and walls.any() else None


def _most_memory(run: ComparedRun, *, runs: Sequence[ComparedRun], kind: str) -> int | None:
    """The most that was allocated on one device; None if not recorded, or known from the trace's beginning on only."""
    curves = run.curves(kind)
    others = [other for other in runs if other is not run and other.curves(kind)]
    if not curves or (run.is_relative(kind) and any(not other.is_relative(kind) for other in others)):
        return None
    return max(one.peak_bytes for one in curves)


def _why_no_memory(run: ComparedRun, *, kind: str) -> str:
    if run.curves(kind):
        return "the trace tells the change since its beginning alone"
    if any(report.memory_curves for report in run.reports):
        return f"nothing was allocated on the {kind}"
    return "the trace was taken without profile_memory=True"


def _said(run: ComparedRun, *, words: str) -> str:
    """The same for every run."""
    return words


def _why_no_flops(run: ComparedRun) -> str | None:
    return why_no_flops(run.reports)


def _why_no_mfu(run: ComparedRun) -> str | None:
    return why_no_mfu(run.reports)


def _settings(a: ComparedRun, b: ComparedRun) -> tuple[SettingDifference, ...]:
    """What is set up differently, as far as traces tell."""
    told = [
        {
            "device": run.device or "none",
            "ranks": f"{len(run.traces):,}",
            "dtypes": run.dtypes,
            "recorded": run.recorded,
        }
        for run in (a, b)
    ]
    return tuple(
        SettingDifference(name=name, a=of_a, b=told[1][name])
        for name, of_a in told[0].items()
        if of_a != told[1][name] and of_a and told[1][name]
    )


def _notes(a: ComparedRun, b: ComparedRun) -> list[str]:
    """What limits the comparison, in sentences."""
    notes = [*a.odd, *b.odd]
    if not a.marked:
        notes.append(
            "The traces have no marks of steps: each is compared as a whole, which says something only if both "
            "hold equally many steps. What is noise is not known."
        )
    else:
        few = [(run, count) for run in (a, b) if (count := len(run.steps)) < LEAST_STEPS]
        notes += [too_few(run.source, f"{count} traced {plural('step', count)}") for run, count in few]
    for run in (a, b):
        if len(run.traces) > 1:
            notes.append(f"Times of {run.source} are means over its {len(run.traces)} ranks.")
        if any(report.flops is not None and report.flops.lower_bound for report in run.reports):
            notes.append(f"FLOPs of {run.source} are lower bounds: what could not be counted is not in them.")
    notes += _notes_on_tables(a, b)
    if a.recorded != b.recorded:
        notes.append(
            "The two traces recorded different things. Recording shapes, memory and above all Python's calls slows "
            "the host down: record the same in both."
        )
    if any(run.is_relative(kind) for run in (a, b) for _, kind in _MEMORY):
        notes.append("Peaks of memory are what was allocated beyond what was there when the traces began.")
    return notes


def _notes_on_tables(a: ComparedRun, b: ComparedRun) -> list[str]:
    """Which tables only one run has, and which phases."""
    notes = []
    phases = [set(run.sums(("phases", "host")) or ()) for run in (a, b)]
    for run, mine, others in ((a, phases[0], phases[1]), (b, phases[1], phases[0])):
        if lacking := sorted(others - mine):
            names = " and ".join([", ".join(lacking[:-1])] * (len(lacking) > 1) + lacking[-1:])
            notes.append(f"{run.source} does not tell its {names}: in both, that is in others.")
    if a.clock != b.clock:
        without = a if a.clock == "host" else b
        return [
            *notes,
            f"Nothing ran on a device in {without.source}: kernels and modules are not compared, operators on the "
            "host alone.",
        ]
    shown = [run.sums(("modules", run.clock)) for run in (a, b)]
    if (shown[0] is None) != (shown[1] is None):
        without = a if shown[0] is None else b
        notes.append(f"Modules are not compared: {without.source} shows none. with_stack=True records them.")
    elif shown[0] is not None and shown[1] is not None and not (set(shown[0]) & set(shown[1])) - {""}:
        notes.append("No module of one run has the name of one of the other: they are of different models.")
    return notes
