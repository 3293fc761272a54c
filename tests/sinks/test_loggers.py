"""Every logger of a run gets the scalars, TensorBoard the text, and none of them can hurt the others."""

from __future__ import annotations

import csv
import importlib
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_flops.sinks.loggers import LoggersSink
from lightning_flops.sinks.sink import Sink

ROOTS = ("lightning.pytorch", "pytorch_lightning")
WANDB = {name: ModuleType(name) for name in ("wandb", "wandb.sdk", "wandb.sdk.lib", "wandb.wandb_run")}
WANDB["wandb.sdk.lib"].RunDisabled = WANDB["wandb.wandb_run"].Run = object  # type: ignore[attr-defined]
REPORT = "```\nfwd flops   1 M\n  × indented\n```"


@pytest.fixture(params=ROOTS)
def root(request: pytest.FixtureRequest) -> str:
    """Each import root."""
    name: str = request.param
    return name


@pytest.fixture
def loggers_of_root(root: str) -> Any:
    """The ``loggers`` module of each import root."""
    return importlib.import_module(f"{root}.loggers")


@pytest.fixture
def tensorboard_logger(loggers_of_root: Any, tmp_path: Path) -> Iterator[Any]:
    logger = loggers_of_root.TensorBoardLogger(tmp_path, name="run")
    yield logger
    logger.experiment.close()


def events(logger: Any) -> EventAccumulator:
    """What TensorBoard itself reads of *logger*'s files."""
    return EventAccumulator(logger.log_dir).Reload()


class Recording:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, float], int]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append((dict(metrics), step))
        metrics["added in place"] = 1.0


class ByName:
    """A logger that takes what it is given by name alone, which is all that Lightning's own call needs."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def log_metrics(self, **given: Any) -> None:
        self.calls.append(given)

    def save(self) -> None:
        """Lightning asks for it after each call."""


class Broken:
    """A logger whose service is down."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        raise ConnectionError("no route to host")

    @property
    def experiment(self) -> Any:
        raise ConnectionError("no route to host")


def test_tensorboard_reads_back_every_scalar_at_its_step(tensorboard_logger: Any) -> None:
    sink: Sink = LoggersSink([tensorboard_logger])
    sink.write_scalars({"flops_profiler/fwd_flops": 1024.0, "flops_profiler/mfu": 0.5}, step=7)
    tensorboard_logger.experiment.flush()
    read = events(tensorboard_logger)
    assert set(read.Tags()["scalars"]) >= {"flops_profiler/fwd_flops", "flops_profiler/mfu"}
    for tag, value in (("flops_profiler/fwd_flops", 1024.0), ("flops_profiler/mfu", 0.5)):
        assert [(event.step, event.value) for event in read.Scalars(tag)] == [(7, value)]


def test_tensorboard_reads_back_the_text_without_waiting_for_the_run_to_end(tensorboard_logger: Any) -> None:
    sink = LoggersSink([tensorboard_logger])
    assert sink.has_board
    assert sink.write_text("flops_profiler/profile", REPORT, step=7) is True
    (event,) = events(tensorboard_logger).Tensors("flops_profiler/profile/text_summary")
    assert event.step == 7
    assert [item.decode() for item in event.tensor_proto.string_val] == [REPORT]


def test_a_csv_logger_gets_the_scalars_and_takes_no_text(loggers_of_root: Any, tmp_path: Path) -> None:
    logger = loggers_of_root.CSVLogger(tmp_path)
    sink = LoggersSink([logger])
    sink.write_scalars({"flops_profiler/mfu": 0.5}, step=7)
    assert sink.write_text("flops_profiler/profile", REPORT, step=7) is False
    logger.save()
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        assert list(csv.DictReader(file)) == [{"flops_profiler/mfu": "0.5", "step": "7"}]


def test_a_dummy_logger_is_not_taken_for_tensorboard(loggers_of_root: Any) -> None:
    dummy = importlib.import_module(f"{loggers_of_root.__name__}.logger").DummyLogger()
    dummy.experiment.add_text("it answers", "to any name", 0)
    sink = LoggersSink([dummy])
    assert not sink.has_board
    assert sink.write_text("flops_profiler/profile", REPORT, step=7) is False


def test_a_logger_without_an_experiment_takes_no_text() -> None:
    assert LoggersSink([Recording()]).write_text("flops_profiler/profile", REPORT, step=7) is False


def test_without_loggers_nothing_happens() -> None:
    sink = LoggersSink([])
    sink.write_scalars({"mfu": 0.5}, step=1)
    assert sink.write_text("flops_profiler/profile", REPORT, step=1) is False


