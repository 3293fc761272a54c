"""Throughput and data wait of a run: batches, samples, tokens and seconds between two readings, and over all of it.

A step lasts from the end of one update to the end of the next. What the profiler slowed down is in no figure, and
neither is what belongs to no step, such as a validation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_flops import host_clock
from lightning_flops.records import NO_TOKENS, UNKNOWN_TOKENS, BatchTokens, BatchTotals, Extremes


@dataclass(slots=True)
class MonitorReading:
    """The unprofiled batches since the last reading."""

    seconds: float = 0.0
    data_wait_sec: float | None = None
    """Of these seconds, inside the data loader; None if no wait was seen."""
    batches: int = 0
    samples: int | None = 0
    """None if the size of a batch is not known."""
    tokens: BatchTokens = NO_TOKENS


@dataclass(slots=True)
class _Spread:
    """Number, sum and extremes of some values."""

    number: int = 0
    total: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf

    def add(self, value: float) -> None:
        self.number += 1
        self.total += value
        self.least = min(self.least, value)
        self.greatest = max(self.greatest, value)

    def record(self) -> Extremes | None:
        if not self.number:
            return None
        return Extremes(number=self.number, total=self.total, least=self.least, greatest=self.greatest)


@dataclass(slots=True)
class Monitor:
    """Adds up batches until it is read, and over the whole run."""

    now: Callable[[], float] = host_clock.now
    """The host's clock, in seconds."""
    all_tokens: BatchTokens = NO_TOKENS
    """Of every batch, profiled ones as well."""
    _since: float = 0.0
    _step_sec: float = 0.0
    _wait: float = 0.0
    _fetches: int = 0
    _fetch_since: float | None = None
    _outside_since: float | None = None
    _reading: MonitorReading = field(default_factory=MonitorReading)
    _tokens: BatchTokens = NO_TOKENS
    """Of the unprofiled batches of the readings before; the samples likewise."""
    _samples: int | None = 0
    _batch_sec: _Spread = field(default_factory=_Spread)
    _waits: _Spread = field(default_factory=_Spread)
    _rates: _Spread = field(default_factory=_Spread)

    def go_on(self) -> None:
        """A batch begins here: what ran since the last one was the profiler's."""
        self._since = self.now()

    def outside(self, *, since_batch: bool = False) -> None:
        """What runs from here, or since the last batch ended, until ``inside`` belongs to no step."""
        self._outside_since = self._since if since_batch else self.now()
        if since_batch:
            self._wait, self._fetches = 0.0, 0

    def inside(self) -> None:
        """Steps go on."""
        if self._outside_since is not None:
            self._since += self.now() - self._outside_since
            self._outside_since = None

    def fetch_begins(self) -> None:
        """The loop asks its data loader for a batch."""
        self._fetch_since = self.now()

    def fetch_ends(self) -> None:
        """The data loader has delivered the batch."""
        if self._fetch_since is not None:
            self._wait += self.now() - self._fetch_since
            self._fetches += 1
            self._fetch_since = None

    def batch(self, *, samples: int | None, tokens: BatchTokens | None, profiled: bool, ends_step: bool) -> float:
        """A batch is done; returns the seconds of its step until now.

        Args:
            samples: in the batch; None if not known.
            tokens: in the batch; None if it does not tell them.
            profiled: the profiler slowed the batch down, so it is in no figure.
            ends_step: a step ends with the batch.
        """
        if self._outside_since is not None:  # a batch that ends while something outside of steps goes on
            self.inside()
            self.outside()
        now = self.now()
        seconds, self._since = now - self._since, now
        self.all_tokens = UNKNOWN_TOKENS if tokens is None else self.all_tokens.plus(tokens)
        if not profiled:
            self._add(seconds, samples, tokens)
        self._wait, self._fetches = 0.0, 0
        self._step_sec += seconds
        step_sec = self._step_sec
        if ends_step:
            self._step_sec = 0.0
        return step_sec

    def _add(self, seconds: float, samples: int | None, tokens: BatchTokens | None) -> None:
        reading = self._reading
        reading.seconds += seconds
        reading.batches += 1
        reading.samples = None if samples is None or reading.samples is None else reading.samples + samples
        reading.tokens = UNKNOWN_TOKENS if tokens is None else reading.tokens.plus(tokens)
        self._batch_sec.add(seconds)
        if self._fetches:
            reading.data_wait_sec = (reading.data_wait_sec or 0.0) + self._wait
            self._waits.add(self._wait)
        if samples is not None and seconds > 0:
            self._rates.add(samples / seconds)

    def read(self) -> MonitorReading:
        """The batches since the last reading; the next reading begins here."""
        reading, self._reading = self._reading, MonitorReading()
        unknown = reading.tokens is UNKNOWN_TOKENS
        self._tokens = UNKNOWN_TOKENS if unknown else self._tokens.plus(reading.tokens)
        known = self._samples is not None and reading.samples is not None
        self._samples = (self._samples or 0) + (reading.samples or 0) if known else None
        return reading

    def totals(self) -> BatchTotals:
        """All unprofiled batches of the run; what was not read is added up."""
        self.read()
        return BatchTotals(
            batches=self._batch_sec.number,
            seconds=self._batch_sec.record(),
            reader_sec=self._waits.record(),
            samples=self._samples,
            samples_per_sec=None if self._samples is None else self._rates.record(),
            tokens=self._tokens,
        )
