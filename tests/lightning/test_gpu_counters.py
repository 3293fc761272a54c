"""A GPU's counters in a whole fit: read between steps, never in one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_flops import FlopsProfilerCallback, render_text
from lightning_flops.measure.timing.gpu_counters import GpuWatch, open_nvml
from tests.fake_clock import FakeNow
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.lightning.nets import loader, new_net
from tests.results import profile_of

MakeTrainer = Callable[..., Any]

STEP_SEC, QUESTION_SEC = 2.0 + 4.0 + 8.0, 1000.0


def test_no_question_is_asked_inside_a_timed_step(
    trainer: MakeTrainer, now: FakeNow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question takes its time, in which the GPU draws 1 kW."""
    gpu = FakeGpu("GPU-a", violation_ns={0: 0, 1: 0}, clock_mhz=1400)

    def takes() -> None:
        assert gpu.millijoules is not None
        now.sleep(QUESTION_SEC)
        gpu.millijoules += int(QUESTION_SEC * 1e6)

    nvml = FakeNvml(gpu, takes=takes)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr("lightning_flops.run.run.open_nvml", lambda _, undo: open_nvml(cuda, undo))
    monkeypatch.setattr("lightning_flops.run.window.GpuWatch", lambda ask: GpuWatch(ask, now))
    callback = FlopsProfilerCallback(profile_step=1, timing_steps=3, trace=False, monitor=False)
    trainer(callback).fit(new_net(now=now), loader(9))
    profile: Any = profile_of(callback)
    assert profile.timing.global_step.steps_sec == (STEP_SEC,) * 3
    assert nvml.asked.count("energy") == 2
    assert nvml.asked.count("clock") == 2 + 2  # at both ends, and between three steps
    # From the first question for the energy to the second: three steps, that question and the two for what held the
    # clock down, and two between the steps.
    assert profile.energy.measured_sec == 3 * STEP_SEC + 5 * QUESTION_SEC
    watts = 5 * QUESTION_SEC * 1e3 / profile.energy.measured_sec
    assert (profile.energy.watts, profile.energy.joules_per_step) == pytest.approx((watts, watts * STEP_SEC), rel=1e-12)
    assert "Energy and clocks of this GPU" in render_text(profile, detailed=True)
