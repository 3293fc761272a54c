"""Whether the thread that trains had a processor whenever it was ready to run, by the system's counters."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

LEAST_SEC = 1.0
"""A shorter time says little: another process that wakes up for a moment is a large share of it."""
WORTH_TELLING = 0.05
"""From this share on we report it: the times and rates are those of a run that had too little processor time."""

_CALLING_THREAD = Path("/proc/thread-self/schedstat")
_MACHINE = Path("/proc/stat")
_IDLE, _WAITS_FOR_DISK, _STOLEN, _GUEST = 3, 4, 7, 8
"""Columns in the times of all processors; the columns from the last one on are parts of earlier columns."""


class Counters(NamedTuple):
    """The system's counters; they only grow. None: this system does not have the counter."""

    waited_sec: float | None
    """How long the calling thread was ready to run and had no processor."""
    wanted_ticks: int | None
    """Processor time that anything on this machine was ready to use, in some unit."""
    stolen_ticks: int | None
    """The part of it that the hypervisor gave to other machines."""


def read_counters() -> Counters:
    """Linux's counters of the calling thread and of the machine."""
    try:
        waited_sec = int(_CALLING_THREAD.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # not Linux, or a Linux without these counters
        waited_sec = None
    try:
        with _MACHINE.open() as file:
            ticks = [int(field) for field in file.readline().split()[1:]]
        wanted = sum(ticks[:_GUEST]) - ticks[_IDLE] - ticks[_WAITS_FOR_DISK]
        return Counters(waited_sec, wanted, ticks[_STOLEN])
    except (OSError, ValueError, IndexError):
        return Counters(waited_sec, None, None)


class ProcessorWatch:
    """Reads the counters where a series of timed steps begins and ends.

    It sees what keeps the calling thread from running: other processes and threads, a limit on the processor time of
    this container, and other machines on the same host. It does not watch the threads that help this one.

    Args:
        read: the counters now.
        now: the host's clock, in seconds.
    """

    def __init__(
        self, read: Callable[[], Counters] = read_counters, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._read = read
        self._now = now
        self._began: tuple[float, Counters] | None = None
        self._sentences: tuple[str, ...] = ()

    def follow(self, *, timed: bool) -> None:
        """Call this at every step, to say whether the next is timed."""
        if timed and self._began is None:
            self._began = (self._now(), self._read())
        elif not timed and self._began is not None:
            (since, before), self._began = self._began, None
            self._sentences = _in_words(before, self._read(), seconds=self._now() - since)

    def sentences(self) -> tuple[str, ...]:
        """Sentences for the report on the latest timed steps; empty if they had the processor time they needed."""
        self.follow(timed=False)
        return self._sentences


def _in_words(before: Counters, after: Counters, *, seconds: float) -> tuple[str, ...]:
    if seconds < LEAST_SEC:
        return ()
    found = []
    if before.waited_sec is not None and after.waited_sec is not None:
        # A wait is counted when it ends, so a wait that began earlier may be included.
        share = min(1.0, (after.waited_sec - before.waited_sec) / seconds)
        if share >= WORTH_TELLING:
            found.append(
                f"While steps were timed, the thread that trains was ready to run and had no processor for {share:.0%} "
                "of the time: other work on this machine (a data loader's workers, too), or a limit on this process, "
                "slows it, and times and rates are those of a starved run."
            )
    if None not in (*before[1:], *after[1:]):
        assert after.wanted_ticks is not None and before.wanted_ticks is not None
        assert after.stolen_ticks is not None and before.stolen_ticks is not None
        ticks = after.wanted_ticks - before.wanted_ticks
        share = (after.stolen_ticks - before.stolen_ticks) / ticks if ticks > 0 else 0.0
        if share >= WORTH_TELLING:
            found.append(
                f"While steps were timed, the hypervisor gave other machines {share:.0%} of the processor time that "
                "this one asked for: times and rates are those of what was left."
            )
    return tuple(found)
