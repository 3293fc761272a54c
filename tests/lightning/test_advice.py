"""The advice of a whole run: a loader that is too slow first, and none where nothing holds the run back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_flops import FlopsProfilerCallback, Profile, render_text
from tests.fake_clock import FakeNow
from tests.lightning.nets import BATCH, loader, new_net
from tests.lightning.tensorboard_runs import read_back, tensorboard_logger
from tests.results import profile_of

MakeTrainer = Callable[..., Any]

FORWARD_AND_BACKWARD_SEC = 2.0 + 4.0


def fitted(trainer: MakeTrainer, now: FakeNow, folder: Path, *, batch_sec: float) -> tuple[Profile, str]:
    """The profile of a run whose loader takes *batch_sec* for a batch, and the advice on TensorBoard's text page."""
    net = new_net(now=now)
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.01)  # takes no time
    callback = FlopsProfilerCallback(timing_steps=8)
    run = trainer(callback, logger=tensorboard_logger(folder))
    run.fit(net, loader(20, on_fetch=lambda: now.sleep(batch_sec / BATCH)))
    profile = profile_of(callback)
    assert profile.traced is not None
    (event,) = read_back(folder).Tensors("flops_profiler/advice/text_summary")
    return profile, event.tensor_proto.string_val[0].decode()


def test_a_slow_loader_comes_first_wherever_the_report_goes(trainer: MakeTrainer, now: FakeNow, tmp_path: Path) -> None:
    profile, page = fitted(trainer, now, tmp_path, batch_sec=FORWARD_AND_BACKWARD_SEC)
    first = profile.advice[0]
    assert (first.rule[:9], first.ceiling) == ("data_wait", 0.5)
    assert "1. The step waits 6 s a batch for data (50.00%), with 0 loader workers;" in render_text(profile)
    assert page.startswith("```\n1. The step waits 6 s a batch for data (50.00%)")
    kept = Profile.from_json((tmp_path / "run" / "version_0" / "lightning_flops" / "profile.json").read_text())
    assert kept.advice == profile.advice


def test_a_healthy_run_has_none(trainer: MakeTrainer, now: FakeNow, tmp_path: Path) -> None:
    # 4% of the step: below the threshold of 5%.
    profile, page = fitted(trainer, now, tmp_path, batch_sec=FORWARD_AND_BACKWARD_SEC / 24)
    assert profile.advice == ()
    assert page.startswith("```\nNothing that was measured is above its threshold.")
