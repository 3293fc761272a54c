"""What a user may give as ``writer``: TensorBoard's writer, an object like it, or a function."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from lightning_flops import ConfigError, profile_training
from lightning_flops.sinks.writers import TensorBoardFiles, WritersSink, is_writer
from tests.prompt_worker import NoChecks, PromptWorker


class Board:
    """An object with ``add_scalar`` alone."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))


def test_each_writer_takes_what_it_can() -> None:
    board, calls = Board(), []
    sink = WritersSink([board, lambda scalars, step: calls.append((scalars, step))])
    sink.write_scalars({"a": 1.0, "b": 2.0}, step=7)
    assert board.scalars == [("a", 1.0, 7), ("b", 2.0, 7)]
    assert calls == [({"a": 1.0, "b": 2.0}, 7)]
    assert sink.write_text("report", "words", step=7) is False
    assert not sink.has_board


def test_tensorboards_writer_gets_scalars_and_texts_and_stays_open(tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    sink = WritersSink([writer])
    sink.write_scalars({"a": 1.5}, step=3)
    assert sink.write_text("report", "words", step=3) is True
    assert sink.folder() == str(tmp_path) and sink.has_board
    sink.close()
    writer.add_scalar("later", 1.0, 4)
    writer.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(one.step, one.value) for one in read.Scalars("a")] == [(3, 1.5)]
    assert [one.step for one in read.Tensors("report/text_summary")] == [3]
    assert read.Scalars("later")


def test_files_of_our_own_are_made_when_something_is_written_and_are_closed(tmp_path: Path) -> None:
    files = TensorBoardFiles(str(tmp_path / "logs"))
    WritersSink([files]).close()
    assert not (tmp_path / "logs").exists()
    sink = WritersSink([files])
    sink.write_scalars({"a": 1.5}, step=3)
    sink.close()
    assert EventAccumulator(str(tmp_path / "logs")).Reload().Scalars("a")[0].value == 1.5


def test_a_writer_that_raises_costs_one_warning_and_keeps_nothing_from_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board = Board()
    sink = WritersSink([lambda scalars, step: 1 / 0, board])
    for step in range(3):
        sink.write_scalars({"a": 1.0}, step=step)
    assert len(board.scalars) == 3
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "ZeroDivisionError" in warnings[0]


@pytest.mark.parametrize("value", [3, "logs", object()])
def test_anything_else_is_refused(value: Any) -> None:
    assert not is_writer(value)
    net = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"^writer must have add_scalar, or be a function of scalars and a step, got"):
        profile_training(net, torch.optim.SGD(net.parameters()), writer=value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optimizer": 3}, "optimizer must be an optimizer or several, with a method step, got 3"),
        ({"log_every_n_steps": 0}, "log_every_n_steps must be an integer >= 1, got 0"),
        ({"initial_step": -1}, "initial_step must be an integer >= 0, got -1"),
        ({"timing_steps": 0}, "flops_profiler.timing_steps must be an integer >= 1, got 0"),
        ({"timing_step": 1}, "is not a setting of profile_training, did you mean timing_steps?"),
        ({"accelerator": 1, "fabric": 2}, "accelerator and fabric cannot both drive the loop"),
    ],
)
def test_a_wrong_argument_is_named_with_its_rule(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        profile_training(nn.Linear(2, 2), **given)
    assert words in str(caught.value)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got int$"):
        profile_training(3)  # type: ignore[arg-type]


def test_a_loop_writes_into_its_folder_at_its_own_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_flops.run.reports.Worker", PromptWorker)
    monkeypatch.setattr("lightning_flops.run.run.StepFlops", NoChecks)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    calls: list[tuple[dict[str, float], int]] = []
    with profile_training(
        net,
        optimizer,
        log_dir=tmp_path,
        writer=lambda scalars, step: calls.append((scalars, step)),
        initial_step=100,
        log_every_n_steps=5,
        timing_steps=2,
        trace=False,
    ):
        for _ in range(12):
            net(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    read = EventAccumulator(str(tmp_path)).Reload()
    # Step 1 is counted, 2 and 3 settle, 4 and 5 are timed.
    assert [(one.step, one.value) for one in read.Scalars("flops_profiler/fwd_flops")] == [(106, 2 * 3 * 4 * 2)]
    assert [one.step for one in read.Scalars("flops_monitor/samples_per_sec")] == [105, 110]
    assert [step for _, step in calls] == [105, 106, 110]
    ours = tmp_path / "lightning_flops"
    assert sorted(path.name for path in ours.glob("*.json")) == ["profile.json", "throughput.json"]
