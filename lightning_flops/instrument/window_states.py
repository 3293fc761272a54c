"""The states of a window; each holds what exists only in that state.

The ``Recorder`` tells its state what happens in the running step. At the end of a step, and when the scope of a batch
is left, the state returns the next state, which may be itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from lightning_flops.instrument.batches import never_alike, shapes_text
from lightning_flops.instrument.border import UndoLedger
from lightning_flops.instrument.counting.part_counter import Counter, PartCounter
from lightning_flops.instrument.module_scope import describe_modules
from lightning_flops.instrument.notes import Notes
from lightning_flops.instrument.timing.clocks import Clock
from lightning_flops.instrument.timing.phase_timer import Mark, PhaseTimer, StepMarks
from lightning_flops.instrument.torch_private.profiling import profiler_is_recording
from lightning_flops.instrument.tracing.trace_cycles import TraceCycles
from lightning_flops.records import (
    BucketFlops,
    ModuleRecord,
    Shapes,
    StepRecord,
    StepSignature,
    TimePhase,
)

_SEEN_BY_PROFILER = (
    "Another profiler recorded the counted step: its trace has the counter's own work in that step, which takes longer "
    "there than the others."
)

_FEW_MATCHES = 10
"""Signatures "keep changing" when fewer than one in this many of the steps that were watched has the counted step's.
That is asked whenever as many more were watched as are to be timed, and at least so many. So it is known at the latest
when this many times ``timing_steps`` were watched."""


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


class State:
    """A state of a window. By default it leaves the running step alone and changes nothing."""

    idle = False
    """Whether steps pass by, neither counted, timed nor traced."""
    waiting = False
    """Whether the step to count is still to come."""
    counting = False
    """Whether the running step is counted."""
    closed = False
    """Whether nothing more is measured."""
    timer: PhaseTimer | None = None
    """Takes the marks of the running step if it is timed."""
    measured: Measured | None = None
    """None before the end of the first counted step."""
    left_undone: str | None = None
    """What the report must say of the run, or of the window, if that ends now: a sentence without its subject."""

    def __init__(self, window: WindowParts) -> None:
        self._window = window

    @property
    def tracing(self) -> bool:
        """The running step is traced, or warms up for it."""
        return False

    def open(self) -> State:
        """The step that begins now is the one to count, if none was yet."""
        return self

    def sample(self) -> State:
        """The running step is counted, if this is a state in which steps pass by."""
        return self

    def batch_begins(self, scope: ExitStack) -> None:
        """A batch begins; leaving *scope* removes what is put on torch for it."""

    def batch_ends(self) -> State:
        """The scope of a batch that began in this state was left."""
        return self

    def batch_was_abandoned(self) -> None:
        """The scope of a batch that began in this state was left after the window was abandoned."""

    def enter(self, part: TimePhase | str, *, counts: bool) -> None:
        """*part* of the step begins; whether it *counts* as a forward, a backward or an update by itself."""
        if counts:
            self._window.step.enter(part)

    def leave(self) -> None:
        """The part entered last ends."""

    def claim(self, part: TimePhase) -> None:
        """What ran since the last part was left, if none is running now, was *part* too."""

    def optimizer_work(self) -> AbstractContextManager[Any]:
        """Inside, what is counted is the optimizer's."""
        return nullcontext()

    def step_ends(self) -> State:
        """The last batch of the running step went through the loop; its scope may not be left yet."""
        self._window.end_step()
        self._window.steps_done += 1
        return self


class Waiting(State):
    """The step to count is still to come."""

    idle = True
    waiting = True

    def __init__(self, window: WindowParts) -> None:
        super().__init__(window)
        self._sampler: PartCounter | None = None

    def open(self) -> State:
        """The step that begins now is the one to count."""
        window = self._window
        counter = PartCounter(window.new_counter(window.root))
        window.undo.add(counter.give_up)
        return Counting(window, counter)

    def sample(self) -> State:
        """The running step is counted, beside every window; afterwards the step to count is still to come."""
        window = self._window
        if self._sampler is None:
            self._sampler = PartCounter(window.new_counter(window.root))
            window.undo.add(self._sampler.give_up)
        return Sampling(window, self._sampler, self)

    def step_ends(self) -> State:
        """A step ended that is not profiled; the next one may be the one to count."""
        super().step_ends()
        return self.open() if self._window.steps_done >= self._window.profile_step else self