def test_each_logger_gets_scalars_of_its_own() -> None:
    first, second = Recording(), Recording()
    scalars = {"mfu": 0.5}
    LoggersSink([first, second]).write_scalars(scalars, step=3)
    assert first.calls == second.calls == [({"mfu": 0.5}, 3)]
    assert scalars == {"mfu": 0.5}


def test_a_logger_is_called_as_lightning_calls_it(root: str) -> None:
    connector = importlib.import_module(f"{root}.trainer.connectors.logger_connector.logger_connector")
    by_lightning, by_us = ByName(), ByName()
    trainer = SimpleNamespace(loggers=[by_lightning])
    connector._LoggerConnector(trainer).log_metrics({"mfu": 0.5, "step": 3.0})
    LoggersSink([by_us]).write_scalars({"mfu": 0.5}, step=3)
    assert by_us.calls == by_lightning.calls == [{"metrics": {"mfu": 0.5}, "step": 3}]


def test_a_logger_that_raises_costs_one_warning_and_the_others_get_theirs(
    tensorboard_logger: Any, caplog: pytest.LogCaptureFixture
) -> None:
    recording = Recording()
    sink = LoggersSink([Broken(), tensorboard_logger, recording])
    with caplog.at_level(logging.WARNING, "lightning_flops"):
        for step in (1, 2):
            sink.write_scalars({"mfu": 0.5}, step=step)
            assert sink.write_text("flops_profiler/profile", REPORT, step=step) is True
    assert [record.getMessage() for record in caplog.records] == [
        "Broken did not take the FLOPs report, the other loggers did not notice: ConnectionError: no route to host"
    ]
    assert [step for _, step in recording.calls] == [1, 2]
    assert [event.step for event in events(tensorboard_logger).Tensors("flops_profiler/profile/text_summary")] == [1, 2]


def test_two_broken_loggers_are_each_named_once(caplog: pytest.LogCaptureFixture) -> None:
    sink = LoggersSink([Broken(), Broken()])
    with caplog.at_level(logging.WARNING, "lightning_flops"):
        sink.write_scalars({"mfu": 0.5}, step=1)
        sink.write_scalars({"mfu": 0.5}, step=2)
    assert len(caplog.records) == 2


class Artifacts:
    """What a service's client remembers of files."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, ...]] = []

    def log_artifact(self, *place: str, **about: str) -> None:
        self.kept.append((*place, about))


def test_wandb_and_mlflow_keep_a_file_as_an_artifact_and_others_do_not(loggers_of_root: Any, tmp_path: Path) -> None:
    page = tmp_path / "profile-2.html"
    page.write_text("page")
    wandb = object.__new__(loggers_of_root.WandbLogger)
    wandb._experiment, mlflow = Artifacts(), object.__new__(loggers_of_root.MLFlowLogger)
    mlflow._mlflow_client, mlflow._initialized, mlflow._run_id = Artifacts(), True, "run 7"
    other = SimpleNamespace(experiment=Artifacts(), log_metrics=None)
    with patch.dict(sys.modules, {"mlflow": ModuleType("mlflow"), **WANDB}):
        LoggersSink([wandb, mlflow, other]).keep_file(str(page))
        LoggersSink([wandb, mlflow]).keep_file("s3://bucket/profile.html")  # no local file
        assert wandb._experiment.kept == [(str(page), {"name": "flops-profile-2", "type": "profile"})]
        assert mlflow._mlflow_client.kept == [("run 7", str(page), {})]
    assert other.experiment.kept == []


def test_a_service_that_refuses_a_file_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class WandbLogger:
        @property
        def experiment(self) -> Any:
            raise OSError("offline")

    (tmp_path / "profile.html").write_text("page")
    sink = LoggersSink([WandbLogger()])
    with caplog.at_level(logging.WARNING, logger="lightning_flops"):
        for _ in range(2):
            sink.keep_file(str(tmp_path / "profile.html"))
    assert [record.getMessage() for record in caplog.records] == [
        "WandbLogger did not take the FLOPs report, the other loggers did not notice: OSError: offline"
    ]


def test_an_exception_of_the_users_signal_handler_passes_through() -> None:
    class Preempted(Exception):
        """What a cluster's notice is made into."""

    def handler(number: int, frame: Any) -> None:
        raise Preempted

    class Slow:
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Preempted):
            LoggersSink([Slow()]).write_scalars({"mfu": 0.5}, step=1)
    finally:
        signal.signal(signal.SIGUSR1, before)
