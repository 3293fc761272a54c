"""Throughput of a run for as long as it trains, from a few host timestamps a step and no synchronization."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


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
    """Adds up batches, samples and data wait until it is read.

    Args:
        now: the host's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._reasons: set[str] = set()
        self.restart()

    def restart(self) -> None:
        """Forget what went by: the next reading begins here."""
        self._begin(self._now())

    def _begin(self, start: float) -> None:
        self._start = start
        self._excluded_sec = 0.0
        self._excluded_since = start  # means something while there is a reason only
        self._data_wait_sec: float | None = None
        self._fetch_since: float | None = None
        self._batches = 0
        self._steps = 0
        self._samples: int | None = 0
        self._counted_signature = True

    def fetch_begins(self) -> None:
        """The loop turns to the data loader."""
        self._fetch_since = self._now()

    def fetch_ends(self) -> None:
        """The data loader has delivered."""
        if self._fetch_since is not None:
            if not self._reasons:
                self._data_wait_sec = (self._data_wait_sec or 0.0) + self._now() - self._fetch_since
            self._fetch_since = None

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

    def batch(self, *, samples: int | None, ends_step: bool, counted_signature: bool) -> None:
        """A batch went through the loop."""
        self._batches += 1
        self._steps += ends_step
        self._samples = None if self._samples is None or samples is None else self._samples + samples
        self._counted_signature &= counted_signature

    def read(self) -> MonitorReading:
        """What went by since the last reading; the next one begins here."""
        now = self._now()
        excluded = self._excluded_sec + (now - self._excluded_since if self._reasons else 0.0)
        reading = MonitorReading(
            seconds=now - self._start - excluded,
            data_wait_sec=self._data_wait_sec,
            batches=self._batches,
            steps=self._steps,
            samples=self._samples,
            counted_signature=self._counted_signature,
        )
        self._begin(now)
        return reading
