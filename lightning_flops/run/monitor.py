"""Throughput and data wait of a run: batches, samples, tokens and seconds between two readings, and over all of it.

A step lasts from the end of one update to the end of the next. What the profiler slowed down is in no figure, and
neither is what belongs to no step, such as a validation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_flops import host_clock
from lightning_flops.records import NO_TOKENS, BatchTokens, BatchTotals, Extremes

_MOST_STRETCHES = 64


@dataclass(slots=True)
class MonitorReading:
    """Sums over unprofiled batches, of the whole run or since the last reading."""

    seconds: float = 0.0
    data_wait_sec: float | None = None  # of these seconds, inside the data loader; None if no wait was seen
    batches: int = 0
    samples: int | None = 0  # None if the size of a batch is not known
    tokens: BatchTokens = NO_TOKENS

    def add(
        self, seconds: float, wait: float | None, samples: int | None, tokens: BatchTokens | None, batches: int
    ) -> None:
        """Add so many batches."""
        self.seconds += seconds
        if wait is not None:
            self.data_wait_sec = (self.data_wait_sec or 0.0) + wait
        self.batches += batches
        self.samples = None if samples is None or self.samples is None else self.samples + samples
        self.tokens = self.tokens.plus(tokens)


def _with(value: float | None, others: Extremes | None, *, of: int = 1) -> Extremes | None:
    """The extremes of *others*, if there are any, and of the mean of so many values whose sum is *value*, if known."""
    if value is None:
        return others
    mean = value / of
    if others is None:
        return Extremes(number=of, total=value, least=mean, greatest=mean)
    least, greatest = min(mean, others.least), max(mean, others.greatest)
    return Extremes(number=others.number + of, total=others.total + value, least=least, greatest=greatest)


@dataclass(slots=True)
class Stretches:
    """Seconds of batches in a row, and of their waits: in 32 to 63 stretches of equally many, however long a run is."""

    sums: list[tuple[float, float]] = field(default_factory=list)  # of complete stretches
    length: int = 1  # batches of each
    _batches: int = 0  # of the running one
    _seconds: float = 0.0
    _wait: float = 0.0

    def add(self, seconds: float, wait: float) -> None:
        """Add a batch."""
        self._batches, self._seconds, self._wait = self._batches + 1, self._seconds + seconds, self._wait + wait
        if self._batches < self.length:
            return
        self.sums.append((self._seconds, self._wait))
        self._batches, self._seconds, self._wait = 0, 0.0, 0.0
        if len(self.sums) == _MOST_STRETCHES:
            pairs = zip(self.sums[::2], self.sums[1::2], strict=True)
            self.sums, self.length = [(one[0] + next_[0], one[1] + next_[1]) for one, next_ in pairs], 2 * self.length

    def means(self) -> tuple[tuple[float, float], ...]:
        """Of one batch in each complete stretch."""
        return tuple((seconds / self.length, wait / self.length) for seconds, wait in self.sums)


@dataclass(slots=True)
class Monitor:
    """Adds up batches until it is read, and over the whole run."""

    now: Callable[[], float] = host_clock.now  # the host's clock, in seconds
    all_tokens: BatchTokens = NO_TOKENS  # of every batch, profiled ones as well
    _since: float = 0.0
    _step_sec: float = 0.0
    _wait: float | None = None
    _fetches: int = 0  # depth of the running ones
    _fetch_since: float | None = None
    _outside_since: float | None = None
    _reading: MonitorReading = field(default_factory=MonitorReading)
    _total: MonitorReading = field(default_factory=MonitorReading)
    _batch_sec: Extremes | None = None
    _waits: Extremes | None = None
    _rates: Extremes | None = None
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
        self.all_tokens = self.all_tokens.plus(tokens)
        if not profiled:
            for sums in (self._reading, self._total):
                sums.add(seconds, wait, samples, tokens, batches)
            for _ in range(batches):
                self._stretches.add(seconds / batches, (wait or 0.0) / batches)
            self._batch_sec = _with(seconds, self._batch_sec, of=batches)
            self._waits = _with(wait, self._waits, of=batches)
            self._rates = _with(samples / seconds if samples is not None and seconds > 0 else None, self._rates)
        seconds += self._step_sec
        self._step_sec = 0.0 if ends_step else seconds
        return seconds

    def read(self) -> MonitorReading:
        """The batches since the last reading; the next reading begins here."""
        reading, self._reading = self._reading, MonitorReading()
        return reading

    def totals(self) -> BatchTotals:
        """All unprofiled batches of the run."""
        total = self._total
        return BatchTotals(
            batches=total.batches,
            seconds=self._batch_sec,
            reader_sec=self._waits,
            samples=total.samples,
            samples_per_sec=None if total.samples is None else self._rates,
            tokens=total.tokens,
            stretches_sec=self._stretches.means(),
        )
