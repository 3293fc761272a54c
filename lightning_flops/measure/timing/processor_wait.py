"""Processor time of the timed steps, what was asked for and not given, and what heat took of the GPU's speed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_flops import host_clock
from lightning_flops.records import ProcessorLoss
from lightning_flops.signals import Quiet, Undo
from lightning_flops.units import package_logger

logger = package_logger(__name__)

#: From so long on the system's ticks, a hundredth of a second each, show to a fifth of a core how many are idle.
_LEAST_IDLE_SEC = 0.05

_THREADS, _MACHINE = Path("/proc/self/task"), Path("/proc/stat")
#: Columns in the times of all processors; the columns from the last one on are parts of earlier columns.
_IDLE, _WAITS_FOR_DISK, _GUEST = 3, 4, 8

_HEAT = 1  #: NVML_PERF_POLICY_THERMAL.

#: Reads for how many seconds heat has held the clock of the whole GPU down; None: it is not known.
Heat = Callable[[], float | None]


def heat_counter(device: torch.device, undo: Undo) -> Heat:
    """The driver's counter of the NVIDIA GPU that *device* is, by the extra ``nvidia``; *undo* lets NVML go."""
    if device.type != "cuda" or torch.version.hip is not None:
        return lambda: None
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        undo.callback(_quietly, nvml.nvmlShutdown)
        # Numbers of devices are no names: torch's depend on CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
    except Exception:  # not there, without a driver, another package of that name, or it does not know this device
        logger.debug("NVML cannot be used", exc_info=True)
        return lambda: None
    return lambda: _quietly(lambda: float(nvml.nvmlDeviceGetViolationStatus(handle, _HEAT).violationTime) / 1e9)


def _quietly(ask: Callable[[], Any]) -> Any:
    with Quiet(Exception):  # most errors of NVML say that this GPU does not know
        return ask()


class Counters(NamedTuple):
    """The system's counters; they only grow. Empty or 0: this system does not have the counter."""

    waited_sec: Mapping[str, float]  #: How long each thread of this process was ready to run and had no processor.
    busy_ticks: int = 0  #: Processor time that anything on this machine was ready to use, in some unit.
    idle_ticks: int = 0  #: Processor time that nothing was ready to use.


def read_counters() -> Counters:
    """Linux's counters of this process's threads and of the machine."""
    waited_sec: dict[str, float] = {}
    unknown = Quiet(OSError, ValueError, IndexError)  # not Linux, without these counters, or it has ended
    with unknown:
        for thread in _THREADS.iterdir():
            with unknown:
                waited_sec[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
    with unknown:
        ticks = [int(field) for field in _MACHINE.read_text().partition("\n")[0].split()[1:]]
        idle = ticks[_IDLE] + ticks[_WAITS_FOR_DISK]
        return Counters(waited_sec, sum(ticks[:_GUEST]) - idle, idle)
    return Counters(waited_sec)


class ProcessorWatch:
    """Reads the counters where a series of timed steps begins and ends, and the process's processor time between."""

    def __init__(
        self,
        read: Callable[[], Counters] = read_counters,
        now: Callable[[], float] = host_clock.now,
        processor_sec: Callable[[], float] = host_clock.processor_sec,
        heat: Heat = lambda: None,
    ) -> None:
        self._read, self._now, self._processor_sec, self.heat = read, now, processor_sec, heat
        self._readings: list[float] = []
        self._began: tuple[float, Counters, float | None] | None = None
        self._loss: ProcessorLoss | None = None

    def follow(self, *, timed: bool) -> None:
        """Call this before every batch, to say whether it is timed."""
        if timed and self._began is None:
            self._began, self._readings = (self._now(), self._read(), self.heat()), []
        if self._began is not None:
            self._readings.append(self._processor_sec())
        if not timed and self._began is not None:
            (since, before, heat), self._began = self._began, None
            after, seconds = self.heat(), self._now() - since
            batches = [after - before for before, after in itertools.pairwise(self._readings)]
            heated = None if heat is None or after is None or not seconds else min(1.0, (after - heat) / seconds)
            self._loss = _lost(before, self._read(), seconds=seconds, batches_sec=batches, heat_share=heated)

    def loss(self) -> ProcessorLoss | None:
        """What the latest timed steps had and lost; None before any."""
        self.follow(timed=False)
        return self._loss


def _lost(
    before: Counters, after: Counters, *, seconds: float, batches_sec: Sequence[float], heat_share: float | None
) -> ProcessorLoss:
    # A wait is counted when it ends, so a wait that began earlier may be included.
    waits = [sec - before.waited_sec[name] for name, sec in after.waited_sec.items() if name in before.waited_sec]
    busy, idle = after.busy_ticks - before.busy_ticks, after.idle_ticks - before.idle_ticks
    known = seconds >= _LEAST_IDLE_SEC and after.busy_ticks > 0
    return ProcessorLoss(
        seconds=seconds,
        batches_sec=tuple(batches_sec),
        waited_share=min(1.0, max(waits) / seconds) if waits and seconds > 0 else None,
        waits_share=min(1.0, sum(waits) / seconds) if waits and seconds > 0 else None,
        idle_cores=(os.cpu_count() or 1) * idle / max(1, busy + idle) if known else None,
        busy_share=busy / max(1, busy + idle) if known else None,
        heat_share=heat_share,
    )
