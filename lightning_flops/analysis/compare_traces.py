"""The traces of two runs compared: what in their steps takes longer, and what of it is noise.

All times are means over the traced steps, and over the ranks if each run has several. The mean over the ranks is taken
first, in each step, because ranks that wait for one another are no independent measurements. The parts of a step add up
to it. The rows of other tables are sums of events, which may overlap. The difference of what is called many times is
apportioned to more calls and longer calls by the formula of ``compare_split``, calls being the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lightning_flops.analysis.compare_noise import (
    CONFIDENCE,
    LEAST_STEPS,
    Floats,
    noise_interval,
    too_few,
)
from lightning_flops.analysis.compare_rules import figure_difference
from lightning_flops.analysis.compare_split import Work, split
from lightning_flops.analysis.no_mfu import why_no_flops, why_no_mfu
from lightning_flops.errors import ComparisonError
from lightning_flops.schema.comparison import FigureDifference, SettingDifference
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
from lightning_flops.schema.trace_steps import STEP_PARTS
from lightning_flops.trace.many import refuse_mixed_ranks
from lightning_flops.trace.report import AnalyzedTrace
from lightning_flops.trace.step_sums import OTHERS, Clock, TraceBySteps
from lightning_flops.units import plural

_TABLES: tuple[tuple[TableName, Clock], ...] = (
    ("phases", "host"), ("phases", "device"), ("modules", "device"), ("modules", "host"), ("kernels", "device"),
    ("operators", "device"), ("operators", "host"), ("collectives", "device"), ("collectives", "host"),
)  # fmt: skip
_COUNTS = {"forward_flops": "forward", "backward_flops": "backward", "hardware_flops": "hardware"}
_SHARES = {
    "data_wait_ratio": ("data_loader_us", "the trace shows no DataLoader"),
    "exposed_communication_ratio": ("communication_us", "the trace has no collectives"),
}
_MEMORY = {"device_memory_peak_bytes": "device", "host_memory_peak_bytes": "host"}
_NS_PER_US, _NS_PER_SEC = 1000, 1e9

_Times = tuple[Floats, Floats]
"""Nanoseconds and calls in each step."""


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
    runs = (_run_of(a, sources[0]), _run_of(b, sources[1]))
    if runs[0].marked != runs[1].marked:
        without, other = sorted(runs, key=lambda run: run.marked)
        raise ComparisonError(
            f"the steps cannot be compared: {without.source} has no marks of steps, which profiler.step() makes, and "
            f"{other.source} has {len(other.steps)}"
        )
    parts = [
        _difference(name, *(run.part(field) for run in runs))
        for name, field in STEP_PARTS
        if any(run.knows(field) for run in runs)
    ]
    # The whole step is the sum of its parts, which are rounded.
    whole = _difference("step" if runs[0].marked else "whole trace", *(run.part("wall_us") for run in runs))
    ends = [sum(part.a_ns for part in parts), sum(part.b_ns for part in parts)]
    tables = [TimeTable(of=of, clock=clock, rows=rows) for of, clock in _TABLES if (rows := _table(runs, (of, clock)))]
    return TraceComparison(
        schema_version=SCHEMA_VERSION,
        kind="traces",
        a=runs[0].identity(),
        b=runs[1].identity(),
        settings=_settings(*runs),
        step=replace(whole, a_ns=ends[0], b_ns=ends[1], difference_ns=ends[1] - ends[0]),
        parts=tuple(parts),
        ranks=tuple(_ranks(*runs)),
        tables=tuple(tables),
        figures=tuple(_figures(runs)),
        confidence=CONFIDENCE,
        notes=tuple(_notes(*runs)),
    )


@dataclass(frozen=True, eq=False)
class _Run:
    """The traces of one run, and the steps that all of them have."""

    source: str
    """What the user calls it."""
    reports: tuple[TraceReport, ...]
    """By rank; what all have in common the first has."""
    by_steps: tuple[TraceBySteps, ...]
    steps: tuple[tuple[int, ...], ...]
    """For each step that is compared, its place in each of the traces."""
    odd: tuple[str, ...]
    """Marks that are no steps, in sentences."""

    @property
    def marked(self) -> bool:
        """Whether its steps are the profiler's."""
        return self.by_steps[0].marked

    @property
    def clock(self) -> Clock:
        """Where its kernels and modules took their time."""
        return "host" if all(report.kernels is None for report in self.reports) else "device"

    @property
    def device(self) -> str:
        """Names of the devices; empty without one."""
        return ", ".join(dict.fromkeys(one.name or "unknown" for one in self.reports[0].device_metrics or ()))

    @property
    def recorded(self) -> str:
        """What stands in its traces beside names and times."""
        first = self.reports[0]
        found = {
            "shapes": first.operators_by_shape is not None,
            "memory": first.memory_curves is not None,
            "stacks": any(row.called_from for row in first.operators or ()),
        }
        return ", ".join(name for name, there in found.items() if there) or "times alone"

    def identity(self) -> ComparedTraces:
        """What the comparison says of it."""
        sources = tuple(report.source for report in self.reports)
        count = {"ranks": len(self.reports), "steps": len(self.steps)}
        return ComparedTraces(sources=sources, marked=self.marked, device=self.device, **count)

    def each(self, values: Callable[[TraceReport], Sequence[Any]]) -> Floats:
        """One number of each step: the mean of the ranks'; NaN where one of these is not known."""
        ranks = [np.array(values(report), dtype=np.float64) for report in self.reports]
        columns = zip(ranks, zip(*self.steps, strict=True), strict=True)
        means: Floats = np.mean([column[list(at)] for column, at in columns], axis=0)
        return means

    def part(self, field: str) -> _Times:
        """Nanoseconds of a part of each step, 0 where it is not known; nothing is called."""
        ns = self.each(
            lambda report: [round((getattr(step, field) or 0.0) * _NS_PER_US) for step in report.step_times.steps]
        )
        return ns, np.zeros(len(ns))

    def knows(self, field: str) -> bool:
        """Whether a part of the steps is known of any rank."""
        return any(getattr(report.step_times.mean, field) is not None for report in self.reports)

    def sums(self, table: tuple[TableName, Clock]) -> dict[str, _Times] | None:
        """Nanoseconds and calls of each name in each step, means of the ranks; None if no trace has the table."""
        found: dict[str, _Times] = {}
        nothing = np.zeros(len(self.steps))
        with_table = [(at, mine) for at, one in enumerate(self.by_steps) if (mine := one.tables.get(table))]
        for at, mine in with_table:
            places, share = [step[at] for step in self.steps], 1 / len(self.reports)
            for column, name in enumerate(mine.names):
                ns, calls = found.get(name, (nothing, nothing))
                found[name] = (ns + mine.ns[places, column] * share, calls + mine.calls[places, column] * share)
        return found if with_table else None

    def used_ns(self, share: str) -> Floats | None:
        """Nanoseconds of each step that its FLOPs take at the peak; None if not known of all steps and ranks."""
        if any(report.flops is None for report in self.reports):
            return None

        def of_steps(report: TraceReport) -> list[float | None]:
            steps = report.flops.steps if report.flops else ()
            shares = [(getattr(step, share), step.wall_us) for step in steps]
            return [None if used is None else used * wall_us * _NS_PER_US for used, wall_us in shares]

        values = self.each(of_steps)
        return None if np.isnan(values).any() else values

    def count(self, field: str) -> float | None:
        """A count of one step; an integer where all steps and ranks together are a multiple of their number."""
        ranks = [report.flops.steps for report in self.reports if report.flops is not None]
        if len(ranks) < len(self.reports):
            return None
        total: int = sum(getattr(rank[at], field) for step in self.steps for rank, at in zip(ranks, step, strict=True))
        number = len(self.steps) * len(ranks)
        return total // number if total % number == 0 else total / number

    def curves(self, kind: str) -> list[MemoryCurve]:
        """Memory over time of the host, or of all devices."""
        return [one for report in self.reports for one in report.memory_curves or () if one.device_type == kind]

    def is_relative(self, kind: str) -> bool:
        """Whether memory is known from the traces' beginning on only."""
        return any(not one.absolute for one in self.curves(kind))


