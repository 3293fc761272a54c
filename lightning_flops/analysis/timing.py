"""The timing of a step: each part's mean over the timed steps, their spread, and a typical step.

A typical step is the mean of the middle half of the timed steps by wall time. Which steps these are is the same for
all parts, so the parts still add up. One hiccup of the machine is in none of them: it is a stall.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import get_args

from lightning_flops.records import PhaseSeconds, ProcessorLoss, StepRecord, TimePhase, WindowRecord
from lightning_flops.schema.step import PartTiming, Stalls, TimingProfile

_PHASES: tuple[TimePhase, ...] = get_args(TimePhase)
_OF_TRAINING: tuple[TimePhase, ...] = ("backward", "bubble", "optimizer")
_STALLS_FROM = 1.1  # a step that takes so many times as long as a typical one has stalled
_NO_LOSS = ProcessorLoss(seconds=0.0, batches_sec=(), waited_share=None)  # nothing is known
_LEAST_PLAIN = 4  # from fewer steps no typical one is known
_LONGEST_SEC = 1e9  # thirty years: no step takes longer


def is_timed(step: StepRecord) -> bool:
    """Whether the times of *step* are possible: no part negative or absurd, their sum above zero."""
    seconds = step.seconds
    return seconds is not None and all(_is_duration(getattr(seconds, one)) for one in _PHASES) and seconds.total > 0


def timed_steps(window: WindowRecord) -> tuple[list[StepRecord], float]:
    """The steps of *window* whose times are possible, and how many times as long as a plain step one took.

    Marks cost time, on a host-bound GPU above all. So the typical step is one of those between two stamps alone, and
    each time of the others is scaled to it.
    """
    steps = [step for step in window.timed_steps if is_timed(step)]
    plain = [seconds for seconds in window.plain_steps_sec if 0 < seconds <= _LONGEST_SEC]
    if not steps or len(plain) < _LEAST_PLAIN:
        return steps, 1.0
    longer = _typical([step.seconds.total for step in steps if step.seconds is not None]) / _typical(plain)
    return [replace(step, seconds=_scaled(step.seconds, 1 / longer)) for step in steps], longer


def _typical(times: Sequence[float]) -> float:
    middle = middle_half(times)
    return math.fsum(times[place] for place in middle) / len(middle)


def _scaled(seconds: PhaseSeconds | None, factor: float) -> PhaseSeconds | None:
    return seconds and PhaseSeconds(**{name: factor * spent for name, spent in asdict(seconds).items()})


def build_timing(
    steps: Sequence[StepRecord],
    *,
    mixed_phases: Iterable[TimePhase],
    trains: bool = True,
    processor: ProcessorLoss | None = None,
) -> TimingProfile | None:
    """Means and spread over *steps*, for which ``is_timed`` holds; None without any.

    Of *mixed_phases*, which cannot be separated, only the sum is given. Phases of training that took no time are not
    there in a run that does not train.
    """
    seconds = [step.seconds for step in steps if step.seconds is not None]
    if not seconds:
        return None
    mixed = tuple(phase for phase in _PHASES if phase in set(mixed_phases))
    wall = [one.total for one in seconds]
    middle = middle_half(wall)
    parts = tuple(_part(phases, times, middle) for phases, times in _by_part(seconds, mixed, trains=trains).items())
    sums = (math.fsum(part.mean_sec for part in parts), math.fsum(part.typical_sec for part in parts))
    step = PartTiming(phases=(), mean_sec=sums[0], typical_sec=sums[1], steps_sec=tuple(wall))
    measured = _NO_LOSS if processor is None else processor
    return TimingProfile(
        stalls=_stalls(parts, step, middle),
        parts=parts,
        global_step=step,
        reader_sec=None if "data_wait" in mixed else _reader_sec(steps),  # not timed apart, and so not by the host
        excluded_sec=_excluded_sec(steps),
        excludes_in_each=all(any(one.excluded_sec.values()) for one in steps),
        processor_steps_sec=_by_step(measured.batches_sec, len(seconds)),
        starved_share=measured.waited_share,
        cpu_system_ratio=measured.busy_share,
        heat_limited_share=measured.heat_share,
    )


def _by_part(
    seconds: Sequence[PhaseSeconds], mixed: tuple[TimePhase, ...], *, trains: bool
) -> dict[tuple[TimePhase, ...], list[float]]:
    """Each step's time of each phase, of the *mixed* ones together, without phases that such a run does not have."""
    times = {
        together: [math.fsum(getattr(one, phase) for phase in together) for one in seconds]
        for together in dict.fromkeys(mixed if phase in mixed else (phase,) for phase in _PHASES)
    }
    rare = {(phase,) for phase in (("bubble",) if trains else _OF_TRAINING)}  # only pipelines have a bubble
    return {together: of_steps for together, of_steps in times.items() if together not in rare or any(of_steps)}


def _reader_sec(steps: Sequence[StepRecord]) -> float | None:
    """Mean of what the reader took; None where one of *steps* does not know it."""
    known = [one.reader_sec for one in steps if one.reader_sec is not None and _is_duration(one.reader_sec)]
    return math.fsum(known) / len(known) if len(known) == len(steps) else None


def _excluded_sec(steps: Iterable[StepRecord]) -> dict[str, float]:
    """What was left out of all *steps* together, by cause."""
    excluded: Counter[str] = Counter()
    for one in steps:
        excluded.update({cause: sec for cause, sec in one.excluded_sec.items() if _is_duration(sec)})
    return {cause: sec for cause, sec in sorted(excluded.items()) if sec}


def middle_half(times: Sequence[float]) -> list[int]:
    """Places of the middle half of *times*: without the shortest and the longest quarter, both rounded down."""
    ordered = sorted(range(len(times)), key=times.__getitem__)
    return sorted(ordered[len(times) // 4 : len(times) - len(times) // 4])


def _part(phases: tuple[TimePhase, ...], times: Sequence[float], middle: Sequence[int]) -> PartTiming:
    return PartTiming(
        phases=phases,
        mean_sec=math.fsum(times) / len(times),
        typical_sec=math.fsum(times[place] for place in middle) / len(middle),
        steps_sec=tuple(times),
    )


def _by_step(batches_sec: Sequence[float], steps: int) -> tuple[float, ...]:
    """Sums over the batches of each of so many *steps*; none if the batches are not those of these steps."""
    size, odd = divmod(len(batches_sec), steps)
    if odd or not size or not all(map(_is_duration, batches_sec)):
        return ()
    return tuple(math.fsum(batches_sec[at : at + size]) for at in range(0, len(batches_sec), size))


def _stalls(parts: Sequence[PartTiming], step: PartTiming, middle: Sequence[int]) -> Stalls | None:
    others = set(range(len(step.steps_sec))).difference(middle)
    stalled = [place for place in others if step.steps_sec[place] > _STALLS_FROM * step.typical_sec]

    def longer_sec(part: PartTiming) -> float:
        return math.fsum(part.steps_sec[place] - part.typical_sec for place in stalled)

    most = max(parts, key=longer_sec)
    return Stalls(steps=len(stalled), seconds=longer_sec(step), part=most.name) if stalled else None


def _is_duration(seconds: float) -> bool:
    return 0 <= seconds <= _LONGEST_SEC  # false for NaN as well