class _CountingSteps(State, ABC):
    """The running step is counted. It ends when the scope of its last batch is left, with what ran until then.

    Args:
        window: what the states share.
        counter: counts.
    """

    counting = True

    def __init__(self, window: WindowParts, counter: PartCounter) -> None:
        super().__init__(window)
        self._counter = counter
        self._seen_by_profiler = False
        self._ended: RunningStep | None = None  # until its batch's scope is left

    def batch_begins(self, scope: ExitStack) -> None:
        """Count until *scope* is left."""
        self._seen_by_profiler = profiler_is_recording()
        scope.enter_context(self._counter.on())

    def batch_ends(self) -> State:
        """If the step is over, too, take what was counted."""
        window = self._window
        if not self.waiting and (self._seen_by_profiler or profiler_is_recording()):
            window.notes.add(_SEEN_BY_PROFILER)
        step, self._ended = self._ended, None
        if step is None:
            return self
        record = replace(step.record(window.steps_done), flops=self._counter.step_ends())
        window.steps_done += 1
        counter = self._counter
        lower_bound = any(one.heavy for one in counter.flops.uncounted.values())
        window.counted(
            CountedStep(
                flops=counter.step_buckets,
                sampled=self.waiting,
                lower_bound=lower_bound,
                compile_sec=counter.step_compile_sec,
                data_dependent=counter.step_is_data_dependent,
            )
        )
        return self._counted(record)

    def batch_was_abandoned(self) -> None:
        """Remove the counter again: if it was removed inside a backward, torch has put a part of it back."""
        self._counter.sweep()

    def enter(self, part: TimePhase | str, *, counts: bool) -> None:
        """*part* of the step begins."""
        self._counter.enter(part)
        super().enter(part, counts=counts)

    def leave(self) -> None:
        """The part entered last ends."""
        self._counter.leave()

    def claim(self, part: TimePhase) -> None:
        """What ran since the last part was left, if none is running now, was *part* too."""
        self._counter.claim(part)

    def optimizer_work(self) -> AbstractContextManager[Any]:
        """Inside, what is counted is the optimizer's."""
        return self._counter.in_optimizer()

    def step_ends(self) -> State:
        """The step's last batch is through; it is over when the batch's scope is left."""
        self._ended = self._window.end_step()
        return self

    @abstractmethod
    def _counted(self, step: StepRecord) -> State:
        """*step* was counted to its end; returns the next state."""


class Sampling(_CountingSteps):
    """One step is counted beside every window, for the FLOPs of the run.

    Args:
        window: what the states share.
        counter: counts.
        back: the state that follows.
    """

    waiting = True

    def __init__(self, window: WindowParts, counter: PartCounter, back: State) -> None:
        super().__init__(window, counter)
        self._back = back

    def _counted(self, step: StepRecord) -> State:
        return self._back


class Counting(_CountingSteps):
    """The window's first step is counted."""

    def _counted(self, step: StepRecord) -> State:
        window = self._window
        times = None if window.clock is None else Times(window.clock, step.signature)
        measured = Measured(
            counter=self._counter,
            counted=[step],
            modules=describe_modules(window.root, whole=window.whole(), note=window.notes.add),
            times=times,
            timing_steps=window.timing_steps,
        )
        if times is None:
            return _traces_or_closes(window, measured)
        if window.settle_steps == 0:
            return Timing(window, measured, times)
        return SettlingDown(window, measured, times)


class SettlingDown(State):
    """Steps are left alone until they are like those of the long run."""

    idle = True
    measured: Measured

    def __init__(self, window: WindowParts, measured: Measured, times: Times) -> None:
        super().__init__(window)
        self.measured = measured
        self._times = times
        self._done = 0

    def leave(self) -> None:
        """A part ends that began while the step was counted."""
        self.measured.counter.leave()

    def step_ends(self) -> State:
        """One more step was left alone."""
        super().step_ends()
        self._done += 1
        if self._done < self._window.settle_steps:
            return self
        return Timing(self._window, self.measured, self._times)


