"""Reports of a run: a closed window becomes a profile on a thread of its own, and scalars and text reach the loggers.

What needs the user's objects is read on the training thread, before the record is handed over; the training thread
gives what is ready to the run's loggers at its next batch.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_flops.analysis.peaks import measured_peaks, peak_for
from lightning_flops.analysis.profile import build_profile
from lightning_flops.analysis.rates import padding_ratio
from lightning_flops.analysis.throughput import build_throughput
from lightning_flops.analysis.traced_step import build_traced_step
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.notes import Notes
from lightning_flops.measure.random_state import random_state_kept
from lightning_flops.measure.run_facts import gather_run_facts
from lightning_flops.records import BatchTokens, RunContext, StepSums, UnprofiledFlops, WindowRecord
from lightning_flops.report.headline import figures
from lightning_flops.report.scalars import monitor_scalars
from lightning_flops.run.facts import Facts
from lightning_flops.run.monitor import Monitor, MonitorReading
from lightning_flops.run.output import LoggedOutput, RunFiles
from lightning_flops.run.ranks import NoStoreError, Ranks
from lightning_flops.run.window import Window
from lightning_flops.run.worker import Worker
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.throughput import ThroughputSummary
from lightning_flops.schema.trace import TracedStep
from lightning_flops.signals import words_of
from lightning_flops.sinks.trace_file import keep_trace
from lightning_flops.units import package_logger

logger = package_logger(__name__)

PROFILES_KEPT = 100  # the latest: with ``every`` they would take ever more memory
_SEC_TO_FINISH = 10.0  # the end of a run waits at most this long for reports that are being written
_SEC_AFTER_ERROR = 2.0  # and for other ranks when training has raised: the cause may have ended them, too


class ProfiledRun:
    """Properties with a run's results. A public class inherits them, calls ``_start_anew`` and stores the results."""

    _config: ProfilerConfig
    _profiles: deque[Profile]
    _throughput: ThroughputSummary | None

    def _start_anew(self) -> None:
        """Forget what an earlier run measured."""
        self._profiles = deque(maxlen=PROFILES_KEPT)
        self._throughput = None

    @property
    def config(self) -> ProfilerConfig:
        """The settings in force."""
        return self._config

    @property
    def profile(self) -> Profile | None:
        """What the latest window measured; None until one has closed."""
        return self._profiles[-1] if self._profiles else None

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """What the windows of the latest run measured, in their order; of more than a hundred the last hundred."""
        return tuple(self._profiles)

    @property
    def throughput(self) -> ThroughputSummary | None:
        """Throughput of the latest run; None until the run has ended, or if nothing was monitored."""
        return self._throughput


@dataclass
class Outcomes:
    """What became of the runs of this process, for a command that says at its end what was profiled."""

    runs: int = 0
    profiles: int = 0
    reasons: list[str] = field(default_factory=list)  # why runs ended without a report
    warned: bool = False  # the log has said so


OUTCOMES = Outcomes()


