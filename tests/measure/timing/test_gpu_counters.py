"""What is read of a GPU's own counters, when, and of which GPU; NVML is a stand-in."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_flops.measure.timing.gpu_counters import Ask, GpuWatch, open_nvml
from lightning_flops.records import GpuRecord
from tests.fake_clock import FakeNow
from tests.fake_nvml import UNKNOWN, FakeGpu, FakeNvml, NVMLError

CUDA = torch.device("cuda", 0)
BARE = "5bdff0c4-1c3a-0b6d-8a3f-0c62f8a3a1d7"
"""As torch writes a device's identifier."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """NVML that knows one GPU, another one before it; torch's device 0 is the second."""
    nvml = FakeNvml(FakeGpu("GPU-another", millijoules=7), FakeGpu(f"GPU-{BARE}", millijoules=42))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    properties = SimpleNamespace(uuid=BARE)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return nvml


def test_the_gpu_is_the_one_that_torch_uses_and_nvml_is_let_go(installed: FakeNvml) -> None:
    with ExitStack() as undo:
        ask = open_nvml(CUDA, undo)
        assert ask is not None and ask("nvmlDeviceGetTotalEnergyConsumption") == 42
        assert installed.users == 1
    assert installed.users == 0


def test_without_nvml_a_driver_or_a_gpu_nothing_is_read(installed: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise NVMLError(UNKNOWN)

    with ExitStack() as undo:
        assert open_nvml(torch.device("cpu"), undo) is None
        installed.gpus.clear()
        assert open_nvml(CUDA, undo) is None
        monkeypatch.setattr(installed, "nvmlInit", fails)
        assert open_nvml(CUDA, undo) is None
        monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
        assert open_nvml(CUDA, undo) is None
    assert installed.users == 0


@pytest.mark.parametrize(
    ("uuid", "mig", "is_whole"),
    [(f"MIG-{BARE}", None, False), (f"GPU-{BARE}", [1, 1], False), (f"GPU-{BARE}", [0, 0], True)],
)
def test_the_counters_of_a_whole_gpu_are_not_taken_for_those_of_a_slice(
    installed: FakeNvml, uuid: str, mig: list[int] | None, is_whole: bool
) -> None:
    installed.gpus = {uuid: FakeGpu(uuid, millijoules=42, mig=mig)}
    assert (open_nvml(CUDA, ExitStack()) is not None) == is_whole


def asking(gpu: FakeGpu) -> tuple[Ask, FakeNvml]:
    nvml = FakeNvml(gpu)
    nvml.users = 1

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(gpu, *arguments)
        except NVMLError:
            return None

    return ask, nvml


def watched(gpu: FakeGpu, *, seconds: float, **then: Any) -> GpuRecord:
    """What is read of *gpu* where the timed steps begin, and of the same as *then* where they end."""
    now = FakeNow()
    watch = GpuWatch(asking(gpu)[0], now)
    watch.follow(timed=False)
    watch.follow(timed=True)
    now.sleep(seconds)
    vars(gpu).update(then)
    watch.follow(timed=False)
    record = watch.record()
    assert record is not None
    return record


def test_energy_and_the_time_held_down_are_differences_of_two_readings() -> None:
    gpu = FakeGpu("a", millijoules=5_000, violation_ns={0: 10**9, 1: 5}, clock_mhz=1400)
    record = watched(gpu, seconds=4.0, millijoules=2_405_000, violation_ns={0: 3 * 10**9, 1: 5}, clock_mhz=1600)
    assert (record.seconds, record.joules, record.no_joules_because) == (4.0, 2400.0, "")
    assert (record.power_limited_sec, record.heat_limited_sec) == (2.0, 0.0)
    assert (record.clock_mhz, record.highest_clock_mhz) == ((1400, 1600), 1980)


@pytest.mark.parametrize(
    ("seconds", "later", "why"),
    [
        (
            1.9,
            1_000_000,
            "the timed steps took 1.9 s, and the counter is brought up to date only about every 0.1 s: raise "
            "timing_steps until they take 2 s",
        ),
        (4.0, None, "this GPU's driver has no counter of its energy"),
        (4.0, 4_000, "this GPU's driver has no counter of its energy"),  # it was loaded anew
    ],
)
def test_a_short_time_or_no_counter_gives_no_energy_and_says_why(seconds: float, later: int | None, why: str) -> None:
    record = watched(FakeGpu("a", millijoules=5_000), seconds=seconds, millijoules=later)
    assert (record.joules, record.no_joules_because) == (None, why)
