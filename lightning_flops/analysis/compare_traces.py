"""The traces of two runs compared: what in their steps takes longer, and what of it is noise.

All times are means over the traced steps, and over the ranks if each run has several. The mean over the ranks is taken
first, in each step, because ranks that wait for one another are no independent measurements. The parts of a step add up
to it. The rows of other tables are sums of events, which may overlap.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import methodcaller
from typing import Any, get_args

import numpy as np

from lightning_flops.analysis.collectives import refuse_mixed_ranks
from lightning_flops.analysis.compare_noise import LEAST_STEPS, Floats, noise_ns, too_few
from lightning_flops.analysis.compare_rules import figure_difference
from lightning_flops.analysis.peaks import NO_FLOPS, why_no_flops, why_no_mfu
from lightning_flops.errors import ComparisonError
from lightning_flops.schema.comparison import (
    CalledDifference,
    CausedDifference,
    ComparedRun,
    Comparison,
    FigureDifference,
    TableName,
)
from lightning_flops.schema.tables import STEP_PARTS
from lightning_flops.schema.trace import TraceReport
from lightning_flops.trace.report import AnalyzedTrace
from lightning_flops.trace.tables import StepSums
from lightning_flops.units import plain, plural

_NOT_THERE = {
    "data_loader_us": "the trace shows no DataLoader", "communication_us": "the trace has no collectives"
}  # fmt: skip
_NS_PER_US, _NS_PER_SEC = 1000, 1e9
_Figure = tuple[float | None, Floats | None, str | None]
"""A figure of a run, what it is in each step or in proportion to that, and why it is not known if it is not."""


def compare_traces(
    a: Sequence[AnalyzedTrace], b: Sequence[AnalyzedTrace], *, sources: tuple[str, str] = ("A", "B")
) -> Comparison:
    """What the traced steps of run *b* take longer than those of run *a*: traces of each rank, analyzed step by step.

    Raises:
        ComparisonError: a run's traces are not of one run, have no step that all ranks have, or only one run's traces
            have marks of steps.
        RanksError: two traces of a run are of the same rank, or some do not say theirs.
    """
    first, second = runs = (_run_of(a, sources[0]), _run_of(b, sources[1]))
    if first.marked != second.marked:
        bare, marked = runs if second.marked else runs[::-1]
        raise ComparisonError(
            f"the steps cannot be compared: {bare.source} has no marks of steps, which profiler.step() makes, and "
            f"{marked.source} has {marked.steps}"
        )

    def part(name: str, field: str) -> CausedDifference:
        return CausedDifference(name=name, causes={}, **_times([run.part(field) for run in runs]))

    parts = tuple(part(*one) for one in STEP_PARTS if any(run.knows(one[1]) for run in runs))
    whole = part("step" if first.marked else "whole trace", "wall_us")
    return Comparison(
        kind="traces",
        a=first.identity(),
        b=second.identity(),
        # The whole step is the sum of its parts, which are rounded.
        step=replace(whole, a_ns=sum(one.a_ns for one in parts), b_ns=sum(one.b_ns for one in parts)),
        parts=parts,
        tables={of: rows for of in get_args(TableName) if (rows := _rows(runs, of))},
        figures=tuple(_figures(*runs)),
        notes=tuple(_notes(runs)),
    )


@dataclass(frozen=True, eq=False)
class _Run:
    """The traces of one run; all have the same steps."""

    source: str
    """What the user calls it."""
    reports: tuple[TraceReport, ...]
    """By rank; what all have in common the first has."""
    sums: tuple[Mapping[TableName, StepSums], ...]

    @property
    def marked(self) -> bool:
        """False if they have no marks of steps: each is then one step as a whole."""
        return self.reports[0].step_times.marked

    @property
    def steps(self) -> int:
        """How many steps every one of them has."""
        return len(self.reports[0].step_times.steps)

    def identity(self) -> ComparedRun:
        """What the comparison says of it."""
        ranks, devices = len(self.reports), self.reports[0].device_metrics or ()
        words = [", ".join(dict.fromkeys(one.name or "unknown device" for one in devices)) or "no device"]
        words += [f"{plain(ranks)} ranks"] if ranks > 1 else []
        words += [f"{plain(self.steps)} {plural('step', self.steps)}" if self.marked else "no marks of steps"]
        return ComparedRun(source=self.source, about=", ".join(words))

    def knows(self, field: str) -> bool:
        """Whether a part of the steps is known of any rank."""
        return any(getattr(report.step_times.mean, field) is not None for report in self.reports)

    def part(self, field: str) -> Floats:
        """Nanoseconds of a part of each step, 0 where it is not known: the mean of the ranks'."""
        ranks = [[getattr(step, field) or 0.0 for step in report.step_times.steps] for report in self.reports]
        means: Floats = np.mean(np.rint(np.array(ranks) * _NS_PER_US), axis=0)
        return means

    def times(self, table: TableName) -> dict[str, tuple[Floats, Floats]]:
        """Nanoseconds and calls of each name in each step, means of the ranks."""
        found: dict[str, tuple[Floats, Floats]] = {}
        for mine in (tables[table] for tables in self.sums):
            for column, name in enumerate(mine.names):
                ns, calls = (values[:, column] / len(self.sums) for values in (mine.ns, mine.calls))
                before = found.get(name, (0, 0))
                found[name] = before[0] + ns, before[1] + calls
        return found

    def flops(self, field: str) -> list[list[Any]] | None:
        """A field of the FLOPs of each step, rank by rank; None if not known of all of them."""
        found = [[getattr(step, field) for step in report.flops.steps] for report in self.reports if report.flops]
        return None if len(found) < len(self.reports) or any(None in rank for rank in found) else found

    def step_sec(self) -> _Figure:
        """Seconds of a step."""
        wall = self.part("wall_us")
        return float(wall.mean()) / _NS_PER_SEC, wall, None

    def count(self, field: str) -> _Figure:
        """A count of one step; an integer where the mean over steps and ranks is one."""
        counts = self.flops(field)
        return None if counts is None else statistics.mean(chain(*counts)), None, why_no_flops(self.reports)

    def utilization(self, name: str) -> _Figure:
        """MFU or HFU: of each step, what its FLOPs take at the peak."""
        shares, walls = self.flops(name), self.flops("wall_us")
        used = None if shares is None else np.mean(np.array(shares) * np.array(walls) * _NS_PER_US, axis=0)
        return self._share(used, why_no_mfu(self.reports))

    def waiting(self, field: str) -> _Figure:
        """The share of a part of the steps."""
        return self._share(self.part(field) if self.knows(field) else None, _NOT_THERE[field])

    def _share(self, part: Floats | None, why: str | None) -> _Figure:
        wall = self.part("wall_us")
        if part is None or not wall.any():
            return None, None, why
        return float(part.mean()) / float(wall.mean()), part / wall if wall.all() else None, why

    def most_memory(self, where: str, absolute: bool) -> _Figure:
        """The most that was allocated on one device, or on the host."""
        curves = [one for report in self.reports for one in report.memory_curves or ()]
        known = [one.peak_bytes for one in curves if (one.device < 0, one.absolute) == (where == "host", absolute)]
        why = f"the trace shows no allocations on the {where}" + (", or their change alone" if absolute else "")
        return max(known, default=None), None, why


