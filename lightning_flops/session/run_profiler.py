"""One run of training under the profiler, whatever framework drives it: the recorder, the monitor and the report.

A front door's subclass says where its framework is tapped; what a window does with its steps is its recorder's
decision, and when a window opens, and what follows from the recorder's state - taps on, taps off, the report - is
decided here. Between windows a batch costs the monitor's few stamps and nothing else.

Everything here runs inside somebody's training. Every entry is guarded: the first failure of ours is logged once, the
profiler takes itself out completely, and training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_flops.analysis.throughput import build_throughput
from lightning_flops.analysis.traced_step import NEEDS_NUMPY, can_read_traces
from lightning_flops.instrument.batches import BatchMeter, Shapes, tensor_shapes
from lightning_flops.instrument.counting.flop_counter import FlopCounter
from lightning_flops.instrument.memory import MemoryWatch, memory_reader
from lightning_flops.instrument.notes import Notes
from lightning_flops.instrument.patches import Patches
from lightning_flops.instrument.random_state import random_state_kept
from lightning_flops.instrument.recorder import Recorder
from lightning_flops.instrument.run_facts import gather_run_facts
from lightning_flops.instrument.stack_room import stack_room
from lightning_flops.instrument.timing.clocks import clock_for
from lightning_flops.instrument.timing.forward_timer import ForwardTimer
from lightning_flops.instrument.timing.monitor import LONGEST_LOG, Monitor
from lightning_flops.instrument.timing.processor_wait import ProcessorWatch
from lightning_flops.instrument.tracing.step_tracer import StepTracer
from lightning_flops.instrument.tracing.trace_cycles import TraceCycles, Tracer
from lightning_flops.session.rank_exchange import NoExchangeError
from lightning_flops.session.ranks import RankReports, join_ranks, output_of_rank
from lightning_flops.session.taps import StepTaps, guarded
from lightning_flops.session.window_profile import profile_of_window
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lightning_flops.config import ProfilerConfig
    from lightning_flops.instrument.timing.loader_queue import Feed
    from lightning_flops.records import MemoryRecord, RunContext, RunFacts
    from lightning_flops.schema.profile import Profile
    from lightning_flops.schema.throughput import ThroughputSummary
    from lightning_flops.session.output import LoggedOutput, RunOutput

logger = package_logger(__name__)

_FRAMES_OF_TAPS = 16
"""Of ours, at most, on the stack below a model's first one: taps are in one another."""


