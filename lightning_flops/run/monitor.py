"""Throughput and data wait of a run: batches, samples, tokens and seconds between two readings, and over all of it.

A step lasts from the end of one update to the end of the next. What the profiler slowed down is in no figure, and
neither is what belongs to no step, such as a validation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_flops import host_clock
from lightning_flops.records import NO_TOKENS, UNKNOWN_TOKENS, BatchTokens, BatchTotals, Extremes


class MonitorReading(NamedTuple):
    """The unprofiled batches since the last reading."""

    seconds: float
    data_wait_sec: float | None
    """Of these seconds, inside the data loader; None if no wait was seen."""
    batches: int
    samples: int | None
    """None if the size of a batch is not known."""
    tokens: BatchTokens


_NOTHING = MonitorReading(0.0, None, 0, 0, NO_TOKENS)


class _Batch(NamedTuple):
    """One unprofiled batch."""

    seconds: float
    wait_sec: float
    fetches: int
    samples: int | None


@dataclass(slots=True)
class _Spread:
    """Number, sum and extremes of some values."""

    number: int = 0
    total: float = 0.0
    least: float = math.inf
    greatest: float = -math.inf

    def add(self, values: Sequence[float]) -> None:
        if values:
            self.number += len(values)
            self.total += sum(values)
            self.least = min(self.least, *values)
            self.greatest = max(self.greatest, *values)

    def record(self) -> Extremes | None:
        if not self.number:
            return None
        return Extremes(number=self.number, total=self.total, least=self.least, greatest=self.greatest)


_MOST_BATCHES = 4096
"""Batches that are kept one by one until they are added up."""


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
    _batches: list[_Batch] = field(default_factory=list)
    """Unprofiled ones that are in no sum yet."""
    _reading: MonitorReading = field(default_factory=lambda: _NOTHING)
    _tokens: BatchTokens = NO_TOKENS
    """Of the unprofiled batches of this reading."""
    _run_tokens: BatchTokens = NO_TOKENS
    """Of those of the readings before."""
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
        if self.all_tokens is not UNKNOWN_TOKENS:
            self.all_tokens = self.all_tokens.plus(tokens)
        if not profiled:
            self._batches.append(_Batch(seconds, self._wait, self._fetches, samples))
            if self._tokens is not UNKNOWN_TOKENS:
                self._tokens = self._tokens.plus(tokens)
            if len(self._batches) > _MOST_BATCHES:
                self._add_up()
        self._wait, self._fetches = 0.0, 0
        self._step_sec += seconds
        step_sec = self._step_sec
        if ends_step:
            self._step_sec = 0.0
        return step_sec

    def read(self) -> MonitorReading:
        """The batches since the last reading; the next reading begins here."""
        self._add_up()
        sums, self._reading = self._reading, _NOTHING
        tokens, self._tokens = self._tokens, NO_TOKENS
        self._run_tokens = self._run_tokens.plus(tokens)
        return sums._replace(tokens=tokens)

    def _add_up(self) -> None:
        batches, self._batches = self._batches, []
        samples = [one.samples for one in batches]
        waits = [one.wait_sec for one in batches if one.fetches]
        seconds = [one.seconds for one in batches]
        self._batch_sec.add(seconds)
        self._waits.add(waits)
        self._rates.add([one.samples / one.seconds for one in batches if one.samples is not None and one.seconds > 0])
        known = None if None in samples else sum(filter(None, samples))
        self._samples = None if known is None or self._samples is None else self._samples + known
        before = self._reading
        self._reading = before._replace(
            seconds=before.seconds + sum(seconds),
            data_wait_sec=(before.data_wait_sec or 0.0) + sum(waits) if waits else before.data_wait_sec,
            batches=before.batches + len(batches),
            samples=None if known is None or before.samples is None else before.samples + known,
        )

    def totals(self) -> BatchTotals:
        """All unprofiled batches of the run; what was not read is added up."""
        self.read()
        seconds = self._batch_sec.record()
        return BatchTotals(
            batches=self._batch_sec.number,
            seconds=seconds,
            reader_sec=self._waits.record(),
            samples=self._samples,
            samples_per_sec=None if self._samples is None else self._rates.record(),
            tokens=self._run_tokens,
        )
