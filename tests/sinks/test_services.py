"""Every logger, monitor and writer gets what it can take, as its framework calls it, and none hurts the others."""

from __future__ import annotations

import csv
import importlib
import logging
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from lightning_flops.sinks.services import Services, TensorBoardFiles, TrainerLog, monitors_in

WANDB = {name: ModuleType(name) for name in ("wandb", "wandb.sdk", "wandb.sdk.lib", "wandb.wandb_run")}
WANDB["wandb.sdk.lib"].RunDisabled = WANDB["wandb.wandb_run"].Run = object  # type: ignore[attr-defined]
REPORT = "```\nfwd flops   1 M\n  × indented\n```"


@pytest.fixture(params=("lightning.pytorch", "pytorch_lightning"))
def root(request: pytest.FixtureRequest) -> str:
    """Each import root."""
    return str(request.param)


@pytest.fixture
def loggers(root: str) -> Any:
    """The ``loggers`` module of each import root."""
    return importlib.import_module(f"{root}.loggers")


def texts_in(folder: str, tag: str) -> list[tuple[int, str]]:
    """What TensorBoard itself reads of the files in *folder*."""
    read = EventAccumulator(folder).Reload().Tensors(f"{tag}/text_summary")
    return [(event.step, item.decode()) for event in read for item in event.tensor_proto.string_val]


class ByName:
    """A logger that takes what it is given by name alone, which is all that Lightning's own call needs."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def log_metrics(self, **given: Any) -> None:
        self.calls.append({**given, "metrics": dict(given["metrics"])})
        given["metrics"]["added in place"] = 1.0

    def save(self) -> None:
        """Lightning asks for it after each call."""


def down(*given: Any, **named: Any) -> Any:
    """A service that cannot be reached."""
    raise ConnectionError("no route to host")


def broken_service(method: str, writer: str) -> Any:
    """A logger or a monitor whose service is down."""
    return type("Broken", (), {method: down, writer: property(down)})()


class Monitor:
    """A monitor of DeepSpeed's that remembers, and that shows no text."""

    def __init__(self, folder: str | None = None) -> None:
        self.events: list[Any] = []
        self.log_dir = folder

    def write_events(self, events: list[Any]) -> None:
        self.events += events
        events.clear()


