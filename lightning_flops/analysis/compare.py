"""Runs compared: by their profiles, by traces of their steps, or by their throughput alone.

Each is read as a ``Run`` here; ``differences`` has what two sides of such runs differ in. The times of a profile's
parts are means over the timed steps, which nothing slowed down; how a part is cut into modules, waiting for other ranks
and idle time comes from the traced steps. Of traces, the mean over the ranks is taken in each step first, because ranks
that wait for one another are no independent measurements; the rows of their tables are sums of events, which may
overlap. Of throughput, what is chance is seen in stretches of batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast, get_args

import numpy as np

from lightning_flops.analysis.counts import parent_name, rows_of_both
from lightning_flops.analysis.differences import (
    WALL,
    Figure,
    Part,
    Pieces,
    Row,
    Run,
    Sums,
    Work,
    compare_sides,
    mean_if_known,
    name_of,
    noise_ns,
    peaks_text,
    set_up_of,
    times,
)
from lightning_flops.analysis.rates import flops_per_byte, ratio, why_no_flops, why_no_mfu
from lightning_flops.analysis.timing import apportioned, whole_ns
from lightning_flops.analysis.trace_report import AnalyzedTrace, refuse_mixed_ranks
from lightning_flops.errors import ComparisonError
from lightning_flops.records import OUTSIDE, PhaseBytes, TimePhase, summed
from lightning_flops.schema.comparison import (
    SHARED,
    STARTS,
    CalledDifference,
    Cause,
    Comparison,
    ModuleDifference,
    ModuleSide,
    TableName,
)
from lightning_flops.schema.profile import Profile, ThroughputSummary
from lightning_flops.schema.tables import STEP_PARTS
from lightning_flops.schema.trace import TraceReport
from lightning_flops.trace.intervals import Floats
from lightning_flops.units import plain, plural

_COMPUTING: tuple[TimePhase, ...] = ("forward", "backward", "optimizer")
# What a part of a step that computes nothing of the model is a wait for.
_WAITS: dict[str, Cause] = {"data_wait": "data", "transfer": "loop", "bubble": "communication", "other": "loop"}
_ERRORS = 4  # so many standard errors of both runs together may separate a module's times by figures


def compare_profiles(
    a: Profile | Sequence[Profile],
    b: Profile | Sequence[Profile],
    *,
    sources: tuple[str | Sequence[str], str | Sequence[str]] = ("A", "B"),
) -> Comparison:
    """What the step of run *b* takes longer than that of run *a*, and why.

    Every nanosecond of the difference has one of three causes. *More work*: FLOPs or bytes changed, modules are new or
    gone. *Worse efficiency*: the same work, slower. *More waiting*: for data, communication, the host, or the loop
    around the model. A cause is below zero if there is less of it. The causes of all parts of a step, or of all
    modules, add up to the whole difference, to the nanosecond. What chance explains is marked as noise: of one run a
    side the spread of its timed steps, of two and more that of the runs.

    Args:
        a: the profile that is compared with, or several of runs of the same program: times are their means.
        b: the profile that is compared, or several.
        sources: where they are from, for the report.

    Raises:
        ComparisonError: one of them has no timed step, or one run trains and the other does not.
    """
    of_a, of_b = _side(a, sources[0]), _side(b, sources[1])
    first, second = of_a[0].profile, of_b[0].profile
    if first.context.loop != second.context.loop:
        raise ComparisonError(
            f"the steps cannot be compared: {name_of(of_a)} is of a {first.context.loop} loop, {name_of(of_b)} of a "
            f"{second.context.loop} loop"
        )
    per_byte, rows = flops_per_byte([first, second]), rows_of_both(first.modules, second.modules)
    note = f"Where FLOPs and bytes changed differently, a byte weighs as much as {per_byte:.3g} FLOPs."
    if untimed := [run.source for run in (*of_a, *of_b) if not run.inside]:
        note = (
            f"Differences by module are not known without times of modules in {' and '.join(untimed)}. What the trace "
            "shows of waiting inside a part is in its work and efficiency."
        )
    compared, of_rows = compare_sides(
        of_a,
        of_b,
        kind="profiles",
        step=second.step_name,
        order=get_args(TimePhase),
        rows=rows,
        flops_per_byte=per_byte,
        notes=[note],
    )
    return replace(compared, modules=tuple(_modules(of_a, of_b, rows, of_rows, beyond_noise=compared.is_told)))


def _side(profiles: Profile | Sequence[Profile], sources: str | Sequence[str]) -> list[_Profiled]:
    """The runs of one side."""
    each = [profiles] if isinstance(profiles, Profile) else list(profiles)
    if isinstance(sources, str):
        sources = [sources] if len(each) == 1 else [f"{sources}[{place}]" for place in range(len(each))]
    side = [_of_profile(profile, source) for profile, source in zip(each, sources, strict=True)]
    if len({tuple(module.name for module in profile.modules) for profile in each}) > 1:
        raise ComparisonError(f"{name_of(side)} cannot be one side: their modules differ, so these are other programs")
    return side


def _of_profile(profile: Profile, source: str) -> _Profiled:
    timing, context, traced = profile.timing, profile.context, profile.traced
    if timing is None:
        raise ComparisonError(f"the steps cannot be compared: {source} has no timed step")
    steps, model = timing.timed_steps, f"{profile.modules[0].type_name} on " if profile.modules else ""
    device = context.device_name or "unknown device"
    parts: dict[Part, tuple[float, Floats]] = {
        part.phases: (part.mean_sec, np.array(part.steps_sec)) for part in timing.parts
    }
    wall = sum((of_steps for _, of_steps in parts.values()), start=np.zeros(steps))
    waits = parts.get(("data_wait",), (0.0, np.zeros(steps)))[1]
    of_steps = dict.fromkeys(WALL, wall) | {
        "data_wait_ratio": waits / wall,
        "cpu_time_sec": np.array(timing.processor_steps_sec),
    }
    why = {**profile.unavailable, **profile.job_unavailable}
    limits = {
        "the traced steps took over twice or under half as long as the timed ones: which module a difference is in is "
        "uncertain.": traced is not None and traced.is_apart,
        f"times are those of rank {context.rank} of {context.world_size}.": context.world_size > 1,
    }
    traced_parts = traced.parts if traced is not None and any(one.times for one in profile.modules) else ()
    return _Profiled(
        source=source,
        about=f"{model}{device}, step {profile.profile_step} counted, {steps} timed {plural('step', steps)}",
        unit="timed step",
        steps=steps,
        parts=parts,
        figures={
            name: Figure(cast("float | None", value), of_steps.get(name), why.get(name, ""))
            for name, value in profile.summary().items()
            if name != "advice"
        },
        set_up=set_up_of(profile),
        starts_share=SHARED if context.device_type == "cpu" else STARTS,
        starved=timing.waits_share or 0.0,
        lower_bound=profile.lower_bound,
        notes=[*(note for note, holds in limits.items() if holds), *profile.notes],
        inside={(part.name,): part for part in traced_parts if part.name in _COMPUTING},
        profile=profile,
    )


@dataclass(frozen=True, kw_only=True)
class _Profiled(Run):
    """A run with a profile, which knows what filled the parts of its step."""

    profile: Profile

    @cached_property
    def works(self) -> dict[str, dict[str, Work]]:
        """FLOPs and bytes of one step by phase and module, without those below it."""
        modules, per_step, nothing = self.profile.modules, self.profile.per_step, PhaseBytes()
        below = summed(((parent_name(one.name), one.total_bytes) for one in modules if one.name), nothing)
        return {
            phase: {
                one.name: Work(
                    per_step(_amount(one.own, phase)),
                    per_step(_amount(one.total_bytes, phase) - _amount(below.get(one.name, nothing), phase)),
                )
                for one in modules
            }
            for phase in ("forward", "backward")
        }

    @cached_property
    def errors(self) -> dict[str | None, float]:
        """Standard error of each module's own time over the traced steps, divided by that time, where it is known."""
        traced = self.profile.traced
        table = traced and not traced.is_apart and traced.tables and traced.tables.modules
        found: dict[str | None, float] = {
            row.name: ratio(part=row.own_error_us, whole=row.own_forward_us + row.own_backward_us) or 0.0
            for row in (table.rows if table else ())
            if row.own_error_us is not None
        }
        return {None: 0.0, **found}

    def module(self, name: str | None) -> ModuleSide | None:
        """What forward and backward of a module compute; None if it is not there."""
        if name is None:
            return None
        flops, moved = map(sum, zip(*(works[name] for works in self.works.values()), strict=True))
        return ModuleSide(name=name, flops=round(flops), bytes=round(moved))

    def pieces(self, part: Part, *, by_module: bool) -> Pieces:
        """What *part* consists of: modules, communication, idle time of a device, and the rest."""
        profile, ns = self.profile, self.ns(part)
        work = Work(
            sum(_amount(profile.flops, phase) for phase in part),
            profile.per_step(sum(_amount(profile.bytes_total, phase) for phase in part)),
        )
        if not by_module:
            waits = {_WAITS.get(one) for one in part}  # several kinds of waiting count as one for the loop
            return {(None, None if None in waits else waits.pop() if len(waits) == 1 else "loop"): (ns, work)}
        works = self.works.get(part[0], {})
        owned = map(sum, zip(Work(), *works.values(), strict=True))
        left = Work(*(max(0, every - own) for every, own in zip(work, owned, strict=True)))
        keys: list[Any] = [(name, None) for name in works]
        keys += [(None, "communication"), (None, "idle"), (None, None)]
        filled = apportioned(ns, self._filling(part, list(works), ns))
        return dict(zip(keys, zip(filled, [*works.values(), Work(), Work(), left], strict=True), strict=True))

    def _filling(self, part: Part, modules: Sequence[str], timed_ns: int) -> list[int]:
        """Nanoseconds that *modules*, communication, idle time of a device, and the rest fill of a traced part.

        A device waits less for its host in the timed part, which takes *timed_ns*, than in the traced one.
        """
        phase, traced = part[0], self.profile.traced
        inside, fillings = self.inside[part], (traced and traced.filling) or {}
        scale = getattr(traced, f"{phase}_scale", 1.0)
        times = {one.name: one.times for one in self.profile.modules if one.times is not None}
        own = [whole_ns(getattr(times.get(name), f"own_{phase}_sec", None) or 0.0) for name in modules]
        wall_ns, communication, idle = whole_ns(scale * inside.wall_sec), whole_ns(scale * inside.exposed_sec), 0
        computing = max(0, wall_ns - communication)
        if phase in fillings and next(iter(times.values())).clock == "device":
            idle = min(computing, round(scale * fillings[phase].idle_ns))
        computing -= idle
        if traced and traced.shows_device:
            communication = communication * timed_ns // max(1, wall_ns)  # it waits for other hosts, and keeps its share
            idle = max(0, timed_ns - computing - communication)
        if sum(own) > computing:  # a module's time has what ran at once on several streams, and its own communication
            own = apportioned(computing, own)
        return [*own, communication, idle, computing - sum(own)]


