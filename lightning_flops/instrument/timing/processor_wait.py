"""Whether the thread that trains had a processor whenever it was ready to run, by the system's counters."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_flops import host_clock
from lightning_flops.records import ProcessorLoss

LEAST_IDLE_SEC = 0.2
"""From so long on the system's ticks, a hundredth of a second each, tell how many cores are idle."""
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
    idle_ticks: int | None = None
    """Processor time that nothing on this machine was ready to use."""


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
        return Counters(waited_sec, wanted, ticks[_STOLEN], ticks[_IDLE] + ticks[_WAITS_FOR_DISK])
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

    def __init__(self, read: Callable[[], Counters] = read_counters, now: Callable[[], float] = host_clock.now) -> None:
        self._read = read
        self._now = now
        self._began: tuple[float, Counters] | None = None
        self._loss: ProcessorLoss | None = None

    def follow(self, *, timed: bool) -> None:
        """Call this at every step, to say whether the next is timed."""
        if timed and self._began is None:
            self._began = (self._now(), self._read())
        elif not timed and self._began is not None:
            (since, before), self._began = self._began, None
            self._loss = _lost(before, self._read(), seconds=self._now() - since)

    def sentences(self) -> tuple[str, ...]:
        """Sentences for the report on the latest timed steps; empty if they had the processor time they needed."""
        loss = self.loss()
        return () if loss is None else tuple(_in_words(loss))

    def loss(self) -> ProcessorLoss | None:
        """What the latest timed steps lost; None if they took too little time to tell."""
        self.follow(timed=False)
        return self._loss


def _lost(before: Counters, after: Counters, *, seconds: float) -> ProcessorLoss | None:
    if seconds < LEAST_IDLE_SEC:
        return None
    waited = stolen = None
    wanted, given_away, idle = (
        None if old is None or new is None else new - old for old, new in zip(before[1:], after[1:], strict=True)
    )
    if seconds >= LEAST_SEC:
        if before.waited_sec is not None and after.waited_sec is not None:
            # A wait is counted when it ends, so a wait that began earlier may be included.
            waited = min(1.0, (after.waited_sec - before.waited_sec) / seconds)
        if wanted is not None and given_away is not None:
            stolen = given_away / wanted if wanted > 0 else 0.0
    idle_cores = None if wanted is None or idle is None else (os.cpu_count() or 1) * idle / max(1, wanted + idle)
    return ProcessorLoss(waited_share=waited, stolen_share=stolen, idle_cores=idle_cores)


def _in_words(loss: ProcessorLoss) -> Iterator[str]:
    if loss.waited_share is not None and loss.waited_share >= WORTH_TELLING:
        yield (
            "While steps were timed, the thread that trains was ready to run and had no processor for "
            f"{loss.waited_share:.0%} of the time: other work on this machine (a data loader's workers, too), or a "
            "limit on this process, slows it, and times and rates are those of a starved run."
        )
    if loss.stolen_share is not None and loss.stolen_share >= WORTH_TELLING:
        yield (
            f"While steps were timed, the hypervisor gave other machines {loss.stolen_share:.0%} of the processor time "
            "that this one asked for: times and rates are those of what was left."
        )