class Board:
    """A writer with ``add_scalar`` alone."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))


def test_tensorboard_reads_back_scalars_and_text_without_waiting_for_the_end(loggers: Any, tmp_path: Path) -> None:
    logger = loggers.TensorBoardLogger(tmp_path, name="run")
    sink = Services([logger])
    sink.write_scalars({"flops_profiler/fwd_flops": 1024.0, "flops_profiler/mfu": 0.5}, step=7)
    assert sink.has_board and sink.write_text("flops_profiler/profile", REPORT, step=7) is True
    assert texts_in(logger.log_dir, "flops_profiler/profile") == [(7, REPORT)]
    read = EventAccumulator(logger.log_dir).Reload()
    for tag, value in (("flops_profiler/fwd_flops", 1024.0), ("flops_profiler/mfu", 0.5)):
        assert [(event.step, event.value) for event in read.Scalars(tag)] == [(7, value)]
    logger.experiment.close()


def test_a_csv_logger_gets_the_scalars_and_takes_no_text(loggers: Any, tmp_path: Path) -> None:
    logger = loggers.CSVLogger(tmp_path)
    sink = Services([logger])
    sink.write_scalars({"flops_profiler/mfu": 0.5}, step=7)
    assert sink.write_text("flops_profiler/profile", REPORT, step=7) is False
    logger.save()
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        assert list(csv.DictReader(file)) == [{"flops_profiler/mfu": "0.5", "step": "7"}]


def test_a_logger_is_called_as_lightning_calls_it_with_scalars_of_its_own(root: str) -> None:
    connector = importlib.import_module(f"{root}.trainer.connectors.logger_connector.logger_connector")
    by_lightning, first, second = ByName(), ByName(), ByName()
    trainer = SimpleNamespace(loggers=[by_lightning])
    connector._LoggerConnector(trainer).log_metrics({"mfu": 0.5, "step": 3.0})
    scalars = {"mfu": 0.5}
    Services([first, second]).write_scalars(scalars, step=3)
    assert first.calls == second.calls == by_lightning.calls == [{"metrics": {"mfu": 0.5}, "step": 3}]
    assert scalars == {"mfu": 0.5}


@pytest.mark.parametrize(
    "broken",
    [broken_service("log_metrics", "experiment"), broken_service("write_events", "summary_writer"), lambda *_: 1 / 0],
    ids=["object", "monitor", "function"],
)
def test_one_that_raises_costs_one_warning(broken: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    board, logger, files = Board(), ByName(), TensorBoardFiles(str(tmp_path))
    sink = Services([broken, board, files, logger])
    with caplog.at_level(logging.WARNING, "lightning_flops"):
        for step in (1, 2):
            sink.write_scalars({"mfu": 0.5}, step=step)
            assert sink.has_board and sink.write_text("profile", REPORT, step=step) is True
    (record,) = caplog.records
    name, error = type(broken).__name__, "ConnectionError: no route to host"
    error = "ZeroDivisionError: division by zero" if name == "function" else error
    assert record.getMessage() == f"{name} did not take the FLOPs report, the others did not notice: {error}"
    assert [step for *_, step in board.scalars] == [call["step"] for call in logger.calls] == [1, 2]
    assert texts_in(str(tmp_path), "profile") == [(1, REPORT), (2, REPORT)]
    sink.close()


def test_every_monitor_of_an_engine_gets_all_scalars_as_events_of_its_own(tmp_path: Path) -> None:
    first, second = Monitor(), Monitor(str(tmp_path))
    sink = monitors_in(SimpleNamespace(enabled=True, first=first, second=second), tensorboard_dir=None)
    sink.write_scalars({"mfu": 0.5, "hfu": 0.25}, step=3)
    assert first.events == second.events == [("mfu", 0.5, 3), ("hfu", 0.25, 3)]
    assert sink.write_text("flops_profiler/profile", "text", step=7) is False
    assert sink.folder() == str(tmp_path) and not sink.has_board
    board = monitors_in(SimpleNamespace(), tensorboard_dir=str(tmp_path / "board"))
    assert board.folder() == str(tmp_path / "board") and board.has_board


def test_the_users_writer_stays_open_and_files_of_our_own_are_made_late_and_closed(tmp_path: Path) -> None:
    writer, files = SummaryWriter(str(tmp_path / "a")), TensorBoardFiles(str(tmp_path / "b"))
    sink = Services([writer, files])
    assert sink.folder() == str(tmp_path / "a") and not (tmp_path / "b").exists()
    sink.write_scalars({"a": 1.5}, step=3)
    sink.close()
    writer.add_scalar("later", 1.0, 4)
    writer.close()
    for name in "ab":
        read = EventAccumulator(str(tmp_path / name)).Reload()
        assert [(one.step, one.value) for one in read.Scalars("a")] == [(3, 1.5)]
        assert ("later" in read.Tags()["scalars"]) is (name == "a")


def test_files_of_ours_that_cannot_be_written_are_no_second_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The report's own files lie in the same folder, and have said so."""
    (tmp_path / "file").write_text("no folder")
    files = TensorBoardFiles(str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "lightning_flops"):
        Services([files]).write_scalars({"mfu": 0.5}, step=1)
    assert caplog.messages == []


def test_numbers_that_are_none_do_not_reach_a_trainers_integrations() -> None:
    seen: list[Any] = []

    class Integration:
        def on_log(self, arguments: Any, state: Any, control: Any, *, logs: dict[str, float]) -> None:
            seen.append((state.global_step, logs))

    Integration.__module__ = "transformers.integrations.somewhere"
    log = TrainerLog([Integration()])
    log.write_scalars({"mfu": 0.5, "hfu": float("nan")}, step=3)
    log.log_ends(None, SimpleNamespace(global_step=7), None)
    assert seen == [(3, {"mfu": 0.5})]
