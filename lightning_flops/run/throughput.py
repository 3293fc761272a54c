"""What the steps of a run take, in a window and outside of it: seconds, samples, tokens and FLOPs, and their rates.

A step lasts from the end of one update to the end of the next. What the profiler slowed down is in no figure, and
neither is what belongs to no step, such as a validation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from lightning_flops import host_clock
from lightning_flops.analysis.rates import build_throughput, measured_peaks, padding_ratio, peak_for, peak_seconds
from lightning_flops.analysis.step_flops import Batches, StepFlops, Tokens, UnprofiledFlops, seed_of_run
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.batches import BatchMeter
from lightning_flops.measure.counting.flop_counter import CountedStep
from lightning_flops.records import (
    NO_TOKENS,
    UNKNOWN_TOKENS,
    BatchTokens,
    BatchTotals,
    Extremes,
    Shapes,
    StepRecord,
)
from lightning_flops.report.scalars import monitor_scalars
from lightning_flops.run.adapter import Adapter
from lightning_flops.schema.profile import ThroughputSummary

_MOST_STRETCHES = 64
_UNHOOKED = "{} steps, or batches without one, ran without hooks, to time them, and are in no figure of the run."
_MOST_APART = 64  # batches that are not added up yet: one by one it costs each step as much again


@dataclass(slots=True)
class Batch:
    """A batch, or a micro-batch, as it was before its step may have changed it."""

    shapes: Shapes = ()
    tokens: BatchTokens | None = None
    given: Any = ()  # to the model; settings that are functions of the batch are asked of it


def _extremes(value: float | None, of: int = 1) -> Extremes | None:
    """Those of so many values that are alike, whose sum is *value*, if that is known."""
    return None if value is None else Extremes(of, value, value / of, value / of)


def _of_all(values: Iterable[Extremes | None]) -> Extremes | None:
    """The extremes of all these values, if any are known."""
    known = [one for one in values if one is not None]
    if not known:
        return None
    numbers, totals, least, greatest = zip(*known, strict=True)
    return Extremes(sum(numbers), sum(totals), min(least), max(greatest))


def _together(totals: Sequence[BatchTotals]) -> BatchTotals:
    """The batches of all of them, without stretches."""
    samples = [one.samples for one in totals]
    return BatchTotals(
        batches=sum([one.batches for one in totals]),
        seconds=_of_all([one.seconds for one in totals]),
        reader_sec=_of_all([one.reader_sec for one in totals]),
        samples=None if None in samples else sum(filter(None, samples)),
        samples_per_sec=_of_all([one.samples_per_sec for one in totals]),
        tokens=NO_TOKENS.plus(*(one.tokens for one in totals)),
    )


@dataclass(slots=True)
class Stretches:
    """Seconds of batches in a row, and of their waits: in 32 to 63 stretches of equally many, however long a run is."""

    sums: list[tuple[float, float]] = field(default_factory=list)  # of complete stretches
    length: int = 1  # batches of each
    _batches: int = 0  # of the running one
    _seconds: float = 0.0
    _wait: float = 0.0

    def add(self, seconds: float, wait: float) -> None:
        """Add a batch that took so many *seconds*, of which *wait* seconds were in the data loader."""
        self._batches, self._seconds, self._wait = self._batches + 1, self._seconds + seconds, self._wait + wait
        if self._batches < self.length:
            return
        self.sums.append((self._seconds, self._wait))
        self._batches, self._seconds, self._wait = 0, 0.0, 0.0
        if len(self.sums) == _MOST_STRETCHES:
            pairs = zip(self.sums[::2], self.sums[1::2], strict=True)
            self.sums, self.length = [(one[0] + next_[0], one[1] + next_[1]) for one, next_ in pairs], 2 * self.length

    def means(self) -> tuple[tuple[float, float], ...]:
        """Mean seconds of a batch, and of its wait, in each complete stretch."""
        return tuple((seconds / self.length, wait / self.length) for seconds, wait in self.sums)


@dataclass(slots=True)
class Monitor:
    """Adds up batches until it is read, and over the whole run."""

    now: Callable[[], float] = field(default_factory=lambda: host_clock.now)  # the host's clock, in seconds
    _since: float = 0.0
    _step_sec: float = 0.0
    _wait: float | None = None
    _fetches: int = 0  # depth of the running ones
    _fetch_since: float | None = None
    _outside_since: float | None = None
    _apart: list[tuple[Any, ...]] = field(default_factory=list)  # the latest batches, as ``batch`` got them
    _reading: BatchTotals = field(default_factory=BatchTotals)  # the other ones since the last reading
    _read: BatchTotals = field(default_factory=BatchTotals)  # those before
    _profiled_tokens: BatchTokens = NO_TOKENS
    _stretches: Stretches = field(default_factory=Stretches)

    def go_on(self) -> None:
        """A batch begins here: what ran since the last one was the profiler's."""
        self._since = self.now()

    def outside(self, *, since_batch: bool = False) -> None:
        """What runs from here, or since the last batch ended, until ``inside`` belongs to no step."""
        self._outside_since = self._since if since_batch else self.now()
        if since_batch:
            self._wait = None

    def inside(self) -> None:
        """Steps go on."""
        if self._outside_since is not None:
            self._since += self.now() - self._outside_since
            self._outside_since = None

    def fetch_begins(self, *, inside: bool = True) -> bool:
        """The loop asks its data loader for a batch; whether the wait is one of a step's, *inside* which it is."""
        self._fetches += 1
        if self._fetches > 1 or not inside:
            return False
        self._fetch_since = self.now()
        return True

    def fetch_ends(self, *, inside: bool = True) -> bool:
        """The data loader has delivered the batch; as for ``fetch_begins``."""
        self._fetches -= 1
        if self._fetches or not inside:
            return False
        if self._fetch_since is not None:
            self._wait = (self._wait or 0.0) + self.now() - self._fetch_since
            self._fetch_since = None
        return True

    def batch(
        self,
        *,
        samples: int | None,
        tokens: BatchTokens | None,
        profiled: bool,
        ends_step: bool,
        batches: int = 1,
    ) -> float:
        """So many batches are done, in no figure if *profiled*; returns the seconds of their step until now."""
        if self._outside_since is not None:  # a batch that ends while something outside of steps goes on
            self.inside()
            self.outside()
        now = self.now()
        seconds, self._since = now - self._since, now
        wait, self._wait = self._wait, None
        if profiled:
            self._profiled_tokens = self._profiled_tokens.plus(tokens)
        else:
            self._apart.append((seconds, wait, samples, tokens or UNKNOWN_TOKENS, batches))
            if len(self._apart) == _MOST_APART:
                self._add_up()
        seconds += self._step_sec
        self._step_sec = 0.0 if ends_step else seconds
        return seconds

    def _add_up(self) -> None:
        if not self._apart:
            return
        seconds, waits, samples, tokens, numbers = zip(*self._apart, strict=True)
        rates = [one / sec for one, sec in zip(samples, seconds, strict=True) if one is not None and sec > 0]
        these = BatchTotals(
            batches=sum(numbers),
            seconds=_of_all(map(_extremes, seconds, numbers)),
            reader_sec=_of_all(map(_extremes, waits, numbers)),
            samples=None if None in samples else sum(samples),
            samples_per_sec=_of_all(map(_extremes, rates)),
            tokens=NO_TOKENS.plus(*tokens),
        )
        for sec, wait, number in zip(seconds, waits, numbers, strict=True):
            for _ in range(number):
                self._stretches.add(sec / number, (wait or 0.0) / number)
        self._apart, self._reading = [], _together([self._reading, these])

    def read(self) -> BatchTotals:
        """The batches since the last reading; the next reading begins here."""
        self._add_up()
        reading, self._read, self._reading = self._reading, self.totals(), BatchTotals()
        return reading

    def totals(self) -> BatchTotals:
        """All unprofiled batches of the run."""
        self._add_up()
        return replace(_together([self._read, self._reading]), stretches_sec=self._stretches.means())

    @property
    def all_tokens(self) -> BatchTokens:
        """Of every batch, profiled ones as well."""
        return self._profiled_tokens.plus(self.totals().tokens)


