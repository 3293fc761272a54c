"""What is read of a GPU's own counters, when, and of which GPU; NVML is a stand-in."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from lightning_flops.instrument.timing.gpu_counters import GpuMeter, GpuWatch, open_meter
from lightning_flops.records import GpuRecord
from tests.fake_clock import FakeNow
from tests.fake_nvml import UNKNOWN, FakeGpu, FakeNvml, NVMLError, OldNvml

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


def test_the_gpu_is_the_one_that_torch_uses_and_not_the_one_of_its_number(installed: FakeNvml) -> None:
    meter = open_meter(CUDA, ExitStack())
    assert meter is not None and meter.counters().millijoules == 42


def test_nvml_is_let_go(installed: FakeNvml) -> None:
    ledger = ExitStack()
    assert open_meter(CUDA, ledger) is not None and installed.users == 1
    ledger.close()
    assert installed.users == 0


def test_nvml_is_let_go_if_a_ctrl_c_arrives_while_it_looks_for_the_gpu(
    installed: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(uuid: str) -> FakeGpu:
        raise KeyboardInterrupt

    monkeypatch.setattr(installed, "nvmlDeviceGetHandleByUUID", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_meter(CUDA, ExitStack())
    assert installed.users == 0


def test_without_nvml_there_is_no_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert open_meter(CUDA, ExitStack()) is None


def test_without_a_driver_there_is_no_meter(installed: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise NVMLError(UNKNOWN)

    monkeypatch.setattr(installed, "nvmlInit", fails)
    assert open_meter(CUDA, ExitStack()) is None


def test_a_gpu_that_nvml_does_not_know_has_no_meter_and_nvml_is_let_go(installed: FakeNvml) -> None:
    installed.gpus.clear()
    assert open_meter(CUDA, ExitStack()) is None
    assert installed.users == 0


def test_a_cpu_has_no_meter_and_nvml_is_not_asked(installed: FakeNvml) -> None:
    installed.users = -1  # would be 0 after an nvmlInit
    assert open_meter(torch.device("cpu"), ExitStack()) is None
    assert installed.users == -1


@pytest.mark.parametrize(
    "gpu",
    [FakeGpu(f"MIG-{BARE}", millijoules=42), FakeGpu(f"GPU-{BARE}", millijoules=42, mig=[1, 1])],
    ids=["torch has the slice's identifier", "torch has the whole GPU's identifier"],
)
def test_the_counters_of_a_whole_gpu_are_not_taken_for_those_of_a_slice(installed: FakeNvml, gpu: FakeGpu) -> None:
    installed.gpus = {gpu.uuid: gpu}
    assert open_meter(CUDA, ExitStack()) is None
    assert installed.users == 0


def test_a_gpu_whose_mig_is_off_is_a_whole_one(installed: FakeNvml) -> None:
    installed.gpus = {f"GPU-{BARE}": FakeGpu(f"GPU-{BARE}", millijoules=42, mig=[0, 0])}
    meter = open_meter(CUDA, ExitStack())
    assert meter is not None


def watched(gpu: FakeGpu, *, seconds: float, then: FakeGpu, nvml: type[FakeNvml] = FakeNvml) -> GpuRecord:
    """What is read of *gpu* where the timed steps begin, and of the same as *then* where they end."""
    asked = nvml(gpu)
    asked.users = 1
    now = FakeNow()
    watch = GpuWatch(GpuMeter(asked, gpu), now)
    assert not watch.follow(timed=False)
    assert watch.follow(timed=True)
    assert not watch.follow(timed=True)
    now.sleep(seconds)
    gpu.__dict__.update(then.__dict__)
    assert not watch.follow(timed=False)
    record = watch.record()
    assert record is not None
    return record


def test_energy_is_the_difference_of_two_readings() -> None:
    record = watched(FakeGpu("a", millijoules=5_000), seconds=4.0, then=FakeGpu("a", millijoules=2_405_000))
    assert (record.seconds, record.joules, record.no_joules_because) == (4.0, 2400.0, "")


def test_a_short_time_gives_no_energy_and_says_why() -> None:
    record = watched(FakeGpu("a", millijoules=0), seconds=1.9, then=FakeGpu("a", millijoules=1_000_000))
    assert record.joules is None
    assert record.no_joules_because == (
        "the timed steps took 1.9 s, and the counter is brought up to date only about every 0.1 s: raise timing_steps "
        "until they take 2 s"
    )


@pytest.mark.parametrize("later", [None, 4_000])  # not there, or a driver that was loaded anew
def test_a_counter_that_is_not_there_or_fell_gives_no_energy(later: int | None) -> None:
    record = watched(FakeGpu("a", millijoules=5_000), seconds=4.0, then=FakeGpu("a", millijoules=later))
    assert record.joules is None and "no counter" in record.no_joules_because


def test_time_held_down_is_the_drivers_counters_difference() -> None:
    record = watched(
        FakeGpu("a", violation_ns={0: 10**9, 1: 5}), seconds=4.0, then=FakeGpu("a", violation_ns={0: 3 * 10**9, 1: 5})
    )
    assert (record.power_limited_sec, record.heat_limited_sec) == (2.0, 0.0)


@pytest.mark.parametrize("nvml", [FakeNvml, OldNvml])
def test_the_clock_and_what_holds_it_down_are_read_at_both_ends(nvml: type[FakeNvml]) -> None:
    # 0x4 is the power limit, 0x20 heat; that it is idle (0x1) slows no GPU down.
    record = watched(
        FakeGpu("a", clock_mhz=1400, reasons=0x4),
        seconds=4.0,
        then=FakeGpu("a", clock_mhz=1600, reasons=0x4 | 0x20 | 0x1),
        nvml=nvml,
    )
    assert record.clock_mhz == (1400, 1600) and record.highest_clock_mhz == 1980
    assert record.reason_readings == 2
    assert record.reasons == {"the power limit": 2, "heat": 1}


def test_the_clock_is_read_between_steps_but_not_more_often_than_twice_a_second() -> None:
    gpu, now = FakeGpu("a"), FakeNow()
    nvml = FakeNvml(gpu)
    nvml.users = 1
    watch = GpuWatch(GpuMeter(nvml, gpu), now)
    watch.follow(timed=True)
    for _ in range(20):  # steps of 0.1 s: after 0.5, 1, 1.5 and 2 s
        now.sleep(0.1)
        watch.between_steps()
    record = watch.record()
    assert record is not None
    assert nvml.asked.count("energy") == 2
    assert len(record.clock_mhz) == 2 + 3 or len(record.clock_mhz) == 2 + 4  # 0.1 has no exact sum


def test_nothing_is_read_outside_of_timed_steps() -> None:
    gpu = FakeGpu("a")
    nvml = FakeNvml(gpu)
    watch = GpuWatch(GpuMeter(nvml, gpu), FakeNow())
    watch.between_steps()
    watch.follow(timed=False)
    assert nvml.asked == [] and watch.record() is None


def test_the_latest_timed_steps_are_told_of() -> None:
    gpu, now = FakeGpu("a"), FakeNow()
    nvml = FakeNvml(gpu)
    nvml.users = 1
    watch = GpuWatch(GpuMeter(nvml, gpu), now)
    for joules in (100, 300):  # the first steps came too early, and are forgotten
        watch.follow(timed=True)
        now.sleep(3.0)
        assert gpu.millijoules is not None
        gpu.millijoules += joules * 1000
        watch.follow(timed=False)
        now.sleep(1.0)
    record = watch.record()
    assert record is not None and record.joules == 300.0