class Timing(State):
    """The running step is timed; it begins where this state does."""

    timer: PhaseTimer
    measured: Measured

    def __init__(self, window: WindowParts, measured: Measured, times: Times) -> None:
        super().__init__(window)
        self.timer = times.timer
        self.measured = measured
        self._times = times
        self.timer.begin()

    def enter(self, part: TimePhase | str, *, counts: bool) -> None:
        """*part* of the step begins; the mark keeps whether it counts."""
        self.timer.enter(Mark(part, counts))

    def leave(self) -> None:
        """The part entered last ends."""
        self.timer.leave()

    def claim(self, part: TimePhase) -> None:
        """What ran since the last part was left, if none is running now, was *part* too."""
        self.timer.claim(part)

    def step_ends(self) -> State:
        """A step was timed. The next state depends on how many of the timed steps are like the counted one."""
        window, times = self._window, self._times
        step = window.end_step()
        marks = self.timer.cut()
        for part in marks.entered:
            step.enter(part)
        times.watch(step.record(window.steps_done), marks)
        window.steps_done += 1
        return self._follows(window, times, self.measured.timing_steps)

    def _follows(self, window: WindowParts, times: Times, wanted: int) -> State:
        if times.matches >= wanted:
            return _traces_or_closes(window, self.measured)
        watched = len(times.watched)
        if watched % max(wanted, _FEW_MATCHES) or times.matches * _FEW_MATCHES >= watched:
            return self
        times.variable = True
        del times.watched[:-wanted]
        if len(self.measured.counted) >= len(times.watched):
            return _traces_or_closes(window, self.measured)
        return CountingMore(window, self.measured, times)


class CountingMore(_CountingSteps):
    """As many steps are counted as were timed, because signatures keep changing."""

    measured: Measured

    def __init__(self, window: WindowParts, measured: Measured, times: Times) -> None:
        super().__init__(window, measured.counter)
        self.measured = measured
        self._times = times

    def _counted(self, step: StepRecord) -> State:
        measured, times = self.measured, self._times
        measured.counted.append(step)
        if len(measured.counted) < len(times.watched):
            return self
        return _traces_or_closes(self._window, measured)


class Tracing(State):
    """Steps are traced, or left alone by the trace schedule. A traced step ends like a counted one."""

    measured: Measured
    left_undone = "ended before all was traced that was to be."

    def __init__(self, window: WindowParts, measured: Measured) -> None:
        super().__init__(window)
        self.measured = measured
        self._cycles = window.tracing
        self._ended: RunningStep | None = None  # until its batch's scope is left

    @property
    def tracing(self) -> bool:
        """The running step is traced, or warms up for it."""
        return not self._cycles.waits

    def batch_begins(self, scope: ExitStack) -> None:
        """Trace the batch if the schedule says so. What a tracer puts on torch stays for all batches of a step."""
        self._cycles.batch_begins(self._window.steps_done)

    def batch_ends(self) -> State:
        """If the step is over, too, and was the last to trace, the trace ends."""
        step, self._ended = self._ended, None
        if step is None:
            return self
        self._window.steps_done += 1
        self._cycles.step_ends(step.signature)
        return Closed(self._window, self.measured) if self._cycles.over else self

    def enter(self, part: TimePhase | str, *, counts: bool) -> None:
        """*part* of the step begins."""
        self._cycles.enter(part)
        super().enter(part, counts=counts)

    def leave(self) -> None:
        """The part entered last ends."""
        self._cycles.leave()

    def step_ends(self) -> State:
        """The step's last batch is through; one that was left alone has no scope, and is over now."""
        step = self._window.end_step()
        if self.tracing:
            self._ended = step
        else:
            self._cycles.step_ends(step.signature)
            self._window.steps_done += 1
        return self


class Closed(State):
    """Nothing more is measured."""

    closed = True

    def __init__(self, window: WindowParts, measured: Measured | None) -> None:
        super().__init__(window)
        self.measured = measured


def _traces_or_closes(window: WindowParts, measured: Measured) -> State:
    """The next state, when counts and times are complete."""
    measured.complete = True
    window.tracing.begin(measured.is_comparable)
    return Closed(window, measured) if window.tracing.over else Tracing(window, measured)
