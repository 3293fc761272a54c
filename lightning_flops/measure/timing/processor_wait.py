"""Processor time of the timed steps, and whether they had it when they were ready to run, by the system's counters."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_flops import host_clock
from lightning_flops.records import ProcessorLoss

LEAST_IDLE_SEC = 0.2
"""From so long on the system's ticks, a hundredth of a second each, show how many cores are idle."""

_THREADS = Path("/proc/self/task")
_MACHINE = Path("/proc/stat")
_IDLE, _WAITS_FOR_DISK, _GUEST = 3, 4, 8
"""Columns in the times of all processors; the columns from the last one on are parts of earlier columns."""


class Counters(NamedTuple):
    """The system's counters; they only grow. Empty or 0: this system does not have the counter."""

    waited_sec: Mapping[str, float]
    """How long each thread of this process was ready to run and had no processor."""
    busy_ticks: int = 0
    """Processor time that anything on this machine was ready to use, in some unit."""
    idle_ticks: int = 0
    """Processor time that nothing was ready to use."""


def read_counters() -> Counters:
    """Linux's counters of this process's threads and of the machine."""
    waited_sec: dict[str, float] = {}
    with contextlib.suppress(OSError):  # not Linux
        for thread in _THREADS.iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended; a Linux without these counters
                waited_sec[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    try:
        with _MACHINE.open() as file:
            ticks = [int(field) for field in file.readline().split()[1:]]
        idle = ticks[_IDLE] + ticks[_WAITS_FOR_DISK]
        return Counters(waited_sec, sum(ticks[:_GUEST]) - idle, idle)
    except (OSError, ValueError, IndexError):
        return Counters(waited_sec)


class ProcessorWatch:
    """Reads the counters where a series of timed steps begins and ends, and this process's processor time in between.

    It sees what keeps a thread of this process from running: other processes and threads, or a limit on the processor
    time of this container. One thread that waits holds up those that share its work.
    """

    def __init__(
        self,
        read: Callable[[], Counters] = read_counters,
        now: Callable[[], float] = host_clock.now,
        processor_sec: Callable[[], float] = host_clock.processor_sec,
    ) -> None:
        self._read = read
        self._now = now
        self._processor_sec = processor_sec
        self._readings: list[float] = []
        self._began: tuple[float, Counters] | None = None
        self._loss: ProcessorLoss | None = None

    def follow(self, *, timed: bool) -> None:
        """Call this before every batch, to say whether it is timed."""
        if timed and self._began is None:
            self._began, self._readings = (self._now(), self._read()), []
        if self._began is not None:
            self._readings.append(self._processor_sec())
        if not timed and self._began is not None:
            (since, before), self._began = self._began, None
            batches = [after - before for before, after in itertools.pairwise(self._readings)]
            self._loss = _lost(before, self._read(), seconds=self._now() - since, batches_sec=batches)

    def loss(self) -> ProcessorLoss | None:
        """What the latest timed steps had and lost; None before any."""
        self.follow(timed=False)
        return self._loss


def _lost(before: Counters, after: Counters, *, seconds: float, batches_sec: Sequence[float]) -> ProcessorLoss:
    # A wait is counted when it ends, so a wait that began earlier may be included.
    waits = [sec - before.waited_sec[name] for name, sec in after.waited_sec.items() if name in before.waited_sec]
    busy, idle = after.busy_ticks - before.busy_ticks, after.idle_ticks - before.idle_ticks
    known = seconds >= LEAST_IDLE_SEC and after.busy_ticks > 0
    return ProcessorLoss(
        seconds=seconds,
        batches_sec=tuple(batches_sec),
        waited_share=min(1.0, max(waits) / seconds) if waits and seconds > 0 else None,
        idle_cores=(os.cpu_count() or 1) * idle / max(1, busy + idle) if known else None,
        busy_share=busy / max(1, busy + idle) if known else None,
    )
