"""A stand-in for pynvml, as NVML's documentation has it: it answers for GPUs that a test makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

T = TypeVar("T")

NOT_SUPPORTED, NOT_FOUND, UNKNOWN = 3, 6, 999
"""NVML_ERROR_NOT_SUPPORTED and so on."""


class NVMLError(Exception):
    """What pynvml raises, with NVML's number."""

    def __init__(self, value: int) -> None:
        self.value = value


@dataclass
class FakeGpu:
    """A GPU's counters; None is one that it does not have."""

    uuid: str
    """As NVML writes it, with what it is before it: ``GPU-`` or ``MIG-``."""
    millijoules: int | None = 0
    clock_mhz: int | None = 1980
    highest_mhz: int | None = 1980
    violation_ns: dict[int, int] = field(default_factory=dict)
    """By policy: 0 is power, 1 heat."""
    mig: list[int] | None = None
    """[current, pending]; None: there is no MIG on this GPU."""


class FakeNvml:
    """The functions of pynvml that are asked.

    Args:
        gpus: that NVML knows.
        takes: is called in every question, for how long it takes.
    """

    NVMLError = NVMLError

    def __init__(self, *gpus: FakeGpu, takes: Callable[[], None] = lambda: None) -> None:
        self.gpus = {gpu.uuid: gpu for gpu in gpus}
        self.takes = takes
        self.users = 0
        self.asked: list[str] = []

    def nvmlInit(self) -> None:
        self.users += 1

    def nvmlShutdown(self) -> None:
        assert self.users > 0, "NVML is let go more often than it was taken"
        self.users -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        assert self.users > 0, "NVML is not initialized"
        if uuid not in self.gpus:
            raise NVMLError(NOT_FOUND)
        return self.gpus[uuid]

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return _known(gpu.mig)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        return self._answer("energy", gpu.millijoules)

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        assert kind == 1, "NVML_CLOCK_SM"
        return self._answer("clock", gpu.clock_mhz)

    def nvmlDeviceGetMaxClockInfo(self, gpu: FakeGpu, kind: int) -> int:
        assert kind == 1, "NVML_CLOCK_SM"
        return _known(gpu.highest_mhz)

    def nvmlDeviceGetViolationStatus(self, gpu: FakeGpu, policy: int) -> Any:
        return SimpleNamespace(referenceTime=0, violationTime=self._answer("limits", gpu.violation_ns.get(policy)))

    def _answer(self, question: str, value: int | None) -> int:
        assert self.users > 0, "NVML is not initialized"
        self.asked.append(question)
        self.takes()
        return _known(value)


def _known(value: T | None) -> T:
    if value is None:
        raise NVMLError(NOT_SUPPORTED)
    return value
