"""Owns the window: micro-steps go in, one ``WindowRecord`` comes out.

An adapter's events reach a ``Recorder`` by the ``Run``. Which step is counted, which are timed, and when the window is
over, is said in one place, in the order in which it happens: ``Recorder._window``::

    waiting ── open() ──> counting ──> settling ──> timing ──> plain ──> unhooked ┬──> tracing ──> lines ──> closed
                             ^                        │                          │
                             └── signatures keep changing: as many are counted ──┘
"""

from __future__ import annotations

import math
import operator
from collections import Counter as Tally
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise, starmap
from statistics import median
from typing import Any, get_args

from torch import device, nn

from lightning_flops.measure.batches import never_alike, shapes_text
from lightning_flops.measure.counting.flop_counter import CountedStep, FlopCounter, PartCounter
from lightning_flops.measure.lines import LineSampler
from lightning_flops.measure.memory import MemoryWatch
from lightning_flops.measure.module_scope import describe_modules
from lightning_flops.measure.notes import Notes, notes_on_times
from lightning_flops.measure.parts import Parts
from lightning_flops.measure.timing.phase_timer import Mark, PhaseTimer, WallClock
from lightning_flops.measure.tracing.step_tracer import StepTracer
from lightning_flops.records import (
    REST,
    SCORING,
    TRAINING,
    ModuleRecord,
    RunContext,
    Shapes,
    StepRecord,
    StepSignature,
    TimePhase,
    WindowRecord,
)
from lightning_flops.signals import Undo

_LEAST_WATCHED = 10
# Signatures "keep changing" when none of the steps to time, so many at least, has the counted one's, or few of twice.

_SHORT_SEC = 0.01  # below it steps are timed unhooked, too: to be heard makes them longer by up to 0.3 ms
_LEAST_HALVED = 16  #: From so many steps on the parts of one half are timed, and of the other half the step alone.


class Phase(Enum):
    """What a recorder does with the running step."""

    WAITING = "waiting"  #: The step to count is still to come.
    SAMPLING = "sampling"  #: One step is counted outside of every window, for the FLOPs of the run.
    COUNTING = "counting"
    #: Steps are left alone until the loader's queue has drained, and no earlier report is made beside them.
    SETTLING = "settling"
    TIMING = "timing"
    PLAIN = "plain"  #: Steps are timed between two stamps alone.
    UNHOOKED = "unhooked"  #: Short ones are, too, if nothing else is heard of them: between the ends of two.
    TRACING = "tracing"
    LINES = "lines"  #: The user's lines are sampled.
    CLOSED = "closed"


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


#: What is done with one step, and what takes its parts; None: nothing asks for them.
_Plan = tuple[Phase, Parts | None]

#: The plan of one step after the other: each step is sent in when it is over, and brings the plan of the next.
_Life = Generator[_Plan, RunningStep, None]

_OF_WHOLE = 2  # marks of a step that is timed between two stamps alone

_TimedStep = tuple[StepRecord, list[Mark]]


@dataclass(slots=True, kw_only=True)
class Measured:
    """What a window has measured since its first step was counted."""

    counter: PartCounter
    timer: PhaseTimer | None
    counted: list[StepRecord]  #: One step; several where signatures keep changing.
    modules: tuple[ModuleRecord, ...]
    #: The steps that ran while some were timed.
    watched: list[_TimedStep] = field(default_factory=list)
    plain: list[_TimedStep] = field(default_factory=list)  #: Those of which no part was timed.
    #: Stamps where steps end that go without hooks after these, and before them where the first begins.
    unhooked: list[Any] = field(default_factory=list)
    are_alike: bool = False  #: The step after them has batches as those before.
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

    def stamp(self) -> None:
        """A step ends, and the next one goes without hooks, or has."""
        if self.timer is not None:
            self.unhooked.append(self.timer.clock.stamp())

    def timed(self) -> dict[str, Any]:
        """Fields of a ``WindowRecord``: steps that can be compared with what was counted, and how they were timed."""
        if (timer := self.timer) is None:
            return {"timed_steps": ()}
        timer.clock.settle()
        unhooked = self.unhooked if self.are_alike else []
        return {
            "timed_steps": tuple(timer.read(*one) for one in self.watched if self.is_comparable(one[0].signature)),
            "plain_steps": tuple(timer.read(*one) for one in self.plain if self.may_be_comparable(one[0].signature)),
            "unhooked_sec": tuple(starmap(timer.clock.seconds_between, pairwise(unhooked))),
        }