class Reports:
    """Makes the reports of one run; *publish* gets each profile, on the training thread."""

    def __init__(self, facts: Facts, config: ProfilerConfig, publish: Callable[[Profile], None], notes: Notes) -> None:
        self.throughput: ThroughputSummary | None = None  # of the whole run, once it is over
        self.analyzing = False  # a window is being analyzed on the worker's thread, which slows the steps beside it
        self._has_closed_a_window = False
        self._facts = facts
        self._config = config
        self._publish = publish
        self._notes = notes
        self._worker = Worker()
        self._ranks: Ranks | None = None
        self._writes = facts.rank == 0
        self._logged_at = facts.logged_at or facts.x_axis
        self._output: LoggedOutput | RunFiles | None = facts.output if facts.rank == 0 else None

    def begin(self) -> None:
        """The run begins: find the other ranks, and where reports go."""
        OUTCOMES.runs += 1
        facts = self._facts
        if facts.world_size > 1:
            try:
                self._ranks = Ranks(rank=facts.rank, world_size=facts.world_size, config=self._config)
            except NoStoreError as error:
                self._notes.add_for_run(
                    f"This report is of rank {facts.rank} alone: the ranks could not exchange anything: {error}."
                )
        self._dp_size = facts.context().dp_size
        if facts.rank and self._config.all_ranks:
            self._output = RunFiles(self._config, facts.output.folder, rank=facts.rank, part=facts.output.part)
        elif not facts.rank:
            facts.output.files.folder()  # of the user's loggers, so it is asked on the training thread

    def warn(self, sentence: str) -> None:
        """Say *sentence* in the log, on the rank that writes."""
        if self._writes:
            logger.warning(sentence)

    def passed_over(self, step: int) -> None:
        """*step* was to be profiled, and another window was still open."""
        sentence = f"profile_step lists {step}, too: it was not profiled, because this window was still open."
        self._notes.add(sentence)
        self.warn(sentence)
        if self._ranks is not None:
            self._ranks.say_absent(step, "it passed this step over: another window was still open")

    def report(self, record: WindowRecord, window: Window, *, all_tokens: BatchTokens) -> None:
        """Make the report of *record*, which *window* has measured."""
        facts = self._facts
        run_facts = memory = None
        try:
            with random_state_kept():  # the questions call methods of the user's modules and optimizers
                optimizers = facts.optimizers()
                run_facts = gather_run_facts(
                    facts.root,
                    device=facts.device,
                    optimizers=optimizers,
                    loader_workers=facts.loader_workers(),
                    padding_ratio=padding_ratio(all_tokens),
                )
                memory = window.memory.record(optimizers=optimizers)
        except Exception as error:  # the report lacks these answers
            self.warn(f"how the run is set up, or what its memory is for, could not be read: {words_of(error)}")
        record = replace(record, facts=run_facts, memory=memory, processor=window.processors.loss())
        step = facts.x_axis()
        self.analyzing = self._has_closed_a_window = True
        self._worker.submit(lambda: self._made(record, step, window), f"the report of step {record.profile_step}")

    def _made(self, record: WindowRecord, step: int, window: Window) -> Callable[[], None]:
        """Analyze *record*, on the worker's thread; *window* keeps its trace files."""
        ranks = self._ranks
        try:
            profile = profile_of_window(record, config=self._config, warns=self._writes)
        except Exception as error:
            if ranks is not None:
                ranks.say_absent(record.profile_step, f"its profiler failed: {type(error).__name__}: {error}")
            raise
        finally:
            self.analyzing = False
        profile = replace(profile, report_step=step)
        if self._writes:
            word, line = profile.context.step_word, figures(profile)
            logger.info("profiled %s %d of this %s: %s", word, profile.profile_step, profile.context.run_word, line)
        if ranks is not None and self._writes:
            return lambda: ranks.await_reports(profile)
        if ranks is not None:
            ranks.send(profile)
        return lambda: self._show(profile)

    def _show(self, profile: Profile) -> None:
        """Give *profile* to the user, to its files and to the loggers."""
        OUTCOMES.profiles += 1
        self._publish(profile)
        if (output := self._output) is not None:
            self._write(lambda: output.report(profile), f"the report of step {profile.profile_step}")

    def _write(self, write: Callable[[], Callable[[int], None] | None], what: str) -> None:
        """Have the worker write files; what that returns gives the rest to the loggers, at the run's step."""

        def written() -> Callable[[], None] | None:
            show = write()
            return None if show is None else lambda: self._to_loggers(show)

        self._worker.submit(written, what)

    def _to_loggers(self, show: Callable[[int], None]) -> None:
        with random_state_kept():
            show(self._logged_at())

    def deliver(self) -> bool:
        """Give what is ready to the loggers, and report what all ranks have sent; whether there was anything."""
        made, ranks = self._worker.made, self._ranks
        if not made and (ranks is None or not ranks.pending):
            return False
        while made:
            made.popleft()()
        for profile in () if ranks is None else ranks.ready():
            self._show(profile)
        return True

    def write_reading(self, reading: MonitorReading, flops: UnprofiledFlops | None) -> None:
        """Give the loggers what went by since the last reading, with what its steps cost."""
        if not (self._writes and reading.batches):
            return
        scalars = monitor_scalars(
            seconds=reading.seconds,
            data_wait_sec=reading.data_wait_sec,
            batches=reading.batches,
            samples=reading.samples,
            dp_size=self._dp_size,
            tokens=self._tokens_in(reading.samples, reading.tokens),
            padding_ratio=None if reading.tokens.real is None else padding_ratio(reading.tokens),
            model_flops=None if flops is None else sum(flops.by_dtype.values()),
            estimated_ratio=None if flops is None else flops.estimated_ratio,
            prefix=self._facts.output.monitor_prefix,
            **self._peak_sec(flops),
        )
        self._facts.output.loggers.write_scalars(scalars, step=self._logged_at())

    def _tokens_in(self, samples: int | None, tokens: BatchTokens) -> int | None:
        """Tokens of so many *samples*, as the user has said, or else the real ones among *tokens*."""
        per_sample = self._config.tokens_per_sample
        if per_sample is None:
            return tokens.real
        return samples * per_sample if samples is not None and isinstance(per_sample, int) else None

    @functools.cached_property
    def _peak_in(self) -> Callable[..., float | None]:
        """The peak of this device in a ``dtype``."""
        context = self._facts.context()
        measured = measured_peaks(context.host, context.device_name)
        given = self._config.peak_flops_per_sec
        return functools.partial(peak_for, device_name=context.device_name, given=given, measured=measured)

    def _at_peak(self, by_dtype: Mapping[str, float] | None) -> float | None:
        """Seconds that these FLOPs take at this device's peaks; None if not known."""
        seconds = 0.0
        for dtype, flops in (by_dtype or {}).items():
            if (peak := self._peak_in(dtype=dtype)) is None:
                return None
            seconds += flops / peak
        return None if by_dtype is None else seconds

    def _peak_sec(self, flops: UnprofiledFlops | None) -> dict[str, float | None]:
        """The same of model FLOPs, and of the useful ones among them."""
        by_dtype, useful = (None, None) if flops is None else (flops.by_dtype, flops.useful_by_dtype)
        return {"model_flops_peak_sec": self._at_peak(by_dtype), "useful_flops_peak_sec": self._at_peak(useful)}

    def not_reached(self, step: int, context: RunContext, *, steps_done: int) -> None:
        """The run has ended before *step* was profiled."""
        steps = "step(s)" if context.trains else "batch(es)"
        ended = f"this {context.run_word} ended after {steps_done} {steps}"
        if not steps_done and context.framework in ("torch", "accelerate"):
            given = [type(one).__name__ for one in self._facts.optimizers() or ()]
            none = "no optimizer was given to profile_training, and step() was never called"
            ended += f": a step ends when {' and '.join(given)} have made their updates" if given else f": {none}"
        if not self._has_closed_a_window:
            OUTCOMES.reasons.append(f"profile_step is {step}, and {ended}")
            OUTCOMES.warned |= self._writes
            self.warn(f"nothing was profiled: {OUTCOMES.reasons[-1]}")
        elif self._config.every is None:
            self.warn(f"{context.step_word} {step} was not profiled: {ended}")

    def finish(
        self, monitor: Monitor, flops: StepSums | None, *, missed: str | None, interrupted_by: BaseException | None
    ) -> None:
        """The run is over: wait a bounded time for what is being written, and write its throughput.

        *missed* says when it ended if a window was still to close.
        """
        within = _SEC_TO_FINISH if interrupted_by is None else _SEC_AFTER_ERROR
        done, ranks = self._worker.finish(within), self._ranks
        if ranks is not None and done:
            if missed is not None:
                why = "ended" if interrupted_by is None else f"was interrupted by {type(interrupted_by).__name__}"
                ranks.say_absent(None, f"its run {why} {missed}, before its window closed")
            for profile in ranks.finish(self._config.ranks_timeout_sec if interrupted_by is None else _SEC_AFTER_ERROR):
                self._show(profile)
        if self._config.monitor:
            self._summarize(monitor, flops)
        self._worker.finish(within)
        if ranks is not None:
            ranks.close()

    def _summarize(self, monitor: Monitor, flops: StepSums | None) -> None:
        totals = monitor.totals()
        self.throughput = summary = build_throughput(
            totals,
            dp_size=self._dp_size,
            flops=flops,
            notes=self._notes.unreported,
            tokens=monitor.all_tokens,
            timed_tokens=self._tokens_in(totals.samples, totals.tokens),
            **self._peak_sec(None if flops is None else flops.unprofiled),
        )
        if summary is not None and (output := self._output) is not None:
            self._write(lambda: output.summary(summary), "the throughput of the run")

    def fail(self, why: str) -> None:
        """Our side has failed: notify rank 0 *why*, and write what is complete."""
        try:
            if self._ranks is not None:
                self._ranks.say_absent(None, f"its profiler failed: {why}")
                for profile in self._ranks.finish(0.0):
                    self._show(profile)
                self._ranks.close()
            self._worker.finish(_SEC_AFTER_ERROR)
        except Exception as lost:
            logger.warning("a report was lost: %s", words_of(lost), exc_info=lost)


