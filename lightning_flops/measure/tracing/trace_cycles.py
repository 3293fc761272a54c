"""Which steps after the timed ones are traced, until one can be compared with the counted step."""

from __future__ import annotations

from collections.abc import Callable

from lightning_flops.config import TraceSchedule
from lightning_flops.measure.parts import Parts
from lightning_flops.measure.tracing.step_tracer import StepTracer
from lightning_flops.records import StepSignature, TracedStepRecord

_LEAST_TRIES = 3
"""Up to this many cycles run, whatever the schedule says, until a step has the counted step's signature."""

_MOST_OPERATORS = 100_000
"""Unless the user has said how many steps are traced, they are fewer if they would run more operators than these: an
operator leaves about ten events in a trace, and a million take torch seconds to write."""


class TraceCycles(Parts):
    """Runs the cycles of a schedule, wait, warm up, record, with a *tracer*; None: nothing is traced."""

    def __init__(self, tracer: StepTracer | None, schedule: TraceSchedule) -> None:
        super().__init__()
        self._tracer = tracer
        self._schedule = schedule
        self._active = schedule.active
        self._warms_up_until = schedule.wait + schedule.warmup
        self._is_alike: Callable[[StepSignature], bool] = lambda signature: True
        """Whether a step of this signature can be compared with the counted one."""
        self._position = self._cycles = 0
        self._signatures: list[StepSignature] = []
        self._alike = False
        self.traces: list[TracedStepRecord] = []  # the traces, one of each cycle
        self.over = tracer is None  # whether no step will be recorded any more

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be recorded, in sentences."""
        return () if self._tracer is None or self._tracer.lost is None else (self._tracer.lost,)

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
        if self._tracer is None or self.over:
            return
        if self._position >= self._warms_up_until:
            self._tracer.start(index)
        elif not self.waits:
            self._tracer.warm_up()
        self.over = self._tracer.lost is not None

    def enter(self, part: str, *, counts: bool = True) -> None:
        """*part* of the step begins."""
        super().enter(part, counts=counts)
        if self._tracer is not None:
            self._tracer.enter(part)

    def leave(self) -> None:
        """The part entered last ends."""
        if self._tracer is not None:
            self._tracer.leave()

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
        tracer = self._tracer
        if tracer is None or self.over or not self._signatures:
            return
        record = tracer.stop(*self._signatures)
        if record is not None:
            self.traces.append(record)
        self._alike |= all(map(self._is_alike, self._signatures))
        self._signatures.clear()
        self._position = 0
        self._cycles += 1
        enough = self._cycles >= self._schedule.repeat and (self._alike or self._cycles >= _LEAST_TRIES)
        self.over = enough or tracer.lost is not None

    def give_up(self) -> None:
        """Stop recording for good, and remove everything from torch."""
        self.over = True
        if self._tracer is not None:
            self._tracer.give_up()
