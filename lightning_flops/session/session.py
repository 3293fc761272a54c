"""One run under the profiler, on one rank, whatever framework drives it: of training, or of a loop without it.

A door tells the session what happens in the run. The session decides when a window opens, and what to do in each state
of its recorder: put wrappers on, take them off, report. The recorder decides what a window does with its steps. Between
windows a batch costs a few readings of the clock by the monitor, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import compress
from typing import TYPE_CHECKING, Any

from lightning_flops.instrument.batches import of_tensors, one_object_if_equal
from lightning_flops.instrument.border import UndoLedger, on_deletion
from lightning_flops.instrument.notes import Notes
from lightning_flops.instrument.random_state import random_state_kept
from lightning_flops.instrument.stack_room import stack_room
from lightning_flops.instrument.timing.gpu_counters import open_meter
from lightning_flops.instrument.timing.monitor import ENDS_STEP, LONGEST_LOG, BatchLog, Monitor
from lightning_flops.instrument.torch_private.profiling import profiler_is_recording
from lightning_flops.records import Shapes, activity_of
from lightning_flops.session.border import Border, guarded
from lightning_flops.session.instruments import Instruments
from lightning_flops.session.outcomes import OUTCOMES
from lightning_flops.session.output import output_of_rank
from lightning_flops.session.rank_exchange import NoExchangeError
from lightning_flops.session.ranks import RankReports, join_ranks
from lightning_flops.session.run_reports import RunReports
from lightning_flops.session.run_so_far import RunSoFar
from lightning_flops.session.samples import SHARE
from lightning_flops.session.step_book import StepBook
from lightning_flops.session.step_flops import StepFlops
from lightning_flops.session.taps import Taps
from lightning_flops.session.token_reader import TokenReader
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lightning_flops.analysis.step_keys import StepKey
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.instrument.window_states import CountedStep
    from lightning_flops.records import BatchTokens, Loop
    from lightning_flops.schema.profile import Profile
    from lightning_flops.session.door import Door, RunPlan
    from lightning_flops.session.window import Window

logger = package_logger(__name__)

_FRAMES_OF_TAPS = 16
"""At most this many of our frames are on the stack below a model's first one: wrappers may be nested."""


