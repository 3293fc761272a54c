"""The traces of two runs compared: what in their steps takes longer, and what of it is noise.

All times are means over the traced steps, and over the ranks if each run has several. The mean over the ranks is taken
first, in each step, because ranks that wait for one another are no independent measurements. The parts of a step add up
to it. The rows of other tables are sums of events, which may overlap.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from lightning_flops.analysis.collectives import refuse_mixed_ranks
from lightning_flops.analysis.compare_noise import (
    LEAST_STEPS,
    Floats,
    noise_interval,
    too_few,
)
from lightning_flops.analysis.compare_rules import figure_difference
from lightning_flops.analysis.peaks import NO_FLOPS, why_no_flops, why_no_mfu
from lightning_flops.errors import ComparisonError
from lightning_flops.schema.comparison import FigureDifference
from lightning_flops.schema.trace import TraceReport
from lightning_flops.schema.trace_comparison import (
    SCHEMA_VERSION,
    ComparedTraces,
    TableName,
    TimeDifference,
    TimeTable,
    TraceComparison,
)
from lightning_flops.schema.trace_steps import STEP_PARTS
from lightning_flops.trace.report import AnalyzedTrace
from lightning_flops.trace.tables import StepSums
from lightning_flops.units import plural

_COUNTS = {"forward_flops": "forward", "backward_flops": "backward", "hardware_flops": "hardware"}
_SHARES = {
    "data_wait_ratio": ("data_loader_us", "the trace shows no DataLoader"),
    "exposed_communication_ratio": ("communication_us", "the trace has no collectives"),
}
_MEMORY = {"device_memory_peak_bytes": "device", "host_memory_peak_bytes": "host"}
_NS_PER_US, _NS_PER_SEC = 1000, 1e9


def compare_traces(
    a: Sequence[AnalyzedTrace], b: Sequence[AnalyzedTrace], *, sources: tuple[str, str] = ("A", "B")
) -> TraceComparison:
    """What the traced steps of run *b* take longer than those of run *a*: traces of each rank, analyzed step by step.

    Raises:
        ComparisonError: a run's traces are not of one run, have no step that all ranks have, or only one run's traces
            have marks of steps.
        RanksError: two traces of a run are of the same rank, or some do not say theirs.
    """
    runs = (_run_of(a, sources[0]), _run_of(b, sources[1]))
    a_is, b_is = (run.identity for run in runs)
    if a_is.marked != b_is.marked:
        without, other = sources if b_is.marked else sources[::-1]
        raise ComparisonError(
            f"the steps cannot be compared: {without} has no marks of steps, which profiler.step() makes, and "
            f"{other} has {max(a_is.steps, b_is.steps)}"
        )
    parts = [
        _difference(name, [run.part(field) for run in runs])
        for name, field in STEP_PARTS
        if any(run.known_part(field) is not None for run in runs)
    ]
    # The whole step is the sum of its parts, which are rounded.
    whole = _difference("step" if a_is.marked else "whole trace", [run.part("wall_us") for run in runs])
    ends = [sum(part.a_ns for part in parts), sum(part.b_ns for part in parts)]
    tables = [TimeTable(of=of, rows=rows) for of in get_args(TableName) if (rows := _table(runs, of))]
    return TraceComparison(
        schema_version=SCHEMA_VERSION,
        kind="traces",
        a=a_is,
        b=b_is,
        step=replace(whole, a_ns=ends[0], b_ns=ends[1], difference_ns=ends[1] - ends[0]),
        parts=tuple(parts),
        tables=tuple(tables),
        figures=tuple(_figures(runs)),
        notes=tuple(_notes(*runs)),
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
    def identity(self) -> ComparedTraces:
        """What the comparison says of it."""
        first = self.reports[0]
        return ComparedTraces(
            sources=tuple(report.source for report in self.reports),
            ranks=len(self.reports),
            steps=len(first.step_times.steps),
            marked=first.step_times.marked,
            device=", ".join(dict.fromkeys(one.name or "unknown" for one in first.device_metrics or ())),
        )

    def part(self, field: str) -> Floats:
        """Nanoseconds of a part of each step, 0 where it is not known: the mean of the ranks'."""
        ranks = [[getattr(step, field) or 0.0 for step in report.step_times.steps] for report in self.reports]
        means: Floats = np.mean(np.rint(np.array(ranks) * _NS_PER_US), axis=0)
        return means

    def known_part(self, field: str) -> Floats | None:
        """The same; None where it is known of no rank."""
        known = any(getattr(report.step_times.mean, field) is not None for report in self.reports)
        return self.part(field) if known else None

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

    def used_ns(self, share: str) -> Floats | None:
        """Nanoseconds of each step that its FLOPs take at the peak; None if not known of all steps and ranks."""
        shares, walls = self.flops(share), self.flops("wall_us")
        return None if shares is None else np.mean(np.array(shares) * np.array(walls) * _NS_PER_US, axis=0)

    def count(self, field: str) -> float | None:
        """A count of one step; an integer where the mean over steps and ranks is one."""
        counts = self.flops(field)
        return None if counts is None else statistics.mean(itertools.chain(*counts))

    def most_memory(self, kind: str, *, absolute: bool) -> int | None:
        """The most that was allocated on one device."""
        curves = [one for report in self.reports for one in report.memory_curves or ()]
        is_host = kind == "host"
        known = [one.peak_bytes for one in curves if (one.device < 0, one.absolute) == (is_host, absolute)]
        return max(known, default=None)


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