def steps_to_settle(*, batches_ahead: int, batches_a_step: int) -> int:
    """Steps to leave alone after a counted one, until the *batches_ahead* that a loader fetches meanwhile are used up.

    If those were timed, they would show less waiting than there is in the long run. At least two.
    """
    return max(2, math.ceil(batches_ahead / batches_a_step))


class Recorder:
    """One window over the steps of one training run, on one rank.

    The caller says when a batch is done (``end_batch``). While ``counting`` or ``tracing`` is true it runs each batch
    inside ``batch_scope``, and ``parts`` hears of each part of a step: while ``marking`` is true of all of them.

    Args:
        root: the model whose modules own the work.
        timing_steps: how many steps of the counted step's signature to time.
        settle_steps: steps left alone after the counted one, for the data loader's queue to drain.
        clock: stamps the parts of a step; None if the device cannot be timed.
        new_counter: makes the FLOP counter when the window opens.
        notes: gets what the report must say of this window.
        memory: follows the parts of the counted steps of the window.
        tracer: traces steps after the timed ones; None: none is traced.
        lines: samples the user's lines in steps after these; None: it was not asked for.
        whole: *root* with all its wrappers; None: it has none.
        counted: gets every step that was counted to its end.
        may_time: whether the steps after so many can be timed; if not, they are left alone.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        timing_steps: int,
        settle_steps: int,
        clock: WallClock | None,
        new_counter: Callable[[nn.Module], FlopCounter],
        notes: Notes,
        memory: MemoryWatch | None = None,
        tracer: StepTracer | None = None,
        lines: LineSampler | None = None,
        whole: nn.Module | None = None,
        counted: Callable[[CountedStep], None] = lambda step: None,
        may_time: Callable[[int], bool] = lambda steps_done: True,
    ) -> None:
        self._root, self._whole, self._new_counter, self._memory = root, whole, new_counter, memory
        self._timing_steps, self._timer = timing_steps, None if clock is None else PhaseTimer(clock)
        self._notes, self._tell_counted, self._may_time = notes, counted, may_time
        self._tracer = tracer or StepTracer(root, device=device("cpu"), asked=False)
        self._lines = LineSampler(asked=False) if lines is None else lines
        self._plain_steps = timing_steps // 2 if timing_steps >= _LEAST_HALVED else 0
        self._settle_steps = min(settle_steps, timing_steps)
        self.state = Phase.WAITING
        self.parts: Parts | None = None  # takes the parts of the running step; None: nothing asks for them
        self._life: _Life | None = None  # decides both
        self._step = RunningStep()
        self._ended: RunningStep | None = None  # a step that is over, until its last batch's scope is left
        self._steps_done = self._profile_step = 0
        self._counter: PartCounter | None = None  # counts the running step, where one is counted
        self._sampler: PartCounter | None = None
        self.measured: Measured | None = None  # once a step of the window was counted to its end
        self._unseen: set[TimePhase] = set()
        self._scope, self._undo = Undo(), Undo()  # of the batch that runs, and of all
        self._undo.callback(self._tracer.give_up)
        self._undo.callback(self._lines.stop)
        self._undo.callback(self._scope.close)

    @property
    def counting(self) -> bool:
        """Whether the running step is counted; its time is then not usable."""
        return self.state in (Phase.COUNTING, Phase.SAMPLING)

    @property
    def marking(self) -> bool:
        """Whether all parts of the running step must be marked."""
        return self.state is not Phase.PLAIN and self.parts is not None

    @property
    def tracing(self) -> bool:
        """Whether the running step is traced, or is the warm-up for it; its time is then not usable."""
        return self.state is Phase.TRACING and self.parts is not None

    @property
    def sampling_lines(self) -> bool:
        """Whether the running step's lines are sampled; its time is then not usable."""
        return self.state is Phase.LINES

    @property
    def closed(self) -> bool:
        """Whether nothing more is measured."""
        return self.state is Phase.CLOSED

    def open(self, *, steps_done: int) -> None:
        """The step that begins now is the one to count; *steps_done* steps of the run came before it."""
        if self.state is Phase.WAITING:
            self._profile_step = steps_done
            counter = self._part_counter(self._memory)
            self._begin(counter, self._window(counter), steps_done)

    def sample(self, *, steps_done: int) -> None:
        """The running step, of which no batch has run, is counted outside of every window; *steps_done* as above."""
        if self.state is Phase.WAITING:
            counter = self._sampler = self._sampler or self._part_counter()
            self._step = RunningStep()
            counter.entered.clear()
            self._begin(counter, self._sampled(counter), steps_done)

    def _begin(self, counter: PartCounter, life: _Life, steps_done: int) -> None:
        self._counter, self._life, self._steps_done = counter, life, steps_done
        self.state, self.parts = next(life)

    def _part_counter(self, memory: MemoryWatch | None = None) -> PartCounter:
        counter = PartCounter(self._new_counter(self._root), memory)
        self._undo.callback(counter.give_up)
        return counter

    # ---- the parts of a step

    @contextmanager
    def batch_scope(self) -> Iterator[None]:
        """Run one whole batch inside this, including the wait for it; it is counted if the running step is.

        A counted or traced step is over when its last batch's scope is left. After ``abandon`` or ``close`` inside a
        backward, leaving it removes what torch has put back since.
        """
        state, counter = self.state, self._counter if self.counting else None
        with self._scope:
            if counter is not None:
                self._scope.enter_context(counter.counter)
            elif state is Phase.TRACING:
                self._tracer.batch_begins(self._steps_done)
            yield
        if self.closed and counter is not None:
            counter.counter.__exit__()
        self._step_is_over()

    def phase(self, name: str, *rollouts: tuple[int, int]) -> None:
        """What runs from here on is of this phase; empty: of none. *rollouts*, with their tokens, have ended here."""
        if (parts := self.parts) is not None:
            parts.phase(name)
        self._step.phases |= {name} - {""}
        self._step.rollouts += rollouts

    def optimizer_work(self) -> AbstractContextManager[Any]:
        """Inside, what is counted is the optimizer's, whatever part of the step is running."""
        return self._counter.counter.in_optimizer() if self.counting and self._counter is not None else nullcontext()

    def cannot_tell_apart(self, phases: Iterable[TimePhase]) -> None:
        """These phases are not seen apart in this run: their seconds are known as one sum."""
        self._unseen.update(phases)

    def settle_for(self, steps: int) -> None:
        """Leave at least *steps* steps alone after the counted one, but not more than are timed."""
        self._settle_steps = min(max(self._settle_steps, steps), self._timing_steps)

    def resume(self) -> None:
        """What is measured of a batch is in place: it goes on from here, and so does a step of which no batch ran."""
        if self.state is Phase.LINES:
            self._lines.resume()
        elif isinstance(parts := self.parts, PhaseTimer) and not self._step.batches:
            parts.go_on()

    # ---- steps end

    def unhooked_steps_are_over(self, steps: int) -> None:
        """So many went without hooks; what comes is heard."""
        self._steps_done += steps - 1
        self._ended = RunningStep()
        self._step_is_over()

    def end_batch(self, *, shapes: Shapes, samples: int | None, tokens: int | None, ends_step: bool) -> None:
        """A batch went through the loop, with so many samples and tokens, if that is known.

        A global step ends here if an optimizer attempt belongs to this batch.
        """
        step = self._step
        step.batches.append(never_alike(shapes))
        step.samples = None if step.samples is None or samples is None else step.samples + samples
        step.tokens = None if step.tokens is None or tokens is None else step.tokens + tokens
        if not ends_step:
            return
        self._step = RunningStep()
        if (parts := self.parts) is not None:
            step.parts, parts.entered = parts.entered, []
        self._ended = step
        if not self.counting and not self.tracing:  # what these take, they have when the batch's scope is left
            self._step_is_over()

    def _step_is_over(self) -> None:
        """What has ended, if anything, is a whole step: on to the next one, unless the window was abandoned."""
        step, self._ended = self._ended, None
        if step is not None and self._life is not None and self.state is not Phase.WAITING:
            step.index = self._steps_done
            self._steps_done += 1
            try:
                plan = self._life.send(step)
            except BaseException:  # Ctrl-C, which the program may catch: a generator that has raised is over
                self.abandon()
                raise
            self.state, self.parts = (Phase.CLOSED, None) if self.closed else plan

    # ---- what is done with one step after the other

    def _sampled(self, counter: PartCounter) -> _Life:
        yield from self._count(counter, Phase.SAMPLING)
        yield Phase.WAITING, None

    def _window(self, counter: PartCounter) -> _Life:
        first = yield from self._count(counter)
        modules = describe_modules(self._root, whole=self._whole, note=self._notes.add)
        measured = Measured(counter=counter, timer=self._timer, counted=[first], modules=modules)
        if not self.closed:  # asking the user's modules may have ended the run
            self.measured = measured
        if self._timer is not None:
            yield from self._settle_and_time(measured, self._timer)
        measured.complete = True
        if self._timer is not None and _are_short(measured.plain, self._timer.clock):
            yield from self._time_without_hooks(measured)
        flops = counter.flops
        calls = sum(cell.calls for cell in flops.cells) + sum(one.calls for one in flops.uncounted.values())
        for _ in self._tracer.steps(measured.is_comparable, operators=calls // len(measured.counted)):
            step = yield Phase.TRACING, None if self._tracer.waits else self._tracer
            self._tracer.step_ends(step.record().signature)
        self._lines.begin()
        while not self._lines.over:
            yield Phase.LINES, self._lines.timer
            self._lines.step_ends()
        yield Phase.CLOSED, None

    def _count(self, counter: PartCounter, phase: Phase = Phase.COUNTING) -> Generator[_Plan, RunningStep, StepRecord]:
        step = yield phase, counter
        counted = counter.step_ends()
        self._tell_counted(counted)
        return replace(step.record(), flops=counted.by_phase)

    def _settle_and_time(self, measured: Measured, timer: PhaseTimer) -> _Life:
        settled, matches, plain_matches = 0, 0, 0
        while settled < self._settle_steps or not self._may_time(self._steps_done):
            yield Phase.SETTLING, None
            settled += 1
        timer.begin()
        # Steps that run by phases would show none of these between two stamps alone.
        plain_steps = 0 if measured.counter.phases.keys() - {TRAINING, REST} else self._plain_steps
        wanted, least = self._timing_steps - plain_steps, max(self._timing_steps, _LEAST_WATCHED)
        while matches < wanted and len(measured.watched) < (2 * least if matches else least):
            signature = yield from self._time(Phase.TIMING, timer, measured.watched)
            matches += measured.is_comparable(signature)
        if matches < wanted:
            measured.variable, plain_steps = True, 0
            del measured.watched[: -self._timing_steps]
        while measured.variable and len(measured.counted) < len(measured.watched):
            measured.counted.append((yield from self._count(measured.counter)))
        timer.whole = True
        timer.begin()
        while plain_matches < plain_steps and len(measured.plain) < 2 * self._timing_steps:
            signature = yield from self._time(Phase.PLAIN, timer, measured.plain)
            plain_matches += measured.may_be_comparable(signature)

    def _time_without_hooks(self, measured: Measured) -> _Life:
        yield Phase.UNHOOKED, None  # until they are over
        step = yield Phase.SETTLING, None
        measured.are_alike = step.record().signature.batches == measured.plain[-1][0].signature.batches

    def _time(
        self, phase: Phase, timer: PhaseTimer, steps: list[_TimedStep]
    ) -> Generator[_Plan, RunningStep, StepSignature]:
        """Add the next step to *steps*."""
        step = yield phase, timer
        marks = timer.cut()
        steps.append((step.record(), marks))
        return steps[-1][0].signature

    # ---- the result

    def abandon(self) -> None:
        """Remove everything of this window from torch, in any phase, also what is left when something raises here."""
        self.state, self.parts, self._life = Phase.CLOSED, None, None
        self._undo.close()

    def close(self, *, context: RunContext) -> WindowRecord | None:
        """End the window, in any phase; what it measured, or None if no step was counted to its end."""
        if self.state is Phase.TRACING:
            self._notes.add(f"{context.activity} ended before all was traced that was to be.")
            if not self._step.batches:  # no step is in the trace in part
                self._tracer.end_cycle()
        self.abandon()
        return None if self.measured is None else self._record(self.measured, context)

    def _record(self, measured: Measured, context: RunContext) -> WindowRecord:
        mixed, tracer = measured.counter.mixed, self._tracer
        window = WindowRecord(
            profile_step=self._profile_step,
            context=context,
            modules=measured.modules,
            flops=measured.counter.flops,
            counted_steps=tuple(measured.counted),
            **measured.timed(),
            timing_steps=self._timing_steps,
            phases=measured.counter.phases,
            variable=measured.variable,
            traces=tuple(tracer.traces),
            lines=self._lines.record(),
            mixed_phases=_in_order(mixed | self._unseen),
        )
        for sentence in notes_on_times(
            window,
            watched=len(measured.watched) + len(measured.plain),
            clocked=self._timer is not None,
            mixed=_in_order(mixed),
            complete=measured.complete,
        ):
            self._notes.add(sentence)
        return replace(window, notes=(*self._notes.of_report(), *filter(None, [tracer.lost])))


def _are_short(steps: Sequence[_TimedStep], clock: WallClock) -> bool:
    """Whether *steps* are alike and, by the host's clock, short; what belongs to no step was in none of them."""
    spans = [(marks[0][2], marks[-1][2]) for _, marks in steps if len(marks) == _OF_WHOLE]
    is_alike = len(spans) == len(steps) > 0 and len({step.signature for step, _ in steps}) == 1
    return is_alike and median([clock.host_seconds_between(*span) for span in spans]) < _SHORT_SEC


def _in_order(phases: set[TimePhase]) -> tuple[TimePhase, ...]:
    return tuple(phase for phase in get_args(TimePhase) if phase in phases)
