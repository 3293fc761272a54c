"""Owns the window: micro-steps go in, one ``WindowRecord`` comes out.

An adapter's events reach a ``Recorder`` by the ``Run``. The window's states, and nothing else, decide which step is
counted, which are timed, and when the window is over::

    waiting ── N steps ──> counting ──> settling ──> timing ─────────────────────┬──> tracing ──> closed
                                                       │                         │
                              signatures keep changing └──> counting more ───────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, get_args

from torch import nn

from lightning_flops import host_clock
from lightning_flops.config import TraceSchedule
from lightning_flops.instrument.border import UndoLedger
from lightning_flops.instrument.counting.part_counter import Counter
from lightning_flops.instrument.notes import Notes
from lightning_flops.instrument.timing.clocks import Clock
from lightning_flops.instrument.timing.phase_timer import PhaseTimer
from lightning_flops.instrument.tracing.trace_cycles import TraceCycles
from lightning_flops.instrument.window_notes import notes_on_times
from lightning_flops.instrument.window_parts import CountedStep, Measured, RunningStep, WindowParts
from lightning_flops.instrument.window_states import Closed, State, Waiting
from lightning_flops.records import RunContext, Shapes, TimePhase, WindowRecord

_TIME_PHASES: tuple[TimePhase, ...] = get_args(TimePhase)


class Recorder:
    """One window over the steps of one training run, on one rank.

    The caller tells it when a batch is done (``end_batch``), and when an epoch ends and begins. While ``marking`` is
    true it also runs each batch inside ``batch_scope`` and calls ``enter``/``leave`` around each part of a step.

    Args:
        root: the model whose modules own the work.
        profile_step: the step to count, given as the number of steps before it.
        timing_steps: how many steps of the counted step's signature to time.
        settle_steps: steps left alone after the counted one, for the data loader's queue to drain.
        clock: stamps the parts of a step; None if the device cannot be timed.
        new_counter: makes the FLOP counter when the window opens.
        notes: gets what the report must say of this window.
        tracing: traces steps after the timed ones; None: none is traced.
        whole: returns *root* with all its wrappers, which may know more about its parameters; None: it has no wrapper.
        counted: is told of every step that was counted to its end.
        now: the host's clock, in seconds.
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
        notes: Notes,
        tracing: TraceCycles | None = None,
        whole: Callable[[], nn.Module] | None = None,
        counted: Callable[[CountedStep], None] = lambda step: None,
        now: Callable[[], float] = host_clock.now,
    ) -> None:
        self._now = now
        self._slowed_batches = 0
        self._slowed_sec = 0.0
        self._undo = UndoLedger()
        self._scope = ExitStack()  # of the batch that runs
        self._window = window = WindowParts(
            root=root,
            whole=whole or (lambda: None),
            profile_step=profile_step,
            timing_steps=timing_steps,
            settle_steps=min(settle_steps, timing_steps),
            clock=clock,
            new_counter=new_counter,
            tracing=TraceCycles((), TraceSchedule()) if tracing is None else tracing,
            notes=notes,
            undo=self._undo,
            counted=counted,
        )
        # abandon() runs these, the last one first. They remove things directly, with no line of ours that could fail
        # before.
        self._undo.add(window.tracing.give_up)
        self._undo.add(self._scope.close)
        self._unseen: set[TimePhase] = set()
        self._reached = False
        waiting = Waiting(window)
        self._state: State = waiting.open() if profile_step == 0 else waiting

    @property
    def state(self) -> State:
        """The state of the window."""
        return self._state

    @property
    def waiting(self) -> bool:
        """Whether the step to count is still to come."""
        return self._state.waiting

    @property
    def counting(self) -> bool:
        """Whether the running step is counted; its time is then not usable."""
        return self._state.counting

    @property
    def timer(self) -> PhaseTimer | None:
        """If the running step is timed, the timer to call directly instead of ``enter`` and ``leave``.

        These do the same through several calls, and some of the calls would be in the time of the part.
        """
        return self._state.timer

    @property
    def tracing(self) -> bool:
        """Whether the running step is traced, or is the warm-up for it; its time is then not usable."""
        return self._state.tracing

    @property
    def marking(self) -> bool:
        """Whether the running step's phases must be marked."""
        state = self._state
        return state.counting or state.timer is not None or state.tracing

    @property
    def closed(self) -> bool:
        """Whether nothing more is measured."""
        return self._state.closed

    @property
    def reached(self) -> bool:
        """Whether a batch of the step to count has begun."""
        return self._reached

    @property
    def has_counted(self) -> bool:
        """Whether a step was counted to its end."""
        return self._state.measured is not None

    def open(self, *, steps_done: int) -> None:
        """The step that begins now is the one to count; *steps_done* steps of the run came before it."""
        self._window.steps_done = steps_done
        self._go_on(self._state.open())

    def sample(self, *, steps_done: int) -> None:
        """The running step, of which no batch has run, is counted beside every window.

        It must be told of the batches like a window's, inside ``batch_scope``; *steps_done* as for ``open``.
        """
        self._window.steps_done = steps_done
        self._window.step = RunningStep()
        self._go_on(self._state.sample())

    @property
    def sampling(self) -> bool:
        """Whether the running step is counted beside every window."""
        return self._state.counting and self._state.waiting

    # ---- the parts of a step

    @contextmanager
    def batch_scope(self) -> Iterator[None]:
        """Run one whole batch inside this, including the wait for it; it is counted if the running step is.

        A counted or traced step is over when its last batch's scope is left: what runs after ``end_batch`` still
        belongs to it. After ``abandon`` or ``close``, leaving a scope only removes what torch has put back since; torch
        does so if they were called inside a backward.
        """
        state, began = self._state, self._now()
        slowed = (state.counting and not state.waiting) or state.tracing
        self._reached |= state.counting and not state.waiting
        with self._scope:
            state.batch_begins(self._scope)
            yield
        if slowed:
            self._slowed_sec += self._now() - began
        if state is self._state:
            self._go_on(state.batch_ends())
        elif self.closed:
            state.batch_was_abandoned()

    def enter(self, part: TimePhase | str, *, counts: bool = True) -> None:
        """*part* of the step begins, inside whatever part is running.

        A name that is not a phase (``validation``, ``checkpoint``) is time that does not belong to the step.

        Args:
            part: its name.
            counts: whether it is a forward, a backward or an update by itself, and not only a part of one.
        """
        self._state.enter(part, counts=counts)

    def leave(self) -> None:
        """The part entered last ends."""
        self._state.leave()

    def claim(self, part: TimePhase) -> None:
        """Book what ran since the last part was left to *part*, if no part is running now."""
        self._state.claim(part)

    def optimizer_work(self) -> AbstractContextManager[Any]:
        """Inside, what is counted is the optimizer's, whatever part of the step is running."""
        return self._state.optimizer_work()

    def cannot_tell_apart(self, phases: Iterable[TimePhase]) -> None:
        """These phases are not seen apart in this run: their seconds are known as one sum."""
        self._unseen.update(phases)

    def settle_for(self, steps: int) -> None:
        """Leave at least *steps* steps alone after the counted one, but not more than are timed."""
        window = self._window
        window.settle_steps = min(max(window.settle_steps, steps), window.timing_steps)

    # ---- the borders

    def end_batch(self, *, shapes: Shapes, samples: int | None, tokens: int | None, ends_step: bool) -> None:
        """A batch went through the loop.

        Args:
            shapes: shapes of its tensors.
            samples: samples in it; None if not known.
            tokens: tokens in it; None if not known.
            ends_step: an optimizer attempt belongs to this batch, so a global step ends here.
        """
        self._slowed_batches += (self.counting and not self.waiting) or self.tracing
        self._window.step.add_batch(shapes, samples=samples, tokens=tokens)
        if ends_step:
            self._go_on(self._state.step_ends())

    def _go_on(self, state: State) -> None:
        """Change to *state*, unless the window was abandoned meanwhile."""
        if not self._state.closed:
            self._state = state

    # ---- the result

    def abandon(self) -> None:
        """Remove everything of this window from torch, in any state; nothing more is measured.

        The scope of a batch that is still entered is left, too. If something raises, or the user's Ctrl-C arrives, the
        rest is still removed, and then the exception is raised. This may be called again.
        """
        try:
            self._state = Closed(self._window, self._state.measured)
        finally:
            self._undo.close()

    def close(self, *, context: RunContext) -> WindowRecord | None:
        """End the window, in any state, and return what it measured.

        Args:
            context: where the run takes place.

        Returns:
            None if no step was counted to its end.
        """
        if self._state.left_undone is not None:
            self._window.notes.add(f"{context.activity} {self._state.left_undone}")
        self.abandon()
        measured = self._state.measured
        return None if measured is None else self._record(measured, context)

    def _record(self, measured: Measured, context: RunContext) -> WindowRecord:
        window, times, mixed = self._window, measured.times, measured.counter.mixed
        timed = () if times is None else times.read()
        for sentence in notes_on_times(
            counted=len(measured.counted),
            watched=0 if times is None else len(times.watched),
            timed=len(timed),
            wanted=measured.timing_steps,
            clocked=times is not None,
            variable=measured.variable,
            same_shapes=measured.signatures_are_alike,
            mixed=_in_order(mixed),
            closed_early=not measured.complete,
            activity=context.activity,
        ):
            window.notes.add(sentence)
        return WindowRecord(
            profile_step=window.profile_step,
            context=context,
            modules=measured.modules,
            flops=measured.counter.flops,
            counted_steps=tuple(measured.counted),
            timed_steps=timed,
            timing_steps=measured.timing_steps,
            settle_steps=window.settle_steps,
            variable=measured.variable,
            traces=window.tracing.traces,
            module_seconds=window.tracing.module_seconds,
            mixed_phases=_in_order(mixed | self._unseen),
            slowed_batches=self._slowed_batches,
            slowed_sec=self._slowed_sec,
            notes=(*window.notes.of_report(), *window.tracing.notes),
        )


def _in_order(phases: set[TimePhase]) -> tuple[TimePhase, ...]:
    return tuple(phase for phase in _TIME_PHASES if phase in phases)