def _run_of(analyzed: Sequence[AnalyzedTrace], source: str) -> _Run:
    """The run of these traces, one of each rank."""
    refuse_mixed_ranks(analyzed)
    if len(analyzed) > 1 and all(one.report.rank is None for one in analyzed):
        raise ComparisonError(
            f"{source} has {len(analyzed)} traces that do not say their ranks, so they are of separate runs: give one "
            "of them"
        )
    by_rank = sorted(analyzed, key=lambda one: -1 if one.report.rank is None else one.report.rank)
    if len({tuple(step.number for step in one.report.step_times.steps) for one in by_rank}) > 1:
        raise ComparisonError(f"the ranks of {source} cannot be compared: their traces do not have the same steps")
    sums = tuple(one.step_sums for one in by_rank if one.step_sums is not None)
    return _Run(source, tuple(one.report for one in by_rank), sums)


def _times(ns: Sequence[Floats]) -> dict[str, Any]:
    """The fields of a difference of nanoseconds in each step."""
    a_ns, b_ns = (round(float(one.mean())) for one in ns)
    return {"a_ns": a_ns, "b_ns": b_ns, "noise_ns": noise_ns(ns[0] / _NS_PER_SEC, ns[1] / _NS_PER_SEC)}


def _rows(runs: tuple[_Run, _Run], which: TableName) -> tuple[CalledDifference, ...]:
    """The rows of a table, the largest difference first."""
    found, rows = [run.times(which) for run in runs], []
    nothing = [(np.zeros(run.steps),) * 2 for run in runs]
    for name in dict.fromkeys((*found[0], *found[1])):
        ns, calls = zip(*(mine.get(name, none) for mine, none in zip(found, nothing, strict=True)), strict=True)
        calls_a, calls_b = (float(one.mean()) for one in calls)
        rows.append(CalledDifference(name=name, **_times(ns), calls_a=calls_a, calls_b=calls_b))
    return tuple(sorted(rows, key=lambda row: (-abs(row.difference_ns), -max(row.a_ns, row.b_ns), row.name)))


