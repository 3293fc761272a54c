"""What a user reads who has made one of the usual mistakes: one line, and what to do."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from lightning_flops import ConfigError, ProfilerConfig, profile_training
from lightning_flops.cli import main
from lightning_flops.config import BLOCK
from tests.listening import warnings_in


def train(steps: int, *, given: bool, **settings: object) -> None:
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    settings = {"profile_step": 1, "timing_steps": 1, "trace": False, **settings}
    with profile_training(net, optimizer if given else None, **settings):  # type: ignore[arg-type]
        for _ in range(steps):
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()


def test_a_forgotten_optimizer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    train(4, given=False)
    assert (
        "nothing was profiled: profile_step is 1, and this run ended after 0 step(s): no optimizer was given to "
        "profile_training, and step() was never called"
    ) in caplog.messages
    caplog.clear()
    train(1, given=True)
    assert "nothing was profiled: profile_step is 1, and this run ended after 1 step(s)" in caplog.messages


def test_a_loops_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("lightning_flops"), "level", logging.WARNING)
    train(6, given=True, log_dir="logs")
    (line,) = [one for one in capfd.readouterr().err.splitlines() if one.startswith("lightning-flops: ")]
    assert line.endswith(". Page: logs/lightning_flops/profile.html") and len(line) <= 200
    train(6, given=True)
    assert "print(profiler.profile) shows the report; log_dir=... keeps it." in capfd.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    train(6, given=True, log_dir=str(tmp_path / "file"))
    (line,) = (one for one in warnings_in(caplog) if "written" in one)
    assert line.startswith("the FLOPs report was not written: [Errno 20] Not a directory")


def test_a_misspelt_option_is_named_and_a_short_dtype_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--profile-steps", "3", "train.py"])
    assert capsys.readouterr().err.endswith("unrecognized arguments: --profile-steps\n")
    assert ProfilerConfig(peak_flops_per_sec={"bf16": 1e12}).peak_flops_per_sec == {"bfloat16": 1e12}


def test_all_wrong_values_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        ProfilerConfig(profile_step="5", top_modules=0)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"{BLOCK}.profile_step must be an integer >= 0, or a list of such, got '5'; "
        f"{BLOCK}.top_modules must be an integer >= 1, got 0"
    )
