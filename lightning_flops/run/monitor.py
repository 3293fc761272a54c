"""Throughput and data wait of a run: batches, samples, tokens and seconds between two readings, and over all of it.

A step lasts from the end of one update to the end of the next. What the profiler slowed down is in no figure, and
neither is what belongs to no step, such as a validation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_flops import host_clock
from lightning_flops.records import NO_TOKENS, UNKNOWN_TOKENS, BatchTokens, BatchTotals, Extremes

_MOST_KEPT = 256  # batches before they are added up, in a run that is not read


class _Batch(NamedTuple):
    seconds: float
    wait: float | None
    samples: int | None
    tokens: BatchTokens | None
    profiled: bool


@dataclass(slots=True)
class _Sums:
    """Sums over unprofiled batches."""

    samples: int | None = 0  # None if the size of a batch is not known
    tokens: BatchTokens = NO_TOKENS


@dataclass(slots=True)
class MonitorReading(_Sums):
    """The unprofiled batches since the last reading."""

    seconds: float = 0.0
    data_wait_sec: float | None = None  # of these seconds, inside the data loader; None if no wait was seen
    batches: int = 0


@dataclass(slots=True)
class _Spread:
    """Number, sum and extremes of some values."""

    number: int = 0
    total: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf

    def record(self) -> Extremes | None:
        if not self.number:
            return None
        return Extremes(number=self.number, total=self.total, least=self.least, greatest=self.greatest)


@dataclass(slots=True)
class Monitor:
    """Keeps batches until it is read, and adds them up then."""

    now: Callable[[], float] = host_clock.now  # the host's clock, in seconds
    _since: float = 0.0
    _step_sec: float = 0.0
    _wait: float | None = None
    _fetch_since: float | None = None
    _outside_since: float | None = None
    _batches: list[_Batch] = field(default_factory=list)  # not added up yet
    _reading: MonitorReading = field(default_factory=MonitorReading)
    _total: _Sums = field(default_factory=_Sums)
    _all_tokens: BatchTokens = NO_TOKENS
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
            self._wait = None

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
            self._wait = (self._wait or 0.0) + self.now() - self._fetch_since
            self._fetch_since = None

    def batch(self, *, samples: int | None, tokens: BatchTokens | None, profiled: bool, ends_step: bool) -> float:
        """A batch is done, in no figure if it was *profiled*; returns the seconds of its step until now."""
        if self._outside_since is not None:  # a batch that ends while something outside of steps goes on
            self.inside()
            self.outside()
        now = self.now()
        seconds, self._since = now - self._since, now
        self._batches.append(_Batch(seconds, self._wait, samples, tokens, profiled))
        self._wait = None
        if len(self._batches) >= _MOST_KEPT:
            self._add_up()
        seconds += self._step_sec
        self._step_sec = 0.0 if ends_step else seconds
        return seconds

    def _add_up(self) -> None:
        batches, self._batches = self._batches, []
        reading = self._reading
        for seconds, wait, samples, tokens, profiled in batches:
            self._all_tokens = UNKNOWN_TOKENS if tokens is None else self._all_tokens.plus(tokens)
            if profiled:
                continue
            reading.batches += 1
            reading.seconds += seconds
            if wait is not None:
                reading.data_wait_sec = (reading.data_wait_sec or 0.0) + wait
            for sums in (reading, self._total):
                sums.samples = None if samples is None or sums.samples is None else sums.samples + samples
                sums.tokens = UNKNOWN_TOKENS if tokens is None else sums.tokens.plus(tokens)
            rate = samples / seconds if samples is not None and seconds > 0 else None
            for spread, value in ((self._batch_sec, seconds), (self._waits, wait), (self._rates, rate)):
                if value is not None:
                    spread.number += 1
                    spread.total += value
                    spread.least = min(spread.least, value)
                    spread.greatest = max(spread.greatest, value)

    def read(self) -> MonitorReading:
        """The batches since the last reading; the next reading begins here."""
        self._add_up()
        reading, self._reading = self._reading, MonitorReading()
        return reading

    @property
    def all_tokens(self) -> BatchTokens:
        """Tokens of every batch, profiled ones as well."""
        self._add_up()
        return self._all_tokens

    def totals(self) -> BatchTotals:
        """All unprofiled batches of the run."""
        self._add_up()
        total = self._total
        return BatchTotals(
            batches=self._batch_sec.number,
            seconds=self._batch_sec.record(),
            reader_sec=self._waits.record(),
            samples=total.samples,
            samples_per_sec=None if total.samples is None else self._rates.record(),
            tokens=total.tokens,
        )
