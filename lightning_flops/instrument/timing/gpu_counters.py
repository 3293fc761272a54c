"""What a GPU's own counters tell of the timed steps: its energy, its clock, and what holds the clock down.

NVML reads them. It comes with NVIDIA's driver, and its Python names with the package nvidia-ml-py (the extra
``nvidia``). Without one of the two there is no meter, and nothing is said. All counters are those of the whole GPU.

NVML is asked between steps only: where the series of timed steps begins and ends, and now and then at a border between
two of them; the timer begins the next step afterwards. No call waits for the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, TypeVar

import torch

from lightning_flops import host_clock
from lightning_flops.records import GpuRecord
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

T = TypeVar("T")

REFRESHED_SEC = 0.1
"""How often the driver brings the energy counter up to date, about: measured by others, NVIDIA does not say."""
LEAST_SEC = 2.0
"""A shorter time gives no energy: at both ends together the counter may miss one time between two refreshes."""
_BETWEEN_READINGS_SEC = 0.5
"""The clock is not read more often than this."""

_REASONS = (
    (0x0000000000000002, "the clocks that a user has set"),
    (0x0000000000000004, "the power limit"),
    (0x0000000000000008, "a slowdown by the hardware, for heat or power"),
    (0x0000000000000010, "the clocks of another GPU (sync boost)"),
    (0x0000000000000020, "heat"),
    (0x0000000000000040, "heat (a slowdown by the hardware)"),
    (0x0000000000000080, "the power supply (a power brake)"),
    (0x0000000000000100, "the clocks of a display"),
    (0x0000000000000200, "a limit of the board"),
    (0x0000000000000400, "reliability of the voltage"),
)
"""The bits of nvmlClocksEventReasons but one: that an idle GPU lowers its clock slows nothing down."""
_POWER, _HEAT = 0, 1
"""NVML_PERF_POLICY_POWER and NVML_PERF_POLICY_THERMAL."""
_SM = 1
"""NVML_CLOCK_SM."""
_IN_WHOLE = "this process computes on a slice of a GPU (MIG), and the counters are those of the whole GPU"


class _Counters(NamedTuple):
    """Counters that only grow; None: this GPU or driver does not have the counter."""

    millijoules: int | None
    power_limited_ns: int | None
    heat_limited_ns: int | None


class _Clock(NamedTuple):
    """The clock now, and why it is not higher; None if it could not be read."""

    megahertz: int | None
    reasons: tuple[str, ...] | None


class GpuMeter:
    """Reads the counters of one GPU.

    Args:
        nvml: the module pynvml, initialized.
        handle: NVML's handle of the GPU; None if this process has only a slice of it.
    """

    def __init__(self, nvml: Any, handle: Any | None) -> None:
        self._nvml = nvml
        self._handle = handle

    @property
    def is_slice(self) -> bool:
        """Whether this process has only a slice of the GPU, whose counters would be those of the whole."""
        return self._handle is None

    def counters(self) -> _Counters:
        """The counters now."""
        return _Counters(
            millijoules=self._asked("nvmlDeviceGetTotalEnergyConsumption", int),
            power_limited_ns=self._limited_ns(_POWER),
            heat_limited_ns=self._limited_ns(_HEAT),
        )

    def clock(self) -> _Clock:
        """The clock now."""
        # The second name is that of drivers before 535.
        bits = self._asked("nvmlDeviceGetCurrentClocksEventReasons", int)
        if bits is None:
            bits = self._asked("nvmlDeviceGetCurrentClocksThrottleReasons", int)
        reasons = None if bits is None else tuple(words for bit, words in _REASONS if bits & bit)
        return _Clock(megahertz=self._asked("nvmlDeviceGetClockInfo", int, _SM), reasons=reasons)

    def highest_clock_mhz(self) -> int | None:
        """The highest clock that this GPU can have."""
        return self._asked("nvmlDeviceGetMaxClockInfo", int, _SM)

    def _limited_ns(self, policy: int) -> int | None:
        return self._asked("nvmlDeviceGetViolationStatus", lambda found: int(found.violationTime), policy)

    def _asked(self, function: str, as_number: Callable[[Any], T], *arguments: Any) -> T | None:
        if self._handle is None:
            return None
        return _quietly(lambda: as_number(getattr(self._nvml, function)(self._handle, *arguments)))


def open_meter(device: torch.device, undo: ExitStack) -> GpuMeter | None:
    """A meter of the GPU that *device* is; None for another kind of device, or without NVML.

    *undo* lets NVML go. It counts its users, so that others of this process keep it.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        import pynvml as nvml
    except Exception:  # not there; or a package of that name that cannot be imported
        return None
    held: list[Any] = []

    def let_go() -> None:
        with suppress(nvml.NVMLError):
            while held:
                held.pop().nvmlShutdown()  # on one line: letting go twice would take NVML from another user

    undo.callback(let_go)
    try:
        held.append((nvml.nvmlInit(), nvml)[1])
    except Exception:  # there is no driver, or it is another version's; or the package has no such function
        logger.debug("NVML cannot be used", exc_info=True)
        return None
    try:
        # Numbers of devices are no names: torch's depend on CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, NVML's do not.
        return GpuMeter(nvml, _whole_gpu(nvml, str(torch.cuda.get_device_properties(device).uuid)))
    except Exception:
        logger.debug("NVML does not know this device", exc_info=True)
        let_go()
        return None