def _amount(amounts: Any, phase: str) -> int:
    """FLOPs or bytes of one phase; the backward has what it repeats of the forward."""
    repeated: int = amounts.recompute if phase == "backward" else 0
    return repeated + getattr(amounts, phase) if phase in _COMPUTING else 0


def _modules(
    a: Sequence[_Profiled],
    b: Sequence[_Profiled],
    rows: Sequence[Row],
    of_rows: Mapping[Row, Sums],
    *,
    beyond_noise: bool,
) -> Iterator[ModuleDifference]:
    """Each row, and last what no module owns; with what may be chance, where the step is *beyond_noise*."""
    for row in rows:
        own = of_rows.get(row, Sums())
        noise = _noise_of_module(a, b, row, own) if beyond_noise and (own["a_ns"] or own["b_ns"]) else None
        of_a, of_b = (side[0].module(name) for side, name in zip((a, b), row, strict=True))
        name = str(row[0] if row[1] is None else row[1])
        yield ModuleDifference(name=name, a=of_a, b=of_b, **times(own, noise))
    outside = ModuleSide(name=OUTSIDE, flops=0, bytes=0)
    yield ModuleDifference(name=OUTSIDE, a=outside, b=outside, **times(of_rows[None, None], None))


def _noise_of_module(a: Sequence[_Profiled], b: Sequence[_Profiled], row: Row, own: Sums) -> int | None:
    """How far the difference of a module may be chance; None if it is not known."""
    if min(len(a), len(b)) > 1:
        of_runs = [np.array([1e-9 * own[number]]) for number in range(len(a) + len(b))]
        return noise_ns(of_runs[: len(a)], of_runs[len(a) :])
    errors = own["a_ns"] * a[0].errors.get(row[0], math.nan), own["b_ns"] * b[0].errors.get(row[1], math.nan)
    noise = _ERRORS * math.hypot(*errors)
    return None if math.isnan(noise) else math.ceil(noise)


