"""Every monitor of an engine gets the scalars, those that can show one the text, and none can hurt the others."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_flops.sinks.deepspeed_monitor import DeepSpeedMonitorSink
from lightning_flops.sinks.sink import Sink


class Recording:
    """A monitor that remembers, and that shows no text."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def write_events(self, events: list[Any]) -> None:
        self.events += events
        events.clear()


class Tables(Recording):
    """One that keeps files in a folder, as DeepSpeed's for CSV does."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.log_dir = str(folder)


class Broken:
    """One whose service is down."""

    log_dir = None

    def write_events(self, events: list[Any]) -> None:
        raise ConnectionError("no route to host")

    @property
    def summary_writer(self) -> Any:
        raise ConnectionError("no route to host")


def test_every_monitor_gets_all_scalars_as_events_of_its_own() -> None:
    first, second = Recording(), Recording()
    sink: Sink = DeepSpeedMonitorSink(SimpleNamespace(enabled=True, first=first, second=second))
    sink.write_scalars({"mfu": 0.5, "hfu": 0.25}, step=3)
    assert first.events == second.events == [("mfu", 0.5, 3), ("hfu", 0.25, 3)]


def test_the_folder_is_that_of_the_first_monitor_that_has_one(tmp_path: Path) -> None:
    assert DeepSpeedMonitorSink(SimpleNamespace(one=Recording(), csv=Tables(tmp_path))).folder() == str(tmp_path)
    sink = DeepSpeedMonitorSink(SimpleNamespace(), tensorboard_dir=str(tmp_path / "board"))
    assert sink.folder() == str(tmp_path / "board") and sink.has_board


def test_where_no_monitor_shows_text_none_took_it() -> None:
    sink = DeepSpeedMonitorSink(SimpleNamespace(one=Recording()))
    assert sink.write_text("flops_profiler/profile", "text", step=7) is False
    assert sink.folder() is None and not sink.has_board


def test_a_monitor_that_raises_costs_one_warning_and_the_others_get_theirs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tables = Tables(tmp_path)
    sink = DeepSpeedMonitorSink(SimpleNamespace(broken=Broken(), csv=tables))
    assert not sink.has_board
    with caplog.at_level(logging.WARNING, "lightning_flops"):
        for step in (1, 2):
            sink.write_scalars({"mfu": 0.5}, step=step)
            assert sink.write_text("profile", "text", step=step) is False
    assert [record.getMessage() for record in caplog.records] == [
        "Broken did not take the FLOPs report, the other monitors did not notice: ConnectionError: no route to host"
    ]
    assert [step for _, _, step in tables.events] == [1, 2]