def _run_of(analyzed: Sequence[AnalyzedTrace], source: str) -> _Run:
    """The run of these traces, one of each rank."""
    refuse_mixed_ranks([one.report for one in analyzed])
    if len(analyzed) > 1 and all(one.report.rank is None for one in analyzed):
        raise ComparisonError(
            f"{source} has {len(analyzed)} traces that do not say their ranks, so they are of separate runs: give one "
            "of them"
        )
    by_rank = sorted(analyzed, key=lambda one: -1 if one.report.rank is None else one.report.rank)
    reports = tuple(one.report for one in by_rank)
    by_steps = tuple(one.by_steps for one in by_rank if one.by_steps is not None)
    if len({one.marked for one in by_steps}) > 1:
        raise ComparisonError(f"the ranks of {source} cannot be compared: some traces have no marks of steps")
    alone = len(reports) == 1
    odd = tuple(
        f"{source if alone else report.source}: {mark}"
        for report, one in zip(reports, by_steps, strict=True)
        for mark in one.odd
    )
    places = [{number: place for place, number in enumerate(one.numbers)} for one in by_steps]
    common = [number for number in by_steps[0].numbers if all(number in known for known in places)]
    steps = tuple(tuple(known[number] for known in places) for number in common)
    if alone:  # whose numbers may be there twice
        steps = tuple((place,) for place in range(len(by_steps[0].numbers)))
    if not steps:
        raise ComparisonError(f"the ranks of {source} cannot be compared: no step is in all of their traces")
    return _Run(source, reports, by_steps, steps, odd)


