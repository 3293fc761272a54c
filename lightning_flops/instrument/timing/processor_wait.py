"""Processor time of the timed steps, and whether they had it when they were ready to run, by the system's counters."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_flops import host_clock
from lightning_flops.records import ProcessorLoss

LEAST_IDLE_SEC = 0.2
"""From so long on the system's ticks, a hundredth of a second each, show how many cores are idle."""
LEAST_SEC = 1.0
"""Of a shorter time we say nothing in words: another process that wakes up for a moment is a large share of it."""
WORTH_TELLING = 0.05
"""From this share on we report it: the times and rates are those of a run that had too little processor time."""

_THREADS = Path("/proc/self/task")
_MACHINE = Path("/proc/stat")
_IDLE, _WAITS_FOR_DISK, _STOLEN, _GUEST = 3, 4, 7, 8
"""Columns in the times of all processors; the columns from the last one on are parts of earlier columns."""


class Counters(NamedTuple):
    """The system's counters; they only grow. None: this system does not have the counter."""

    waited_sec: Mapping[str, float]
    """How long each thread of this process was ready to run and had no processor; empty if that is not counted."""
    wanted_ticks: int | None
    """Processor time that anything on this machine was ready to use, in some unit."""
    stolen_ticks: int | None
    """The part of it that the hypervisor gave to other machines."""
    idle_ticks: int | None = None
    """Processor time that nothing on this machine was ready to use."""


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
        wanted = sum(ticks[:_GUEST]) - ticks[_IDLE] - ticks[_WAITS_FOR_DISK]
        return Counters(waited_sec, wanted, ticks[_STOLEN], ticks[_IDLE] + ticks[_WAITS_FOR_DISK])
    except (OSError, ValueError, IndexError):
        return Counters(waited_sec, None, None)


class ProcessorWatch:
    """Reads the counters where a series of timed steps begins and ends, and this process's processor time in between.

    It sees what keeps a thread of this process from running: other processes and threads, a limit on the processor time
    of this container, and other machines on the same host. One thread that waits holds up those that share its work.

    Args:
        read: the counters now.
        now: the host's clock, in seconds.
        processor_sec: the processor time that all threads of this process have had.
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

    def sentences(self) -> tuple[str, ...]:
        """Sentences for the report on the latest timed steps; empty if they had the processor time they needed."""
        loss = self.loss()
        return () if loss is None or loss.seconds < LEAST_SEC else tuple(_in_words(loss))

    def loss(self) -> ProcessorLoss | None:
        """What the latest timed steps had and lost; None before any."""
        self.follow(timed=False)
        return self._loss


def _lost(before: Counters, after: Counters, *, seconds: float, batches_sec: Sequence[float]) -> ProcessorLoss:
    # A wait is counted when it ends, so a wait that began earlier may be included.
    waits = [sec - before.waited_sec[name] for name, sec in after.waited_sec.items() if name in before.waited_sec]
    waited = min(1.0, max(waits) / seconds) if waits and seconds > 0 else None
    stolen = idle_cores = busy = None
    wanted, given_away, idle = (
        None if old is None or new is None else new - old for old, new in zip(before[1:], after[1:], strict=True)
    )
    if wanted is not None and given_away is not None and seconds >= LEAST_SEC:  # a tick is 10 ms
        stolen = given_away / wanted if wanted > 0 else 0.0
    if wanted is not None and idle is not None and seconds >= LEAST_IDLE_SEC:
        idle_cores = (os.cpu_count() or 1) * idle / max(1, wanted + idle)
        busy = wanted / max(1, wanted + idle)
    return ProcessorLoss(
        seconds=seconds,
        batches_sec=tuple(batches_sec),
        waited_share=waited,
        stolen_share=stolen,
        idle_cores=idle_cores,
        busy_share=busy,
    )


def _in_words(loss: ProcessorLoss) -> Iterator[str]:
    if loss.waited_share is not None and loss.waited_share >= WORTH_TELLING:
        yield (
            "While steps were timed, a thread of this process was ready to run and had no processor for "
            f"{loss.waited_share:.0%} of the time: other work on this machine (a data loader's workers, too), or a "
            "limit on this process, slows it, and times and rates are those of a starved run."
        )
    if loss.stolen_share is not None and loss.stolen_share >= WORTH_TELLING:
        yield (
            f"While steps were timed, the hypervisor gave other machines {loss.stolen_share:.0%} of the processor time "
            "that this one asked for: times and rates are those of what was left."
        )
