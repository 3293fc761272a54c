"""Two runs compared that have no profiles: by the traces of their steps, or by their throughput alone.

All times are means over the traced steps, in each of which the mean over the ranks is taken first, because ranks that
wait for one another are no independent measurements. The parts of a step add up to it. The rows of other tables are
sums of events, which may overlap. Of throughput, what is chance is seen in stretches of batches.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import get_args

import numpy as np

from lightning_flops.analysis import compare_figures as figures
from lightning_flops.analysis.compare_figures import Figure, Floats
from lightning_flops.analysis.rates import NO_FLOPS, sum_if_all_known, why_no_flops, why_no_mfu
from lightning_flops.analysis.trace_report import AnalyzedTrace, refuse_mixed_ranks
from lightning_flops.errors import ComparisonError
from lightning_flops.schema.comparison import (
    SHARED,
    CalledDifference,
    CausedDifference,
    ComparedRun,
    Comparison,
    TableName,
)
from lightning_flops.schema.profile import ThroughputSummary
from lightning_flops.schema.tables import STEP_PARTS
from lightning_flops.units import plain, plural

_NS_PER_US, _NS_PER_SEC = 1000, 1e9
# Figures of devices, which fields they are of, and why they are not known.
_OF_DEVICES = {
    "gpu_utilization": ("utilization", "no device is in the trace"),
    "sm_efficiency": ("sm_efficiency", "the trace does not say the blocks of its kernels"),
    "occupancy_percent": ("occupancy_percent", "the trace does not say the occupancy of its kernels"),
}


def compare_traces(
    a: Sequence[AnalyzedTrace], b: Sequence[AnalyzedTrace], *, sources: tuple[str, str] = ("A", "B")
) -> Comparison:
    """What the traced steps of run *b* take longer than those of run *a*: traces of each rank, analyzed step by step.

    Raises:
        ComparisonError: a run's traces are not of one run, have no step that all ranks have, or only one run's traces
            have marks of steps.
        RanksError: two traces of a run are of the same rank, or some do not say theirs.
    """
    first, second = runs = (_Run(a, sources[0]), _Run(b, sources[1]))
    if first.marked != second.marked:
        bare, marked = runs if second.marked else runs[::-1]
        raise ComparisonError(
            f"the steps cannot be compared: {bare.source} has no marks of steps, which profiler.step() makes, and "
            f"{marked.source} has {marked.steps}"
        )

    def part(name: str, field: str) -> CausedDifference:
        return CausedDifference(name=name, causes={}, **figures.times(*(_figure(run.part(field)) for run in runs)))

    means = [report.step_times.mean for run in runs for report in run.reports]
    parts = tuple(part(*one) for one in STEP_PARTS if any(getattr(mean, one[1]) is not None for mean in means))
    whole = part("step" if first.marked else "whole trace", "wall_us")
    return Comparison(
        kind="traces",
        a=first.identity(),
        b=second.identity(),
        # The whole step is the sum of its parts, which are rounded.
        step=replace(whole, a_ns=sum(one.a_ns for one in parts), b_ns=sum(one.b_ns for one in parts)),
        parts=parts,
        tables={of: rows for of in get_args(TableName) if (rows := _rows(runs, of))},
        figures=tuple(figures.differences(first.figures(), second.figures(), peaks=[run.peaks for run in runs])),
        notes=tuple(_notes(runs)),
    )


class _Run:
    """The traces of one run, of all its ranks or of one; all have the same steps."""

    def __init__(self, analyzed: Sequence[AnalyzedTrace], source: str) -> None:
        refuse_mixed_ranks(analyzed)
        if len(analyzed) > 1 and analyzed[0].rank is None:
            raise ComparisonError(
                f"{source} has {len(analyzed)} traces that do not say their ranks, so they are of separate runs: give "
                "one of them"
            )
        self.source, self.reports = source, [one.report for one in analyzed]
        if len({tuple(step.number for step in one.step_times.steps) for one in self.reports}) > 1:
            raise ComparisonError(f"the ranks of {source} cannot be compared: their traces do not have the same steps")
        self.sums = [one.step_sums or {} for one in analyzed]
        self.marked = self.reports[0].step_times.marked  # if not, each is one step as a whole
        self.steps = len(self.reports[0].step_times.steps)
        self.peaks = figures.peaks_text(
            dict(peak for one in self.reports if one.flops for peak in one.flops.peaks.items())
        )

    def identity(self) -> ComparedRun:
        ranks, devices = len(self.reports), self.reports[0].device_metrics or ()
        words = [", ".join(dict.fromkeys(one.name or "unknown device" for one in devices)) or "no device"]
        words += [f"{plain(ranks)} ranks"] if ranks > 1 else []
        words += [f"{plain(self.steps)} {plural('step', self.steps)}" if self.marked else "no marks of steps"]
        return figures.identity([self.source], ", ".join(words))

    def part(self, field: str) -> Floats:
        """Nanoseconds of a part of each step, 0 where it is not known: the mean of the ranks'."""
        ranks = [[getattr(step, field) or 0.0 for step in report.step_times.steps] for report in self.reports]
        means: Floats = np.mean(np.rint(np.array(ranks) * _NS_PER_US), axis=0)
        return means

    def table(self, which: TableName) -> Mapping[str, Floats]:
        """Nanoseconds and calls of each name in each step, means of the ranks."""
        names = dict.fromkeys(name for tables in self.sums for name in tables[which])
        nothing = np.zeros((2, self.steps))
        return {name: np.mean([tables[which].get(name, nothing) for tables in self.sums], axis=0) for name in names}

    def figures(self) -> dict[str, Figure]:
        """Step time and rates with the times that their noise is of, and counts of one step."""
        wall, waits, flops = self.part("wall_us"), self.part("data_loader_us"), [one.flops for one in self.reports]
        found: dict[str, Figure] = {"global_step_sec": _figure(wall)}
        for name in ("mfu", "hfu"):
            shares: list[float | None] = [None if one is None else getattr(one, name) for one in flops]
            found[name] = _mean(shares), [wall], why_no_mfu(self.reports) or ""
        for phase, name in (("forward",) * 2, ("backward",) * 2, ("total", "hardware")):
            counts = [getattr(step, phase) for one in flops if one for step in one.steps]
            mean = statistics.mean(counts) if all(flops) else None
            found[f"{name}_flops"] = mean, None, why_no_flops(self.reports) or ""
        known = any(one.step_times.mean.data_loader_us is not None for one in self.reports) and wall.any()
        share = float(waits.mean() / wall.mean()) if known else None
        found["data_wait_ratio"] = share, [waits / np.maximum(wall, 1)], "the trace shows no DataLoader"
        return found | self._of_devices()

    def _of_devices(self) -> dict[str, Figure]:
        """How busy the devices are, and how much memory was held; of the whole trace, so single steps are not known."""
        devices = [one for report in self.reports for one in report.device_metrics or ()]
        curves = [one for report in self.reports for one in report.memory_curves or ()]
        found: dict[str, Figure] = {}
        for name, (field, why) in _OF_DEVICES.items():
            used = _mean([getattr(one, field) for one in devices])
            found[name] = used, [np.array([used or 0.0])], why
        peak = max((one.peak_bytes for one in curves if one.device >= 0 and one.absolute), default=None)
        why = "the trace does not say how much memory is allocated on the device"
        return found | {"device_memory_peak_bytes": (peak, None, why)}