class RunProfiler(StepTaps):
    """The profiler inside one run of training, on one rank; inert after ``take_out``.

    A subclass calls ``_start`` when it knows the run, then ``_batch_starts`` and ``_batch_ends``, and, from the taps
    that ``_tap_parts`` puts in, ``_enter_batch_scope``, ``_enter`` and ``_leave``, or what ``_inside_part`` makes.

    Args:
        root: the model whose modules own the work.
        config: the settings.
        publish: gets the profile when the window has closed; on rank 0, when the other ranks have answered.
        rank: of this process; rank 0 writes the reports.
        world_size: ranks of the run.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        rank: int,
        world_size: int,
    ) -> None:
        super().__init__()
        self._root = root
        self._config = config
        self._publish = publish
        self._rank = rank
        self._writes = rank == 0
        self._whole_run = Patches()
        self._window = Patches()
        self._output: RunOutput | None = None
        self._monitor = Monitor(describe=self._describe_passed) if config.monitor else None
        self._spare_batches = 0
        self._next_step: int | None = None
        self._in_window = False
        room = ExitStack()
        room.enter_context(stack_room.open(_FRAMES_OF_TAPS))
        self._room = weakref.finalize(self, room.close)  # also where somebody lets an engine go, and us with it
        self._room.atexit = False
        self._steps_done = 0
        self._settle_steps = 0
        self._profile: Profile | None = None
        self._throughput: ThroughputSummary | None = None
        self._counted_shapes: tuple[Shapes, ...] | None = None
        self._counted_updates: int | None = None
        self._notes = Notes(self._speak)
        self._batch: Any = None
        self._shapes: Shapes = ()
        self._step_shapes: list[Shapes] = []
        self._step_updates = 0
        self._micro_batch_size: int | None = None
        self._device: torch.device | None = None
        self._dp_size = 1
        self._meter = BatchMeter(
            batch_size=config.batch_size, tokens_per_sample=config.tokens_per_sample, note=self._note
        )
        # At once, so that a rank whose profiler fails later can say so, and every rank numbers its runs alike.
        self._ranks = self._join_ranks(world_size) if world_size > 1 else None

    # ---- what a front door says

    @abstractmethod
    def _tap_parts(self, taps: Patches) -> None:
        """Put taps around the parts of a step into *taps*; they are undone when no window needs them."""

    @abstractmethod
    def _take_out_taps(self) -> None:
        """Take off what the two ``Patches`` do not hold."""

    @abstractmethod
    def _run_context(self) -> RunContext:
        """Where the run takes place, as it is now."""

    @abstractmethod
    def _x_axis(self) -> int:
        """The run's own step, by which its loggers order what they get."""

    @abstractmethod
    def _reading_is_due(self) -> bool:
        """Whether the run logs its own metrics at its present step."""

    def _optimizers(self) -> Iterable[Any] | None:
        """The optimizers that update the model; None if not known."""
        return None

    def _whole_model(self) -> nn.Module:
        """The model in all its wrappers, some of which may be around the root."""
        return self._root

    def _loader_workers(self) -> int | None:
        """Fewest worker processes of the training DataLoaders; None if not known."""
        return None

    def _feed(self) -> Feed | None:
        """What feeds the training loop; None if nobody can tell."""
        return None

    # ---- the run

    def _start(
        self, *, profile_step: int | None, settle_steps: int, device: torch.device, output: LoggedOutput, dp_size: int
    ) -> None:
        """The run begins.

        Args:
            profile_step: the first step to profile, by the number of steps of the run before it; None: there is none.
            settle_steps: steps to leave alone after a counted one.
            device: where the model is.
            output: where rank 0 shows reports.
            dp_size: ranks that see different data.
        """
        self._output = output_of_rank(self._rank, output, ranks=self._ranks, config=self._config)
        self._device = device
        self._settle_steps = settle_steps
        self._dp_size = dp_size
        self._await_window(profile_step)
        self._tap_window()

    def _join_ranks(self, world_size: int) -> RankReports | None:
        try:
            return join_ranks(rank=self._rank, world_size=world_size, config=self._config, show=self._show)
        except NoExchangeError as error:
            self._note(f"This report is of rank {self._rank} alone: the ranks could not exchange anything: {error}.")
            return None

    def _await_window(self, profile_step: int | None) -> None:
        """Have a window ready that opens before *profile_step*, or at once if that is the step that begins now."""
        assert self._device is not None
        device, self._next_step = self._device, profile_step
        if self._ranks is not None:
            self._ranks.await_window(profile_step)
        self._micro_batch_size = None
        self._notes.begin_window()
        self._memory = MemoryWatch(self._root, read=memory_reader(device), on_device=device.type == "cuda")
        self._processors = ProcessorWatch()
        self._recorder = Recorder(
            self._root,
            profile_step=self._steps_done + 1 if profile_step is None else profile_step,
            timing_steps=self._config.timing_steps,
            settle_steps=self._settle_steps,
            feed=self._feed(),
            clock=clock_for(device),
            new_counter=lambda root: FlopCounter(root, causal_attention=self._config.causal_attention),
            notes=self._notes,
            tracing=self._tracing(device) if self._config.trace and profile_step is not None else None,
            whole=self._whole_model,
        )
        if profile_step == self._steps_done:
            self._open_window()

    def _open_window(self) -> None:
        """The step that begins now is counted."""
        assert self._recorder is not None
        self._recorder.open(steps_done=self._steps_done)
        self._in_window = True

    def _tracing(self, device: torch.device) -> TraceCycles:
        config = self._config
        tracers: list[Tracer] = []
        keep_file = config.trace_dir is not None and (self._writes or config.all_ranks)
        if keep_file or can_read_traces():
            tracers.append(
                StepTracer(
                    self._root,
                    device=device,
                    record_shapes=config.record_shapes,
                    profile_memory=config.profile_memory,
                    with_stack=config.with_stack,
                    keep_file=keep_file,
                )
            )
        else:
            self._note(f"No step was traced: {NEEDS_NUMPY}.")
        tracers.append(ForwardTimer(self._root, lambda: clock_for(device)))
        return TraceCycles(tracers, config.trace_schedule)

    @property
    def out(self) -> bool:
        """Whether the profiler has nothing more to do in this run."""
        return self._out

    @property
    def throughput(self) -> ThroughputSummary | None:
        """What the run's batches came to; None before its end, or if nothing was monitored."""
        return self._throughput

    def _tap_window(self) -> None:
        """Mark the parts of a step while a window needs them, and only then."""
        assert self._recorder is not None
        self._marking = self._recorder.marking
        if self._marking == bool(self._window):
            return
        if self._marking:
            self._tap_parts(self._window)
        else:
            self._window.undo()

    # ---- the borders: called for every batch of the run, and so without a decorator's frames; the caller guards them

    def _batch_starts(self, batch: Any) -> None:
        """Take the batch's shapes before the user's step may change it."""
        self._batch = batch
        self._shapes = tensor_shapes(batch)

    def _batch_ends(self, batch: Any, *, updates: int, ends_step: bool) -> None:
        """Tell the recorder and the monitor; report if the window is over.

        Args:
            batch: what the step was given; None if that is not known.
            updates: optimizer attempts that belong to this batch.
            ends_step: a global step ends with it.
        """
        started, self._batch = self._batch, None
        if batch is not started:
            self._shapes = tensor_shapes(batch)  # a dataloader_iter step fetches its batch itself
        elif batch is None:
            return  # the loader yielded None: no batch, no start, nothing ran
        if self._spare_batches:
            self._batch_passes(updates, ends_step)
            return
        shapes, monitor = self._shapes, self._monitor
        samples = self._meter.samples(batch, shapes)
        slowed = self._in_window and self._tell_recorder(batch, samples=samples, ends_step=ends_step)
        alike = self._book_batch(shapes, updates, ends_step)
        if monitor is not None:
            if slowed:
                monitor.restart()  # counting and tracing cost time, so what went by until here is no throughput
            else:
                self._watch(monitor, samples=samples, ends_step=ends_step, alike=alike)
        if ends_step:
            if self._ranks is not None and self._ranks.pending and not self._in_window:
                self._show_ready_reports()
            if self._steps_done == self._next_step:
                self._open_window()
        if self._in_window and not self._in_batch_scope:
            self._after_batch()
        self._spare_batches = self._batches_to_spare()
        if ends_step and self._recorder is not None and (timer := self._recorder.timer) is not None:
            timer.go_on()

    def _batch_passes(self, updates: int, ends_step: bool) -> None:
        """All of ``_batch_ends`` while nobody but the monitor is there: the rest of the run, and so as short as can be.

        What the batch was is found out when the monitor is read, or when another one may need it.
        """
        monitor = self._monitor
        assert monitor is not None
        waiting = monitor.passed(self._shapes, updates, ends_step)
        if ends_step and self._reading_is_due():
            self._write_reading(monitor)
        elif waiting < self._spare_batches:
            return
        monitor.add_up()
        self._spare_batches = self._batches_to_spare()

    def _batches_to_spare(self) -> int:
        """How many of the next batches nobody but the monitor will ask for, and the monitor for their shapes only."""
        reports_wait = self._ranks is not None and self._ranks.pending
        if self._monitor is None or self._in_window or reports_wait or self._meter.asks_for_batches:
            return 0
        if self._next_step is None:
            return LONGEST_LOG
        return max(0, min(LONGEST_LOG, self._next_step - self._steps_done - 1))

    def _describe_passed(self, shapes: Shapes, updates: int, ends_step: bool) -> tuple[int | None, bool]:
        return self._meter.samples(None, shapes), self._book_batch(shapes, updates, ends_step)

    def _book_batch(self, shapes: Shapes, updates: int, ends_step: bool) -> bool:
        """Book a batch to the running step; whether the step, if it ends, was like the counted one."""
        self._step_shapes.append(shapes)
        self._step_updates += updates
        if not ends_step:
            return True
        alike = tuple(self._step_shapes) == self._counted_shapes and self._step_updates == self._counted_updates
        self._steps_done += 1
        self._step_shapes.clear()
        self._step_updates = 0
        return alike

    def _tell_recorder(self, batch: Any, *, samples: int | None, ends_step: bool) -> bool:
        """Tell the open window of *batch*; whether it ran slower than it does without a profiler."""
        recorder = self._recorder
        assert recorder is not None
        counted, traced = recorder.counting, recorder.tracing
        if not recorder.closed:
            tokens = self._meter.tokens(batch, samples)
            recorder.end_batch(shapes=self._shapes, samples=samples, tokens=tokens, ends_step=ends_step)
        if counted and self._micro_batch_size is None:
            self._micro_batch_size = samples
        return counted or traced

    @guarded
    def _after_batch(self) -> None:
        """What follows from the state the window is in now: taps on or off, the report, or the end of our work."""
        recorder = self._recorder
        assert recorder is not None
        self._tap_window()
        self._processors.follow(timed=recorder.timer is not None)
        if self._in_window and recorder.closed:
            self._report()
            self._await_window(self._config.next_profile_step(steps_done=self._steps_done))
            self._tap_window()
        self._take_out_if_done()

    def _take_out_if_done(self) -> None:
        waits = self._ranks is not None and self._ranks.pending
        if self._next_step is None and self._monitor is None and not waits:
            self.take_out()

    def _watch(self, monitor: Monitor, *, samples: int | None, ends_step: bool, alike: bool) -> None:
        """Tell *monitor* of a batch; read it if the run logs its own metrics now."""
        monitor.batch(samples=samples, ends_step=ends_step, counted_signature=alike)
        if ends_step and self._reading_is_due():
            self._write_reading(monitor)

    def _write_reading(self, monitor: Monitor) -> None:
        reading = monitor.read()
        if reading.steps and self._writes:
            assert self._output is not None
            profile = self._profile if reading.counted_signature else None
            self._output.write_reading(
                reading,
                dp_size=self._dp_size,
                model_flops_peak_sec=None if profile is None else profile.model_flops_peak_sec,
                step=self._x_axis(),
            )

    @guarded
    def finish(self, *, interrupted_by: BaseException | None = None) -> None:
        """The run ends: report what there is, or say why there is nothing."""
        recorder = self._recorder
        assert recorder is not None
        if self._monitor is not None:
            self._monitor.add_up()
        if self._in_window and recorder.reached:
            if interrupted_by is not None:
                self._notes.add(f"Training was interrupted by {type(interrupted_by).__name__}.")
            self._report()
        elif self._next_step is not None and interrupted_by is None and self._writes:
            self._say_what_was_not_reached(self._next_step)
        if self._ranks is not None:
            self._ranks.finish(steps_done=self._steps_done, interrupted_by=interrupted_by)
        self._report_throughput()
        if self._ranks is not None:
            self._ranks.leave(wait=True)

    @guarded
    def _show_ready_reports(self) -> None:
        assert self._ranks is not None
        if self._ranks.show_ready() and self._monitor is not None:
            self._monitor.restart()
        self._take_out_if_done()

    def _say_what_was_not_reached(self, step: int) -> None:
        ended = f"this {self._run_context().run_word} ended after {self._steps_done} step(s)"
        if self._profile is None:
            logger.warning("nothing was profiled: profile_step is %d, and %s", step, ended)
        elif self._config.every is None:
            logger.warning("step %d was not profiled: %s", step, ended)

    def _report_throughput(self) -> None:
        if self._monitor is None:
            return
        self._throughput = build_throughput(self._monitor.totals(), dp_size=self._dp_size)
        if self._throughput is not None and self._output is not None:
            with random_state_kept():
                self._output.write_throughput(self._throughput, step=self._x_axis())

    def _report(self) -> None:
        with random_state_kept():  # the report asks the user's modules, optimizers and loggers
            self._make_report()

    def _make_report(self) -> None:
        recorder = self._recorder
        assert recorder is not None
        self._name_steps_passed_over()
        for sentence in self._processors.sentences():
            self._notes.add(sentence)
        self._in_window = False
        self._next_step = None
        started = time.perf_counter()
        step = self._x_axis()
        window = recorder.close(context=self._run_context())
        self._window.undo()
        if window is None:
            if self._writes:
                logger.warning("nothing was profiled: training ended while the first step was being counted")
            return
        profile = profile_of_window(
            window,
            config=self._config,
            report_step=step,
            facts=self._run_facts,
            memory=self._memory_record,
            warns=self._writes,
        )
        self._profile = profile
        self._counted_shapes, self._counted_updates = recorder.counted_shapes, recorder.counted_updates
        if self._writes:
            taken_sec = time.perf_counter() - started
            logger.info(
                "profiled step %d of this %s in %.3f s", window.profile_step, profile.context.run_word, taken_sec
            )
        if self._ranks is None:
            self._show(profile)
        else:
            self._ranks.hand_over(profile)
            self._ranks.show_ready()
        if self._monitor is not None:
            self._monitor.restart()

    def _show(self, profile: Profile) -> None:
        """Give *profile*, in which nothing is missing any more, to whoever waits for it, at the run's present step."""
        step = self._x_axis()
        profile = replace(profile, report_step=step)
        self._publish(profile)
        if self._output is not None:
            with random_state_kept():
                self._output.write_profile(profile, step=step)

    def _name_steps_passed_over(self) -> None:
        """Say in the report and the log which listed steps this window was too long for."""
        assert self._next_step is not None
        for step in self._config.listed_between(self._next_step, self._steps_done):
            sentence = f"profile_step lists {step}, too: it was not profiled, because this window was still open."
            self._notes.add(sentence)
            if self._writes:
                logger.warning(sentence)
            if self._ranks is not None:
                self._ranks.say_absent(step, "it passed this step over: another window was still open")

    def _memory_record(self) -> MemoryRecord | None:
        return None if self._memory is None else self._memory.record(optimizers=self._optimizers())

    def _run_facts(self) -> RunFacts:
        assert self._device is not None
        return gather_run_facts(
            self._root, device=self._device, optimizers=self._optimizers(), loader_workers=self._loader_workers()
        )

    def _note(self, sentence: str) -> None:
        """Put *sentence* into this window's report and those of later ones and, once, into the log."""
        self._notes.add_for_run(sentence)

    def _speak(self, sentence: str) -> None:
        if self._writes:
            logger.warning(sentence)

    # ---- out of the way

    def take_out(self) -> None:
        """Leave nothing of ours on the framework's objects or on torch."""
        self._take_off()
        if self._ranks is not None:
            self._ranks.leave(wait=False)

    def _take_off(self) -> None:
        self._out = True
        abandon = () if self._recorder is None else (self._recorder.abandon,)
        for undo in (*abandon, self._room, self._window.undo, self._whole_run.undo, self._take_out_taps):
            try:
                undo()
            except Exception as error:  # what is left of the others still comes off
                _warn("could not take every tap off the training loop", because=error)

    def _fail(self, error: Exception) -> None:
        if self._out:
            return
        # First out of the way, then words: whoever hears them may fail, too, such as a logging handler of the user's.
        self._take_off()
        _warn(
            "the FLOPs profiler failed and has taken itself out; training goes on: %s: %s",
            type(error).__name__,
            error,
            because=error if logger.isEnabledFor(logging.DEBUG) else None,
        )
        if self._ranks is None:
            return
        try:
            self._ranks.say_out(f"its profiler failed: {type(error).__name__}: {error}")
            self._ranks.show_all(within_sec=0.0)
        except Exception as lost:
            _warn("a report that waited for other ranks was lost", because=lost)
        with contextlib.suppress(Exception):
            self._ranks.leave(wait=False)


def _warn(message: str, *values: object, because: BaseException | None) -> None:
    """Warn while something of ours fails, where not even that may raise into training."""
    with contextlib.suppress(Exception):
        logger.warning(message, *values, exc_info=because)