# ---- traces


def compare_traces(
    a: Sequence[AnalyzedTrace], b: Sequence[AnalyzedTrace], *, sources: tuple[str, str] = ("A", "B")
) -> Comparison:
    """What the traced steps of run *b* take longer than those of run *a*: traces of each rank, analyzed step by step.

    Raises:
        ComparisonError: a run's traces are not of one run, have no step that all ranks have, or only one run's traces
            have marks of steps.
        RanksError: two traces of a run are of the same rank, or some do not say theirs.
    """
    means = [one.report.step_times.mean for one in (*a, *b)]
    parts = {name: of for name, of in STEP_PARTS if any(getattr(mean, of) is not None for mean in means)}
    runs = [_of_traces(side, source, parts) for side, source in zip((a, b), sources, strict=True)]
    marked = [side[0].report.step_times.marked for side in (a, b)]  # if not, each is one step as a whole
    if marked[0] != marked[1]:
        bare, other = runs if marked[1] else runs[::-1]
        raise ComparisonError(
            f"the steps cannot be compared: {bare.source} has no marks of steps, which profiler.step() makes, and "
            f"{other.source} has {other.steps}"
        )
    return compare_sides(
        runs[:1],
        runs[1:],
        kind="traces",
        step="step" if marked[0] else "whole trace",
        order=tuple(parts),
        notes=[]
        if marked[0]
        else [
            "The traces have no marks of steps: each is compared as a whole, which says something only if both hold "
            "equally many steps."
        ],
        tables={of: rows for of in get_args(TableName) if (rows := _rows((a, b), of))},
    )[0]


