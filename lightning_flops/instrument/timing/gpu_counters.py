"""What a GPU's own counters measure in the timed steps: its energy, its clock, and what holds the clock down.

NVML reads them. It comes with NVIDIA's driver, and its Python names with the package nvidia-ml-py (the extra
``nvidia``). Without one of the two there is no meter, and nothing is said. All counters are those of the whole GPU.

NVML is read between steps only: where the series of timed steps begins and ends, and sometimes at a boundary between
two of them; the timer begins the next step afterwards. No call waits for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from lightning_flops import host_clock
from lightning_flops.records import GpuRecord
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

REFRESHED_SEC = 0.1
"""How often the driver brings the energy counter up to date, about: measured by others, NVIDIA does not say."""
LEAST_SEC = 2.0
"""A shorter time gives no energy: at both ends together the counter may miss one time between two refreshes."""
_BETWEEN_READINGS_SEC = 0.5
"""The clock is not read more often than this."""

_REASONS = (
    (0x002, "the clocks that a user has set"),
    (0x004, "the power limit"),
    (0x008, "a slowdown by the hardware, for heat or power"),
    (0x010, "the clocks of another GPU (sync boost)"),
    (0x020, "heat"),
    (0x040, "heat (a slowdown by the hardware)"),
    (0x080, "the power supply (a power brake)"),
    (0x100, "the clocks of a display"),
    (0x200, "a limit of the board"),
    (0x400, "reliability of the voltage"),
)
"""The bits of nvmlClocksEventReasons but one: that an idle GPU lowers its clock slows nothing down."""
_POWER, _HEAT = 0, 1
"""NVML_PERF_POLICY_POWER and NVML_PERF_POLICY_THERMAL."""
_SM = 1
"""NVML_CLOCK_SM."""


class _Counters(NamedTuple):
    """Counters that only grow; None: this GPU or driver does not have the counter."""

    millijoules: int | None
    power_limited_ns: int | None
    heat_limited_ns: int | None

    def since(self, before: _Counters) -> _Counters:
        """How much each grew; None if it is not known, or if the driver was loaded anew in between."""
        pairs = zip(before, self, strict=True)
        return _Counters._make(None if a is None or b is None or b < a else b - a for a, b in pairs)


class _Clock(NamedTuple):
    """The clock now, and why it is not higher; None if it could not be read."""

    megahertz: int | None
    reasons: tuple[str, ...] | None


class GpuMeter:
    """Reads the counters of one GPU by *nvml*, the module pynvml, initialized, and its handle."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    def counters(self) -> _Counters:
        """The counters now."""
        limited = [self._ask("nvmlDeviceGetViolationStatus", policy) for policy in (_POWER, _HEAT)]
        times = [None if found is None else int(found.violationTime) for found in limited]
        return _Counters(self._ask("nvmlDeviceGetTotalEnergyConsumption"), *times)

    def clock(self) -> _Clock:
        """The clock now."""
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # a driver before 535
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        reasons = None if bits is None else tuple(words for bit, words in _REASONS if int(bits) & bit)
        return _Clock(self._ask("nvmlDeviceGetClockInfo", _SM), reasons)

    def highest_clock_mhz(self) -> int | None:
        """The highest clock that this GPU can have."""
        highest: int | None = self._ask("nvmlDeviceGetMaxClockInfo", _SM)
        return highest

    def _ask(self, function: str, *arguments: Any) -> Any:
        return _quietly(lambda: getattr(self._nvml, function)(self._handle, *arguments))


def open_meter(device: torch.device, undo: ExitStack) -> GpuMeter | None:
    """A meter of the GPU that *device* is; None for another kind of device, or without NVML.

    *undo* lets NVML go. It counts its users, so that others of this process keep it.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # not there, or there is no driver, or a package of that name that is another one
        logger.debug("NVML cannot be used", exc_info=True)
        return None
    with ExitStack() as held:
        held.callback(_quietly, nvml.nvmlShutdown)
        try:
            # Numbers of devices are no names: torch's depend on CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
            meter = GpuMeter(nvml, _whole_gpu(nvml, str(torch.cuda.get_device_properties(device).uuid)))
        except Exception:
            logger.debug("NVML does not know this device", exc_info=True)
            return None
        undo.push(held.pop_all())
    return meter


def _whole_gpu(nvml: Any, uuid: str) -> Any:
    """NVML's handle of the GPU with this identifier, as torch writes it.

    Raises:
        Exception: NVML knows no such GPU, or this process has a slice of it (MIG): the counters are the whole GPU's.
    """
    handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
    mode = _quietly(lambda: nvml.nvmlDeviceGetMigMode(handle))  # [current, pending]; an error where there is no MIG
    if mode is not None and mode[0] == 1:
        raise LookupError("a slice of a GPU")
    return handle


def _quietly(ask: Callable[[], Any]) -> Any:
    """The answer; None for any error: of NVML's, most say that this GPU or driver does not know."""
    try:
        return ask()
    except Exception:  # also of ctypes, and of a package of that name that is another one
        logger.debug("NVML gave no answer", exc_info=True)
        return None


class GpuWatch:
    """Reads a meter, if there is one, where a series of timed steps begins and ends, and its clock in between."""

    def __init__(self, meter: GpuMeter | None, now: Callable[[], float] = host_clock.now) -> None:
        self._meter = meter
        self._now = now
        self._began: tuple[float, _Counters] | None = None
        self._clocks: list[_Clock] = []
        self._read_at = 0.0
        self._record: GpuRecord | None = None

    def follow(self, *, timed: bool) -> bool:
        """Call this at every step, to say whether the next is timed; True if the meter was read for the first one."""
        meter = self._meter
        if meter is None:
            return False
        if timed and self._began is None:
            self._clocks = [meter.clock()]
            self._began = (self._now(), meter.counters())
            self._read_at = self._now()
            return True
        if not timed and self._began is not None:
            (since, before), self._began = self._began, None
            seconds, after = self._now() - since, meter.counters()
            self._clocks.append(meter.clock())
            self._record = self._recorded(meter, after.since(before), seconds=seconds)
        return False

    def between_steps(self) -> None:
        """A timed step is over, and the next has not begun."""
        if self._meter is None or self._began is None:
            return
        if self._now() - self._read_at >= _BETWEEN_READINGS_SEC:
            self._clocks.append(self._meter.clock())
            self._read_at = self._now()

    def record(self) -> GpuRecord | None:
        """What the latest timed steps took; None without a meter or a timed step."""
        self.follow(timed=False)
        return self._record

    def _recorded(self, meter: GpuMeter, grown: _Counters, *, seconds: float) -> GpuRecord:
        why = ""
        if grown.millijoules is None:
            why = "this GPU's driver has no counter of its energy"
        elif seconds < LEAST_SEC:
            why = (
                f"the timed steps took {seconds:.2g} s, and the counter is brought up to date only about every "
                f"{REFRESHED_SEC:g} s: raise timing_steps until they take {LEAST_SEC:g} s"
            )
        known = [clock.reasons for clock in self._clocks if clock.reasons is not None]
        return GpuRecord(
            seconds=seconds,
            joules=None if why or grown.millijoules is None else grown.millijoules / 1e3,
            no_joules_because=why,
            clock_mhz=tuple(clock.megahertz for clock in self._clocks if clock.megahertz is not None),
            highest_clock_mhz=meter.highest_clock_mhz(),
            power_limited_sec=_seconds(grown.power_limited_ns),
            heat_limited_sec=_seconds(grown.heat_limited_ns),
            reason_readings=len(known),
            reasons=dict(Counter(reason for reasons in known for reason in reasons)),
        )


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9
