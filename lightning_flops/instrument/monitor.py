"""Throughput of a run for as long as it trains, from a few host timestamps a step and no synchronization."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from lightning_flops.records import BatchTotals, Extremes


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorReading:
    """What went by between two readings, on this rank."""

    seconds: float
    """Wall time, less what was excluded."""
    data_wait_sec: float | None
    """Host time inside the data loader; None if no wait was seen."""
    batches: int
    steps: int
    samples: int | None
    """None if the size of a batch was not known."""
    counted_signature: bool
    """Every step had the batch shapes of the step whose FLOPs are known."""


class Monitor:
    """Adds up batches, samples and data wait until it is read, and over the whole run.

    All that happens at every batch is a few stamps, sums and comparisons: it is called from inside training loops whose
    steps may take less than a millisecond.

    Args:
        now: the host's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._reasons: set[str] = set()
        # These two only ever grow: an interval of any kind is a difference of two of their values.
        self._excluded_sec = 0.0
        self._wait_sec = 0.0
        self._fetches = 0
        self._excluded_since = 0.0  # means something while there is a reason only
        self._fetch_since: float | None = None
        self._cost = _Spread()
        self._wait = _Spread()
        self._rate = _Spread()
        self._total_samples: int | None = 0
        self.restart()

    def restart(self) -> None:
        """Forget what went by: the next reading and the next batch begin here."""
        now = self._now()
        self._cut_exclusion(now)
        self._begin_reading(now)
        self._begin_batch(now)

    def _begin_reading(self, now: float) -> None:
        self._read_since = now
        self._read_excluded_sec = self._excluded_sec
        self._read_wait_sec = self._wait_sec
        self._read_fetches = self._fetches
        self._batches = 0
        self._steps = 0
        self._samples: int | None = 0
        self._counted_signature = True

    def _begin_batch(self, now: float) -> None:
        self._batch_since = now
        self._batch_excluded_sec = self._excluded_sec
        self._batch_wait_sec = self._wait_sec
        self._batch_fetches = self._fetches

    def fetch_begins(self) -> None:
        """The loop turns to the data loader."""
        self._fetch_since = self._now()

    def fetch_ends(self) -> None:
        """The data loader has delivered."""
        since = self._fetch_since
        if since is not None:
            self._fetch_since = None
            self._fetches += 1
            if not self._reasons:
                self._wait_sec += self._now() - since

    def exclude(self, reason: str) -> None:
        """From here until ``include`` with the same *reason* the run does something else than training."""
        if not self._reasons:
            self._excluded_since = self._now()
        self._reasons.add(reason)

    def include(self, reason: str) -> None:
        """*reason* is over; the run trains again unless there is another one."""
        if reason in self._reasons:
            self._reasons.remove(reason)
            if not self._reasons:
                self._excluded_sec += self._now() - self._excluded_since

    def _cut_exclusion(self, now: float) -> None:
        """Book what has been excluded up to *now*; what follows is booked by ``include``."""
        if self._reasons:
            self._excluded_sec += now - self._excluded_since
            self._excluded_since = now

    def batch(self, *, samples: int | None, ends_step: bool, counted_signature: bool) -> None:
        """A batch went through the loop."""
        now = self._now()
        if self._reasons:
            self._cut_exclusion(now)
        seconds = now - self._batch_since - (self._excluded_sec - self._batch_excluded_sec)
        self._cost.add(seconds)
        if self._fetches != self._batch_fetches:
            self._wait.add(self._wait_sec - self._batch_wait_sec)
        self._batch_since = now
        self._batch_excluded_sec = self._excluded_sec
        self._batch_wait_sec = self._wait_sec
        self._batch_fetches = self._fetches
        self._batches += 1
        if ends_step:
            self._steps += 1
        if not counted_signature:
            self._counted_signature = False
        if samples is None:
            self._samples = self._total_samples = None
            return
        if self._samples is not None:
            self._samples += samples
        if self._total_samples is not None:
            self._total_samples += samples
            if seconds > 0:
                self._rate.add(samples / seconds)

    def read(self) -> MonitorReading:
        """What went by since the last reading; the next one begins here."""
        now = self._now()
        self._cut_exclusion(now)
        reading = MonitorReading(
            seconds=now - self._read_since - (self._excluded_sec - self._read_excluded_sec),
            data_wait_sec=None if self._fetches == self._read_fetches else self._wait_sec - self._read_wait_sec,
            batches=self._batches,
            steps=self._steps,
            samples=self._samples,
            counted_signature=self._counted_signature,
        )
        self._begin_reading(now)
        return reading

    def totals(self) -> BatchTotals:
        """All batches of the run but those that ``restart`` made forget."""
        return BatchTotals(
            batches=self._cost.number,
            seconds=self._cost.record(),
            reader_sec=self._wait.record(),
            samples=self._total_samples,
            samples_per_sec=None if self._total_samples is None else self._rate.record(),
        )


class _Spread:
    """Sum, least and greatest of what is added."""

    __slots__ = ("greatest", "least", "number", "total")

    def __init__(self) -> None:
        self.number = 0
        self.total = 0.0
        self.least = float("inf")
        self.greatest = float("-inf")

    def add(self, value: float) -> None:
        self.number += 1
        self.total += value
        if value < self.least:
            self.least = value
        if value > self.greatest:
            self.greatest = value

    def record(self) -> Extremes | None:
        """None if nothing was added."""
        if not self.number:
            return None
        return Extremes(number=self.number, total=self.total, least=self.least, greatest=self.greatest)
