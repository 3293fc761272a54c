"""What a GPU's own counters measure in the timed steps: its energy, its clock, and how long power or heat held it down.

NVML reads them. It comes with NVIDIA's driver, and its Python names with the package nvidia-ml-py (the extra
``nvidia``). Without one of the two nothing is read or said. All counters are those of the whole GPU. NVML is read
between steps only, and no call waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from lightning_flops import host_clock
from lightning_flops.records import GpuRecord
from lightning_flops.units import package_logger

logger = package_logger(__name__)

REFRESHED_SEC = 0.1
"""How often the driver brings the energy counter up to date, about: measured by others, NVIDIA does not say."""
LEAST_SEC = 2.0
"""A shorter time gives no energy: at both ends together the counter may miss one time between two refreshes."""
_BETWEEN_READINGS_SEC = 0.5
"""The clock is not read more often than this."""
_POWER, _HEAT = 0, 1
"""NVML_PERF_POLICY_POWER and NVML_PERF_POLICY_THERMAL."""
_SM = 1
"""NVML_CLOCK_SM."""

Ask = Callable[..., Any]
"""Calls the function of NVML of this name for one GPU; None for any error, most of which say that it does not know."""

_Counters = tuple[float | None, ...]


def open_nvml(device: torch.device, undo: ExitStack) -> Ask | None:
    """NVML's functions for the GPU that *device* is; None for another kind of device, or without NVML.

    *undo* lets NVML go. It counts its users, so that others of this process keep it.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        undo.callback(_quietly, nvml.nvmlShutdown)
        # Numbers of devices are no names: torch's depend on CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
    except Exception:  # not there, without a driver, another package of that name, or it does not know this device
        logger.debug("NVML cannot be used", exc_info=True)
        return None

    def ask(function: str, *arguments: Any) -> Any:
        return _quietly(lambda: getattr(nvml, function)(handle, *arguments))

    mode = ask("nvmlDeviceGetMigMode")  # [current, pending]; None where there is no MIG
    return None if mode is not None and mode[0] == 1 else ask  # this process has a slice of the GPU


def _quietly(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:  # also of ctypes, and of a package of that name that is another one
        logger.debug("NVML gave no answer", exc_info=True)
        return None


class GpuWatch:
    """Reads one GPU's counters where a series of timed steps begins and ends, and its clock in between.

    *ask* as ``open_nvml`` returns it; without it nothing is read.
    """

    def __init__(self, ask: Ask | None, now: Callable[[], float] = host_clock.now) -> None:
        self._ask = ask
        self._now = now
        self._began: tuple[float, _Counters] | None = None
        self._clocks: list[int | None] = []
        self._read_at = 0.0
        self._record: GpuRecord | None = None

    def follow(self, *, timed: bool) -> None:
        """Call this between two steps, to say whether the next is timed."""
        ask = self._ask
        if ask is None or not (timed or self._began):
            return
        if self._began is None:
            self._clocks = []
            self._read_clock(ask)
            self._began = self._now(), _counters(ask)
        elif not timed:
            (since, before), self._began = self._began, None
            seconds, after = self._now() - since, _counters(ask)
            self._read_clock(ask)
            # None also where the driver was loaded anew in between.
            pairs = zip(before, after, strict=True)
            grown = [None if a is None or b is None or b < a else b - a for a, b in pairs]
            self._record = self._recorded(ask, *grown, seconds=seconds)
        elif self._now() - self._read_at >= _BETWEEN_READINGS_SEC:
            self._read_clock(ask)

    def record(self) -> GpuRecord | None:
        """What the latest timed steps took; None without a GPU that is read, or without a timed step."""
        self.follow(timed=False)
        return self._record

    def _read_clock(self, ask: Ask) -> None:
        self._clocks.append(ask("nvmlDeviceGetClockInfo", _SM))
        self._read_at = self._now()

    def _recorded(
        self, ask: Ask, joules: float | None, power_sec: float | None, heat_sec: float | None, *, seconds: float
    ) -> GpuRecord:
        why = ""
        if joules is None:
            why = "this GPU's driver has no counter of its energy"
        elif seconds < LEAST_SEC:
            why = (
                f"the timed steps took {seconds:.2g} s, and the counter is brought up to date only about every "
                f"{REFRESHED_SEC:g} s: raise timing_steps until they take {LEAST_SEC:g} s"
            )
        return GpuRecord(
            seconds=seconds,
            joules=None if why else joules,
            no_joules_because=why,
            clock_mhz=tuple(clock for clock in self._clocks if clock is not None),
            highest_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", _SM),
            power_limited_sec=power_sec,
            heat_limited_sec=heat_sec,
        )


def _counters(ask: Ask) -> _Counters:
    """Joules, and seconds that power and heat have held the clock down; None: this GPU has no such counter."""
    limited = [ask("nvmlDeviceGetViolationStatus", policy) for policy in (_POWER, _HEAT)]
    times = [None if found is None else found.violationTime / 1e9 for found in limited]
    millijoules = ask("nvmlDeviceGetTotalEnergyConsumption")
    return (None if millijoules is None else millijoules / 1e3, *times)
