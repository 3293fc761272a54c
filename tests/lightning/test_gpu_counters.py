"""A GPU's counters in a whole fit: read between steps, never in one, and whatever they do the training is the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_flops import FlopsProfilerCallback, render_text
from lightning_flops.measure.timing.gpu_counters import Ask, GpuWatch, open_nvml
from tests.fake_clock import FakeNow
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.lightning.nets import loader, new_net

MakeTrainer = Callable[..., Any]

STEP_SEC, QUESTION_SEC = 2.0 + 4.0 + 8.0, 1000.0


class Met:
    """What a fit on a CPU is given as its GPU."""

    def __init__(self, now: FakeNow, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = FakeGpu("GPU-a", violation_ns={0: 0, 1: 0}, clock_mhz=1400)
        self.nvml = FakeNvml(self.gpu, takes=self.asked)
        self.now = now
        self.opened = 0
        monkeypatch.setitem(sys.modules, "pynvml", self.nvml)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
        monkeypatch.setattr("lightning_flops.run.run.open_nvml", self.open)
        monkeypatch.setattr("lightning_flops.run.window.GpuWatch", lambda ask: GpuWatch(ask, now))

    def open(self, device: Any, undo: ExitStack[bool | None]) -> Ask | None:
        self.opened += 1
        return open_nvml(torch.device("cuda", 0), undo)

    def asked(self) -> None:
        """A question takes its time, in which this GPU spends 1 kW."""
        assert self.gpu.millijoules is not None
        self.now.sleep(QUESTION_SEC)
        self.gpu.millijoules += int(QUESTION_SEC * 1e6)


@pytest.fixture
def met(now: FakeNow, monkeypatch: pytest.MonkeyPatch) -> Met:
    return Met(now, monkeypatch)


def profiler() -> FlopsProfilerCallback:
    return FlopsProfilerCallback(profile_step=1, timing_steps=3, trace=False, monitor=False)


def test_no_question_is_asked_inside_a_timed_step(trainer: MakeTrainer, now: FakeNow, met: Met) -> None:
    callback = profiler()
    trainer(callback).fit(new_net(now=now), loader(9))
    profile = callback.profile
    assert profile is not None and profile.timing is not None and profile.energy is not None
    assert profile.timing.global_step.steps_sec == (STEP_SEC,) * 3
    assert met.nvml.asked.count("energy") == 2
    assert met.nvml.asked.count("clock") == 2 + 2  # at both ends, and between three steps
    # From the first question for the energy to the second: three steps, that question and the two for what held the
    # clock down, and two between the steps.
    assert profile.energy.measured_sec == 3 * STEP_SEC + 5 * QUESTION_SEC
    watts = 5 * QUESTION_SEC * 1e3 / profile.energy.measured_sec
    assert (profile.energy.watts, profile.energy.joules_per_step) == pytest.approx((watts, watts * STEP_SEC), rel=1e-12)
    assert "Energy and clocks of this GPU" in render_text(profile, detailed=True)


def test_nvml_that_fails_at_every_question_is_not_noticed(
    trainer: MakeTrainer, now: FakeNow, met: Met, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("the driver is gone")

    plain = new_net(now=now)
    trainer().fit(plain, loader(9))
    met.nvml.takes = fails
    watched, callback = new_net(now=now), profiler()
    trainer(callback).fit(watched, loader(9))
    assert watched.losses == plain.losses
    assert [weight.tolist() for weight in watched.parameters()] == [weight.tolist() for weight in plain.parameters()]
    assert "the driver is gone" not in caplog.text
    assert callback.profile is not None and callback.profile.energy is not None
    assert callback.profile.energy.watts is None
    assert "no counter of its energy" in callback.profile.energy.no_joules_because
