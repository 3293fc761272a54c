"""Pictures and charts for TensorBoard's own pages, in the event files that each door's sink writes."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_flops.report.scalars import monitor_scalars, profile_scalars, scalar_charts
from lightning_flops.session import output
from lightning_flops.session.output import own_pages
from lightning_flops.sinks.deepspeed_monitor import DeepSpeedMonitorSink
from lightning_flops.sinks.loggers import LoggersSink
from lightning_flops.sinks.sink import Sink
from lightning_flops.sinks.tensorboard_pages import OwnPages
from lightning_flops.sinks.trainer_log import TrainerLogSink
from lightning_flops.sinks.writers import TensorBoardFiles, WritersSink
from tests.page import samples

LAYOUT = "custom_scalars__config__"
PAGES = own_pages(samples.decoder(), prefix="flops_profiler", charts_of="flops_profiler")

SINKS: dict[str, Callable[[Any], Sink]] = {
    "lightning": lambda writer: LoggersSink([SimpleNamespace(experiment=writer)]),
    "plain loop": lambda writer: WritersSink([writer]),
    "transformers": lambda writer: TrainerLogSink([SimpleNamespace(tb_writer=writer)]),
    "deepspeed": lambda writer: DeepSpeedMonitorSink(
        SimpleNamespace(tb=SimpleNamespace(write_events=print, summary_writer=writer))
    ),
}


@pytest.fixture()
def writer(tmp_path: Path) -> Iterator[Any]:
    made = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(tmp_path))
    yield made
    made.close()


def read(folder: Path) -> Any:
    accumulators = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = accumulators.EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0})
    return found.Reload()


def layouts(folder: Path) -> list[Any]:
    """The charts in *folder*, each time that some were written."""
    layout = importlib.import_module("tensorboard.plugins.custom_scalar.layout_pb2").Layout
    found = read(folder)
    if LAYOUT not in found.Tags()["tensors"]:
        return []
    return [layout.FromString(one.tensor_proto.string_val[0]) for one in found.Tensors(LAYOUT)]


@pytest.mark.parametrize("door", SINKS)
def test_the_pictures_lie_in_the_event_files_of_every_door(door: str, writer: Any, tmp_path: Path) -> None:
    SINKS[door](writer).write_record(PAGES, step=7)
    found = read(tmp_path)
    assert found.Tags()["images"] == ["flops_profiler/step", "flops_profiler/modules"]
    for tag, drawn in PAGES.pictures().items():
        (event,) = found.Images(tag)
        assert (event.step, event.width, event.height) == (7, drawn.width, drawn.height)
        assert event.encoded_image_string == drawn.png
    assert [category.title for category in layouts(tmp_path)[0].category] == list(PAGES.charts)


def test_files_that_we_make_ourselves_get_them_too(tmp_path: Path) -> None:
    sink = WritersSink([TensorBoardFiles(str(tmp_path))])
    sink.write_record(PAGES, step=1)
    sink.close()
    assert len(read(tmp_path).Tags()["images"]) == 2


def test_the_charts_are_written_once_however_often_the_run_is_profiled(writer: Any, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        SINKS["lightning"](writer).write_record(PAGES, step=step)
    assert len(layouts(tmp_path)) == 1
    assert [event.step for event in read(tmp_path).Images("flops_profiler/step")] == [1, 2, 3]


def test_charts_of_the_users_are_left_alone(writer: Any, tmp_path: Path) -> None:
    writer.add_custom_scalars({"mine": {"loss": ["Multiline", ["loss"]]}})
    SINKS["plain loop"](writer).write_record(PAGES, step=1)
    (left,) = layouts(tmp_path)
    assert [category.title for category in left.category] == ["mine"]


def test_no_charts_are_written_where_it_cannot_be_seen_whether_there_are_some(
    writer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_flops.sinks.tensorboard_pages._MOST_BYTES", 10)
    SINKS["plain loop"](writer).write_record(PAGES, step=1)
    assert layouts(tmp_path) == []


def test_the_charts_show_tags_that_are_written() -> None:
    throughput = monitor_scalars(
        seconds=1.0,
        data_wait_sec=0.1,
        batches=1,
        samples=1,
        dp_size=1,
        tokens=1,
        padding_ratio=0.1,
        model_flops=1,
        model_flops_peak_sec=0.1,
        useful_flops_peak_sec=0.1,
    )
    written = {*profile_scalars(samples.decoder()), *throughput}
    shown = {tag for charts in scalar_charts().values() for tags in charts.values() for tag in tags}
    # No recomputation and no n/a is in this profile's way: what is shown is written, or it would be an empty chart.
    assert shown <= written
    assert {"flops_profiler/mfu", "flops_monitor/mfu", "flops_profiler/global_step_sec"} <= shown


@pytest.mark.parametrize(
    "tag", ["flops_profiler/mfu", "train/flops_profiler/mfu", "mine-flops_profiler/mfu", "flops_profiler/predict/mfu"]
)
def test_a_chart_finds_its_tags_of_every_loop_below_a_loggers_prefix(tag: str, writer: Any, tmp_path: Path) -> None:
    SINKS["plain loop"](writer).write_record(PAGES, step=1)
    patterns = {
        pattern
        for category in layouts(tmp_path)[0].category
        for chart in category.chart
        for pattern in chart.multiline.tag
    }
    # As TensorBoard does it: the pattern must match from the start.
    assert len([one for one in patterns if re.match(one, tag)]) == 1
    assert not any(re.match(one, f"{tag}_of_mine") for one in patterns)


def test_nothing_is_drawn_where_nobody_takes_pictures() -> None:
    def fail() -> Any:
        raise AssertionError("drawn")

    pages = OwnPages(pictures=fail, charts={})
    for made in SINKS.values():
        made(print).write_record(pages, step=1)


def test_without_pillow_one_line_says_so_and_the_charts_are_there(
    writer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "lightning_flops.report.pictures", raising=False)
    output._say_there_are_no_pictures.cache_clear()
    with caplog.at_level(logging.WARNING, logger="lightning_flops"):
        for step in (1, 2):
            pages = own_pages(samples.decoder(step), prefix="flops_profiler", charts_of="flops_profiler")
            SINKS["lightning"](writer).write_record(pages, step=step)
    (said,) = caplog.messages
    assert said.startswith("TensorBoard's page Images shows no FLOPs") and "pip install pillow" in said
    assert read(tmp_path).Tags()["images"] == [] and len(layouts(tmp_path)) == 1
