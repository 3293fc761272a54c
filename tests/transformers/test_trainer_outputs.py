"""Where the report of a Trainer goes: its log, TensorBoard, files, and one line that says where."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback

from lightning_flops import Profile
from lightning_flops.report.text import figures
from tests.results import profile_of
from tests.transformers.tiny import BATCH, gpt2_flops, new_net_trainer, new_trainer, profiler


class Board(TensorBoardCallback):
    """What TensorBoard's callback is given, by the step of the Trainer."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.logged: list[tuple[int, dict[str, Any]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append((state.global_step, dict(logs)))

    def ours(self, prefix: str) -> list[tuple[int, dict[str, Any]]]:
        """Those of our figures that have this prefix."""
        found = ((step, {name: logs[name] for name in logs if name.startswith(prefix)}) for step, logs in self.logged)
        return [(step, logs) for step, logs in found if logs]


def test_integrations_get_the_figures_behind_the_trainers_next_log_and_its_history_and_console_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board, callback = Board(), profiler(peak_flops_per_sec=1e12)
    trainer = new_trainer(tmp_path, callback, board, logging_steps=3)
    trainer.train()
    history = trainer.state.log_history
    assert [log["step"] for log in history] == [3, 6, 8]
    assert "flops_" not in str(history) and "flops_profiler/" not in capsys.readouterr().out
    ((at, figures),) = board.ours("flops_profiler/")
    assert at == profile_of(callback).report_step < 8  # the window's last step, whatever the Trainer's is by then
    assert figures["flops_profiler/fwd_flops"] == gpt2_flops(BATCH).forward
    assert 0 < figures["flops_profiler/mfu"] < 1
    monitored = board.ours("flops_monitor/")
    assert {step for step, _ in monitored} <= {3, 6, 8} and "flops_monitor/samples_per_sec" in monitored[0][1]
    assert all(type(value) is float and math.isfinite(value) for _, found in monitored for value in found.values())


def test_without_a_log_of_its_own_they_come_when_it_ends_and_it_returns_what_it_returned_before(tmp_path: Path) -> None:
    def train(*callbacks: Any) -> Any:
        trainer = new_trainer(tmp_path, *callbacks, logging_strategy="no")
        return trainer.train().metrics, trainer.state.log_history

    board = Board()
    (metrics, history), (plain_metrics, plain_history) = train(profiler(), board), train()
    assert "flops_profiler/fwd_flops" in board.logged[-1][1]
    assert sorted(metrics) == sorted(plain_metrics)
    assert [sorted(log) for log in history] == [sorted(log) for log in plain_history]


def test_tensorboard_has_the_figures_and_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    new_trainer(tmp_path / "out", profiler(), report_to="tensorboard").train()
    read = EventAccumulator(str(tmp_path / "board")).Reload()
    (scalar,) = read.Scalars("train/flops_profiler/fwd_flops")
    assert scalar.value == gpt2_flops(BATCH).forward
    for tag in ("flops_profiler/profile", "flops_profiler/advice", "flops_monitor/summary"):
        assert len(read.Tensors(f"{tag}/text_summary")) == 1
    (report,) = read.Tensors("flops_profiler/profile/text_summary")
    assert b"Step time breakdown" in report.tensor_proto.string_val[0]
    # TensorBoard shows the text, so no file of it is written; an event file of ours is for the tab.
    events, *others = sorted(path.name for path in (tmp_path / "board" / "lightning_flops").iterdir())
    assert events.startswith("events.out.tfevents")
    assert others == ["profile.html", "profile.json", "throughput.json"]
    assert not (tmp_path / "out" / "lightning_flops").exists()


@pytest.mark.parametrize("bar", [True, False])
def test_one_line_says_where_files_are(bar: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = profiler()
    new_net_trainer(tmp_path, callback, disable_tqdm=not bar).train()
    folder = tmp_path / "lightning_flops"
    names = ["profile.html", "profile.json", "profile.txt", "throughput.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert Profile.from_json((folder / "profile.json").read_text()) == callback.profile
    line = f"FLOPs of step 1: {figures(profile_of(callback))}. Page: {folder}/profile.html"
    assert capsys.readouterr().out.count(line) == 1


def test_a_tensorboard_that_fails_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Writer:
        def add_text(self, *args: Any) -> None:
            raise OSError("no space left")

    class Failing(TrainerCallback):
        tb_writer = Writer()

    callback = profiler()
    new_net_trainer(tmp_path, Failing(), callback).train()
    assert callback.profile is not None
    assert caplog.text.count("Failing did not take the FLOPs report") == 1
