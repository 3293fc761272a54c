"""One profiled run on one rank: windows, the monitor, FLOPs of every step, and the reports.

There is one path, in a window and outside of it: an adapter calls the methods of ``Run`` as things happen. Three verbs
end a thing, here and in all classes of a run: ``finish`` reports what was measured, ``fail`` says that our side raised
and reports what is complete, ``close`` removes everything of ours, and may be called again.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from lightning_flops.analysis.plan import MemoryPrediction
from lightning_flops.analysis.rates import padding_ratio
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.batches import TokenReader
from lightning_flops.measure.fake_steps import fake_steps
from lightning_flops.measure.notes import Notes
from lightning_flops.measure.recorder import Phase
from lightning_flops.measure.timing.phase_timer import PhaseTimer, WallClock
from lightning_flops.measure.timing.processor_wait import Heat, heat_counter
from lightning_flops.measure.torch_private.optional import profiler_is_recording
from lightning_flops.records import BatchTokens, RunContext, Shapes, TimePhase
from lightning_flops.report.predicted_document import headline
from lightning_flops.report.text import render_text
from lightning_flops.run.adapter import Adapter
from lightning_flops.run.delivery import SEC_AFTER_ERROR, SEC_TO_FINISH, Delivery
from lightning_flops.run.throughput import Batch, Throughput
from lightning_flops.run.unhooked import Unhooked
from lightning_flops.run.window import Window, new_window
from lightning_flops.schema.profile import Profile
from lightning_flops.signals import Undo, words_of
from lightning_flops.sinks.file import shown_path
from lightning_flops.units import package_logger, plain

logger = package_logger(__name__)

_QUICK_SEC = 2.0  # a prediction that took longer is not repeated for other batches: the user waits for the exception
_HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}  # precisions that are an autocast
_BY_HAND = "predict_memory(model, batch, optimizer) says what a step takes"

P = ParamSpec("P")
R = TypeVar("R")


class Run:
    """The profiler in one run. After ``close`` nothing of it is left, and the adapter's hooks do nothing.

    *publish* gets each profile when its report is made, on a thread of ours.
    """

    window: Window  # the window that is open or comes next

    def __init__(self, adapter: Adapter, config: ProfilerConfig, publish: Callable[[Profile], None]) -> None:
        self.adapter = adapter
        facts = adapter.facts
        self.undo = Undo()  # removes everything of ours; an adapter adds the undo of its hooks
        self.closed = False
        self.notes = notes = Notes()
        self.delivery = Delivery(facts, config, publish, notes)
        self.throughput = Throughput(adapter, config, note=notes.add_for_run)
        self.tokens = TokenReader(notes.add_for_run, wanted=config.monitor and config.tokens_per_sample is None)
        self.steps_done = 0
        self.clock: WallClock | None = None  # of the running step, in which what we do takes time; None: it has none
        self.outside_of: list[str] = []  # what runs now and belongs to no step
        self.between = ""  # of it, what the framework is at between two steps
        self.phases: list[str] = []  # of the running step, each inside the one before; "" is no phase of its own
        self.unhooked: Unhooked | None = None  # from the first step of the window that is timed as a whole

    def begin(self) -> None:
        """The run begins; the adapter's own hooks are in place."""
        facts = self.adapter.facts
        self._await_window(facts.profile_step, heat_counter(facts.device, self.undo))
        self.throughput.monitor.go_on()
        self._step_begins()

    def _await_window(self, step: int | None, heat: Heat) -> None:
        """Prepare the window that opens before *step*."""
        self.notes.begin_window()
        self.clock = self.unhooked = None
        self.window = new_window(
            step,
            adapter=self.adapter,
            config=self.throughput.config,
            notes=self.notes,
            heat=heat,
            counted=self.throughput.counted,
            may_time=self.delivery.may_time,
        )

    def _step_begins(self) -> None:
        """A step begins here: count it if the window says so, or if it is drawn as a check of the predicted FLOPs."""
        window, throughput = self.window, self.throughput
        if window.step == self.steps_done and not window.is_open:
            window.open(steps_done=self.steps_done)
        may_check = throughput.counts_steps and not window.is_open and window.step != self.steps_done + 1
        if may_check and throughput.flops.schedule.draws_check() and not profiler_is_recording():
            throughput.step.random = True
            if (
                not self.adapter.facts.ends_when_dropped
            ):  # there with its first forward: what counts would keep the model alive
                window.recorder.sample(steps_done=self.steps_done)
        if not window.is_idle:
            self._follow()

    def batch_begins(self, shapes: Shapes, tokens: BatchTokens | None = None) -> None:
        """The model is about to compute on a batch: count its step if nothing is known of steps of its shapes."""
        window, throughput = self.window, self.throughput
        if window.is_open or throughput.step.batches or window.scope is not None or self.outside_of:
            return
        wants = throughput.step.random or throughput.flops.wants(shapes, tokens)
        if throughput.counts_steps and wants and not profiler_is_recording():
            window.recorder.sample(steps_done=self.steps_done)
            self._follow()

    def _follow(self) -> None:
        self.window.follow(self.adapter.mark_parts, outside=bool(self.outside_of))
        # Beside a device, or a loader's workers, what we take may lengthen no step; samples of lines have it.
        parts, on_host = self.window.parts, self.adapter.facts.device.type == "cpu"
        is_alone = on_host and not (self.window.recorder.sampling_lines or any(self.adapter.loader_workers()))
        self.clock = parts.clock if isinstance(parts, PhaseTimer) and is_alone else None
        self._phase_follows()

    def does(self, ours: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        """What *ours* answers, which the user's program would not call: what it takes is in no time of a step.

        Its first ``Exception`` ends our part of the run with one warning; then, and once the run is closed, it does
        nothing. ``KeyboardInterrupt`` and the like pass through, as does an exception that a signal handler of the
        user's raised while our code ran.
        """
        clock = self.clock
        runs = clock is not None and clock.paused_at is None  # asked first: it goes on, whatever interrupts the pause
        try:
            if clock is not None and runs:
                clock.pause()
            if self.closed:
                return None
            if (unhooked := self.unhooked) is not None:
                return unhooked.does(ours, *args, **kwargs)
            return ours(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, RecursionError):  # there is no room for us, nor for words about it
                failed(self, error)
            return None
        finally:
            if clock is not None and runs:
                clock.go_on()

    @property
    def only(self) -> Any:
        """The only method of the adapter's that is heard now; None: all are."""
        return None if self.unhooked is None else self.unhooked.only

    def fetch_begins(self) -> None:
        """The loop asks its data loader for a batch; calls may nest, and the outermost counts."""
        if self.throughput.monitor.fetch_begins(inside=not self.outside_of):
            self.window.fetches += 1
            if (parts := self.window.parts) is not None:
                parts.enter("data_wait")

    def fetch_ends(self) -> None:
        """The data loader has delivered the batch."""
        if self.throughput.monitor.fetch_ends(inside=not self.outside_of) and (parts := self.window.parts) is not None:
            parts.leave()

    def enter(self, part: TimePhase | str, *, counts: bool = True) -> None:
        """*part* of the step begins, inside whatever part is running; *counts* as in ``Parts.enter``."""
        if (parts := self.window.parts) is not None and not self.outside_of:
            parts.enter(part, counts=counts)

    def leave(self) -> None:
        """The part entered last ends."""
        if (parts := self.window.parts) is not None and not self.outside_of:
            parts.leave()

    def claim(self, part: TimePhase) -> None:
        """What ran since the last part was left, if no part is running now, was *part* too."""
        if (parts := self.window.parts) is not None and not self.outside_of:
            parts.claim(part)

    def outside(self, what: str, *, since_batch: bool = False) -> None:
        """*what* begins, which belongs to no step, and *since_batch* what ran since the last batch; calls may nest."""
        self.outside_of.append(what)
        if len(self.outside_of) == 1:
            self.window.leave_scope()
            self.throughput.monitor.outside(since_batch=since_batch)
            if (parts := self.window.parts) is not None:
                if since_batch:
                    parts.claim(what)
                parts.enter(what, counts=False)

    def inside(self) -> None:
        """What belongs to no step is over."""
        if not self.outside_of:
            return
        self.outside_of.pop()
        if not self.outside_of:
            if (parts := self.window.parts) is not None:
                parts.leave()
            self.throughput.monitor.inside()
            self.window.enter_scope()

    def between_steps(self, what: str, *, since_batch: bool = False) -> None:
        """The framework is at *what* between two steps, or at what it was at before, until this is called with none."""
        if bool(what) is not bool(self.between):
            self.between = what
            if what:
                self.outside(what, since_batch=since_batch)
            else:
                self.inside()

    def phase_begins(self, name: str) -> None:
        """A phase of the step begins, such as a rollout; what begins inside of it is a part of it."""
        self.phases.append("" if self.outside_of else name)
        self._phase_follows()

    def phase_ends(self, *rollouts: tuple[int, int]) -> None:
        """What has begun last ends; *rollouts* that it has ended have tokens of prompts and of completions."""
        del self.phases[-1:]
        self._phase_follows(*rollouts)

    def _phase_follows(self, *rollouts: tuple[int, int]) -> None:
        if self.window.marks is not None:  # the outermost one counts
            self.window.recorder.phase(next(filter(None, self.phases), ""), *rollouts)

    def batch_done(
        self,
        *batches: Batch,
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
        window, delivery, throughput = self.window, self.delivery, self.throughput
        is_measured = window.scope is not None or window.recorder.sampling_lines
        samples = throughput.samples(batches, rows)
        if window.is_open or is_measured:
            for number, (batch, size) in enumerate(zip(batches, samples, strict=True), 1):
                is_last = ends_step and number == len(batches)
                tokens = throughput.tokens_of(batch, size)
                window.recorder.end_batch(shapes=batch.shapes, samples=size, tokens=tokens, ends_step=is_last)
        if is_measured:
            if window.micro_batch_size is None:
                window.micro_batch_size = samples[-1]
            window.leave_scope()  # before the clock is read: the end of counting is a part of what it costs
        seconds = throughput.batches_done(
            batches,
            samples,
            updates=updates,
            profiled=is_measured or delivery.worker.is_busy,
            ends_step=ends_step,
            counts_each=rows is not None,
        )
        if ends_step:
            self._step_ends(seconds)
            if logs:
                self.log()
        if delivery.deliver(self.adapter.logged_at) or logs or is_measured:
            throughput.monitor.go_on()
        if ends_step:
            self._step_begins()
            self._follow_unhooked()
        elif not window.is_idle:
            self._follow()

    def _follow_unhooked(self) -> None:
        if self.unhooked is not None:
            self.unhooked.step_ends(self.window.recorder)
        elif self.window.recorder.state is Phase.PLAIN:
            self.unhooked = Unhooked(self.adapter, self._hooks_are_on_again)

    def _hooks_are_on_again(self, steps: int) -> None:
        # So many went without hooks.
        self.steps_done += steps
        self.throughput.unhooked_steps += steps
        self.window.recorder.unhooked_steps_are_over(steps)
        self._follow()
        self.throughput.monitor.go_on()

    def _step_ends(self, seconds: float) -> None:
        self.throughput.step_ends(seconds, index=self.steps_done if self.window.is_open else None)
        self.steps_done += 1
        if (window := self.window).is_open:
            # But for lines that are sampled: how many steps that takes depends on the machine.
            if window.ends_at is None and (window.recorder.sampling_lines or window.recorder.closed):
                window.ends_at = self.adapter.x_axis(), self.adapter.logged_at()
            if window.recorder.closed:
                self._close_window()

    def log(self) -> None:
        """Give the loggers what the monitor has: the run logs its own metrics now."""
        if self.throughput.config.monitor:
            output = self.adapter.facts.output
            if (scalars := self.throughput.read(prefix=output.monitor_prefix)) and self.adapter.facts.rank == 0:
                output.loggers.write_scalars(scalars, step=self.adapter.logged_at())

    def context(self) -> RunContext:
        """Where the run takes place, as it is now."""
        return replace(self.adapter.context(), micro_batch_size=self.window.micro_batch_size)

    def _close_window(self) -> None:
        """Hand what the window has measured to the reports, and await the next."""
        window, delivery, context = self.window, self.delivery, self.context()
        listed, between = self.throughput.config.profile_step, range((window.step or 0) + 1, self.steps_done)
        for step in () if isinstance(listed, int) else filter(between.__contains__, listed):
            sentence = f"profile_step lists {step}, too: it was not profiled, because this window was still open."
            self.notes.add(sentence)
            delivery.passed_over(step, sentence)
        record = window.finish(
            self.adapter, context, self.notes, padding=padding_ratio(self.throughput.monitor.all_tokens)
        )
        if record is not None:
            record = replace(record, timed_steps=self.throughput.predicted(record.timed_steps))
            step, at = window.ends_at or (self.adapter.x_axis(), self.adapter.logged_at())
            delivery.report(record, window, step=step, at=at)
        else:
            words = f"the {context.run_word} ended in the middle of {context.step_word} {window.step}"
            delivery.warn(f"nothing was profiled: {words}")
        self._await_window(self.throughput.config.next_profile_step(steps_done=self.steps_done), window.processors.heat)

    def finish(self, *, interrupted_by: BaseException | None = None, waits: bool = True) -> None:
        """The run is over, or was *interrupted_by* something: report what was measured, and remove everything.

        It *waits* a bounded time for its reports.
        """
        if self.closed:
            return
        try:
            if (window := getattr(self, "window", None)) is None:
                return  # it was interrupted while it began
            if self.unhooked is not None:
                self.unhooked.end()
            window.leave_scope()
            if window.is_open and (window.recorder.measured or self.throughput.step.batches):
                if interrupted_by is not None:
                    self.notes.add(f"{self.context().activity} was interrupted by {type(interrupted_by).__name__}.")
                self._close_window()
            elif window.step is not None and interrupted_by is None:
                self.delivery.not_reached(
                    window.step,
                    self.context(),
                    steps_done=self.steps_done,
                    updated_by=list(self.adapter.optimizers() or ()),
                )
        finally:  # also if Ctrl-C comes once more
            self.close()
        _account_for(interrupted_by, self.adapter, self.context)
        if interrupted_by is None:
            why, limits_sec = "ended", (SEC_TO_FINISH, self.throughput.config.ranks_timeout_sec)
        else:
            why, limits_sec = f"was interrupted by {type(interrupted_by).__name__}", (SEC_AFTER_ERROR,) * 2
        missed = f"its run {why} after {self.steps_done} step(s), before its window closed"
        summary = self.throughput.summary(notes=self.notes.unreported) if self.throughput.config.monitor else None
        self.delivery.finish(
            "" if self.window.step is None else missed,
            now=self.adapter.logged_at(),
            summary=summary,
            limits_sec=limits_sec,
            waits=waits,
        )

    def __del__(self) -> None:
        # A framework that never says that the run is over, and a user who has dropped it with our callback. Python may
        # collect it anywhere in the user's code, which waits for nothing there.
        if getattr(self, "closed", True):
            return
        try:
            if self.adapter.facts.ends_when_dropped and threading.get_ident() == self.delivery.thread:
                self.finish(waits=False)
        except Exception as error:
            logger.warning("the report of a run that was dropped was lost: %s", words_of(error))
        finally:
            self.close()

    def fail(self, why: str) -> None:
        """Our side has failed: the run goes on without us."""
        self.close()
        try:
            self.delivery.finish(f"its profiler failed: {why}", now=self.adapter.logged_at())
        except Exception as lost:
            logger.warning("a report was lost: %s", words_of(lost), exc_info=lost)

    def close(self) -> None:
        """Remove everything of ours from torch and from the framework's objects."""
        if not self.closed and hasattr(self, "window"):
            self.undo.callback(self.window.close)
        self.closed = True
        close_quietly(self.undo)  # nothing the second time, unless something was raised here the first time


def _account_for(error: BaseException | None, adapter: Adapter, context: Callable[[], RunContext]) -> None:
    """If *error* is of an allocator, say and write what the step takes that it ended. It raises nothing of ours."""
    of_cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    if error is None or not (of_cpu or isinstance(error, torch.OutOfMemoryError)) or adapter.facts.rank:
        return
    try:
        words = _account(adapter, context())
    except Exception as failed:
        words = f"the step is not accounted for: {words_of(failed)}"
    logger.warning("out of memory: %s", words)


def _account(adapter: Adapter, context: RunContext) -> str:
    facts, call = adapter.facts, adapter.call()
    if facts.world_size > 1:
        return f"of several ranks no step is predicted; {_BY_HAND}"
    if call is None:
        return f"what the model was called with is not known; {_BY_HAND}"
    cuda, began = facts.device.type == "cuda", time.monotonic()
    prediction = MemoryPrediction(
        partial(
            fake_steps,
            facts.root,
            call[1],
            next(iter(adapter.optimizers() or ()), None),
            autocast=_HALF.get(context.precision),
            accumulate=min(context.accumulate, 2),  # a third finds the same gradients there as the second
            on_cuda=cuda,
            method=call[0],
        )
    )
    quick = time.monotonic() - began < _QUICK_SEC
    available = torch.cuda.get_device_properties(facts.device).total_memory if cuda else None
    report = prediction.report(available_bytes=available, largest=quick and cuda, checkpoints=quick)
    path = facts.output.files.account(render_text(report))
    fits = "" if report.largest is None else f"; the largest batch that fits is {plain(report.largest.size)}"
    return f"a step would take this. {headline(report)}{fits}{f'. All of it: {shown_path(path)}' if path else ''}"


def safe(hook: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R | None]:
    """A method of an object that has a ``run``, which ``does`` it; without one, what it raises is one warning."""

    @functools.wraps(hook)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.run is not None:
            return self.run.does(hook, self, *args, **kwargs)  # type: ignore[no-any-return]
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:
            failed(self.run, error)  # there may be one by now
            return None

    return call


def failed(run: Run | None, error: Exception) -> None:
    """Our side raised *error*: close *run*, and say so once."""
    words, shown = words_of(error), error if logger.isEnabledFor(logging.DEBUG) else None
    if run is not None:
        run.fail(words)
    logger.warning("the FLOPs profiler failed and is off; the program goes on: %s", words, exc_info=shown)


def close_quietly(undo: Undo) -> None:
    """Run every undo of *undo*; one that raises is a warning, and the others still run."""
    try:
        undo.close()
    except Exception as error:
        logger.warning("something of the FLOPs profiler could not be removed: %s", words_of(error), exc_info=error)
