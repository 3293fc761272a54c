"""The timing of a step: each part's mean over the timed steps, their spread, and a typical step.

A typical step is the mean of the middle half of the timed steps by wall time. Which steps these are is the same for
all parts, so the parts still add up. One hiccup of the machine is in none of them: it is a stall.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import get_args

from lightning_flops.records import ProcessorLoss, StepRecord, TimePhase
from lightning_flops.schema.step import PartTiming, Stalls, TimingProfile

_PHASES: tuple[TimePhase, ...] = get_args(TimePhase)
_OF_TRAINING: tuple[TimePhase, ...] = ("backward", "bubble", "optimizer")
_STALLS_FROM = 1.1  # a step that takes so many times as long as a typical one has stalled
_LONGEST_SEC = 1e9  # thirty years: no step takes longer


def is_timed(step: StepRecord) -> bool:
    """Whether the times of *step* are possible: no part negative or absurd, their sum above zero."""
    seconds = step.seconds
    return seconds is not None and all(_is_duration(getattr(seconds, one)) for one in _PHASES) and seconds.total > 0


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
    samples = {
        together: [math.fsum(getattr(one, phase) for phase in together) for one in seconds]
        for together in dict.fromkeys(mixed if phase in mixed else (phase,) for phase in _PHASES)
    }
    for phase in ("bubble",) if trains else _OF_TRAINING:  # only pipelines have a bubble
        if not any(samples.get((phase,), (1,))):
            del samples[phase,]
    wall = [one.total for one in seconds]
    middle = middle_half(wall)
    parts = tuple(_part(together, times, middle) for together, times in samples.items())
    sums = (math.fsum(part.mean_sec for part in parts), math.fsum(part.typical_sec for part in parts))
    step = PartTiming(phases=(), mean_sec=sums[0], typical_sec=sums[1], steps_sec=tuple(wall))
    excluded: Counter[str] = Counter()
    for one in steps:
        excluded.update({cause: sec for cause, sec in one.excluded_sec.items() if _is_duration(sec)})
    readers = [one.reader_sec for one in steps if one.reader_sec is not None and _is_duration(one.reader_sec)]
    # If the wait was not timed apart, the host did not see it either.
    sees_reader = len(readers) == len(steps) and "data_wait" not in mixed
    return TimingProfile(
        stalls=_stalls(parts, step, middle),
        parts=parts,
        global_step=step,
        reader_sec=math.fsum(readers) / len(readers) if sees_reader else None,
        excluded_sec={cause: sec for cause, sec in sorted(excluded.items()) if sec},
        excludes_in_each=all(any(one.excluded_sec.values()) for one in steps),
        processor_steps_sec=() if processor is None else _by_step(processor.batches_sec, len(seconds)),
        starved_share=None if processor is None else processor.waited_share,
        cpu_system_ratio=None if processor is None else processor.busy_share,
        heat_limited_share=None if processor is None else processor.heat_share,
    )


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
