"""Owns the window: micro-steps go in, one ``WindowRecord`` comes out.

A front door translates its framework's events into calls on a ``Recorder``; which step is counted, which are timed and
when the window is over is decided here and nowhere else::

    waiting ── N steps ──> counting ──> settling ──> timing ─────────────────────┬──> tracing ──> closed
                                                       │                         │
                              signatures keep changing └──> counting more ───────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import Enum
from typing import Any, get_args

from torch import nn

from lightning_flops.config import TraceSchedule
from lightning_flops.instrument.batches import Shapes, shapes_text
from lightning_flops.instrument.counting.part_counter import Counter, PartCounter
from lightning_flops.instrument.module_scope import describe_modules
from lightning_flops.instrument.timing.clocks import Clock
from lightning_flops.instrument.timing.loader_queue import Feed
from lightning_flops.instrument.timing.phase_timer import Mark, PhaseTimer, StepMarks
from lightning_flops.instrument.timing.settling import Settling
from lightning_flops.instrument.torch_private.profiling import profiler_is_recording
from lightning_flops.instrument.tracing.trace_cycles import TraceCycles
from lightning_flops.instrument.window_notes import notes_on_times
from lightning_flops.records import (
    ModuleRecord,
    RunContext,
    StepRecord,
    StepSignature,
    TimePhase,
    WindowRecord,
)
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

_SEEN_BY_PROFILER = (
    "Another profiler recorded the counted step: its trace has the counter's own work in that step, which takes longer "
    "there than the others."
)

_TIME_PHASES: tuple[TimePhase, ...] = get_args(TimePhase)

_LIMIT_FACTOR = 10
"""A window watches at most this many times ``timing_steps`` steps for the counted step's signature."""

_FEW_MATCHES = 10
"""Signatures "keep changing" when fewer than one timed step in this many has the counted step's."""


class State(Enum):
    """Where in the window the run is."""

    WAITING = "waiting"
    COUNTING = "counting"
    SETTLING = "settling"
    TIMING = "timing"
    COUNTING_MORE = "counting more"
    TRACING = "tracing"
    CLOSED = "closed"


class _Step:
    """What is known of the step that is running."""

    def __init__(self) -> None:
        self.batches: list[Shapes] = []
        self.samples: int | None = 0
        self.tokens: int | None = 0
        self.forwards = 0
        self.backwards = 0
        self.updates = 0

    def enter(self, part: str) -> None:
        """*part*, which counts by itself, began in this step."""
        if part == "forward":
            self.forwards += 1
        elif part == "backward":
            self.backwards += 1
        elif part == "optimizer":
            self.updates += 1

    def signature(self) -> StepSignature:
        return StepSignature(
            batches=tuple(shapes_text(shapes) for shapes in self.batches),
            forwards=self.forwards,
            backwards=self.backwards,
            updates=self.updates,
        )