def _mean(values: Sequence[float | None]) -> float | None:
    total = sum_if_all_known(values)
    return None if total is None else total / len(values)


def _figure(ns: Floats) -> Figure:
    """Seconds of a step, given nanoseconds of each."""
    return float(ns.mean()) / _NS_PER_SEC, [ns / _NS_PER_SEC], ""


def _rows(runs: tuple[_Run, _Run], which: TableName) -> tuple[CalledDifference, ...]:
    """The rows of a table, the largest difference first."""
    found, rows = [run.table(which) for run in runs], []
    for name in dict.fromkeys((*found[0], *found[1])):
        both = [mine.get(name, np.zeros((2, run.steps))) for mine, run in zip(found, runs, strict=True)]
        calls_a, calls_b = (float(calls.mean()) for _, calls in both)
        times = figures.times(*(_figure(ns) for ns, _ in both))
        rows.append(CalledDifference(name=name, **times, calls_a=calls_a, calls_b=calls_b))
    return tuple(sorted(rows, key=lambda row: (-abs(row.difference_ns), -max(row.a_ns, row.b_ns), row.name)))


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
        yield from figures.too_few(run.source, run.steps, f"traced {plural('step', run.steps)}") if run.marked else ()
        if any(report.flops is not None and report.flops.uncounted for report in run.reports):
            yield f"FLOPs of {run.source} are lower bounds: what could not be counted is not in them."


