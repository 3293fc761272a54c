"""One profiled run on one rank: windows, the monitor, FLOPs of every step, and the reports.

There is one path, in a window and outside of it: an adapter calls the methods of ``Run`` as things happen.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning_flops.analysis.step_flops import StepFlops
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.batches import BatchMeter
from lightning_flops.measure.notes import Notes
from lightning_flops.measure.timing.processor_wait import heat_counter
from lightning_flops.measure.tokens import TokenReader
from lightning_flops.measure.torch_private.optional import profiler_is_recording
from lightning_flops.records import BatchTokens, RunContext, Shapes, TimePhase, together
from lightning_flops.run.facts import Facts
from lightning_flops.run.monitor import Monitor
from lightning_flops.run.reports import Reports
from lightning_flops.run.window import Window, new_window
from lightning_flops.schema.profile import Profile
from lightning_flops.signals import words_of
from lightning_flops.units import package_logger

logger = package_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class _Step:
    """The running step."""

    batches: list[Shapes] = field(default_factory=list)
    tokens: list[BatchTokens | None] = field(default_factory=list)
    updates: int = 0
    profiled: bool = False  # the profiler slowed a batch of it down
    random: bool = False  # it was drawn to be counted before anything was known of it


class Run:
    """The profiler in one run. After ``close`` nothing of it is left, and the adapter's hooks do nothing.

    *publish* gets each profile, on the training thread, when its report is there.
    """

    window: Window  # the window that is open or comes next

    def __init__(self, facts: Facts, config: ProfilerConfig, publish: Callable[[Profile], None]) -> None:
        self.facts = facts
        self.config = config
        self.undo = ExitStack()  # removes everything of ours; an adapter adds the undo of its hooks
        self.closed = False
        self.thread = threading.get_ident()  # the training thread
        self.notes = Notes()
        self.monitor = Monitor()
        self.flops = StepFlops()
        self.tokens = TokenReader(self.notes.add_for_run, wanted=config.monitor and config.tokens_per_sample is None)
        self.meter = BatchMeter(
            batch_size=config.batch_size,
            tokens_per_sample=config.tokens_per_sample,
            note=self.notes.add_for_run,
            declared=facts.declared_batch_size,
        )
        self.reports = Reports(facts, config, publish, self.notes)
        self.steps_done = 0
        self._counts_steps = config.monitor and not config.timer_only  # steps outside of windows are counted, too
        self._step = _Step()
        self.outside_of: list[str] = []  # what runs now and belongs to no step
        self._fetches = 0  # depth of the running fetches

    def begin(self) -> None:
        """The run begins; the adapter's own hooks are in place."""
        self.notes.speak = self.reports.warn
        self._heat = heat_counter(self.facts.device, self.undo)
        self.reports.begin()
        self._await_window(self.facts.profile_step)
        self.monitor.go_on()
        self._step_begins()

    def _await_window(self, step: int | None) -> None:
        """Prepare the window that opens before *step*; open it if that is the step that begins now."""
        self.notes.begin_window()
        self.window = new_window(step, facts=self.facts, config=self.config, notes=self.notes, heat=self._heat)
        self._open_if_due()

    def _open_if_due(self) -> None:
        if self.window.step == self.steps_done and not self.window.is_open:
            self.window.open(steps_done=self.steps_done)

    def _step_begins(self) -> None:
        """A step begins here: count it if the window says so, or if it is drawn as a check of the predicted FLOPs."""
        window = self.window
        may_check = self._counts_steps and not window.is_open and window.step != self.steps_done + 1
        if may_check and self.flops.schedule.draws_check() and not profiler_is_recording():
            window.sample(steps_done=self.steps_done)
            self._step.random = True
        if not window.is_idle:
            self._follow()

    def batch_begins(self, shapes: Shapes, tokens: BatchTokens | None = None) -> None:
        """The model is about to compute on a batch: count its step if nothing is known of steps of its shapes."""
        if self.window.is_open or self._step.batches or self.window.scope is not None or self.outside_of:
            return
        if self._counts_steps and self.flops.wants(shapes, tokens) and not profiler_is_recording():
            self.window.sample(steps_done=self.steps_done)
            self._follow()

    def _follow(self) -> None:
        self.window.follow(self.facts.mark_parts, outside=bool(self.outside_of))

    def fetch_begins(self) -> None:
        """The loop asks its data loader for a batch; calls may nest, and the outermost counts."""
        self._fetches += 1
        if self._fetches == 1 and not self.outside_of:
            self.window.fetches += 1
            self.monitor.fetch_begins()
            if self.window.marks is not None:
                self.window.enter("data_wait", counts=True)

    def fetch_ends(self) -> None:
        """The data loader has delivered the batch."""
        self._fetches -= 1
        if self._fetches == 0 and not self.outside_of:
            if self.window.marks is not None:
                self.window.leave()
            self.monitor.fetch_ends()

    def enter(self, part: TimePhase | str, *, counts: bool = True) -> None:
        """*part* of the step begins, inside whatever part is running; *counts* as in ``Recorder.enter``."""
        if self.window.marks is not None and not self.outside_of:
            self.window.enter(part, counts=counts)

    def leave(self) -> None:
        """The part entered last ends."""
        if self.window.marks is not None and not self.outside_of:
            self.window.leave()

    def claim(self, part: TimePhase) -> None:
        """What ran since the last part was left, if no part is running now, was *part* too."""
        if self.window.marks is not None and not self.outside_of:
            self.window.recorder.claim(part)

    def outside(self, what: str, *, since_batch: bool = False) -> None:
        """*what* begins, which belongs to no step, and *since_batch* what ran since the last batch; calls may nest."""
        self.outside_of.append(what)
        if len(self.outside_of) == 1:
            self.window.leave_scope()
            self.monitor.outside(since_batch=since_batch)
            if self.window.marks is not None:
                if since_batch:
                    self.window.recorder.claim(what)  # type: ignore[arg-type]
                self.window.enter(what, counts=False)

    def inside(self) -> None:
        """What belongs to no step is over."""
        if not self.outside_of:
            return
        self.outside_of.pop()
        if not self.outside_of:
            if self.window.marks is not None:
                self.window.leave()
            self.monitor.inside()
            self.window.enter_scope()

    @property
    def is_marking(self) -> bool:
        """Whether the parts of the running step are marked."""
        return self.window.marks is not None

    def batch_done(
        self,
        *batches: tuple[Any, Shapes, BatchTokens | None],
        updates: int,
        ends_step: bool,
        logs: bool = False,
        rows: Sequence[int | None] | None = None,
    ) -> None:
        """*batches* went through the loop, several of them together as micro-batches of a pipeline.

        Their shapes and tokens were taken before the step may have changed them. *updates* optimizer attempts belong to
        them, and perhaps the end of a step, at which the run *logs* its metrics. *rows* are the samples of each, if the
        adapter knows them better than the shapes do; the setting ``batch_size`` wins.
        """
        step, window = self._step, self.window
        profiled = window.scope is not None or window.recorder.sampling_lines
        samples: int | None = 0
        for number, (batch, shapes, tokens) in enumerate(batches, 1):
            size = self.meter.samples(batch, shapes) if rows is None else self.meter.given(batch, rows[number - 1])
            samples = None if samples is None or size is None else samples + size
            step.batches.append(shapes)
            step.tokens.append(tokens)
            if window.is_open or profiled:
                real = None if tokens is None else tokens.real
                count = self.meter.tokens(batch, size) if real is None else real
                is_last = ends_step and number == len(batches)
                window.recorder.end_batch(shapes=shapes, samples=size, tokens=count, ends_step=is_last)
        if profiled and window.micro_batch_size is None:
            window.micro_batch_size = size
        step.updates += updates
        step.profiled |= profiled or self.reports.analyzing
        if profiled:
            window.leave_scope()  # before the clock is read: the end of counting is a part of what it costs
        seconds = self.monitor.batch(
            samples=samples,
            tokens=together([one for *_, one in batches]),
            profiled=step.profiled,
            ends_step=ends_step,
            batches=1 if rows is None else len(rows),
        )
        if ends_step:
            self._step_ends(seconds)
            if logs:
                self.log()
        if self.reports.deliver() or logs or profiled:
            self.monitor.go_on()
        if ends_step:
            self._step_begins()
        elif not window.is_idle:
            self._follow()

    def _step_ends(self, seconds: float) -> None:
        step, self._step = self._step, _Step()
        key = tuple(step.batches), tuple(step.tokens), step.updates
        if self.window.counted:
            counted = self.window.counted.pop()
            self.flops.counted(
                *key,
                counted.flops,
                seconds=seconds,
                random=step.random,
                data_dependent=counted.data_dependent,
                lower_bound=counted.lower_bound,
            )
        elif self._counts_steps:
            self.flops.ran(*key, seconds=seconds, profiled=step.profiled)
        self.steps_done += 1
        if self.window.is_open and self.window.recorder.closed:
            self._close_window()
        elif self.window.step == self.steps_done:
            self._open_if_due()

    def log(self) -> None:
        """Give the loggers what the monitor has: the run logs its own metrics now."""
        if self.config.monitor:
            self.reports.write_reading(self.monitor.read(), self.flops.reading())

    def context(self) -> RunContext:
        """Where the run takes place, as it is now."""
        return replace(self.facts.context(), micro_batch_size=self.window.micro_batch_size)

    def _close_window(self) -> None:
        """Hand what the window has measured to the reports, and await the next."""
        window = self.window
        for step in self.config.listed_between(window.step or 0, self.steps_done):
            self.reports.passed_over(step)
        window.end()
        if unseen := self.facts.unseen:
            window.recorder.cannot_tell_apart(unseen if window.fetches else ("data_wait", *unseen))
            if not window.fetches:
                self.notes.add_for_run(
                    "The wait for data could not be seen, because the batches did not come from a torch DataLoader on "
                    "the training thread: it is in other."
                )
        record = window.recorder.close(context=self.context())
        if record is not None:
            self.reports.report(record, window, all_tokens=self.monitor.all_tokens)
        else:
            word, step_word = self.context().run_word, self.context().step_word
            self.reports.warn(f"nothing was profiled: the {word} ended in the middle of {step_word} {window.step}")
        self._await_window(self.config.next_profile_step(steps_done=self.steps_done))

    def finish(self, *, interrupted_by: BaseException | None = None) -> None:
        """The run is over, or was *interrupted_by* something: report what was measured, and remove everything."""
        if self.closed:
            return
        try:
            if (window := getattr(self, "window", None)) is None:
                return  # it was interrupted while it began
            window.leave_scope()
            if window.is_open and (window.recorder.has_counted or self._step.batches):
                if interrupted_by is not None:
                    self.notes.add(f"{self.context().activity} was interrupted by {type(interrupted_by).__name__}.")
                self._close_window()
            elif window.step is not None and interrupted_by is None:
                self.reports.not_reached(window.step, self.context(), steps_done=self.steps_done)
        finally:  # also if Ctrl-C comes once more
            self.close()
        self.reports.finish(
            self.monitor,
            self.flops.totals(),
            missed=f"after {self.steps_done} step(s)" if self.window.step is not None else None,
            interrupted_by=interrupted_by,
        )

    def __del__(self) -> None:
        # A framework that never says that the run is over, and a user who has dropped it with our callback.
        if getattr(self, "closed", True):
            return
        if self.facts.ends_when_dropped and threading.get_ident() == self.thread:
            self.finish()
        self.close()

    def fail(self, why: str) -> None:
        """Our side has failed: the run goes on without us."""
        self.close()
        self.reports.fail(why)

    def close(self) -> None:
        """Remove everything of ours from torch and from the framework's objects."""
        if not self.closed and hasattr(self, "window"):
            self.undo.callback(self.window.abandon)
        self.closed = True
        close_quietly(self.undo)  # nothing the second time, unless something was raised here the first time


def safe(hook: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R | None]:
    """A method of an object that has a ``run``: its first ``Exception`` ends our part of the run with one warning.

    After the run is closed the hook does nothing. ``KeyboardInterrupt`` and the like pass through, as does an exception
    that a signal handler of the user's raised while our code ran.
    """

    @functools.wraps(hook)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        run = self.run
        if run is not None and run.closed:
            return None
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:
            failed(self.run, error)
            return None

    return call


def failed(run: Run | None, error: Exception) -> None:
    """Our side raised *error*: close *run*, and say so once."""
    words, shown = words_of(error), error if logger.isEnabledFor(logging.DEBUG) else None
    if run is not None:
        run.fail(words)
    logger.warning("the FLOPs profiler failed and is off; the program goes on: %s", words, exc_info=shown)


def close_quietly(undo: ExitStack) -> None:
    """Run every undo of *undo*; one that raises is a warning, and the others still run."""
    try:
        undo.close()
    except Exception as error:
        logger.warning("something of the FLOPs profiler could not be removed: %s", words_of(error), exc_info=error)