def _of_traces(analyzed: Sequence[AnalyzedTrace], source: str, parts: Mapping[str, str]) -> Run:
    reports = _of_one_run(analyzed, source)
    names = dict.fromkeys(one.name or "unknown device" for one in reports[0].device_metrics or ())
    ranks, steps = len(reports), len(reports[0].step_times.steps)
    marks, unit = "no marks of steps", "step that is the whole trace"
    if reports[0].step_times.marked:
        marks, unit = f"{plain(steps)} {plural('step', steps)}", "traced step"
    seconds = {name: _ns(reports, field) / 1e9 for name, field in parts.items()}
    flops = [one.flops for one in reports if one.flops]
    return Run(
        source=source,
        about=", ".join([", ".join(names) or "no device", *([f"{plain(ranks)} ranks"] if ranks > 1 else []), marks]),
        unit=unit,
        steps=steps,
        parts={(name,): (float(sec.mean()), sec) for name, sec in seconds.items()},
        figures=_figures_of_traces(reports),
        set_up={"peaks": peaks_text(dict(peak for one in flops for peak in one.peaks.items()))},
        lower_bound=any(one.uncounted for one in flops),
        notes=[note for one in reports for note in one.notes],
    )


def _of_one_run(analyzed: Sequence[AnalyzedTrace], source: str) -> list[TraceReport]:
    """The reports of the traces of one run, of all its ranks or of one; all have the same steps."""
    refuse_mixed_ranks(analyzed)
    if len(analyzed) > 1 and analyzed[0].rank is None:
        raise ComparisonError(
            f"{source} has {len(analyzed)} traces that do not say their ranks, so they are of separate runs: give one "
            "of them"
        )
    reports = [one.report for one in analyzed]
    if len({tuple(step.number for step in one.step_times.steps) for one in reports}) > 1:
        raise ComparisonError(f"the ranks of {source} cannot be compared: their traces do not have the same steps")
    return reports


def _ns(reports: Sequence[TraceReport], field: str) -> Floats:
    """Nanoseconds of a part of each step, 0 where it is not known: the mean of the ranks'."""
    ranks = [[getattr(step, field) or 0.0 for step in one.step_times.steps] for one in reports]
    means: Floats = np.mean(np.rint(np.array(ranks) * 1000), axis=0)
    return means


def _figures_of_traces(reports: Sequence[TraceReport]) -> dict[str, Figure]:
    """Step time and rates with the times that their noise is of, counts of one step, and how busy the devices are."""
    wall, waits, flops = _ns(reports, "wall_us"), _ns(reports, "data_loader_us"), [one.flops for one in reports]
    counts = [step for one in flops for step in getattr(one, "steps", [None])]
    why_flops = next(filter(None, map(why_no_flops, reports)), None)
    why_mfu, whole = why_no_mfu(reports), np.ones(1)  # of which no step is known
    known = wall.any() and any(one.step_times.mean.data_loader_us is not None for one in reports)
    share = float(waits.mean() / wall.mean()) if known else None
    devices = [one for report in reports for one in report.device_metrics or ()]
    curves = [one for report in reports for one in report.memory_curves or ()]
    peak = max((one.peak_bytes for one in curves if one.device >= 0 and one.absolute), default=None)
    return {
        "global_step_sec": Figure(float(wall.mean()) / 1e9, wall),
        "mfu": _mean(flops, "mfu", wall, why_mfu),
        "hfu": _mean(flops, "hfu", wall, why_mfu),
        "forward_flops": _mean(counts, "forward", None, why_flops),
        "backward_flops": _mean(counts, "backward", None, why_flops),
        "hardware_flops": _mean(counts, "total", None, why_flops),
        "data_wait_ratio": Figure(share, waits / np.maximum(wall, 1), "the trace shows no DataLoader"),
        "gpu_utilization": _mean(devices, "utilization", whole, "no device is in the trace"),
        "sm_efficiency": _mean(devices, "sm_efficiency", whole, "the trace does not say the blocks of its kernels"),
        "occupancy_percent": _mean(
            devices, "occupancy_percent", whole, "the trace does not say the occupancy of its kernels"
        ),
        "device_memory_peak_bytes": Figure(
            peak, None, "the trace does not say how much memory is allocated on the device"
        ),
    }