class Session:
    """The profiler inside one run of training, on one rank. Once it is ``out``, nothing of it is left.

    A door makes it, and calls ``begin`` when the door can answer questions about its framework. If our code fails, then
    or later, the session removes itself and says so once. From then on every method does nothing.

    Args:
        door: connects it to the framework.
        root: the model whose modules own the work.
        config: the settings.
        publish: gets each profile when its window has closed; on rank 0, when the other ranks have answered.
        rank: of this process; rank 0 writes the reports.
        world_size: number of ranks of the run.
        whole_steps: the door reports all batches of a step together, when the step has ended.
        hears_starts: the door can tell that a step begins although nobody but the monitor needs to know of its batches.
        loop: what the run does.
        so_far: the run goes on, of which another session knows this; None: it is a new one.
    """

    window: Window
    """The window that is open or comes next. ``begin`` sets this and the attributes below."""
    _plan: RunPlan
    _instruments: Instruments

    def __init__(
        self,
        door: Door,
        root: nn.Module,
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        rank: int,
        world_size: int,
        whole_steps: bool = False,
        hears_starts: bool = False,
        loop: Loop = "training",
        so_far: RunSoFar | None = None,
    ) -> None:
        self.border = Border(take_off=self._take_off, tell=self._tell_failure)
        self.taps = Taps(self, self.border)
        self._door = door
        self._root = root
        self._config = config
        self._rank = rank
        self._writes = rank == 0
        self.notes = Notes() if so_far is None else so_far.notes
        self.notes.goes_on(self.warn)
        self.steps = StepBook(last=None if so_far is None else so_far.last)
        self.monitor = self._new_monitor() if so_far is None else so_far.monitor
        """Adds up throughput during the whole run; None if that was not asked for."""
        self.log = BatchLog() if self.monitor is None else self.monitor.log
        """Notes batches between windows, if there is a monitor."""
        self._whole_steps = whole_steps
        self._hears_starts = hears_starts
        self._loop: Loop = loop
        self._activity = activity_of(loop)
        self._so_far = so_far
        self._is_finished = False
        self._step_is_slowed = False
        """A batch of the running step was slowed down by us."""
        self._samples_of_step: int | None = 0
        self._meter = door.meter(self.notes.add_for_run)
        self.flops = self._new_step_flops(world_size) if so_far is None else so_far.flops
        """What the steps of the run spend."""
        self.tokens = TokenReader(self.notes.add_for_run, wanted=config.monitor and config.tokens_per_sample is None)
        """Reads the tokens of batches."""
        self.reports = RunReports(
            door,
            root,
            config=config,
            publish=publish,
            notes=self.notes,
            steps=self.steps,
            flops=self.flops,
            monitor=self.monitor,
            writes=self._writes,
            warn=self.warn,
            so_far=so_far,
        )
        """What the run reports."""
        self._ledger = UndoLedger()
        # Join now, so that a rank whose profiler fails later can say so, and so that all ranks number their runs alike.
        self._ranks = self._join_ranks(world_size) if world_size > 1 else None

    def _new_monitor(self) -> Monitor | None:
        return Monitor(describe=self._describe_noted) if self._config.monitor else None

    def _new_step_flops(self, world_size: int) -> StepFlops:
        config = self._config
        return StepFlops(
            self._root,
            self.notes.add_for_run,
            updated=self._updated_parameters,
            shown=config.monitor and (self._writes or config.all_ranks),
            share=SHARE / world_size if config.all_ranks else SHARE,
            padding_counts=config.causal_attention == "half",
        )

    @property
    def out(self) -> bool:
        """Whether the session has nothing more to do in this run."""
        return self.border.closed

    # ---- the run begins

    def _join_ranks(self, world_size: int) -> RankReports | None:
        try:
            return join_ranks(rank=self._rank, world_size=world_size, config=self._config, show=self.reports.show)
        except NoExchangeError as error:
            self.notes.add_for_run(
                f"This report is of rank {self._rank} alone: the ranks could not exchange anything: {error}."
            )
            return None

    @guarded
    def begin(self) -> None:
        """The run begins."""
        OUTCOMES.begins(self, trains=self._loop == "training")
        # First register the undo of what can be removed in any state, so that nothing is ever left behind.
        room = ExitStack()
        # Also when the user drops an engine, and us with it.
        weakref.finalize(self, on_deletion(room.close)).atexit = False
        self._ledger.add(self._door.take_out)
        self._ledger.add(self.taps.undo)
        self._ledger.add(room.close)
        room.enter_context(stack_room.open(_FRAMES_OF_TAPS))
        self._plan = plan = self._door.plan()
        self.steps.steps_done = plan.steps_before
        self.flops.books.unseen(plan.steps_before - self._goes_on())
        self.reports.begin(plan, output_of_rank(self._rank, plan.output, ranks=self._ranks, config=self._config))
        self._door.tap_run(self.taps.for_run)
        self._instruments = Instruments(
            self._door,
            self._root,
            config=self._config,
            plan=plan,
            notes=self.notes,
            gpu_meter=open_meter(plan.device, self._ledger),
            keeps_traces=self._writes or self._config.all_ranks,
            taps=self.taps.for_window,
            counted=self._step_was_counted,
        )
        self._await_window(plan.profile_step)
        self._ledger.add(lambda: self.window.abandon())
        self.window.follow()

    def _goes_on(self) -> int:
        """If another session knew an earlier part of the run, go on with what it has added up. Returns its steps."""
        if self._so_far is None:
            return 0
        if self.monitor is not None:
            self.monitor.goes_on(self._describe_noted)
        self.flops.goes_on(self._root, updated=self._updated_parameters)
        return self._so_far.steps_done

    def _await_window(self, profile_step: int | None) -> None:
        """Make a window that opens before *profile_step*; open it now if that is the step that begins now."""
        if self._ranks is not None:
            self._ranks.await_window(profile_step)
        self.reports.micro_batch_size = None
        self.notes.begin_window()
        self.window = self._instruments.window(profile_step, steps_done=self.steps.steps_done)
        if profile_step == self.steps.steps_done:
            self._open_window()

    def _open_window(self) -> None:
        """The step that begins now is counted."""
        self.flops.window_opens(steps_done=self.steps.steps_done)
        self.window.open(steps_done=self.steps.steps_done)
        self._door.window_opens()

    # ---- the parts of a step; these are called by wrappers, which catch their errors

    def enter(self, part: str, *, counts: bool = True) -> None:
        """*part* of a step begins, inside whatever part is running; *counts* as in ``Recorder.enter``."""
        if not self.border.closed:
            self.window.enter(part, counts=counts)

    def leave(self) -> None:
        """The part entered last ends."""
        if not self.border.closed:
            self.window.leave()

    def training_stops(self, reason: str) -> None:
        """What runs from here on belongs to no step, until ``training_goes_on`` is called with the same *reason*."""
        self.flops.samples.pause(reason)
        self.log.exclude(reason)

    def training_goes_on(self, reason: str) -> None:
        """*reason* is over."""
        self.flops.samples.go_on(reason)
        self.log.include(reason)

    def epoch_ends(self) -> None:
        """An epoch ends: until the next one begins, time belongs to no step."""
        self.window.recorder.epoch_ends()
        self.training_stops("epoch restart")
        self.steps_of_epoch_end()

    def steps_of_epoch_end(self) -> None:
        """The last step of an epoch is over."""
        done = self._steps_done_now()
        self.flops.epoch_ends(self.steps.last, steps_done=done)
        self.log.none_to_spare()

    def epoch_begins(self) -> None:
        """An epoch begins: time belongs to steps again."""
        self.window.recorder.epoch_begins()
        self.training_goes_on("epoch restart")
        self.steps_of_epoch_begin()
        self.check_may_begin()

    def steps_of_epoch_begin(self) -> None:
        """The first step of an epoch begins, or the step goes on that was not done when the last epoch ended."""
        self.flops.epoch_begins(steps_done=self._steps_done_now())

    def _steps_done_now(self) -> int:
        """Steps that have ended, those that only the monitor has noted included."""
        if self.monitor is not None:
            self.monitor.add_up()
        return self.steps.steps_done

    def fetch_begins(self) -> None:
        """The loop asks its data loader for a batch."""
        self.log.fetch_begins()
        if self.window.marking:
            self.window.enter("data_wait", counts=True)

    def fetch_ends(self) -> None:
        """The data loader has delivered the batch."""
        if self.window.marking:
            self.window.leave()
        self.log.fetch_ends()

    def optimizer_work_begins(self) -> ExitStack:
        """What is counted from here on is the optimizer's, until ``optimizer_work_ends`` is called with the result."""
        scope = ExitStack()
        scope.enter_context(self.window.recorder.optimizer_work())
        return scope

    def optimizer_work_ends(self, scope: ExitStack) -> None:
        """The optimizer's work is done."""
        scope.close()

    # ---- between batches: called for every batch of the run, so kept short; the caller catches their errors

    def batch(
        self,
        batch: Any,
        shapes: Shapes,
        *,
        updates: int,
        ends_step: bool,
        logs: bool = False,
        tokens: BatchTokens | None = None,
    ) -> None:
        """A batch went through the loop. Every door calls this once for each batch.

        Args:
            batch: what the step was given; an empty tuple if no setting needs it.
            shapes: shapes of its tensors before the step, because the step may have changed it; perhaps with what else
                the batch is known by.
            updates: optimizer attempts that belong to it.
            ends_step: a global step ends with it.
            logs: the run logs its own metrics at the step that ends.
            tokens: what the session's ``tokens`` has found in it.
        """
        if self.border.closed:
            return
        if self.log.note(shapes, updates, ends_step, tokens):  # most of the run
            if logs or not self.log.spare:
                self.look(logs=logs)
            return
        monitor, window = self.monitor, self.window
        if monitor is not None:
            monitor.add_up()
        samples = self._meter.samples(batch, shapes)
        sampling = window.recorder.sampling
        slowed = (window.is_open or sampling) and self._tell_recorder(
            batch, shapes, samples=samples, tokens=tokens, ends_step=ends_step
        )
        # A sample may be dropped in the middle of a step. The rest of that step is in no figure, either.
        is_rest = self._step_is_slowed and not slowed
        slowed = slowed or is_rest
        self._step_is_slowed = slowed and not ends_step
        key = self.steps.book(self.flops.known_by(shapes, tokens), updates, ends_step)
        if key is not None and monitor is not None and slowed:
            self.flops.books.book_slowed(key)
        if sampling and not self.flops.checks.running and (ends_step or not self._whole_steps):
            window.end_sample()
            if ends_step:
                self.flops.sample_ends(steps_done=self.steps.steps_done)
        if monitor is not None:
            if slowed:
                self.reports.slowed_tokens = self.reports.slowed_tokens.plus(tokens)
            if sampling or is_rest:
                monitor.leave_out()
            elif slowed:
                self._restart_monitor()  # counting and tracing cost time, so the time until here gives no throughput
            else:
                self._watch(monitor, samples=samples, tokens=tokens, ends_step=ends_step, logs=logs, key=key)
        self.flops.at_border = ends_step
        if ends_step:
            if self._ranks is not None and self._ranks.pending and not window.is_open:
                self._show_ready_reports(self._ranks)
            if self.steps.steps_done == window.step:
                self._open_window()
            else:
                self.check_may_begin()
        if window.is_open and not window.in_scope:
            self.after_batch()
        self._find_spare_batches()
        if ends_step:
            self.window.next_timed_step()

    def step_was_not_whole(self) -> None:
        """A step has ended that was not seen from its beginning: it is in no figure."""
        self.steps.steps_done += 1
        self.flops.books.unseen(1)
        self._restart_monitor()
        if self.steps.steps_done == self.window.step:
            self._open_window()
            self.after_batch()

    def look(self, *, logs: bool) -> None:
        """A batch was noted after which somebody must look; *logs* as in ``batch``."""
        if self.monitor is None:
            return
        if (
            logs
            and not self.flops.wants_shapes
            and self.reports.reading_can_wait(at=self.log.now())
            and self.log.go_on()
        ):
            return
        if logs:
            self._write_reading(self.monitor)
        else:
            self.monitor.add_up()
        self._find_spare_batches()

    def _find_spare_batches(self) -> None:
        self.log.none_to_spare()
        self.log.spare, self.log.until = self._batches_to_spare(), self.flops.look_from

    def _batches_to_spare(self) -> int:
        """How many of the next batches only the monitor needs, and needs only the shapes of."""
        window = self.window
        if self.monitor is None or self.border.closed or window.is_open or self._whole_steps:
            return 0
        self.flops.look(steps_done=self.steps.steps_done)
        if window.recorder.sampling or (self.flops.wants_shapes and not self._hears_starts):
            return 0
        if self._meter.asks_for_batches or (self._ranks is not None and self._ranks.pending):
            return 0
        done, opens = self.steps.steps_done, self.window.step
        looks = min(self.flops.look_at - done, self.flops.checks.at - done - 1)
        steps = min(LONGEST_LOG, looks, LONGEST_LOG if opens is None else opens - done - 1)
        return max(0, int(steps))

    def _describe_noted(
        self,
        shapes: Sequence[Shapes],
        updates: Sequence[int],
        ends_step: Sequence[bool],
        tokens: Sequence[BatchTokens | None],
        nodes: Sequence[int | None],
        seconds: Sequence[float],
    ) -> Sequence[int | None]:
        if any(tokens):
            known: Sequence[Shapes] = list(map(self.flops.known_by, shapes, tokens))
        else:
            known = shapes = one_object_if_equal(shapes)
        books = self.flops.books
        if self.steps.book_if_steps(known, updates, ends_step):  # as in most runs
            books.book_one_batch_each(known, updates, seconds, nodes)
        else:
            books.book(self.steps.book_all(known, updates, ends_step), seconds, list(compress(nodes, ends_step)))
        self.flops.at_border = ends_step[-1]
        return self._meter.samples_of(shapes)

    def _tell_recorder(
        self, batch: Any, shapes: Shapes, *, samples: int | None, tokens: BatchTokens | None, ends_step: bool
    ) -> bool:
        """Tell the open window of *batch*; return whether the profiler slowed the batch down."""
        recorder = self.window.recorder
        counted, traced = recorder.counting, recorder.tracing
        if not recorder.closed:
            told = None if tokens is None else tokens.real
            if told is None:
                told = self._meter.tokens(batch, samples)
            recorder.end_batch(shapes=of_tensors(shapes), samples=samples, tokens=told, ends_step=ends_step)
        if counted and not recorder.sampling:
            self.flops.window_counts(tokens)
        if counted and self.reports.micro_batch_size is None:
            self.reports.micro_batch_size = samples
        return counted or traced

    # ---- what steps spend

    def step_begins(self, batches: tuple[Shapes, ...], tokens: tuple[BatchTokens | None, ...] = ()) -> None:
        """A step begins whose first *batches* have these shapes; a door calls this if ``flops.wants_shapes``.

        Args:
            batches: those that are known.
            tokens: in each of them; empty if no batch of the run tells its tokens.
        """
        window = self.window
        if self.border.closed or window.is_open or window.recorder.sampling:
            return
        if tokens:
            batches = tuple(map(self.flops.known_by, batches, tokens))
        if self.log.noted:
            self.flops.at_border = bool(self.log.noted[-1][ENDS_STEP])
        if self.flops.is_worth_counting(batches, self.steps) and not profiler_is_recording():
            if self.monitor is not None:
                self.monitor.add_up()
            self.log.none_to_spare()
            self.flops.sample_begins()
            window.begin_sample(steps_done=self.steps.steps_done)
        elif not self.flops.wants_shapes:
            self.log.none_to_spare()  # now it is found out when somebody must look again

    def check_may_begin(self) -> None:
        """Count the step that begins now, if that is due, the run can afford it, and no window opens after it."""
        window, done = self.window, self.steps.steps_done
        if done < self.flops.checks.at or self.steps.batches or self.border.closed:
            return
        if window.is_open or window.recorder.sampling or window.step == done + 1 or profiler_is_recording():
            self.flops.checks.postpone(steps_done=done)
        elif self.flops.checks.begins(steps_done=done):
            self.log.none_to_spare()
            window.begin_check(steps_done=done)

    def _check_may_be_over(self) -> None:
        if self.flops.checks.running and not self.window.recorder.sampling:
            self.window.follow()
            self.flops.checks.ends(steps_done=self.steps.steps_done)
            if self.monitor is not None:
                self.monitor.leave_out()  # what we have just done is in no step

    def _step_was_counted(self, step: CountedStep) -> None:
        if self.steps.last is not None:
            self.steps.last = self.flops.was_counted(self.steps.last, step)

    def _watch(
        self,
        monitor: Monitor,
        *,
        samples: int | None,
        tokens: BatchTokens | None,
        ends_step: bool,
        logs: bool,
        key: StepKey | None,
    ) -> None:
        """Tell *monitor* of a batch, or of a whole step; read it if the run logs its own metrics now."""
        if self._whole_steps:
            known = self._samples_of_step is not None and samples is not None
            self._samples_of_step = (self._samples_of_step or 0) + (samples or 0) if known else None
            if not ends_step:
                return
            samples, self._samples_of_step = self._samples_of_step, 0
        seconds = monitor.batch(samples=samples, ends_step=ends_step, tokens=tokens)
        if key is not None and seconds is not None:
            self.flops.books.book((key,), (seconds,))
        if logs:
            self._write_reading(monitor)

    def run_logs(self) -> None:
        """The run logs its own metrics now, and the monitor's with them."""
        if self.monitor is not None:
            self._write_reading(self.monitor)

    def run_has_logged(self) -> None:
        """The run has logged its own metrics: what waited for that is out."""
        self._take_out_if_done()

    def _write_reading(self, monitor: Monitor) -> None:
        reading = monitor.read()
        read = self.flops.books.reading()
        self.flops.look_at_parameters()
        if not self.reports.of_reading(reading, read, at=self.log.now()):
            self.flops.misses(read.keys(), steps_done=self.steps.steps_done)
            self.log.none_to_spare()

    def _restart_monitor(self) -> None:
        """Drop the time since the last batch, and what the next reading would be of."""
        if self.monitor is not None:
            self.monitor.restart()
            self.flops.books.reading()

    def after_batch(self) -> None:
        """Do what the window's state asks for: put wrappers on or take them off, report, or end our work."""
        if self.border.closed:
            return
        window = self.window
        self._check_may_be_over()
        if window.is_open and window.recorder.closed:
            window.end_watches()
            self._report()
            self._await_window(self._config.next_profile_step(steps_done=self.steps.steps_done))
        self.window.follow()
        self._take_out_if_done()

    def _take_out_if_done(self) -> None:
        waits = self._ranks is not None and self._ranks.pending
        if self.window.step is None and self.monitor is None and not waits and not self._plan.holds_back():
            self.take_out()

    # ---- a step that the loop left unfinished

    def end_window(self, reason: str) -> None:
        """End the window here, in the middle of a step; the report says why."""
        self.notes.add(f"{reason} The window ended with that step.")
        self._report(run_goes_on=True)
        self._await_window(self._config.next_profile_step(steps_done=self.steps.steps_done + 1))
        self._begin_again()

    def postpone_window(self, reason: str) -> None:
        """The step that was being counted did not finish: open the window with the next step instead."""
        if self.window.recorder.sampling:
            self._drop_sample()
            return
        step = self.window.step
        self.window.abandon()
        if self._ranks is not None and step is not None:
            self._ranks.say_absent(step, "its loop left that step half done")
        self._await_window(self.steps.steps_done + 1)
        sentence = f"{reason} Step {self.steps.steps_done} is not counted, but the one after it."
        self.notes.add(sentence)
        self.warn(sentence)
        self._begin_again()

    def _drop_sample(self) -> None:
        """A step that was being counted outside of windows was left unfinished."""
        self.window.drop_sample()
        if self.flops.checks.running:
            self.flops.checks.ends(steps_done=self.steps.steps_done)
        else:
            self.flops.sample_ends(steps_done=self.steps.steps_done)
        self.flops.at_border = True

    def step_begins_anew(self) -> None:
        """What has run since the latest step ended is of no step: the next one begins here."""
        self.steps.drop_running()
        self._step_is_slowed = False
        if self.monitor is not None:
            self.monitor.drop_open_step()
            self.monitor.leave_out()
        self.window.recorder.step_begins_anew()
        self.flops.at_border = True

    def check_waits(self) -> None:
        """What runs now belongs to no step. A check that has just begun would count nothing, and slow it all down."""
        if self.flops.checks.running:
            self._drop_sample()
            self.flops.checks.hurry(steps_done=self.steps.steps_done + 1)

    def _begin_again(self) -> None:
        self.window.follow()
        self._restart_monitor()

    # ---- the reports

    def _report(self, *, run_goes_on: bool = False) -> None:
        with random_state_kept():  # the report calls methods of the user's modules, optimizers and loggers
            self._name_steps_passed_over(self.window)
            profile = self.reports.of_window(self.window, run_goes_on=run_goes_on)
            if profile is None:
                step = self.reports.context().step_word
                ended = f"{self._activity.lower()} ended while the first {step} was being counted"
                self.warn(f"nothing was profiled: {ended}")
                return
            if self._ranks is None:
                self.reports.show(profile)
            else:
                self._ranks.hand_over(profile)
                self._ranks.show_ready()
            self._restart_monitor()

    def _show_ready_reports(self, ranks: RankReports) -> None:
        if ranks.show_ready():
            self._restart_monitor()
        self._take_out_if_done()

    def _name_steps_passed_over(self, window: Window) -> None:
        """Say in the report and the log which listed steps were not profiled because this window was still open."""
        if window.step is None:
            return
        for step in self._config.listed_between(window.step, self.steps.steps_done):
            sentence = f"profile_step lists {step}, too: it was not profiled, because this window was still open."
            self.notes.add(sentence)
            self.warn(sentence)
            if self._ranks is not None:
                self._ranks.say_absent(step, "it passed this step over: another window was still open")

    def warn(self, sentence: str) -> None:
        """Say *sentence* in the log, on the rank that writes."""
        if self._writes:
            logger.warning(sentence)

    # ---- the run ends

    @guarded
    def finish(self, *, interrupted_by: BaseException | None = None, replaced: bool = False) -> None:
        """The run ends: report what was measured, or say why nothing was.

        Args:
            interrupted_by: what ended it; None if it ended by itself.
            replaced: it had ended before another run began, with optimizers of its own.
        """
        window = self.window
        if self.monitor is not None:
            self.monitor.add_up()
        if window.is_open and window.recorder.reached:
            if interrupted_by is not None:
                self.notes.add(f"{self._activity} was interrupted by {type(interrupted_by).__name__}.")
            self._report()
        elif window.step is not None and interrupted_by is None:
            self.reports.was_not_reached(window.step)
        if self._ranks is not None:
            self._ranks.finish(steps_done=self.steps.steps_done, interrupted_by=interrupted_by)
        if self.monitor is not None:
            self.reports.of_run(self.monitor, replaced=replaced)
            if self._so_far is None or not replaced:  # what has many turns is not reported after each
                self.reports.write_run()
        if self._ranks is not None:
            self._ranks.leave(wait=True)
        self._is_finished = True

    def so_far(self) -> RunSoFar | None:
        """What another session needs to go on with the run after this one was taken out; None if this one failed."""
        if not self._is_finished:
            return None
        self.notes.let_go()
        if self.monitor is not None:
            self.monitor.let_go()
        self.flops.let_go(steps_done=self.steps.steps_done)
        reports = self.reports
        return RunSoFar(
            steps_done=self.steps.steps_done,
            last=self.steps.last,
            notes=self.notes,
            monitor=self.monitor,
            flops=self.flops,
            profile=reports.profile,
            slowed_tokens=reports.slowed_tokens,
            throughput=reports.throughput,
            x_axis=self._door.x_axis(),
            output=reports.output,
            is_written=reports.run_is_written,
        )

    def _updated_parameters(self) -> Iterator[torch.Tensor]:
        with contextlib.suppress(Exception):  # of the user's optimizers
            for optimizer in self._door.optimizers() or ():
                for group in optimizer.param_groups:
                    yield from group["params"]

    def take_out(self) -> None:
        """Remove everything of ours from the framework's objects and from torch."""
        try:
            self.border.close()
        except BaseException:
            self.border.close()  # for an error that came before it began
            raise
        if self._ranks is not None:
            self._ranks.leave(wait=False)

    def leave_again(self) -> None:
        """A call during which the session was taken out has ended: remove what torch has put back.

        When a mode is removed inside a backward, torch puts it back on its stack afterwards.
        """
        self.window.abandon()

    def _take_off(self) -> None:
        try:
            self._ledger.close()
        except BaseException as error:
            # The ledger has run every other undo all the same, unless the error came before it began.
            with contextlib.suppress(Exception):
                self._ledger.close()
            if not isinstance(error, Exception):
                raise
            logger.warning("could not take every tap off the training loop", exc_info=error)

    def _tell_failure(self, error: Exception) -> None:
        logger.warning(
            "the FLOPs profiler failed and has taken itself out; %s goes on: %s: %s",
            self._activity.lower(),
            type(error).__name__,
            error,
            exc_info=error if logger.isEnabledFor(logging.DEBUG) else None,
        )
        if self._ranks is None:
            return
        try:
            self._ranks.say_out(f"its profiler failed: {type(error).__name__}: {error}")
            self._ranks.show_all(within_sec=0.0)
        except Exception as lost:
            logger.warning("a report that waited for other ranks was lost", exc_info=lost)
        with contextlib.suppress(Exception):
            self._ranks.leave(wait=False)