class Recorder:
    """One window over the steps of one training run, on one rank.

    The caller tells it when a batch is done (``end_batch``), and when an epoch ends and begins. While ``marking`` is
    true it also runs each batch inside ``batch_scope`` and calls ``enter``/``leave`` around each part of a step.

    Args:
        root: the model whose modules own the work.
        profile_step: the step to count, by the number of steps before it.
        timing_steps: how many steps of the counted step's signature to time.
        settle_steps: steps left alone after the counted one, for the data loader's queue to drain.
        feed: tells whether the loop still lives on batches that were fetched ahead, and is left alone longer; None if
            nobody can tell.
        clock: stamps the parts of a step; None where the device cannot be timed.
        new_counter: makes the FLOP counter when the window opens.
        tracing: traces steps after the timed ones; None: none is traced.
        whole: gives *root* in all its wrappers, which may know more of its parameters; None: nothing is around it.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        profile_step: int,
        timing_steps: int,
        settle_steps: int,
        clock: Clock[Any] | None,
        new_counter: Callable[[nn.Module], Counter],
        feed: Feed | None = None,
        tracing: TraceCycles | None = None,
        whole: Callable[[], nn.Module] | None = None,
    ) -> None:
        self._root = root
        self._whole = whole
        self._tracing = TraceCycles((), TraceSchedule()) if tracing is None else tracing
        self._profile_step = profile_step
        self._timing_steps = timing_steps
        self._settling = Settling(steps=settle_steps, timing_steps=timing_steps, feed=feed, note=self.note)
        self._clock = clock
        self._timer = PhaseTimer(clock) if clock is not None else None
        self._new_counter = new_counter
        self._counter: PartCounter | None = None
        self._modules: tuple[ModuleRecord, ...] = ()
        self._state = State.WAITING
        self._steps_done = 0
        self._matches = 0
        self._step = _Step()
        self._counted: list[StepRecord] = []
        self._timed: list[tuple[StepRecord, StepMarks]] = []
        self._variable = False
        self._notes: list[str] = []
        self._counted_shapes: tuple[Shapes, ...] | None = None
        self._shapes_deceive = False
        self._began = False
        self._ended: _Step | None = None
        self._complete = False
        self._unseen: set[TimePhase] = set()
        if profile_step == 0:
            self._open()

    @property
    def state(self) -> State:
        """Where in the window the run is."""
        return self._state

    @property
    def counting(self) -> bool:
        """The running step is counted; its time means nothing."""
        return self._state in (State.COUNTING, State.COUNTING_MORE)

    @property
    def marking(self) -> bool:
        """The running step's phases must be marked."""
        return self.counting or self._state is State.TIMING or self.tracing

    @property
    def tracing(self) -> bool:
        """The running step is traced, or warms up for it: its time means nothing."""
        return self._state is State.TRACING and not self._tracing.waits

    @property
    def timer(self) -> PhaseTimer | None:
        """What takes the marks of the running step if it is timed, and then instead of ``enter`` and ``leave``.

        They do the same by way of several calls, of which some would be in the time of the part.
        """
        return self._timer if self._state is State.TIMING else None

    @property
    def reached(self) -> bool:
        """A batch of the step to count has begun."""
        return self._began

    @property
    def counted_shapes(self) -> tuple[Shapes, ...] | None:
        """Batch shapes that tell a step with the counted one's FLOPs.

        None before it ended, where several different steps were counted, and where steps of these very shapes had other
        numbers of forwards, backwards or updates, so that shapes tell nothing.
        """
        return None if self._variable or self._shapes_deceive else self._counted_shapes

    @property
    def counted_updates(self) -> int | None:
        """Updates in the counted step; None before it ended."""
        return self._counted[0].signature.updates if self._counted else None

    def note(self, sentence: str) -> bool:
        """Add *sentence* to the report; False if it is there already."""
        if sentence in self._notes:
            return False
        self._notes.append(sentence)
        return True

    def open(self, *, steps_done: int) -> None:
        """The step that begins now is the one to count; so many steps of the run came before it."""
        self._steps_done = steps_done
        if self._state is State.WAITING:
            self._open()

    # ---- the parts of a step

    @contextmanager
    def batch_scope(self) -> Iterator[None]:
        """Run one whole batch inside this, from the wait for it on; it counts when the running step is a counted one.

        A counted or traced step is over when its last batch's scope is left: what runs after ``end_batch`` is still
        its own.
        """
        if self._state is State.TRACING:
            self._tracing.batch_begins(self._steps_done)
            yield
            ended, self._ended = self._ended, None
            if ended is not None:
                self._end_traced_step(ended)
            return
        if not self.counting or self._counter is None:
            yield
            return
        self._began = True
        seen = profiler_is_recording()
        with self._counter.on():
            yield
        if seen or profiler_is_recording():
            self.note(_SEEN_BY_PROFILER)
        ended, self._ended = self._ended, None
        if ended is not None:
            self._end_counted_step(ended)

    def enter(self, part: TimePhase | str, *, counts: bool = True) -> None:
        """*part* of the step begins, inside whatever part is running.

        A name that is no phase (``validation``, ``checkpoint``) is time the step does not own.

        Args:
            part: its name.
            counts: it is a forward, a backward or an update by itself, and not something that belongs to one.
        """
        if (timer := self.timer) is not None:
            timer.enter(Mark(part, counts))
            return
        if self._state is State.TRACING:
            self._tracing.enter(part)
        elif self.counting and self._counter is not None:
            self._counter.enter(part)
        if counts:
            self._step.enter(part)

    def leave(self) -> None:
        """The part entered last ends."""
        if (timer := self.timer) is not None:
            timer.leave()
        elif self._state is State.TRACING:
            self._tracing.leave()
        elif self._counter is not None:
            self._counter.leave()

    def claim(self, part: TimePhase) -> None:
        """What ran since the last part was left, if none is running now, was *part* too."""
        if (timer := self.timer) is not None:
            timer.claim(part)
        elif self.counting and self._counter is not None:
            self._counter.claim(part)

    def optimizer_work(self) -> AbstractContextManager[Any]:
        """Inside, what is counted is the optimizer's, whatever part of the step is running."""
        if self.counting and self._counter is not None:
            return self._counter.in_optimizer()
        return nullcontext()

    def cannot_tell_apart(self, phases: Iterable[TimePhase]) -> None:
        """These phases are not seen apart in this run: their seconds are known as one sum."""
        self._unseen.update(phases)

    def settle_for(self, steps: int) -> None:
        """Leave at least so many steps alone after the counted one, as far as that is no more than are timed."""
        self._settling.at_least(steps)

    def epoch_ends(self) -> None:
        """Until the next epoch begins, time belongs to no step."""
        if (timer := self.timer) is not None:
            timer.pause("epoch restart")

    def epoch_begins(self) -> None:
        """Time is the steps' again."""
        if (timer := self.timer) is not None:
            timer.resume()

    # ---- the borders

    def end_batch(self, *, shapes: Shapes, samples: int | None, tokens: int | None, ends_step: bool) -> None:
        """A batch went through the loop.

        Args:
            shapes: shapes of its tensors.
            samples: samples in it; None if not known.
            tokens: tokens in it; None if not known.
            ends_step: an optimizer attempt belongs to this batch, so a global step ends here.
        """
        step = self._step
        step.batches.append(shapes)
        step.samples = None if step.samples is None or samples is None else step.samples + samples
        step.tokens = None if step.tokens is None or tokens is None else step.tokens + tokens
        if ends_step:
            self._end_step()

    def _end_step(self) -> None:
        step, self._step = self._step, _Step()
        state = self._state
        if self.counting or self.tracing:
            self._ended = step  # the batch's scope is not left yet
            return
        if state is State.SETTLING:
            if self._settling.step_ends():
                self._start_timing()
        elif state is State.TIMING:
            self._end_timed_step(step)
        elif state is State.TRACING:
            self._tracing.step_ends(step.signature())  # left alone, so it had no scope
        self._steps_done += 1
        if state is State.WAITING and self._steps_done >= self._profile_step:
            self._open()

    def _open(self) -> None:
        self._counter = PartCounter(self._new_counter(self._root))
        self._state = State.COUNTING

    def _start_timing(self) -> None:
        assert self._timer is not None
        self._timing_steps = self._settling.in_whole_rounds(self._timing_steps)
        self._state = State.TIMING
        self._timer.begin()

    def _end_counted_step(self, step: _Step) -> None:
        assert self._counter is not None
        self._counted.append(replace(self._record(step), flops=self._counter.step_ends()))
        self._steps_done += 1
        if self._state is State.COUNTING_MORE:
            if len(self._counted) >= len(self._timed):
                self._trace_or_close()
            return
        self._counted_shapes = tuple(step.batches)
        whole = None if self._whole is None else self._whole()
        self._modules = describe_modules(self._root, whole=whole, note=self.note)
        if self._timer is None:
            self._trace_or_close()
        elif self._settling.steps == 0:
            self._start_timing()
        else:
            self._state = State.SETTLING

    def _end_timed_step(self, step: _Step) -> None:
        assert self._timer is not None
        marks = self._timer.cut()
        for part in marks.entered:
            step.enter(part)
        record = self._record(step)
        self._timed.append((record, marks))
        counted = self._counted[0].signature
        self._matches += record.signature == counted
        self._shapes_deceive |= record.signature != counted and record.signature.batches == counted.batches
        if self._matches >= self._timing_steps:
            if self._settling.was_too_early():
                self._timed.clear()
                self._matches = 0
                self._state = State.SETTLING
            else:
                self._trace_or_close()
            return
        watched = len(self._timed)
        if watched == max(self._timing_steps, _FEW_MATCHES) and self._matches * _FEW_MATCHES < watched:
            self._variable = True
            self._timed = self._timed[-self._timing_steps :]
            if len(self._counted) >= len(self._timed):
                self._trace_or_close()
            else:
                self._state = State.COUNTING_MORE
        elif watched >= _LIMIT_FACTOR * self._timing_steps:
            self._trace_or_close()

    def _trace_or_close(self) -> None:
        """Counts and times are complete."""
        self._complete = True
        self._tracing.begin(lambda signature: self._variable or signature == self._counted[0].signature)
        self._state = State.CLOSED if self._tracing.over else State.TRACING

    def _end_traced_step(self, step: _Step) -> None:
        self._steps_done += 1
        self._tracing.step_ends(step.signature())
        if self._tracing.over:
            self._state = State.CLOSED

    def _record(self, step: _Step) -> StepRecord:
        return StepRecord(
            index=self._steps_done,
            signature=step.signature(),
            micro_steps=len(step.batches),
            samples=step.samples,
            tokens=step.tokens,
        )

    # ---- the result

    def abandon(self) -> None:
        """Take everything of this window's off torch, wherever it stands; nothing more is measured."""
        self._state = State.CLOSED
        if self._counter is not None:
            self._counter.give_up()
        self._tracing.give_up()

    def close(self, *, context: RunContext, report_step: int) -> WindowRecord | None:
        """End the window, whatever state it is in, and say what it measured.

        Args:
            context: where the run takes place.
            report_step: the run's own x-axis value now.

        Returns:
            None if no step was counted to its end.
        """
        closed_early = not self._complete
        if self._state is State.TRACING:
            self.note("Training ended before all was traced that was to be.")
        self.abandon()
        if self._counter is None or not self._counted:
            return None
        timed = self._read_times()
        mixed = self._counter.mixed
        for sentence in notes_on_times(
            counted=len(self._counted),
            watched=len(self._timed),
            timed=len(timed),
            wanted=self._timing_steps,
            clocked=self._timer is not None,
            variable=self._variable,
            mixed=_in_order(mixed),
            closed_early=closed_early,
        ):
            self.note(sentence)
        return WindowRecord(
            profile_step=self._profile_step,
            report_step=report_step,
            context=context,
            modules=self._modules,
            flops=self._counter.flops,
            counted_steps=tuple(self._counted),
            timed_steps=timed,
            timing_steps=self._timing_steps,
            settle_steps=self._settling.steps,
            variable=self._variable,
            traces=self._tracing.traces,
            module_seconds=self._tracing.module_seconds,
            mixed_phases=_in_order(mixed | self._unseen),
            notes=(*self._notes, *self._tracing.notes),
        )

    def _read_times(self) -> tuple[StepRecord, ...]:
        if self._timer is None or self._clock is None or not self._timed:
            return ()
        self._clock.settle()
        steps = []
        for record, marks in self._timed:
            if not self._variable and record.signature != self._counted[0].signature:
                continue
            times = self._timer.read(marks)
            steps.append(
                replace(record, seconds=times.seconds, reader_sec=times.reader_sec, excluded_sec=times.excluded_sec)
            )
        return tuple(steps)


def _in_order(phases: set[TimePhase]) -> tuple[TimePhase, ...]:
    return tuple(phase for phase in _TIME_PHASES if phase in phases)
