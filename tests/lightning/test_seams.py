"""Whatever of ours fails in a loop of a Trainer's: one warning, nothing left, the same training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_flops import FlopsProfilerCallback
from lightning_flops.adapters.lightning import LightningRun
from tests.left_on_torch import torch_state
from tests.lightning.evaluations import new_evaluated_net
from tests.lightning.evaluations import run as run_loop
from tests.lightning.footprint import footprint
from tests.lightning.nets import ROOTS, loader, new_gan, new_net, new_trainer
from tests.prompt_worker import PromptWorker
from tests.seams import WORDS, broken_at, seams

SETTINGS: dict[str, Any] = {"profile_step": 1, "timing_steps": 2}


@pytest.fixture(autouse=True)
def prompt_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_flops.run.reports.Worker", PromptWorker)


def trained(folder: Path, *callbacks: Any, manual: bool) -> Any:
    """Everything of one fit that a failure might change."""
    net = new_gan() if manual else new_net(validates=True)
    run = new_trainer(ROOTS[0], folder, *callbacks, max_epochs=2, log_every_n_steps=3)
    torch.manual_seed(11)
    run.fit(net, loader(9), None if manual else loader(2))
    weights = [one.tolist() for one in net.parameters()]
    return weights, getattr(net, "losses", ()), torch.get_rng_state().tolist(), footprint(run, net), torch_state()


def evaluated(folder: Path, *callbacks: Any) -> Any:
    """The same of one prediction."""
    net, run = new_evaluated_net(), new_trainer(ROOTS[0], folder, *callbacks)
    torch.manual_seed(11)
    given = run_loop(run, "predict", net, loader(9))
    return [one.tolist() for one in given], torch.get_rng_state().tolist(), footprint(run, net), torch_state()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plain")
    return {
        "automatic": trained(folder, manual=False),
        "manual": trained(folder, manual=True),
        "predict": evaluated(folder),
    }


@pytest.mark.parametrize("seam", seams(LightningRun))
def test_a_failure_at_a_seam_is_one_warning_and_the_loop_goes_on_untouched(
    seam: str, plain: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for loop in plain:
        caplog.clear()
        callback = FlopsProfilerCallback(**SETTINGS)
        with broken_at(seam, LightningRun, after=1 if loop == "manual" else 0) as broken:
            if loop == "predict":
                found = evaluated(tmp_path, callback)
            else:
                found = trained(tmp_path, callback, manual=loop == "manual")
        assert found == plain[loop], loop
        said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert sum(WORDS in words for words in said) == int(broken.called), (loop, said)
