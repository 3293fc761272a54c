"""What a whole run is told: a loader that is too slow first, and nothing where nothing holds it back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_flops import FlopsProfilerCallback, Profile, render_text
from tests.fake_clock import FakeNow
from tests.lightning.nets import BATCH, loader, new_net
from tests.lightning.tensorboard_runs import read_back, tensorboard_logger

MakeTrainer = Callable[..., Any]

FORWARD_AND_BACKWARD_SEC = 2.0 + 4.0


def fitted(trainer: MakeTrainer, now: FakeNow, folder: Path, *, batch_sec: float, **settings: Any) -> Profile:
    """The profile of a run whose loader takes *batch_sec* for a batch, and whose optimizer takes no time."""
    net = new_net(now=now)
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.01)
    callback = FlopsProfilerCallback(timing_steps=8, **settings)
    run = trainer(callback, logger=tensorboard_logger(folder))
    run.fit(net, loader(20, on_fetch=lambda: now.sleep(batch_sec / BATCH)))
    assert callback.profile is not None
    assert callback.profile.traced is not None
    return callback.profile


def advice_on_the_text_page(folder: Path) -> str:
    (event,) = read_back(folder).Tensors("flops_profiler/advice/text_summary")
    (text,) = event.tensor_proto.string_val
    return str(text.decode())


def test_a_slow_loader_is_told_first_wherever_the_report_goes(
    trainer: MakeTrainer, now: FakeNow, tmp_path: Path
) -> None:
    profile = fitted(trainer, now, tmp_path, batch_sec=FORWARD_AND_BACKWARD_SEC)
    first = profile.advice[0]
    assert (first.rule[:9], first.ceiling) == ("data_wait", 0.5)
    assert "1. The step waits 6 s a batch for data (50.00%), with 0 loader workers;" in render_text(profile)
    assert advice_on_the_text_page(tmp_path).startswith("```\n1. The step waits 6 s a batch for data (50.00%)")
    kept = Profile.from_json((tmp_path / "run" / "version_0" / "lightning_flops" / "profile.json").read_text())
    assert kept.advice == profile.advice


def test_a_healthy_run_is_told_nothing(trainer: MakeTrainer, now: FakeNow, tmp_path: Path) -> None:
    # 4% of the step: below the threshold of 5%.
    profile = fitted(trainer, now, tmp_path, batch_sec=FORWARD_AND_BACKWARD_SEC / 24)
    assert profile.advice == ()
    assert advice_on_the_text_page(tmp_path).startswith("```\nNothing that was measured is above its threshold.")
