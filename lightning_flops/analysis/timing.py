"""The timing of a step: each part's mean over the timed steps, their spread, and a typical step.

A typical step is the mean of the middle half of the timed steps by wall time. Which steps these are is the same for
all parts, so the parts still add up. One hiccup of the machine is in none of them: it is a stall.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import get_args

from lightning_flops.records import PhaseSeconds, ProcessorLoss, StepRecord, TimePhase
from lightning_flops.schema.step import PartTiming, Stalls, TimingProfile, phases_text

_PHASES: tuple[TimePhase, ...] = get_args(TimePhase)

_STALLS_FROM = 1.1
"""A step that takes so many times as long as a typical one has stalled."""

_LONGEST_SEC = 1e9
"""Thirty years: no step takes longer."""

assert tuple(field.name for field in fields(PhaseSeconds)) == _PHASES, "a step has one time for every phase"


def is_timed(step: StepRecord) -> bool:
    """Whether the times of *step* are possible: no part negative or absurd, their sum above zero."""
    if step.seconds is None:
        return False
    return all(_is_duration(getattr(step.seconds, phase)) for phase in _PHASES) and step.seconds.total > 0


_OF_TRAINING: tuple[TimePhase, ...] = ("backward", "bubble", "optimizer")
"""Phases that only a run of training has."""


def build_timing(
    steps: Sequence[StepRecord],
    *,
    mixed_phases: Iterable[TimePhase],
    trains: bool = True,
    processor: ProcessorLoss | None = None,
) -> TimingProfile | None:
    """Means and spread over *steps*.

    Args:
        steps: steps for which ``is_timed`` holds.
        mixed_phases: phases whose seconds cannot be separated; only their sum is given.
        trains: the run trains. If not, the phases of training that took no time are not there, instead of taking 0 s.
        processor: processor time of these steps, in each batch.

    Returns:
        None without steps.
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
    step = replace(
        _part((), wall, middle),
        mean_sec=math.fsum(part.mean_sec for part in parts),
        typical_sec=math.fsum(part.typical_sec for part in parts),
    )
    excluded: Counter[str] = Counter()
    for one in steps:
        excluded.update({cause: sec for cause, sec in one.excluded_sec.items() if _is_duration(sec)})
    return TimingProfile(
        stalls=_stalls(parts, step, middle),
        parts=parts,
        global_step=step,
        # If the wait was not timed apart, the host did not see it either.
        reader_sec=None if "data_wait" in mixed else _mean([step.reader_sec for step in steps]),
        excluded_sec={cause: sec for cause, sec in sorted(excluded.items()) if sec},
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
    if not stalled:
        return None

    def longer_sec(part: PartTiming) -> float:
        return math.fsum(part.steps_sec[place] - part.typical_sec for place in stalled)

    most = max(parts, key=longer_sec)
    return Stalls(steps=len(stalled), seconds=longer_sec(step), part=phases_text(most.phases))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and _is_duration(value)]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def _is_duration(seconds: float) -> bool:
    return 0 <= seconds <= _LONGEST_SEC  # false for NaN as well