def _difference(
    name: str, ns: Sequence[Floats], calls: tuple[float | None, float | None] = (None, None)
) -> TimeDifference:
    """Of nanoseconds in each step, and mean calls."""
    a_ns, b_ns = (round(float(one.mean())) for one in ns)
    noise = noise_interval(ns[0] / _NS_PER_SEC, ns[1] / _NS_PER_SEC, value_ns=b_ns - a_ns)
    difference = {"a_ns": a_ns, "b_ns": b_ns, "difference_ns": b_ns - a_ns}
    return TimeDifference(name=name, **difference, calls_a=calls[0], calls_b=calls[1], noise=noise)


def _table(runs: tuple[_Run, _Run], which: TableName) -> tuple[TimeDifference, ...]:
    """The rows of a table, the largest difference first."""
    found, rows = [run.times(which) for run in runs], []
    nothing = [(np.zeros(run.identity.steps),) * 2 for run in runs]
    for name in dict.fromkeys((*found[0], *found[1])):
        ns, calls = zip(*(mine.get(name, none) for mine, none in zip(found, nothing, strict=True)), strict=True)
        rows.append(_difference(name, ns, (float(calls[0].mean()), float(calls[1].mean()))))
    return tuple(sorted(rows, key=lambda row: (-abs(row.difference_ns), -max(row.a_ns, row.b_ns), row.name)))


def _figures(runs: tuple[_Run, _Run]) -> Iterator[FigureDifference]:
    """Step time and rates with the noise of the times that they are made of, counts, and the most memory."""
    walls = (runs[0].part("wall_us"), runs[1].part("wall_us"))

    def figure(
        name: str,
        values: Sequence[float | None],
        why: Sequence[str | None],
        steps: tuple[Floats | None, Floats | None] | None = None,
    ) -> FigureDifference:
        return figure_difference(name, (values[0], values[1]), unknown=(why[0], why[1]), steps=steps)

    def share(name: str, parts: Sequence[Floats | None], why: Sequence[str | None]) -> FigureDifference:
        """A part of the steps, divided by them."""
        wholes = [float(wall.mean()) for wall in walls]
        values = [
            None if part is None or not of else float(part.mean()) / of for part, of in zip(parts, wholes, strict=True)
        ]
        steps = [
            None if part is None or not wall.all() else part / wall for part, wall in zip(parts, walls, strict=True)
        ]
        return figure(name, values, why, (steps[0], steps[1]))

    yield figure("global_step_sec", [float(wall.mean()) / _NS_PER_SEC for wall in walls], (None, None), walls)
    for name in ("mfu", "hfu"):
        yield share(name, [run.used_ns(name) for run in runs], [why_no_mfu(run.reports) for run in runs])
    for name, field in _COUNTS.items():
        yield figure(name, [run.count(field) for run in runs], [why_no_flops(run.reports) for run in runs])
    for name, (field, reason) in _SHARES.items():
        parts = [run.known_part(field) for run in runs]
        if field != "communication_us" or any(part is not None for part in parts):  # that neither communicates is none
            yield share(name, parts, (reason, reason))
    for name, kind in _MEMORY.items():
        absolute = any(run.most_memory(kind, absolute=True) is not None for run in runs)
        why = f"the trace shows no allocations on the {kind}" + (", or their change alone" if absolute else "")
        yield figure(name, [run.most_memory(kind, absolute=absolute) for run in runs], (why, why))


def _notes(a: _Run, b: _Run) -> Iterator[str]:
    """What limits the comparison, in sentences."""
    for run in (a, b):
        notes = dict.fromkeys(note for report in run.reports for note in report.notes)
        yield from (f"{run.source}: {note}" for note in notes if not note.startswith(NO_FLOPS))
    if not a.identity.marked:
        yield (
            "The traces have no marks of steps: each is compared as a whole, which says something only if both "
            "hold equally many steps. What is noise is not known."
        )
    for run in (a, b):
        if a.identity.marked and (count := run.identity.steps) < LEAST_STEPS:
            yield too_few(run.source, f"{count} traced {plural('step', count)}")
        if len(run.reports) > 1:
            yield f"Times of {run.source} are means over its {len(run.reports)} ranks."
        if any(report.flops is not None and report.flops.uncounted for report in run.reports):
            yield f"FLOPs of {run.source} are lower bounds: what could not be counted is not in them."
