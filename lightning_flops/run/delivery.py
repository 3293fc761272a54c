"""How the reports of a run are made and where they get: on a thread of its own, from all ranks, into the run's loggers.

A closed window becomes a profile, on the first of several ranks with the records of the others, and that text and
files, on the worker's thread. The training thread gives what is ready to the run's loggers at its next batch.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lightning_flops import host_clock
from lightning_flops.analysis.profile import build_profile
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.notes import Notes
from lightning_flops.measure.random_state import random_state_kept
from lightning_flops.records import RunContext, WindowRecord
from lightning_flops.report.text import figures
from lightning_flops.run.adapter import Facts
from lightning_flops.run.ranks import PAUSE_SEC, Ranks
from lightning_flops.schema.profile import Profile, ThroughputSummary
from lightning_flops.schema.trace import TracedStep
from lightning_flops.sinks.file import keep_trace
from lightning_flops.sinks.services import Services
from lightning_flops.units import duration, package_logger

logger = package_logger(__name__)

PROFILES_KEPT = 100  # the latest: with ``every`` they would take ever more memory
_SEC_TO_COMPUTE = 60.0  # a job that takes longer waits for a file system, and slows nothing down
SEC_TO_FINISH = 10.0  # the end of a run waits at most this long for reports that are being written
SEC_AFTER_ERROR = 2.0  # and for other ranks when training has raised: the cause may have ended them, too


@dataclass
class Outcomes:
    """What became of the runs of this process, for a command that says at its end what was profiled."""

    runs: int = 0
    profiles: int = 0
    reasons: list[str] = field(default_factory=list)  # why runs ended without a report
    warned: bool = False  # the log has said so


OUTCOMES = Outcomes()


class Worker:
    """Runs jobs one after another, each on a daemon thread that waits for the one before, and none in a forked child.

    What is slow there, or hangs, never stops the training.
    """

    def __init__(self) -> None:
        self._missing: list[str] = []  # what is still to be made
        self._latest: threading.Thread | None = None  # of the last job
        self._running_since = 0.0
        self.is_paused = False  # the running job waits, and takes no processor time
        self._paused_sec = 0.0  # seconds that jobs have waited so, all together
        self._pid = os.getpid()
        self._given_up = False

    def submit(self, job: Callable[[], object], what: str = "a report") -> None:
        """Run *job*, which makes *what*, behind those that were submitted before."""
        if self.is_off:
            return
        self._missing.append(what)
        before = self._latest
        self._latest = threading.Thread(target=self._run, args=(before, what, job), name="lightning_flops", daemon=True)
        try:
            self._latest.start()
        except RuntimeError:  # the interpreter ends, and starts no more threads
            self._latest = before
            self.finish()
            self._run(None, what, job)

    @property
    def is_off(self) -> bool:
        """Whether nothing is made any more: the end has not waited longer, or this is a forked child."""
        return self._given_up or os.getpid() != self._pid

    @property
    def is_busy(self) -> bool:
        """Whether a job takes processor time from the training."""
        if not self._missing or self.is_paused:
            return False
        return host_clock.now() < self._running_since + _SEC_TO_COMPUTE

    def _run(self, before: threading.Thread | None, what: str, job: Callable[[], object]) -> None:
        if before is not None and before.is_alive():
            before.join()
        try:
            self._running_since = host_clock.now()
            if not self._given_up:
                job()
        except BaseException as error:  # no caller above could take it
            words, shown = f"{type(error).__name__}: {error}", error if logger.isEnabledFor(logging.DEBUG) else None
            logger.warning("%s was lost: %s", what, words, exc_info=shown)
        self._missing.remove(what)

    def pause(self, sec: float) -> None:
        """Have the running job wait *sec* seconds, which ``finish`` does not take for work; 0.0: it waits no longer.

        A job that looks for something again and again, with a pause after each look, is paused until the last one.
        """
        self._running_since = host_clock.now() + sec  # its work, if it goes on, begins then
        self.is_paused = sec > 0
        host_clock.sleep(sec)
        self._paused_sec += sec

    def finish(self, within_sec: float = 10.0) -> bool:
        """Wait until all jobs are done; False: they worked for over *within_sec*, and the log says what is missing."""
        until, paused_before = host_clock.now() + within_sec, self._paused_sec
        while not self.is_off and (latest := self._latest) is not None and latest.is_alive():
            latest.join(PAUSE_SEC)
            if latest.is_alive() and host_clock.now() >= until + self._paused_sec - paused_before:
                self._given_up = True
                logger.warning(
                    "%s could not be written within %s of the run's end; does a file system hang?",
                    ", ".join(self._missing),
                    duration(within_sec),
                )
        return not self._given_up


class Delivery:
    """Makes and delivers the reports of one run; *publish* gets each profile, on the worker's thread.

    Nothing here holds the user's model: a run that was dropped may still deliver.
    """

    def __init__(self, facts: Facts, config: ProfilerConfig, publish: Callable[[Profile], None], notes: Notes) -> None:
        OUTCOMES.runs += 1
        self.throughput: ThroughputSummary | None = None  # of the whole run, once it is over
        self._config = config
        self._publish = publish
        self.worker = Worker()
        self.thread = threading.get_ident()  # the training thread
        self._ready: deque[Callable[[], object]] = deque()  # what the training thread has to give to the loggers
        self._latest: threading.Event | None = None  # is set once the latest closed window's profile is there, or lost
        self._is_first = facts.rank == 0
        self._output = facts.output
        if not self._is_first:
            self._output = replace(facts.output, rank=facts.rank, loggers=Services(()), text_file=False)
        self._writes = self._is_first or config.all_ranks
        if self._writes:
            self._output.files.folder()  # of the user's loggers, so it is asked on the training thread
        notes.speak = self.warn
        self._ranks: Ranks | None = None
        if facts.world_size > 1:  # here, before what fails on one rank alone: each counts its runs by itself
            ranks = Ranks(rank=facts.rank, world_size=facts.world_size, config=config, pause=self.worker.pause)
            if ranks.failure is None:
                self._ranks = ranks
            else:
                alone = f"This report is of rank {facts.rank} alone"
                notes.add_for_run(f"{alone}: the ranks could not exchange anything: {ranks.failure}.")

    def warn(self, sentence: str) -> None:
        """Say *sentence* in the log, on the first rank."""
        if self._is_first:
            logger.warning(sentence)

    # ---- windows

    def may_time(self, step: int, steps_done: int) -> bool:
        """Whether the steps after *steps_done* can be timed for the window of *step*: on all ranks the same ones.

        None is timed beside the making of a report, so a second window waits for the first one's.
        """
        if self._latest is None:
            return True
        ready = not (self.worker.is_busy or self.worker.is_paused)
        return ready if self._ranks is None else self._ranks.may_time(step, steps_done, ready=ready)

    def passed_over(self, step: int, sentence: str) -> None:
        """*step* was to be profiled, and another window was still open, as this *sentence* says."""
        self.warn(sentence)
        if self._ranks is not None:
            self._ranks.say_absent(step, "it passed this step over: another window was still open")

    def report(self, record: WindowRecord, traces: object, *, step: int, at: int) -> None:
        """Make the report of the window that has closed after *step* of the run, which its loggers show *at*.

        *traces* keeps the files of its traces.
        """
        self._latest = made = threading.Event()
        self.worker.submit(
            partial(self._make, record, [traces], step, at, made), f"the report of step {record.profile_step}"
        )

    def _make(self, record: WindowRecord, traces: list[object], step: int, at: int, made: threading.Event) -> None:
        """Analyze a window and report it, of all ranks if this is the first of several, on the worker's thread."""
        ranks = self._ranks
        try:
            profile = profile_of_window(record, config=self._config, warns=self._is_first)
            traces.clear()  # what keeps them has the user's model, which may go while other ranks are awaited
            profile = replace(profile, report_step=step)
            if self._is_first:
                logger.info(
                    "profiled %s %d of this %s: %s",
                    profile.context.step_word,
                    profile.profile_step,
                    profile.context.run_word,
                    figures(profile),
                )
            if ranks is not None:
                profile = ranks.exchange(profile)
            self._publish(profile)
        except Exception as error:
            if ranks is not None:
                ranks.say_absent(record.profile_step, f"its profiler failed: {type(error).__name__}: {error}")
            raise
        finally:
            made.set()
        self._write(profile, at)

    def _write(self, report: Profile | ThroughputSummary, at: int) -> None:
        """Write the files of *report*; the loggers, which get the rest, show it *at* this step."""
        OUTCOMES.profiles += isinstance(report, Profile)
        if self._writes:
            show = self._output.report(report) if isinstance(report, Profile) else self._output.summary(report)
            if self._is_first:
                self._ready.append(partial(show, at))

    # ---- on the training thread

    def deliver(self, now: Callable[[], int]) -> bool:
        """Give what is ready to the loggers, whose x-axis is at *now*; whether there was anything."""
        if not self._ready:
            return False
        self._give(now())
        return True

    def _give(self, now: int) -> None:
        self._output.loggers.now = now
        while self._ready:
            with random_state_kept():
                self._ready.popleft()()

    def await_profiles(self, within_sec: float = SEC_TO_FINISH) -> None:
        """Wait until the profile of every closed window is there, or *within_sec* have gone by."""
        if self._latest is not None and not self.worker.is_off:
            self._latest.wait(within_sec)

    # ---- the end

    def not_reached(self, step: int, context: RunContext, *, steps_done: int, updated_by: list[Any]) -> None:
        """The run has ended before *step* was profiled; its steps end when those *updated_by* have updated."""
        ended = f"this {context.run_word} ended after {steps_done} {'step(s)' if context.trains else 'batch(es)'}"
        if not steps_done and context.framework in ("torch", "accelerate"):
            names = " and ".join(type(one).__name__ for one in updated_by)
            none = "no optimizer was given to profile_training, and step() was never called"
            made = "have made their updates" if len(updated_by) > 1 else "has made its update"
            ended += f": a step ends when {names} {made}" if names else f": {none}"
        if self._latest is None:
            OUTCOMES.reasons.append(f"profile_step is {step}, and {ended}")
            OUTCOMES.warned |= self._is_first
            self.warn(f"nothing was profiled: {OUTCOMES.reasons[-1]}")
        elif self._config.every is None:
            self.warn(f"{context.step_word} {step} was not profiled: {ended}")

    def finish(
        self,
        absent: str,
        *,
        now: int,
        summary: ThroughputSummary | None = None,
        limits_sec: tuple[float, float] = (SEC_TO_FINISH, SEC_AFTER_ERROR),
        waits: bool = True,
    ) -> None:
        """The run is over, *now* on the loggers' x-axis: deliver what there is, the windows that have closed first.

        *absent* says why no more comes of this rank, if that is so. What is being made is awaited for the first of
        *limits_sec*, other ranks for the second; a run that was dropped *waits* for nothing.
        """
        self.throughput = summary
        worker, ranks, (sec, ranks_sec) = self.worker, self._ranks, limits_sec
        if ranks is not None:
            ranks.hurry(ranks_sec)
            worker.submit(partial(ranks.close, absent), "the last word to other ranks")
        if summary is not None:
            worker.submit(partial(self._write, summary, now), "the throughput of the run")
        if not waits:
            _dropped.append(self)
            return
        worker.finish(sec)
        self._give(now)
        self._output.loggers.close()
        if ranks is not None:
            ranks.close()  # if a file system hangs, the worker has not


