"""The states of a window; each holds what exists only in that state.

The ``Recorder`` tells its state what happens in the running step. At the end of a step, and when the scope of a batch
is left, the state returns the next state, which may be itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from lightning_flops.instrument.counting.part_counter import PartCounter
from lightning_flops.instrument.module_scope import describe_modules
from lightning_flops.instrument.timing.phase_timer import Mark, PhaseTimer
from lightning_flops.instrument.torch_private.profiling import profiler_is_recording
from lightning_flops.instrument.window_parts import CountedStep, Measured, RunningStep, Times, WindowParts
from lightning_flops.records import (
    StepRecord,
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