def _whole_gpu(nvml: Any, uuid: str) -> Any | None:
    """NVML's handle of the GPU with this identifier, as torch writes it; None if torch has a slice of a GPU.

    Raises:
        Exception: NVML knows neither a GPU nor a slice of this identifier.
    """
    bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
    handle = _quietly(lambda: nvml.nvmlDeviceGetHandleByUUID(f"GPU-{bare}"))
    if handle is None:
        nvml.nvmlDeviceGetHandleByUUID(f"MIG-{bare}")
        return None
    mode = _quietly(lambda: nvml.nvmlDeviceGetMigMode(handle))  # [current, pending]; an error where there is no MIG
    return None if mode is not None and mode[0] == 1 else handle


def _quietly(ask: Callable[[], T]) -> T | None:
    """The answer; None for any error: of NVML's, most say that this GPU or driver cannot tell."""
    try:
        return ask()
    except Exception:  # also of ctypes, and of a package of that name that is another one
        logger.debug("NVML gave no answer", exc_info=True)
        return None


class GpuWatch:
    """Reads a meter where a series of timed steps begins and ends, and its clock in between.

    Args:
        meter: of the GPU that is trained on; None: nothing is read, and nothing told.
        now: the host's clock, in seconds.
    """

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
            self._clocks.clear()
            self._read_clock(meter)
            self._began = (self._now(), meter.counters())
            self._read_at = self._now()
            return True
        if not timed and self._began is not None:
            (since, before), self._began = self._began, None
            seconds, after = self._now() - since, meter.counters()
            self._read_clock(meter)
            self._record = self._recorded(meter, before, after, seconds=seconds)
        return False

    def between_steps(self) -> None:
        """A timed step is over, and the next has not begun."""
        meter = self._meter
        if meter is None or self._began is None:
            return
        if self._now() - self._read_at >= _BETWEEN_READINGS_SEC:
            self._read_clock(meter)

    def record(self) -> GpuRecord | None:
        """What the latest timed steps took; None without a meter or a timed step."""
        self.follow(timed=False)
        return self._record

    def _read_clock(self, meter: GpuMeter) -> None:
        self._clocks.append(meter.clock())
        self._read_at = self._now()

    def _recorded(self, meter: GpuMeter, before: _Counters, after: _Counters, *, seconds: float) -> GpuRecord:
        millijoules = _difference(before.millijoules, after.millijoules)
        known = [clock for clock in self._clocks if clock.reasons is not None]
        return GpuRecord(
            seconds=seconds,
            joules=None if millijoules is None or seconds < LEAST_SEC else millijoules / 1e3,
            no_joules_because=_IN_WHOLE if meter.is_slice else _why_no_joules(millijoules, seconds),
            clock_mhz=tuple(clock.megahertz for clock in self._clocks if clock.megahertz is not None),
            highest_clock_mhz=meter.highest_clock_mhz(),
            power_limited_sec=_seconds(_difference(before.power_limited_ns, after.power_limited_ns)),
            heat_limited_sec=_seconds(_difference(before.heat_limited_ns, after.heat_limited_ns)),
            reason_readings=len(known),
            reasons=dict(Counter(reason for clock in known for reason in clock.reasons or ())),
        )


def _why_no_joules(millijoules: int | None, seconds: float) -> str:
    if millijoules is None:
        return "this GPU's driver has no counter of its energy"
    if seconds >= LEAST_SEC:
        return ""
    return (
        f"the timed steps took {seconds:.2g} s, and the counter is brought up to date only about every "
        f"{REFRESHED_SEC:g} s: raise timing_steps until they take {LEAST_SEC:g} s"
    )


def _difference(before: int | None, after: int | None) -> int | None:
    """How much a counter grew; None if it is not known, or if the driver was loaded anew in between."""
    return None if before is None or after is None or after < before else after - before


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9
