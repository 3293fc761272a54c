"""What a run reports on one rank: the profile of each window, the monitor's readings, and the throughput of the run.

The session says when; here stands what of its parts goes into each report, and where that goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_flops import host_clock
from lightning_flops.analysis.budget import with_report_sec
from lightning_flops.analysis.peak_flops import peak_for
from lightning_flops.analysis.rates import padding_ratio, peak_seconds
from lightning_flops.analysis.throughput import build_throughput
from lightning_flops.instrument.random_state import random_state_kept
from lightning_flops.instrument.run_facts import gather_run_facts
from lightning_flops.records import NO_TOKENS
from lightning_flops.report.headline import headline
from lightning_flops.session.outcomes import OUTCOMES
from lightning_flops.session.results import Optimizers, profile_of_window
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from torch import nn

    from lightning_flops.analysis.run_books import StepCounts
    from lightning_flops.analysis.same_work import OtherWork
    from lightning_flops.analysis.step_keys import StepKey
    from lightning_flops.analysis.step_laws import StepSeconds
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.instrument.notes import Notes
    from lightning_flops.instrument.timing.monitor import Monitor, MonitorReading
    from lightning_flops.records import BatchTokens, RunContext, RunFacts, WindowRecord
    from lightning_flops.schema.profile import Profile
    from lightning_flops.schema.throughput import ThroughputSummary
    from lightning_flops.session.door import Door, RunPlan
    from lightning_flops.session.output import RunOutput
    from lightning_flops.session.run_so_far import RunSoFar
    from lightning_flops.session.step_book import StepBook
    from lightning_flops.session.step_flops import StepFlops
    from lightning_flops.session.window import Window

logger = package_logger(__name__)

_DOUBTED = "steps of the same shapes may have spent different FLOPs"
_NO_PEAK = "no dense peak is known for the device; set peak_flops_per_sec"

_COMPLETE_IN_A_ROW = 20
"""After so many readings in a row with the FLOPs of all their steps, none is expected soon that lacks some."""

_UNSHOWN_EVERY_SEC = 0.5
"""A reading that nobody gets is made at most this often. It takes less than half a millisecond."""


class RunReports:
    """Makes the reports of one run, and writes them.

    Args:
        door: tells what its framework knows.
        root: the model.
        config: the settings.
        publish: gets each profile when it is complete.
        notes: of the window and of the run.
        steps: that were seen.
        flops: of these.
        monitor: adds up throughput; None if that was not asked for.
        writes: this rank writes the run's reports.
        warn: says a sentence in the log, on the rank that writes.
        so_far: what another session knew of the run.
    """

    output: RunOutput
    """Where reports go. ``begin`` sets this."""
    _plan: RunPlan

    def __init__(
        self,
        door: Door,
        root: nn.Module,
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        notes: Notes,
        steps: StepBook,
        flops: StepFlops,
        monitor: Monitor | None,
        writes: bool,
        warn: Callable[[str], None],
        so_far: RunSoFar | None,
    ) -> None:
        self.profile: Profile | None = None if so_far is None else so_far.profile
        """What the latest window measured."""
        self.throughput: ThroughputSummary | None = None
        """Throughput of the run; None before its end, or if nothing was monitored."""
        self.micro_batch_size: int | None = None
        """Samples in the first batch that was counted in the window."""
        self.run_is_written = False
        """The throughput is in the reports."""
        self.slowed_tokens = NO_TOKENS if so_far is None else so_far.slowed_tokens
        """Tokens of the batches that the profiler slowed down, so that they are in no throughput."""
        self._doubt_is_said = False
        self._complete_in_a_row = 0
        """The latest so many readings had the FLOPs of all their steps."""
        self._read_at = 0.0
        """When the latest reading was made."""
        self._peaks: dict[str, float | None] = {}
        """FLOP/s of this device at its dense peak, of each dtype that was asked for."""
        self._writes = writes
        self._warn = warn
        self._door = door
        self._root = root
        self._config = config
        self._publish = publish
        self._notes = notes
        self._steps = steps
        self._flops = flops
        self._monitor = monitor

    def begin(self, plan: RunPlan, output: RunOutput) -> None:
        """The run begins."""
        self._plan, self.output = plan, output

    def context(self) -> RunContext:
        """Where the run takes place, as it is now."""
        return replace(self._door.context(), micro_batch_size=self.micro_batch_size)

    # ---- a window closes

    def of_window(self, window: Window, *, run_goes_on: bool) -> Profile | None:
        """Close *window*, and make its profile; None if the run ended in the middle of the step that was counted.

        Args:
            window: the one that was open.
            run_goes_on: the window ends early, and the run does not.
        """
        for sentence in window.processors.sentences():
            self._notes.add(sentence)
        started = host_clock.now()
        window.step = None
        record = window.close(context=self.context(), run_goes_on=run_goes_on)
        if record is None:
            return None
        profile = self._with_law(self._profile_of(record, window))
        profile = with_report_sec(profile, host_clock.now() - started)
        self.profile = profile
        self._flops.window_closes(
            shapes_deceive=window.recorder.shapes_deceive,
            variable=record.variable,
            steps_done=self._steps.steps_done,
        )
        if self._writes:
            logger.info(
                "profiled %s %d of this %s in %.3f s: %s",
                profile.context.step_word,
                record.profile_step,
                profile.context.run_word,
                host_clock.now() - started,
                headline(profile),
            )
        return profile

    def _profile_of(self, record: WindowRecord, window: Window) -> Profile:
        padding = None if self._monitor is None else padding_ratio(self._all_tokens(self._monitor))
        return profile_of_window(
            replace(
                record,
                processor=window.processors.loss(),
                gpu=window.gpu.record(),
                flops_without_padding=self._flops.without_padding(),
            ),
            config=self._config,
            optimizers=self._door.optimizers,
            facts=lambda optimizers: replace(self._run_facts(optimizers), padding_ratio=padding),
            memory=lambda optimizers: window.memory.record(optimizers=optimizers),
            warns=self._writes,
        )

    def _run_facts(self, optimizers: Optimizers) -> RunFacts:
        workers = self._door.loader_workers()
        return gather_run_facts(self._root, device=self._plan.device, optimizers=optimizers, loader_workers=workers)

    def _with_law(self, profile: Profile) -> Profile:
        """*profile* with the law of its steps' FLOPs, if their sizes vary."""
        self.profile = profile  # it knows the device
        law = self._flops.law(self._seconds_by_key(), last=self._steps.last, peak_sec=self._peak_sec)
        if not isinstance(law, str):
            return replace(profile, law=law)
        return replace(profile, why_no_law=law) if profile.variable else profile

    def show(self, profile: Profile) -> None:
        """Publish and write *profile*, which is complete, at the run's current step."""
        step = self._door.x_axis()
        profile = replace(profile, report_step=step)
        self._publish(profile)
        OUTCOMES.reports(profile)
        with random_state_kept():
            self.output.write_profile(profile, step=step)

    # ---- the run logs

    def reading_can_wait(self, *, at: float) -> bool:
        """Whether a reading would be made for nobody: no logger gets it, and it would tell ourselves nothing new.

        That is so on all ranks but one. Steps of less than a millisecond would notice it.

        Args:
            at: the time by the log's clock.
        """
        return (
            self._complete_in_a_row >= _COMPLETE_IN_A_ROW
            and not self.output.shows_readings
            and at - self._read_at < _UNSHOWN_EVERY_SEC
        )

    def of_reading(self, reading: MonitorReading, steps: StepCounts, *, at: float) -> bool:
        """Write what the monitor has added up since its last reading; return whether no step's FLOPs are missing.

        Args:
            reading: the monitor's.
            steps: that were booked in the same time.
            at: when it was made, by the log's clock.
        """
        self._read_at = at
        flops = self._flops.books.sums(steps) if reading.steps else None
        if flops is None:
            self._say_doubt(self._flops.books.doubt)
        if reading.steps and self._writes:
            useful: float | str = "not every token is known"
            if flops is not None and reading.tokens.real is not None:
                useful = self._useful_peak_sec(steps.by_key(), reading.tokens)
            self.output.write_reading(
                reading,
                dp_size=self._plan.dp_size,
                tokens=self._tokens_of(reading.samples, reading.tokens),
                model_flops=None if flops is None else flops.model,
                model_flops_peak_sec=None if flops is None else self._peak_sec(flops.model_by_dtype),
                useful_flops_peak_sec=None if isinstance(useful, str) else useful,
                step=self._door.x_axis(),
            )
        if flops is None and self.profile is not None:
            self._complete_in_a_row = 0
            return False
        self._complete_in_a_row += 1
        return True

    def _say_doubt(self, doubt: OtherWork | None) -> None:
        """Say once in the log why steps of known shapes have no FLOPs, and so no MFU."""
        if doubt is not None and not self._doubt_is_said:
            self._doubt_is_said = True
            self._warn(str(doubt))

    def _tokens_of(self, samples: int | None, tokens: BatchTokens) -> int | None:
        """Tokens that the throughput is of: as the user has said of so many *samples*, or those that are no padding."""
        per_sample = self._config.tokens_per_sample
        if per_sample is None:
            return tokens.real
        return None if samples is None or callable(per_sample) else samples * per_sample

    # ---- the run ends

    def of_run(self, monitor: Monitor, *, replaced: bool) -> None:
        """Find the throughput of the run.

        Args:
            monitor: has added it up.
            replaced: the run had ended before another one began, with optimizers of its own.
        """
        self._flops.look_at_parameters(replaced=replaced)
        flops = self._flops.books.totals()
        self._say_doubt(flops.doubt)
        known = flops.undisturbed
        at_peak: float | str = "the FLOPs of a step are not known"
        useful = at_peak
        if known is not None:
            at_peak = self._at_peak(known.model_by_dtype)
            useful = self._useful_peak_sec(flops.keys, monitor.totals().tokens)
        notes = dict.fromkeys((*self._flops.notes, *self._notes.unreported))
        totals = monitor.totals()
        self.throughput = build_throughput(
            totals,
            dp_size=self._plan.dp_size,
            flops=flops,
            model_flops_peak_sec=at_peak,
            useful_flops_peak_sec=useful,
            lower_bound=self._flops.lower_bound,
            notes=(*notes, *([] if flops.doubt is None else [str(flops.doubt)])),
            tokens=self._all_tokens(monitor),
            timed_tokens=self._tokens_of(totals.samples, totals.tokens),
            law=_DOUBTED if flops.doubt is not None else self._flops.laws.report(self._seconds_by_key()),
            peak_sec=self._peak_sec,
        )

    def write_run(self) -> None:
        """Write the throughput of the run."""
        self.run_is_written = True
        if self.throughput is not None:
            with random_state_kept():
                self.output.write_throughput(self.throughput, step=self._door.x_axis())

    def was_not_reached(self, step: int) -> None:
        """Say that the run has ended before *step* was profiled."""
        context = self.context()
        steps = "step(s)" if context.trains else "batch(es)"
        ended = f"this {context.run_word} ended after {self._steps.steps_done} {steps}"
        if self.profile is None:
            before, why = self._plan.steps_before, f"profile_step is {step}"
            if before and step == before + 1:
                why = f"its loop was recognized after {before} steps, so step {step} was the first to be profiled"
            OUTCOMES.reasons.append(f"{why}, and {ended}")
            self._warn(f"nothing was profiled: {OUTCOMES.reasons[-1]}")
        elif self._config.every is None:
            self._warn(f"{context.step_word} {step} was not profiled: {ended}")

    # ---- what several reports have

    def _seconds_by_key(self) -> Mapping[StepKey, StepSeconds]:
        if self._monitor is not None:
            self._monitor.add_up()
        return self._flops.books.seconds_by_key()

    def _all_tokens(self, monitor: Monitor) -> BatchTokens:
        return monitor.totals().tokens.plus(self.slowed_tokens)

    def _useful_peak_sec(self, keys: Mapping[StepKey, int], tokens: BatchTokens) -> float | str:
        """Seconds that the model FLOPs of these steps would take at the peak without padding; in words, why not."""
        useful = self._flops.laws.without_padding(keys, tokens)
        return useful if isinstance(useful, str) else self._at_peak(useful)

    def _at_peak(self, flops: Mapping[str, int]) -> float | str:
        """Seconds that FLOPs by dtype take at the peaks of this device; in words, why that is not known."""
        seconds = self._peak_sec(flops)
        return _NO_PEAK if seconds is None else seconds

    def _peak_sec(self, flops: Mapping[str, int]) -> float | None:
        """Seconds that FLOPs by dtype take at the peaks of this device."""
        if self.profile is None:
            return None
        device, peaks = self.profile.context.device_name, self._peaks
        for dtype in flops:
            if dtype not in peaks:
                peaks[dtype] = peak_for(device_name=device, dtype=dtype, given=self._config.peak_flops_per_sec)
        return peak_seconds(flops=flops, peaks_flops_per_sec=peaks)