def _difference(name: str, a: _Times, b: _Times) -> TimeDifference:
    a_ns, b_ns = (round(float(ns.mean())) for ns, _ in (a, b))
    calls = [float(count.mean()) for _, count in (a, b)]
    work = [Work(one) if one else None for one in calls]
    longer = split(a_ns=a_ns, b_ns=b_ns, a=work[0], b=work[1]).get("efficiency", 0) if any(calls) else None
    return TimeDifference(
        name=name,
        a_ns=a_ns,
        b_ns=b_ns,
        difference_ns=b_ns - a_ns,
        calls_a=calls[0] if any(calls) else None,
        calls_b=calls[1] if any(calls) else None,
        calls_ns=None if longer is None else b_ns - a_ns - longer,
        length_ns=longer,
        noise=noise_interval(a[0] / _NS_PER_SEC, b[0] / _NS_PER_SEC, value_ns=b_ns - a_ns),
    )


def _ranks(a: _Run, b: _Run) -> Iterator[TimeDifference]:
    """The step of each rank that both runs have."""
    places = [{report.rank: at for at, report in enumerate(run.reports)} for run in (a, b)]
    both = [rank for rank in places[0] if rank is not None and rank in places[1]]
    for rank in both if len(both) > 1 else ():
        alone = [
            replace(run, reports=(run.reports[at[rank]],), steps=tuple((step[at[rank]],) for step in run.steps))
            for run, at in zip((a, b), places, strict=True)
        ]
        yield _difference(f"rank {rank}", *(run.part("wall_us") for run in alone))


def _table(runs: tuple[_Run, _Run], which: tuple[TableName, Clock]) -> tuple[TimeDifference, ...]:
    """The rows of a table that can be compared, the largest difference first; none if it cannot."""
    a, b = (run.sums(which) for run in runs)
    if which[0] in ("kernels", "collectives") and runs[0].clock == runs[1].clock == which[1]:
        a, b = a or {}, b or {}  # none of them ran
    if a is None or b is None:
        return ()
    if which[0] == "phases":
        a, b = _joined(a, b), _joined(b, a)
    nothing = [(np.zeros(len(run.steps)), np.zeros(len(run.steps))) for run in runs]
    found = [(name, a.get(name, nothing[0]), b.get(name, nothing[1])) for name in dict.fromkeys((*a, *b))]
    rows = [_difference(*one) for one in found if any(column.any() for side in one[1:] for column in side)]
    return tuple(sorted(rows, key=lambda row: (-abs(row.difference_ns), -max(row.a_ns, row.b_ns), row.name)))


def _joined(mine: dict[str, _Times], other: dict[str, _Times]) -> dict[str, _Times]:
    """The phases that both runs show; the time of other phases is part of what is in none."""
    rest = [ns for name, (ns, _) in mine.items() if name not in other or name == OTHERS]
    common = {name: sums for name, sums in mine.items() if name in other and name != OTHERS}
    return common | {OTHERS: (np.sum(rest, axis=0), np.zeros(len(rest[0])))}


def _figures(runs: tuple[_Run, _Run]) -> Iterator[FigureDifference]:
    """Step time and rates with the noise of the times that they are made of, counts, and the most memory."""
    walls = (runs[0].part("wall_us")[0], runs[1].part("wall_us")[0])

    a, b = runs

    def figure(
        name: str,
        values: Sequence[float | None],
        why: Callable[[_Run], str | None],
        steps: tuple[Floats | None, Floats | None] | None = None,
    ) -> FigureDifference:
        return figure_difference(name, (values[0], values[1]), unknown=(why(a), why(b)), steps=steps)

    def share(name: str, parts: Sequence[Floats | None], why: Callable[[_Run], str | None]) -> FigureDifference:
        """A part of the steps, divided by them."""
        wholes = [float(wall.mean()) for wall in walls]
        values = [
            None if part is None or not of else float(part.mean()) / of for part, of in zip(parts, wholes, strict=True)
        ]
        steps = [
            None if part is None or not wall.all() else part / wall for part, wall in zip(parts, walls, strict=True)
        ]
        return figure(name, values, why, (steps[0], steps[1]))

    yield figure("global_step_sec", [float(wall.mean()) / _NS_PER_SEC for wall in walls], lambda run: None, walls)
    for name in ("mfu", "hfu"):
        yield share(name, [run.used_ns(name) for run in runs], lambda run: why_no_mfu(run.reports))
    for name, field in _COUNTS.items():
        yield figure(name, [run.count(field) for run in runs], lambda run: why_no_flops(run.reports))
    for name, (field, reason) in _SHARES.items():
        if any(run.knows(field) for run in runs) or field != "communication_us":  # that neither communicates is none
            known = [run.part(field)[0] if run.knows(field) else None for run in runs]
            yield share(name, known, lambda run, reason=reason: reason)  # type: ignore[misc]
    for name, kind in _MEMORY.items():
        most = [_most_memory(run, runs, kind) for run in runs]
        yield figure(name, most, partial(_why_no_memory, kind=kind))


