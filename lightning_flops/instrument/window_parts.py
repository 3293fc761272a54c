"""What the states of a window share: the running step, what was counted and timed, what the window is made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from lightning_flops.instrument.batches import never_alike, shapes_text
from lightning_flops.instrument.border import UndoLedger
from lightning_flops.instrument.counting.part_counter import Counter, PartCounter
from lightning_flops.instrument.notes import Notes
from lightning_flops.instrument.timing.clocks import Clock
from lightning_flops.instrument.timing.phase_timer import PhaseTimer, StepMarks
from lightning_flops.instrument.tracing.trace_cycles import TraceCycles
from lightning_flops.records import BucketFlops, ModuleRecord, Shapes, StepRecord, StepSignature


class RunningStep:
    """What is known of the step that is running."""

    def __init__(self) -> None:
        self.batches: list[Shapes] = []
        self._samples: int | None = 0
        self._tokens: int | None = 0
        self._forwards = 0
        self._backwards = 0
        self._updates = 0

    def enter(self, part: str) -> None:
        """*part*, which counts by itself, began in this step."""
        if part == "forward":
            self._forwards += 1
        elif part == "backward":
            self._backwards += 1
        elif part == "optimizer":
            self._updates += 1

    def add_batch(self, shapes: Shapes, *, samples: int | None, tokens: int | None) -> None:
        """A batch of this step went through the loop; None for samples or tokens that are not known."""
        self.batches.append(never_alike(shapes))
        self._samples = None if self._samples is None or samples is None else self._samples + samples
        self._tokens = None if self._tokens is None or tokens is None else self._tokens + tokens

    @property
    def signature(self) -> StepSignature:
        """What the step is compared by."""
        return StepSignature(
            batches=tuple(shapes_text(shapes) for shapes in self.batches),
            forwards=self._forwards,
            backwards=self._backwards,
            updates=self._updates,
        )

    def record(self, index: int) -> StepRecord:
        """The step's record; *index* steps of the run came before it."""
        return StepRecord(
            index=index,
            signature=self.signature,
            micro_steps=len(self.batches),
            samples=self._samples,
            tokens=self._tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedStep:
    """What one step has spent."""

    flops: BucketFlops
    sampled: bool
    """It was counted from the moment on at which its shapes were known, and not as a step of a window."""
    lower_bound: bool
    """An operator that may spend FLOPs was not counted."""
    compile_sec: float
    """How long torch has compiled something in it, which it would have done uncounted, too."""
    data_dependent: bool = False
    """Values in its tensors have decided sizes: another step of its shapes may cost something else."""


@dataclass(slots=True, kw_only=True)
class WindowParts:
    """What the states of one window share: what it was made with, and how far the run is."""

    root: nn.Module
    whole: Callable[[], nn.Module | None]
    profile_step: int
    timing_steps: int
    settle_steps: int
    """Steps to leave alone after the counted one."""
    clock: Clock[Any] | None
    """None where the device cannot be timed."""
    new_counter: Callable[[nn.Module], Counter]
    tracing: TraceCycles
    notes: Notes
    undo: UndoLedger
    """Takes off torch whatever this window has put there."""
    counted: Callable[[CountedStep], None] = lambda step: None
    """Is told of every step that was counted to its end."""
    steps_done: int = 0
    step: RunningStep = field(default_factory=RunningStep)

    def end_step(self) -> RunningStep:
        """The running step is over, and another one runs."""
        ended, self.step = self.step, RunningStep()
        return ended


class Times:
    """The steps that were watched while some were timed.

    Args:
        clock: stamps the parts of a step.
        counted: the signature of the counted step.
    """

    def __init__(self, clock: Clock[Any], counted: StepSignature) -> None:
        self.timer = PhaseTimer(clock)
        self.watched: list[tuple[StepRecord, StepMarks]] = []
        self.matches = 0
        """How many of them have the counted step's signature."""
        self.variable = False
        """Whether steps keep changing in their signatures, or in what they spend."""
        self._clock = clock
        self._counted = counted

    def watch(self, step: StepRecord, marks: StepMarks) -> None:
        """*step* ran, with these borders."""
        self.watched.append((step, marks))
        self.matches += step.signature == self._counted

    def read(self) -> tuple[StepRecord, ...]:
        """The steps that can be compared with what was counted, with their seconds."""
        if not self.watched:
            return ()
        self._clock.settle()
        steps = []
        for step, marks in self.watched:
            if not self.variable and step.signature != self._counted:
                continue
            times = self.timer.read(marks)
            steps.append(
                replace(step, seconds=times.seconds, reader_sec=times.reader_sec, excluded_sec=times.excluded_sec)
            )
        return tuple(steps)


@dataclass(slots=True, kw_only=True)
class Measured:
    """What a window has measured so far. It is made at the end of the first counted step."""

    counter: PartCounter
    counted: list[StepRecord]
    """One step; several where signatures keep changing."""
    modules: tuple[ModuleRecord, ...]
    times: Times | None
    """None where the device cannot be timed."""
    timing_steps: int
    """How many steps are to be timed."""
    complete: bool = False
    """Whether counts and times are complete."""

    @property
    def variable(self) -> bool:
        """Steps keep changing in their signatures, or in what they spend."""
        return self.times is not None and self.times.variable

    @property
    def signatures_are_alike(self) -> bool:
        """The counted steps have one signature."""
        return len({step.signature for step in self.counted}) == 1

    def is_comparable(self, signature: StepSignature) -> bool:
        """Whether a step of this signature can be compared with what was counted."""
        return self.variable or signature == self.counted[0].signature