@dataclass(slots=True)
class RunningStep:
    """What is known of the step that is running."""

    batches: Batches = ()
    tokens: Tokens = ()
    updates: int = 0
    profiled: bool = False  # the profiler slowed a batch of it down
    random: bool = False  # it was drawn to be counted before anything was known of it
    counted: CountedStep | None = None  # its FLOPs, if they were counted


class Throughput:
    """Adds up the steps of one run."""

    def __init__(self, adapter: Adapter, config: ProfilerConfig, *, note: Callable[[str], None]) -> None:
        self.monitor = Monitor()
        self.step = RunningStep()
        self.unhooked_steps = 0  # that are in no figure
        self.counts_steps = config.monitor and not config.timer_only  # those outside of windows, too
        self.config = config
        self._context = adapter.context()
        self.flops = StepFlops(seed=seed_of_run(self._context.world_size))
        self._measured = measured_peaks(self._context.host, self._context.device_name)
        self._of_window: dict[int, tuple[Batches, Tokens, int]] = {}  # what the steps of the open window computed on
        self._meter = BatchMeter(
            batch_size=config.batch_size,
            tokens_per_sample=config.tokens_per_sample,
            note=note,
            declared=adapter.declared_batch_size,
        )

    def counted(self, step: CountedStep) -> None:
        """The running *step* was counted to its end."""
        self.step.counted = step

    def samples(self, batches: Sequence[Batch], rows: Sequence[int | None] | None) -> Sequence[int | None]:
        """Samples of each of *batches*, of which the adapter may know the *rows*; None: not known."""
        if rows is None:
            return [self._meter.samples(one.given, one.shapes) for one in batches]
        if self.config.batch_size is None:
            return rows
        return [self._meter.given(one.given, known) for one, known in zip(batches, rows, strict=True)]

    def tokens_of(self, batch: Batch, samples: int | None) -> int | None:
        """Tokens of *batch*, which has so many *samples*; None: not known, or not asked for."""
        real = None if batch.tokens is None else batch.tokens.real
        return self._meter.tokens(batch.given, samples) if real is None else real

    def batches_done(
        self,
        batches: Sequence[Batch],
        samples_of: Sequence[int | None],
        *,
        updates: int,
        profiled: bool,
        ends_step: bool,
        counts_each: bool,
    ) -> float:
        """*batches* of so many samples went through the loop together; returns their step's seconds until now.

        Micro-batches of a pipeline are one batch of the loop's, unless it *counts_each*.
        """
        step = self.step
        for one in batches:
            step.batches += (one.shapes,)
            step.tokens += (one.tokens,)
        step.updates += updates
        step.profiled |= profiled
        return self.monitor.batch(
            samples=None if None in samples_of else sum(filter(None, samples_of)),
            tokens=batches[0].tokens if len(batches) == 1 else NO_TOKENS.plus(*(one.tokens for one in batches)),
            profiled=step.profiled,
            ends_step=ends_step,
            batches=len(batches) if counts_each else 1,
        )

    def step_ends(self, seconds: float, *, index: int | None) -> None:
        """The running step is over, and took so many *seconds*; *index* is its number in an open window, else None."""
        step, self.step = self.step, RunningStep()
        key = step.batches, step.tokens, step.updates
        if index is not None:
            self._of_window[index] = key
        if (counted := step.counted) is not None:
            self.flops.counted(
                *key,
                counted.flops,
                seconds=seconds,
                random=step.random,
                data_dependent=counted.data_dependent,
                lower_bound=counted.lower_bound,
            )
        elif self.counts_steps:
            self.flops.ran(*key, seconds=seconds, profiled=step.profiled)

    def predicted(self, steps: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
        """The *steps* that a window has timed, which ends here, with their FLOPs by the run's formula."""
        keys, self._of_window = self._of_window, {}
        flops = [self.flops.by_formula(*keys[one.index]) if one.index in keys else (None, False) for one in steps]
        return tuple(
            replace(one, predicted=found, is_beyond=is_beyond)
            for one, (found, is_beyond) in zip(steps, flops, strict=True)
        )

    def read(self, *, prefix: str) -> dict[str, float]:
        """Scalars of the batches since the last reading, by tags that begin with *prefix*; none if there was no batch.

        Rates are a second's, over the wall clock; MFU is of what these steps cost.
        """
        reading, flops = self.monitor.read(), self.flops.reading()
        if reading.seconds is None:
            return {}
        return monitor_scalars(
            seconds=reading.seconds.total,
            data_wait_sec=None if reading.reader_sec is None else reading.reader_sec.total,
            batches=reading.batches,
            samples=reading.samples,
            dp_size=self._context.dp_size,
            tokens=self._tokens_in(reading.samples, reading.tokens),
            padding_ratio=None if reading.tokens.real is None else padding_ratio(reading.tokens),
            model_flops=None if flops is None else sum(flops.by_dtype.values()),
            estimated_ratio=None if flops is None else flops.estimated_ratio,
            prefix=prefix,
            **self._peak_sec(flops),
        )

    def summary(self, *, notes: tuple[str, ...]) -> ThroughputSummary | None:
        """Throughput of the whole run, with *notes*; None if nothing was monitored."""
        totals, flops = self.monitor.totals(), self.flops.totals()
        return build_throughput(
            totals,
            dp_size=self._context.dp_size,
            flops=flops,
            notes=(*notes, _UNHOOKED.format(self.unhooked_steps)) if self.unhooked_steps else notes,
            tokens=self.monitor.all_tokens,
            timed_tokens=self._tokens_in(totals.samples, totals.tokens),
            **self._peak_sec(None if flops is None else flops.unprofiled),
        )

    def _tokens_in(self, samples: int | None, tokens: BatchTokens) -> int | None:
        """Tokens of so many *samples*, as the user has said, or else the real ones among *tokens*."""
        per_sample = self.config.tokens_per_sample
        if per_sample is None:
            return tokens.real
        return samples * per_sample if samples is not None and isinstance(per_sample, int) else None

    def _peak_sec(self, flops: UnprofiledFlops | None) -> dict[str, float | None]:
        """Seconds that model FLOPs, and the useful ones among them, take at this device's peaks; None: not known."""
        by_dtype, useful = (None, None) if flops is None else (flops.by_dtype, flops.useful_by_dtype)
        peak = partial(
            peak_for, self._context.device_name, given=self.config.peak_flops_per_sec, measured=self._measured
        )
        return {
            name: None if part is None else peak_seconds(part, {dtype: peak(dtype) or 0.0 for dtype in part})
            for name, part in (("model_flops_peak_sec", by_dtype), ("useful_flops_peak_sec", useful))
        }