_ONLY_PROFILES = (
    "Only profiles say which part of a step and which module a difference is in, how the runs are set up, and whether "
    "one had to wait for processors: train both without timer_only for that."
)
_PARTS = ("batch", "data wait", "the rest")
_WHY = {
    "samples_per_sec": "how many samples a batch has was not known",
    "batches_per_sec": "its rate is in samples/s",
    "tokens_per_sec": "how many tokens a batch has was not known",
    "reader_cost_sec": "no wait was seen",
    "data_wait_ratio": "no wait was seen",
    "mfu": "no step was counted, or no peak is known",
}


def compare_throughputs(
    a: Sequence[ThroughputSummary], b: Sequence[ThroughputSummary], *, sources: tuple[Sequence[str], Sequence[str]]
) -> Comparison:
    """What a batch of the runs *b* takes longer than one of the runs *a*, and their rates; *sources* names the runs.

    Of several runs a side, figures are means over the runs, and noise is that between them.
    """
    sides = a, b
    of_a, of_b = (figures.of_side([_figures(one) for one in side], _WHY) for side in sides)
    step, waits, rest = (
        CausedDifference(name=name, causes={}, **figures.times(of_a.pop(name), of_b.pop(name))) for name in _PARTS
    )
    rest = replace(rest, a_ns=step.a_ns - waits.a_ns, b_ns=step.b_ns - waits.b_ns)
    alone = zip(sources, (a[0], b[0]), strict=True) if min(len(a), len(b)) == 1 else ()
    few = [figures.too_few(names[0], len(one.batch_stretches_sec), "batches") for names, one in alone]
    run_a, run_b = (
        figures.identity(
            names,
            f"{plain(side[0].batches)} {plural('batch', side[0].batches)}, without a profile",
            starts_share=SHARED,
            others="whether other programs ran beside it is not known",
        )
        for side, names in zip(sides, sources, strict=True)
    )
    return Comparison(
        kind="throughput",
        a=run_a,
        b=run_b,
        figures=tuple(one for one in figures.differences(of_a, of_b, peaks=("", "")) if (one.a, one.b) != (None, None)),
        step=step,
        parts=(waits, rest) if all(one.reader_stretches_sec for one in (*a, *b)) else (),
        notes=(_ONLY_PROFILES, *chain.from_iterable(few)),
    )


def _figures(one: ThroughputSummary) -> dict[str, figures.OfRun]:
    """What the run knows, and last the parts of a batch."""
    batches = np.array(one.batch_stretches_sec)
    waits = np.array(one.reader_stretches_sec or np.zeros(len(batches)))
    rates = {} if one.ips is None else {one.ips_unit: one.ips.average}
    batch_sec, reader = one.batch_cost_sec.average, one.reader_cost_sec
    wait_sec = (one.reader_ratio or 0.0) * batch_sec  # the reader cost is that of the batches that were waited for
    return {
        "samples_per_sec": (rates.get("samples/s"), batches),
        "batches_per_sec": (rates.get("batches/s"), batches),
        "tokens_per_sec": (one.tokens_per_sec, batches),
        "batch_cost_sec": (batch_sec, batches),
        "reader_cost_sec": (None if reader is None else reader.average, waits),
        "data_wait_ratio": (one.reader_ratio, waits / batches),
        "mfu": (one.mfu, batches),
        **dict(
            zip(_PARTS, ((batch_sec, batches), (wait_sec, waits), (batch_sec - wait_sec, batches - waits)), strict=True)
        ),
    }
