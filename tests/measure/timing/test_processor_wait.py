from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_flops.measure.timing.processor_wait import Counters, ProcessorWatch, heat_counter
from lightning_flops.signals import Undo
from tests.fake_clock import FakeNow


def test_what_two_timed_batches_had_and_waited_for() -> None:
    """One thread waited 0.5 s of 2, another 0.25, a third is new; 300 ticks of 400 were busy."""
    shown = iter([Counters({"1": 1.0, "2": 5.0}, 1000, 50), Counters({"1": 1.5, "2": 5.25, "3": 9.0}, 1300, 150)])
    now, spent, heated = FakeNow(), iter([1.0, 1.5, 1.75]), iter([7.0, 7.5])
    watch = ProcessorWatch(lambda: next(shown), now, lambda: next(spent), lambda: next(heated))
    watch.follow(timed=False)
    for _ in range(2):
        watch.follow(timed=True)
        now.sleep(1.0)
    loss = watch.loss()
    assert loss is not None and (loss.seconds, loss.batches_sec) == (2.0, (0.5, 0.25))
    assert (loss.waited_share, loss.busy_share, loss.heat_share) == (0.25, 0.75, 0.25)
    assert loss.waits_share == 0.375
    assert loss.idle_cores == (os.cpu_count() or 1) / 4


@pytest.mark.parametrize("seconds", [0.04, 2.0])  # a tick is 10 ms
def test_where_the_system_does_not_count_nothing_is_known(seconds: float) -> None:
    now = FakeNow()
    watch = ProcessorWatch(lambda: Counters({}, 5, 5) if seconds < 1 else Counters({}), now)
    watch.follow(timed=True)
    now.sleep(seconds)
    loss = watch.loss()
    assert loss is not None
    assert (loss.waited_share, loss.idle_cores, loss.busy_share, loss.heat_share) == (None, None, None, None)


class Nvml(SimpleNamespace):
    """A stand-in for pynvml, as NVML's documentation has it; it knows one GPU."""

    users, heated = 0, 2_500_000_000

    def nvmlInit(self) -> None:
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-5bdff0c4"
        return uuid

    def nvmlDeviceGetViolationStatus(self, handle: str, policy: int) -> Any:
        assert (handle, policy) == ("GPU-5bdff0c4", 1)
        return SimpleNamespace(referenceTime=0, violationTime=int(self.heated))


@pytest.mark.parametrize(
    ("nvml", "device", "uuid", "read"),
    [
        (Nvml(), "cuda", "5bdff0c4", 2.5),
        (Nvml(), "cpu", "5bdff0c4", None),
        (Nvml(), "cuda", "another", None),
        (Nvml(heated="not supported"), "cuda", "5bdff0c4", None),
        (None, "cuda", "5bdff0c4", None),  # as if it were not installed
    ],
)
def test_heat_is_that_of_the_gpu_that_torch_uses_and_nvml_is_let_go(
    nvml: Any, device: str, uuid: str, read: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
    with Undo() as undo:
        assert heat_counter(torch.device(device), undo)() == read
    assert nvml is None or nvml.users == 0
