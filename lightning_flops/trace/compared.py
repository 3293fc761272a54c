"""The traces of one run, as a comparison sees them: its steps that all ranks have, and means over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_flops.analysis.compare_noise import Floats
from lightning_flops.errors import ComparisonError
from lightning_flops.schema.trace import TraceReport
from lightning_flops.schema.trace_comparison import ComparedTraces, TableName
from lightning_flops.schema.trace_events import MemoryCurve
from lightning_flops.schema.trace_flops import TracedStepFlops
from lightning_flops.trace.intervals import NS_PER_US
from lightning_flops.trace.ranks import refuse_mixed_ranks
from lightning_flops.trace.report import AnalyzedTrace
from lightning_flops.trace.step_sums import Clock, TraceBySteps

Sums = dict[str, tuple[Floats, Floats]]
"""Nanoseconds and calls in each step, by name."""


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """The traces of one run, and the steps that all of them have."""

    source: str
    """What the user calls it."""
    traces: tuple[tuple[AnalyzedTrace, TraceBySteps], ...]
    """By rank."""
    steps: tuple[tuple[int, ...], ...]
    """For each step that is compared, its place in each of the traces."""
    odd: tuple[str, ...]
    """Marks that are no steps, or may be none, in sentences."""

    @classmethod
    def of(cls, analyzed: Sequence[AnalyzedTrace], source: str) -> ComparedRun:
        """The run of these traces, one of each rank.

        Raises:
            ComparisonError: they are not of one run, or no step is in all of them.
            RanksError: two are of the same rank, or some do not say theirs.
        """
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
        notes = tuple(
            f"{source if alone else one.report.source}: {mark}" for one, steps in traces for mark in steps.odd
        )
        if alone:
            return cls(source, traces, tuple((place,) for place in range(len(traces[0][1].numbers))), notes)
        places = [{number: place for place, number in enumerate(steps.numbers)} for _, steps in traces]
        common = [number for number in places[0] if all(number in known for known in places)]
        if not common:
            raise ComparisonError(f"the ranks of {source} cannot be compared: no step is in all of their traces")
        return cls(source, traces, tuple(tuple(known[number] for known in places) for number in common), notes)

    @property
    def marked(self) -> bool:
        """Whether its steps are the profiler's."""
        return self.traces[0][1].marked

    @cached_property
    def reports(self) -> list[TraceReport]:
        """By rank; what all have in common is told by the first."""
        return [one.report for one, _ in self.traces]

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

    @property
    def dtypes(self) -> str:
        """Those of its counted operators; empty where none were."""
        flops = self.reports[0].flops
        return "" if flops is None else ", ".join(sorted({row.dtype for row in flops.operators}))

    def identity(self) -> ComparedTraces:
        """What the comparison says of it."""
        return ComparedTraces(
            sources=tuple(report.source for report in self.reports),
            ranks=len(self.traces),
            steps=len(self.steps),
            marked=self.marked,
            device=self.device,
        )

    def each(self, values: Callable[[TraceReport], Sequence[float | None]]) -> Floats:
        """One number of each step: the mean of the ranks'; NaN where one of these is not known."""
        per_rank = [np.array(values(report), dtype=np.float64) for report in self.reports]
        columns = zip(*self.steps, strict=True)
        means: Floats = np.mean([column[list(at)] for column, at in zip(per_rank, columns, strict=True)], axis=0)
        return means

    def sums(self, table: tuple[TableName, Clock]) -> Sums | None:
        """Nanoseconds and calls of each name in each step, means of the ranks; None if no trace has the table."""
        found: Sums = {}
        with_table = [(at, mine) for at, (_, steps) in enumerate(self.traces) if (mine := steps.tables.get(table))]
        for at, mine in with_table:
            places = [step[at] for step in self.steps]
            for column, name in enumerate(mine.names):
                ns, calls = found.get(name, (np.zeros(len(places)), np.zeros(len(places))))
                share = 1 / len(self.traces)
                found[name] = (ns + mine.ns[places, column] * share, calls + mine.calls[places, column] * share)
        return found if with_table else None

    def flops(self, of_step: Callable[[TracedStepFlops], float | None]) -> Floats | None:
        """One number of each step's FLOPs; None if it is not known of all steps of all ranks."""
        if any(report.flops is None for report in self.reports):
            return None
        values = self.each(lambda report: [of_step(step) for step in report.flops.steps] if report.flops else [])
        return None if np.isnan(values).any() else values

    def count(self, of_step: Callable[[TracedStepFlops], int]) -> float | None:
        """A count of one step; an integer where all steps and ranks together are a multiple of their number."""
        steps = [report.flops.steps for report in self.reports if report.flops is not None]
        if len(steps) < len(self.reports):
            return None
        total = sum(of_step(rank[place]) for at in self.steps for rank, place in zip(steps, at, strict=True))
        number = len(self.steps) * len(steps)
        return total // number if total % number == 0 else total / number

    def walls_us(self) -> Floats:
        """Wall time of each step."""
        return self.each(lambda report: [step.wall_us for step in report.step_times.steps])

    def part_ns(self, field: str) -> Floats:
        """Nanoseconds of a part in each step; 0 where it is not known."""
        return self.each(
            lambda report: [round((getattr(step, field) or 0.0) * NS_PER_US) for step in report.step_times.steps]
        )

    def knows(self, field: str) -> bool:
        """Whether a part of the steps is known of any rank."""
        return any(getattr(report.step_times.mean, field) is not None for report in self.reports)

    def curves(self, kind: str) -> list[MemoryCurve]:
        """Memory over time of the host, or of all devices."""
        return [one for report in self.reports for one in report.memory_curves or () if one.device_type == kind]

    def is_relative(self, kind: str) -> bool:
        """Whether memory is known from the traces' beginning on only."""
        return any(not one.absolute for one in self.curves(kind))
