"""The timing of a step: each part's mean over the timed steps, their spread, and a typical step.

A typical step is the mean of the middle half of the timed steps by wall time. Which steps these are is the same for
all parts, so the parts still add up. One hiccup of the machine is in none of them: it is a stall.

The breakdown is one account of where peak x time of a typical step went, in eight rows that add up to its wall time.
What filled each part is known of the traced step alone. In it a device computes as long as in any other step of its
kind, but waits longer for the host, which torch.profiler slows: the device is idle for what its work leaves of the
typical part. On the host, and for communication, which waits for other hosts, shares of the traced part divide the
typical one. What neither shows is not guessed: such rows are n/a, and their time stands in ``compute``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from statistics import fmean
from typing import get_args

from lightning_flops.records import PhaseSeconds, ProcessorLoss, StepRecord, TimePhase, WindowRecord
from lightning_flops.schema.step import Budget, BudgetKey, PartTiming, Stalls, TimingProfile
from lightning_flops.schema.trace import PartFilling, TracedStep

_PHASES: tuple[TimePhase, ...] = get_args(TimePhase)
_OF_TRAINING: tuple[TimePhase, ...] = ("backward", "bubble", "optimizer")
_STALLS_FROM = 1.1  # a step that takes so many times as long as a typical one has stalled
_LEAST_PLAIN = 4  # from fewer steps no typical one is known
_LONGEST_SEC = 1e9  # thirty years: no step takes longer


def timed_steps(window: WindowRecord) -> tuple[list[StepRecord], float, list[StepRecord]]:
    """The steps of *window* whose times are possible, how many times as long as a plain one they took, and plain ones.

    No part is negative or absurd, and their sum is above zero. Marks cost time, on a host-bound GPU above all. So the
    typical step is one of those between two stamps alone, and each time of the others is scaled to it. Too few plain
    ones are none. They are scaled to steps that went without hooks, if these were shorter: to be heard costs time, too.
    """
    found = [(step, asdict(step.seconds)) for step in window.timed_steps if step.seconds is not None]
    timed = [(step, of) for step, of in found if sum(of.values()) > 0 and all(map(_is_duration, of.values()))]
    plain = [one for one in window.plain_steps if one.seconds is not None and 0 < one.seconds.total <= _LONGEST_SEC]
    if not timed or len(plain) < _LEAST_PLAIN:
        return [step for step, _ in timed], 1.0, []
    whole_sec = _typical([one.seconds.total for one in plain if one.seconds is not None])
    unhooked_sec = _typical(window.unhooked_sec) if len(window.unhooked_sec) >= _LEAST_PLAIN else whole_sec
    if unhooked_sec < whole_sec:
        plain = [_times_as_long(one, unhooked_sec / whole_sec) for one in plain]
    longer = _typical([sum(of.values()) for _, of in timed]) / min(unhooked_sec, whole_sec)
    return [_times_as_long(step, 1 / longer) for step, _ in timed], longer, plain


def _times_as_long(step: StepRecord, factor: float) -> StepRecord:
    """*step*, each time of which is multiplied."""
    seconds = {name: spent * factor for name, spent in asdict(step.seconds or PhaseSeconds()).items()}
    reader_sec = None if step.reader_sec is None else step.reader_sec * factor
    return replace(step, seconds=PhaseSeconds(**seconds), reader_sec=reader_sec)


def _as_whole_ones(steps: Sequence[StepRecord], whole: Sequence[StepRecord]) -> list[StepRecord]:
    """Each of *steps* is as long as the one of *whole* that has its place by length, all its parts alike.

    Of other numbers it is as long as the mean of those in its place, so that the mean of all is theirs.
    """
    wall, whole_sec = ([one.seconds.total for one in of if one.seconds is not None] for of in (steps, whole))
    shared = math.lcm(len(wall), len(whole_sec))
    lengths, many = sorted([*whole_sec] * (shared // len(whole_sec))), shared // len(wall)
    in_order = sorted(range(len(wall)), key=wall.__getitem__)
    as_long = {place: fmean(lengths[nth * many : (nth + 1) * many]) for nth, place in enumerate(in_order)}
    return [_times_as_long(step, as_long[place] / wall[place]) for place, step in enumerate(steps)]


def _typical(times: Sequence[float]) -> float:
    return fmean([times[place] for place in middle_half(times)])


def build_timing(
    steps: Sequence[StepRecord],
    *,
    mixed_phases: Iterable[TimePhase],
    trains: bool = True,
    processor: ProcessorLoss | None = None,
    longer: float = 1.0,
    whole: Sequence[StepRecord] = (),
    unhooked_steps: int = 0,
) -> TimingProfile | None:
    """Means and spread over *steps*, whose times are possible; None without any.

    *steps* were so many times *longer*, as the *processor* knows them. Those of *whole* were timed as a whole: how
    long steps are is of them, and how that is divided of *steps*, and where those stalled; more were *unhooked*.
    Of *mixed_phases*, which
    cannot be separated, only the sum is given. Phases of training that took no time are not there in a run that does
    not train.
    """
    if not steps:
        return None
    mixed = tuple(phase for phase in _PHASES if phase in set(mixed_phases))
    stalls = _stalls(*_parts(steps, mixed, trains=trains))
    steps = _as_whole_ones(steps, whole) if whole else steps
    step, parts = _parts(steps, mixed, trains=trains)
    measured = processor or ProcessorLoss(seconds=0.0, batches_sec=(), waited_share=None)  # nothing is known
    readers = [one.reader_sec for one in steps if one.reader_sec is not None and _is_duration(one.reader_sec)]
    return TimingProfile(
        stalls=stalls,
        parts=tuple(parts),
        global_step=step,
        # None: the wait was not timed apart, and so not by the host.
        reader_sec=fmean(readers) if len(readers) == len(steps) and "data_wait" not in mixed else None,
        excluded_sec=_excluded_sec([*steps, *whole]),
        excludes_in_each=all(any(one.excluded_sec.values()) for one in [*steps, *whole]),
        whole_steps=len(whole),
        unhooked_steps=unhooked_steps,
        longer=longer,
        processor_steps_sec=_by_step([spent / longer for spent in measured.batches_sec], steps),
        starved_share=measured.waited_share,
        waits_share=measured.waits_share,
        cpu_system_ratio=measured.busy_share,
        heat_limited_share=measured.heat_share,
    )


def _parts(
    steps: Sequence[StepRecord], mixed: tuple[TimePhase, ...], *, trains: bool
) -> tuple[PartTiming, list[PartTiming]]:
    """A step and its parts, *mixed* phases together, without phases that such a run does not have."""
    seconds = [one.seconds for one in steps if one.seconds is not None]
    wall = tuple(one.total for one in seconds)
    middle = middle_half(wall)
    rare = {(phase,) for phase in (("bubble",) if trains else _OF_TRAINING)}  # only pipelines have a bubble
    each = dict.fromkeys(mixed if phase in mixed else (phase,) for phase in _PHASES)
    times = {of: tuple(math.fsum(getattr(one, phase) for phase in of) for one in seconds) for of in each}
    parts = [
        PartTiming(phases=of, mean_sec=fmean(sec), typical_sec=fmean([sec[place] for place in middle]), steps_sec=sec)
        for of, sec in times.items()
        if of not in rare or any(sec)
    ]
    whole = PartTiming(
        phases=(),
        mean_sec=math.fsum(part.mean_sec for part in parts),
        typical_sec=math.fsum(part.typical_sec for part in parts),
        steps_sec=wall,
    )
    return whole, parts


def _excluded_sec(steps: Iterable[StepRecord]) -> dict[str, float]:
    excluded = [(cause, sec) for one in steps for cause, sec in one.excluded_sec.items() if _is_duration(sec) and sec]
    return {cause: sum(sec for of, sec in excluded if of == cause) for cause in sorted(dict(excluded))}


def middle_half(times: Sequence[float]) -> list[int]:
    """Places of the middle half of *times*: without the shortest and the longest quarter, both rounded down."""
    ordered = sorted(range(len(times)), key=times.__getitem__)
    return sorted(ordered[len(times) // 4 : len(times) - len(times) // 4])


def _by_step(batches_sec: Sequence[float], steps: Sequence[StepRecord]) -> tuple[float, ...]:
    """Sums over the batches of each of *steps*; none if these are others, or have what ran between steps, too."""
    size, odd = divmod(len(batches_sec), len(steps))
    if odd or not size or _excluded_sec(steps) or not all(map(_is_duration, batches_sec)):
        return ()
    return tuple(math.fsum(batches_sec[at : at + size]) for at in range(0, len(batches_sec), size))


def _stalls(step: PartTiming, parts: Sequence[PartTiming]) -> Stalls | None:
    middle = middle_half(step.steps_sec)
    stalled = [
        place
        for place in {*range(len(step.steps_sec))}.difference(middle)
        if step.steps_sec[place] > _STALLS_FROM * step.typical_sec
    ]

    def longer_sec(part: PartTiming) -> float:
        return math.fsum(part.steps_sec[place] - part.typical_sec for place in stalled)

    part = max(parts, key=longer_sec).name
    return Stalls(steps=len(stalled), seconds=longer_sec(step), part=part) if stalled else None


def _is_duration(seconds: float) -> bool:
    return 0 <= seconds <= _LONGEST_SEC  # false for NaN as well


_ROWS: tuple[BudgetKey, ...] = get_args(BudgetKey)
_DATA = {"data_wait", "transfer"}
_NO_COMPUTE = {*_DATA, "bubble", "other"}  # phases of a step in which the model does nothing
# The rows that a trace divides, by fields of ``PartFilling``; the last has all where nothing is known.
_FILLED: Mapping[BudgetKey, tuple[str, ...]] = {
    "operators": ("operators_ns",),
    "communication": ("communication_ns",),
    "idle": ("idle_ns", "copies_ns"),
    "compute": ("matmul_ns",),
}


def build_budget(
    *,
    timing: TimingProfile | None,
    traced: TracedStep | None,
    peak_sec: Sequence[float | None],
    lower_bound: bool,
) -> Budget | None:
    """The account of one step; None if no step was timed.

    *peak_sec* is what the typical step's executed model FLOPs, and all its executed FLOPs, take at the device's peaks.
    """
    if timing is None or timing.global_step.typical_sec <= 0:
        return None
    fillings, notes = traced and traced.filling, []
    times_ns = _spent_ns(timing.parts, fillings or {}, on_device=traced is not None and traced.shows_device)
    if fillings is None:
        times_ns |= dict.fromkeys(("operators", "communication", "idle"))
        notes.append(
            "Other operators, communication and idle are n/a without a trace that shows what filled the phases."
        )
    model_sec, executed_sec = peak_sec
    if model_sec is not None and executed_sec is not None:
        model_ns, others_ns = whole_ns(model_sec), whole_ns(executed_sec - model_sec)
        left_ns = (times_ns["compute"] or 0) - model_ns - others_ns
        if left_ns < 0 and executed_sec <= timing.global_step.typical_sec:  # else why MFU is n/a says it
            notes.append("FLOPs at the peak are n/a: matmul-like operators took less time than that.")
        elif left_ns >= 0:
            times_ns |= {"model": model_ns, "other_flops": others_ns, "compute": left_ns}
            if lower_bound:
                notes.append(
                    "The FLOPs are lower bounds, and so are the rows at the peak; the row after is at most that."
                )
    return Budget(wall_ns=sum(filter(None, times_ns.values())), rows_ns=times_ns, notes=tuple(notes))


def whole_ns(seconds: float) -> int:
    """*seconds* to the nearest nanosecond."""
    return round(seconds * 1e9)


def _spent_ns(
    parts: Sequence[PartTiming], fillings: Mapping[str, PartFilling], *, on_device: bool
) -> dict[BudgetKey, int | None]:
    """Nanoseconds of each row before any peak; what no trace divides is computing."""
    spent = Counter[BudgetKey](dict.fromkeys(_ROWS[2:], 0))
    # If the wait for data is not apart from what is no such wait, it stands in ``other``.
    of_data = {part.phases for part in parts if _DATA.issuperset(part.phases)}
    sees_data = any("data_wait" in phases for phases in of_data)
    for part in parts:
        typical_ns = whole_ns(part.typical_sec)
        if _NO_COMPUTE.issuperset(part.phases):
            spent["data" if sees_data and part.phases in of_data else "other"] += typical_ns
            continue
        inside = [fillings[phase] for phase in part.phases if phase in fillings]
        weights = {row: sum(getattr(one, name) for one in inside for name in names) for row, names in _FILLED.items()}
        if on_device and (traced_ns := sum(weights.values())):
            weights["communication"] = weights["communication"] * typical_ns // traced_ns
            weights["idle"] = max(0, typical_ns + weights["idle"] - sum(weights.values()))
        spent.update(dict(zip(weights, apportioned(typical_ns, list(weights.values())), strict=True)))
    return dict.fromkeys(_ROWS) | dict(spent) | ({} if sees_data else {"data": None})


def apportioned(total_ns: int, weights: Sequence[int]) -> list[int]:
    """*total_ns* in proportion to *weights*, as whole nanoseconds that add up to it; to the last if none is above 0."""
    whole = sum(weights)
    if whole <= 0:
        return [0] * (len(weights) - 1) + [total_ns]
    until = [0, *((2 * total_ns * running + whole) // (2 * whole) for running in accumulate(weights))]
    return [last - first for first, last in zip(until, until[1:], strict=False)]
