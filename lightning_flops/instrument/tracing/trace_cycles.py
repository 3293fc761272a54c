"""Which steps after the timed ones are traced, and by which tracer, until one can be compared with the counted step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lightning_flops.config import TraceSchedule
from lightning_flops.records import ModuleSecondsRecord, StepSignature, TracedStepRecord

_LEAST_TRIES = 3
"""Up to this many cycles run, whatever the schedule says, until a step has the counted step's signature."""

_MOST_OPERATORS = 100_000
"""Unless the user has said how many steps are traced, they are fewer if they would run more operators than these: an
operator leaves about ten events in a trace, and a million take torch seconds to write."""


class Tracer(Protocol):
    """Records one step, or several in a row; it never raises."""

    @property
    def record(self) -> TracedStepRecord | ModuleSecondsRecord | None:
        """The latest steps that were recorded to their end."""

    @property
    def lost(self) -> str | None:
        """Why something cannot be recorded, in a sentence; None if everything can."""

    def warm_up(self) -> None:
        """The next step, or the one after it, will be recorded."""

    def start(self, index: int) -> None:
        """A step begins, or the next one of its batches; *index* steps of this fit came before it."""

    def enter(self, part: str) -> None:
        """*part* of the step begins."""

    def leave(self) -> None:
        """The part entered last ends."""

    def stop(self, signature: StepSignature) -> None:
        """The steps are over, of this signature or of several: keep the record, and remove everything from torch."""

    def give_up(self) -> None:
        """Stop recording, and remove everything from torch. What was recorded before stays."""


class TraceCycles:
    """Runs the cycles of a schedule, wait, warm up, record, with the first of *tracers* that can record."""

    def __init__(self, tracers: Sequence[Tracer], schedule: TraceSchedule) -> None:
        self._tracers = list(tracers)
        self._schedule = schedule
        self._active = schedule.active
        self._warms_up_until = schedule.wait + schedule.warmup
        self._is_alike: Callable[[StepSignature], bool] = lambda signature: True
        """Whether a step of this signature can be compared with the counted one."""
        self._position = self._cycles = 0
        self._signatures: list[StepSignature] = []
        self._alike = False
        self._records: list[TracedStepRecord | ModuleSecondsRecord] = []
        self.over = not self._tracers
        """Whether no step will be recorded any more."""
        self.notes: list[str] = []
        """What could not be recorded, in sentences."""

    @property
    def traces(self) -> tuple[TracedStepRecord, ...]:
        """The traces, one of each cycle."""
        return tuple(record for record in self._records if isinstance(record, TracedStepRecord))

    @property
    def module_seconds(self) -> ModuleSecondsRecord | None:
        """The module times that were taken instead of a trace."""
        return next((record for record in self._records if isinstance(record, ModuleSecondsRecord)), None)

    @property
    def waits(self) -> bool:
        """Whether the running step is left alone."""
        return self._position < self._schedule.wait

    def begin(self, is_alike: Callable[[StepSignature], bool], *, operators: int = 0) -> None:
        """The first cycle begins with the next step; the counted one ran so many *operators*."""
        self._is_alike = is_alike
        if self._schedule == TraceSchedule():
            self._active = max(1, min(self._active, _MOST_OPERATORS // max(1, operators)))

    def batch_begins(self, index: int) -> None:
        """A batch begins; *index* steps of this fit came before its step."""
        if self.over:
            return
        if self._position >= self._warms_up_until:
            self._tracers[0].start(index)
        elif not self.waits:
            self._tracers[0].warm_up()
        self._replace_if_lost()

    def enter(self, part: str) -> None:
        """*part* of the step begins."""
        if not self.over:
            self._tracers[0].enter(part)

    def leave(self) -> None:
        """The part entered last ends."""
        if not self.over:
            self._tracers[0].leave()

    def step_ends(self, signature: StepSignature) -> None:
        """A step is over, and so is its last batch."""
        if self.over:
            return
        self._position += 1
        if self._position <= self._warms_up_until:
            return
        self._signatures.append(signature)
        if len(self._signatures) >= self._active:
            self.end_cycle()

    def end_cycle(self) -> None:
        """Keep the steps that were recorded to their end, if there are any, also where the run ends before others."""
        if self.over or not self._signatures:
            return
        tracer = self._tracers[0]
        different = next((one for one in self._signatures if not self._is_alike(one)), None)
        tracer.stop(self._signatures[-1] if different is None else different)
        record = tracer.record
        if record is not None and all(record is not kept for kept in self._records):
            self._records.append(record)
        self._signatures.clear()
        self._position = 0
        self._cycles += 1
        self._alike |= different is None
        if not self._replace_if_lost():
            self.over = self._cycles >= self._schedule.repeat and (self._alike or self._cycles >= _LEAST_TRIES)

    def give_up(self) -> None:
        """Stop recording for good, and remove everything from torch."""
        self.over = True
        for tracer in self._tracers:
            tracer.give_up()

    def _replace_if_lost(self) -> bool:
        """If the tracer cannot record, the next one takes over from the next step on."""
        tracer = self._tracers[0]
        if tracer.lost is None:
            return False
        tracer.give_up()
        self.notes.append(tracer.lost)
        del self._tracers[0]
        self.over = not self._tracers
        self._position = self._warms_up_until - 1  # the step that runs ends first
        self._signatures.clear()
        self._cycles, self._alike = 0, False
        return True