def profile_of_window(window: WindowRecord, *, config: ProfilerConfig, warns: bool) -> Profile:
    """The profile of *window*, whose traces are kept where the settings say. A failure is noted; *warns*: logged."""
    traced: TracedStep | None = None
    notes: list[str] = []
    try:
        traced = build_traced_step(window)
    except Exception as error:  # a report without the traced step is still a report
        notes.append(f"The traced step could not be analysed: {error}.")
    profile = build_profile(window, config=config, traced=traced)
    files: list[str] = []
    folder = config.trace_dir if window.context.rank == 0 or config.all_ranks else None
    if folder is not None and window.traces:
        from lightning_flops.trace import load_trace
        from lightning_flops.trace.tables import counter_tracks

        for record in window.traces:
            counters: tuple[Any, ...] = ()
            try:
                counters = tuple(counter_tracks(load_trace(record.path)))
            except Exception as error:  # a trace without them is still a trace
                notes.append(f"The kept trace has no counter tracks: {error}.")
            kept_as = {"rank": window.context.rank, "step": record.index, "process": record.process}
            try:
                files.append(keep_trace(record.path, folder, counters=counters, **kept_as))
            except OSError as error:
                notes.append(f"The trace was not kept: {error}.")
    traced = traced and replace(traced, files=tuple(files))
    for note in notes if warns else ():
        logger.warning(note)
    return replace(profile, traced=traced, notes=(*profile.notes, *notes))