def _most_memory(run: _Run, runs: Sequence[_Run], kind: str) -> int | None:
    """The most that was allocated on one device; None if not recorded, or known from the trace's beginning on only."""
    curves = run.curves(kind)
    others = [other for other in runs if other is not run and other.curves(kind)]
    if not curves or (run.is_relative(kind) and any(not other.is_relative(kind) for other in others)):
        return None
    return max(one.peak_bytes for one in curves)


def _why_no_memory(run: _Run, *, kind: str) -> str:
    if run.curves(kind):
        return "the trace shows the change since its beginning alone"
    if any(report.memory_curves for report in run.reports):
        return f"nothing was allocated on the {kind}"
    return "the trace was taken without profile_memory=True"


def _settings(a: _Run, b: _Run) -> tuple[SettingDifference, ...]:
    """What is set up differently, as far as traces show."""

    def of(run: _Run) -> dict[str, str]:
        flops = run.reports[0].flops
        dtypes = sorted({row.dtype for row in flops.operators}) if flops else ()
        ranks = f"{len(run.reports):,}"
        return {"device": run.device or "none", "ranks": ranks, "dtypes": ", ".join(dtypes), "recorded": run.recorded}

    return tuple(
        SettingDifference(name=name, a=of_a, b=of_b)
        for (name, of_a), of_b in zip(of(a).items(), of(b).values(), strict=True)
        if of_a != of_b and of_a and of_b
    )


def _notes(a: _Run, b: _Run) -> Iterator[str]:
    """What limits the comparison, in sentences."""
    yield from (*a.odd, *b.odd)
    if not a.marked:
        yield (
            "The traces have no marks of steps: each is compared as a whole, which says something only if both "
            "hold equally many steps. What is noise is not known."
        )
    for run in (a, b):
        if a.marked and (count := len(run.steps)) < LEAST_STEPS:
            yield too_few(run.source, f"{count} traced {plural('step', count)}")
    for run in (a, b):
        if len(run.reports) > 1:
            yield f"Times of {run.source} are means over its {len(run.reports)} ranks."
        if any(report.flops is not None and report.flops.lower_bound for report in run.reports):
            yield f"FLOPs of {run.source} are lower bounds: what could not be counted is not in them."
    yield from _notes_on_tables(a, b)
    if a.recorded != b.recorded:
        yield (
            "The two traces recorded different things. Recording shapes, memory and above all Python's calls slows "
            "the host down: record the same in both."
        )
    if any(run.is_relative(kind) for run in (a, b) for kind in _MEMORY.values()):
        yield "Peaks of memory are what was allocated beyond what was there when the traces began."


def _notes_on_tables(a: _Run, b: _Run) -> Iterator[str]:
    """Which tables only one run has, and which phases."""
    phases = [set(run.sums(("phases", "host")) or ()) for run in (a, b)]
    for run, mine, others in ((a, phases[0], phases[1]), (b, phases[1], phases[0])):
        if lacking := sorted(others - mine):
            yield f"{run.source} does not show its {' and '.join(lacking)}: in both, that is in others."
    if a.clock != b.clock:
        yield (
            f"Nothing ran on a device in {(a if a.clock == 'host' else b).source}: kernels and modules are not "
            "compared, operators on the host alone."
        )
        return
    shown = [run.sums(("modules", run.clock)) for run in (a, b)]
    if (shown[0] is None) != (shown[1] is None):
        without = a if shown[0] is None else b
        yield f"Modules are not compared: {without.source} shows none. with_stack=True records them."
    elif shown[0] is not None and shown[1] is not None and not (set(shown[0]) & set(shown[1])) - {""}:
        yield "No module of one run has the name of one of the other: they are of different models."