_dropped: deque[Delivery] = deque(maxlen=100)  # of runs that were dropped while something of theirs was still made


def finish_dropped() -> None:
    """The program ends: wait a bounded time for what runs that were dropped have left to make."""
    while _dropped:
        one = _dropped.popleft()
        one.worker.finish(SEC_TO_FINISH)
        one._give(one._output.loggers.now)
        one._output.loggers.close()


class ProfiledRun:
    """Properties with a run's results. A public class inherits them, and says when a run begins and ends."""

    _config: ProfilerConfig
    _profiles: deque[Profile]
    _throughput: ThroughputSummary | None
    _delivery: Delivery | None = None  # of the run that goes on
    _adapter: Any = None  # of it

    @property
    def run(self) -> Any:
        """The run that goes on; None outside of one."""
        return None if self._adapter is None else self._adapter.run

    def _start_anew(self) -> None:
        """Forget what an earlier run measured."""
        self._profiles = deque(maxlen=PROFILES_KEPT)
        self._throughput = self._delivery = None

    def _begin_run(self, adapter: Any) -> None:
        """The run of *adapter* begins."""
        self._adapter, self._delivery = adapter, adapter.run.delivery
        adapter.begin()

    def _finish(self, error: BaseException | None = None) -> None:
        """The run is over, or *error* has ended it: report what was measured, and leave nothing of the run behind."""
        try:
            if self._adapter is not None:
                self._adapter.finish(error)
        finally:
            self._end_run()

    def _end_run(self) -> None:
        """Close the run, whatever became of its report: nothing of ours is left on the user's objects."""
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            adapter.run.close()
            self._keep_results()

    def _keep_results(self) -> None:
        """The run is over: keep its throughput, and nothing else of it."""
        self._throughput, self._delivery = self.throughput, None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside is the phase *name* of a step, with FLOPs, time and MFU of its own; the outermost counts."""
        with ExitStack() as after:
            if (run := getattr(self, "run", None)) is not None and not run.closed:
                run.adapter.names_phase(begins=True)
                run.phase_begins(name)
                after.callback(run.adapter.names_phase, begins=False)
                after.callback(run.phase_ends)
            yield

    @property
    def config(self) -> ProfilerConfig:
        """The settings in force."""
        return self._config

    @property
    def profile(self) -> Profile | None:
        """What the latest window measured; None until one has closed. A report that is being made is waited for."""
        return next(reversed(self.profiles), None)

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """What the windows of the latest run measured, in their order; of more than a hundred the last hundred."""
        if self._delivery is not None:
            self._delivery.await_profiles()
        return tuple(self._profiles)

    @property
    def throughput(self) -> ThroughputSummary | None:
        """Throughput of the latest run; None until the run has ended, or if nothing was monitored."""
        return self._throughput if self._delivery is None else self._delivery.throughput


def profile_of_window(window: WindowRecord, *, config: ProfilerConfig, warns: bool) -> Profile:
    """The profile of *window*, whose traces are kept where the settings say. A failure is noted; *warns*: logged."""
    traced: TracedStep | None = None
    notes: list[str] = []
    try:
        if window.traces:
            from lightning_flops.analysis.trace_report import build_traced_step

            traced = build_traced_step(window)
    except Exception as error:  # a report without the traced step is still a report
        notes.append(f"The traced step could not be analysed: {error}.")
    profile = build_profile(window, config=config, traced=traced)
    files: list[str] = []
    folder = config.trace_dir if window.context.rank == 0 or config.all_ranks else None
    if folder is not None:
        for record in window.traces:
            try:
                files.append(keep_trace(record.path, folder, rank=window.context.rank, step=record.index))
            except OSError as error:
                notes.append(f"The trace was not kept: {error}.")
    traced = traced and replace(traced, files=tuple(files))
    for note in notes if warns else ():
        logger.warning(note)
    return replace(profile, traced=traced, notes=(*profile.notes, *notes))