def _figures(a: _Run, b: _Run) -> Iterator[FigureDifference]:
    """Step time and rates with the noise of the times that they are made of, counts, and the most memory."""

    def figure(name: str, of: Callable[[_Run], _Figure], *, exact: bool = False) -> FigureDifference:
        (of_a, steps_a, why_a), (of_b, steps_b, why_b) = of(a), of(b)
        steps = None if exact else (steps_a, steps_b)
        return figure_difference(name, (of_a, of_b), unknown=(why_a, why_b), steps=steps)

    yield figure("global_step_sec", _Run.step_sec)
    for name in ("mfu", "hfu"):
        yield figure(name, methodcaller("utilization", name))
    for name in ("forward", "backward", "hardware"):
        yield figure(f"{name}_flops", methodcaller("count", name), exact=True)
    yield figure("data_wait_ratio", methodcaller("waiting", "data_loader_us"))
    if a.knows("communication_us") or b.knows("communication_us"):
        yield figure("exposed_communication_ratio", methodcaller("waiting", "communication_us"))
    for name in ("device", "host"):
        absolute = any(run.most_memory(name, absolute=True)[0] is not None for run in (a, b))
        yield figure(f"{name}_memory_peak_bytes", methodcaller("most_memory", name, absolute), exact=True)


def _notes(runs: tuple[_Run, _Run]) -> Iterator[str]:
    """What limits the comparison, in sentences."""
    for run in runs:
        notes = dict.fromkeys(note for report in run.reports for note in report.notes)
        yield from (f"{run.source}: {note}" for note in notes if not note.startswith(NO_FLOPS))
    if not runs[0].marked:
        yield (
            "The traces have no marks of steps: each is compared as a whole, which says something only if both "
            "hold equally many steps. What is noise is not known."
        )
    for run in runs:
        if run.marked and run.steps < LEAST_STEPS:
            yield too_few(run.source, f"{run.steps} traced {plural('step', run.steps)}")
        if len(run.reports) > 1:
            yield f"Times of {run.source} are means over its {len(run.reports)} ranks."
        if any(report.flops is not None and report.flops.uncounted for report in run.reports):
            yield f"FLOPs of {run.source} are lower bounds: what could not be counted is not in them."
