"""What a window has measured so far: its steps as they run, and those that were counted and timed."""

from __future__ import annotations

import operator
from collections import Counter as Tally
from dataclasses import dataclass, field

from lightning_flops.measure.batches import shapes_text
from lightning_flops.measure.counting.flop_counter import PartCounter
from lightning_flops.measure.timing.phase_timer import Mark, PhaseTimer
from lightning_flops.records import SCORING, ModuleRecord, Shapes, StepRecord, StepSignature


@dataclass(slots=True)
class RunningStep:
    """What is known of the step that is running."""

    index: int = 0  #: Steps of the run before it, once it is over.
    batches: list[Shapes] = field(default_factory=list)
    samples: int | None = 0
    tokens: int | None = 0
    phases: set[str] = field(default_factory=set)
    rollouts: tuple[tuple[int, int], ...] = ()
    parts: list[str] = field(default_factory=list)  #: Each forward, backward and update by itself, when it is over.

    def record(self) -> StepRecord:
        """The step's record."""
        parts = Tally(self.parts)
        return StepRecord(
            index=self.index,
            signature=StepSignature(
                batches=tuple(map(shapes_text, self.batches)),
                forwards=parts["forward"],
                backwards=parts["backward"],
                updates=parts["optimizer"],
                phases=tuple(sorted(self.phases - {SCORING})),
            ),
            micro_steps=len(self.batches),
            samples=self.samples,
            tokens=self.tokens,
            rollouts=self.rollouts,
        )


TimedStep = tuple[StepRecord, list[Mark]]


@dataclass(slots=True, kw_only=True)
class Measured:
    """What a window has measured since its first step was counted."""

    counter: PartCounter
    counted: list[StepRecord]  #: One step; several where signatures keep changing.
    modules: tuple[ModuleRecord, ...]
    #: The steps that ran while some were timed.
    watched: list[TimedStep] = field(default_factory=list)
    plain: list[TimedStep] = field(default_factory=list)  #: Those of which no part was timed.
    variable: bool = False  #: Steps keep changing in their signatures.
    complete: bool = False  #: Whether all counts and times are there.

    def is_comparable(self, signature: StepSignature) -> bool:
        """Whether a step of this signature can be compared with what was counted."""
        return self.variable or signature == self.counted[0].signature

    def may_be_comparable(self, signature: StepSignature) -> bool:
        """Whether a step can be of whose parts only those are known that are heard without marks, in some loops."""
        counted = self.counted[0].signature
        heard = (signature.forwards, signature.backwards, signature.updates)
        known = (counted.forwards, counted.backwards, counted.updates)
        return signature.batches == counted.batches and all(map(operator.contains, ((0, one) for one in known), heard))

    def timed(self, timer: PhaseTimer) -> tuple[list[StepRecord], list[float]]:
        """The steps that can be compared with what was counted, and the seconds of those without parts."""
        timer.clock.settle()
        alike = (one for one in self.watched if self.is_comparable(one[0].signature))
        plain = (timer.read(*one) for one in self.plain if self.may_be_comparable(one[0].signature))
        plain_sec = [one.seconds.total for one in plain if one.seconds is not None]
        return [timer.read(*one) for one in alike], plain_sec