def _mean(of: Sequence[object], field: str, steps: Floats | None, why: str | None) -> Figure:
    return Figure(mean_if_known([getattr(one, field, None) for one in of]), steps, why or "")


def _rows(sides: Sequence[Sequence[AnalyzedTrace]], table: TableName) -> tuple[CalledDifference, ...]:
    """The rows of a table, the largest difference first: means of the ranks in each step."""
    of_sides = [[(one.step_sums or {})[table] for one in side] for side in sides]
    nothing, rows = [np.zeros((2, len(side[0].report.step_times.steps))) for side in sides], []
    for name in dict.fromkeys(name for side in of_sides for sums in side for name in sums):
        (ns_a, calls_a), (ns_b, calls_b) = (
            np.mean([sums.get(name, none) for sums in side], axis=0)
            for side, none in zip(of_sides, nothing, strict=True)
        )
        rows.append(
            CalledDifference(
                name=name,
                a_ns=round(float(ns_a.mean())),
                b_ns=round(float(ns_b.mean())),
                noise_ns=noise_ns([ns_a / 1e9], [ns_b / 1e9]),
                calls_a=float(calls_a.mean()),
                calls_b=float(calls_b.mean()),
            )
        )
    return tuple(sorted(rows, key=lambda row: (-abs(row.difference_ns), -max(row.a_ns, row.b_ns), row.name)))


# ---- throughput

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
    of_a, of_b = (list(map(_of_throughput, *side)) for side in zip((a, b), sources, strict=True))
    note = (
        "Only profiles say which part of a step and which module a difference is in, how the runs are set up, and "
        "whether one had to wait for processors: train both without timer_only for that."
    )
    compared, _ = compare_sides(
        of_a, of_b, kind="throughput", step="batch", order=("data wait", "the rest"), notes=[note]
    )
    known = tuple(one for one in compared.figures if (one.a, one.b) != (None, None))
    return replace(compared, figures=known, parts=compared.parts if len(compared.parts) > 1 else ())


def _of_throughput(one: ThroughputSummary, source: str) -> Run:
    batches, batch_sec, reader = np.array(one.batch_stretches_sec), one.batch_cost_sec.average, one.reader_cost_sec
    rates, waits = {} if one.ips is None else {one.ips_unit: one.ips.average}, np.zeros(len(batches))
    parts: dict[Part, tuple[float, Floats]] = {("data wait", "the rest"): (batch_sec, batches)}
    if one.reader_stretches_sec:
        waits = np.array(one.reader_stretches_sec)
        wait_sec = (one.reader_ratio or 0.0) * batch_sec  # the reader cost is that of the batches that were waited for
        parts = {("data wait",): (wait_sec, waits), ("the rest",): (batch_sec - wait_sec, batches - waits)}
    figures = {
        "samples_per_sec": (rates.get("samples/s"), batches),
        "batches_per_sec": (rates.get("batches/s"), batches),
        "tokens_per_sec": (one.tokens_per_sec, batches),
        "batch_cost_sec": (batch_sec, batches),
        "reader_cost_sec": (None if reader is None else reader.average, waits),
        "data_wait_ratio": (one.reader_ratio, waits / batches),
        "mfu": (one.mfu, batches),
    }
    return Run(
        source=source,
        about=f"{plain(one.batches)} {plural('batch', one.batches)}, without a profile",
        unit="batch",
        steps=len(batches),
        parts=parts,
        figures={name: Figure(value, steps, _WHY.get(name, "")) for name, (value, steps) in figures.items()},
        starts_share=SHARED,  # of what device, nothing says
    )
