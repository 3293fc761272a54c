"""Which files a run's reports lie in, on rank 0 and on the others."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_flops.config import ProfilerConfig
from lightning_flops.records import UNKNOWN_TOKENS
from lightning_flops.report import html_page
from lightning_flops.report.html_page import RunPages, packed
from lightning_flops.report.text import render_text
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.throughput import Spread, ThroughputSummary
from lightning_flops.session.output import LoggedOutput, RankOutput, RunFiles, RunOutput
from lightning_flops.sinks.console import StandardOutputSink
from lightning_flops.sinks.event_files import BoardRecord
from tests.memory_sink import MemorySink
from tests.report.windows import build_profile, mlp_window

PROFILE = build_profile(mlp_window(), config=ProfilerConfig())
TEXT = render_text(PROFILE)

FIGURES = (
    "1.4 GFLOPs and 20 ms a step, 5,000 samples/s, MFU n/a (no dense peak is known for float32 on cpu; set "
    "peak_flops_per_sec). First advice: The step waits for data for 10.00% of its time. Raise the DataLoader's "
    "num_workers, and set persistent_workers."
)


class Scalars:
    """Loggers that show no text."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    @property
    def takes_scalars(self) -> bool:
        return True

    def write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        self.steps.append(step)

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        return False

    def keep_file(self, path: str) -> None:
        pass

    def write_record(self, record: BoardRecord, *, step: int) -> None:
        pass


def output(
    folder: Path,
    *,
    loggers: Any = None,
    text_file: bool = True,
    output_file: str | None = None,
    announce: Callable[[str], None] = lambda sentence: None,
    html: bool = True,
) -> RunOutput:
    config = ProfilerConfig(output_file=output_file, html=html)
    return LoggedOutput(
        config,
        loggers=loggers or Scalars(),
        console=StandardOutputSink(),
        files=RunFiles(output_file=output_file, folder=lambda: str(folder)),
        text_file=text_file,
        x_axis=lambda step: 100 * step,
        announce=announce,
    )


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(("rank", "stem"), [(0, "flops"), (3, "flops.rank3")])
def test_reports_of_later_windows_lie_beside_the_first_and_a_second_run_takes_its_place(
    rank: int, stem: str, tmp_path: Path
) -> None:
    named = str(tmp_path / "flops.txt")
    for _ in range(2):
        files = RunFiles(output_file=named, folder=lambda: None, rank=rank)
        files.write_profile(PROFILE, "first", keep_text=True)
    assert names(tmp_path) == {f"{stem}.txt"}
    files.write_profile(PROFILE, "second", keep_text=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        f"{stem}.txt": "first\n",
        f"{stem}-2.txt": "second\n",
    }


def test_a_report_that_no_logger_shows_gets_a_file_unless_one_was_named(tmp_path: Path) -> None:
    output(tmp_path / "a").write_profile(PROFILE, step=7)
    output(tmp_path / "b", loggers=MemorySink()).write_profile(PROFILE, step=7)
    output(tmp_path / "c", text_file=False).write_profile(PROFILE, step=7)
    output(tmp_path / "d", output_file=str(tmp_path / "d" / "flops.txt")).write_profile(PROFILE, step=7)
    assert names(tmp_path / "a") == {"profile.json", "profile.txt"}
    assert names(tmp_path / "b") == {"profile.json"}
    assert names(tmp_path / "c") == {"profile.json"}
    assert names(tmp_path / "d") == {"profile.json", "flops.txt"}
    assert (tmp_path / "a" / "profile.txt").read_text() == TEXT


def windows_in(page: Path) -> tuple[list[dict[str, str]], int]:
    """Where the page says that each window lies, if not here; and how many profiles are in it."""
    text = page.read_text(encoding="utf-8")
    (found,) = re.findall('id="document">(.*)</script>', text)
    (run,) = json.loads(found)["runs"]
    places = [{key: one[key] for key in ("page",) if key in one} for one in run["windows"]]
    return places, len(re.findall('<script type="text/plain" id="profile-0-', text))


def test_a_page_that_grew_too_long_names_the_pages_of_its_oldest_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html_page, "MOST_BYTES", 2 * len(packed(PROFILE)))
    pages = RunPages()
    for number in range(4):
        (tmp_path / f"{number}.html").write_text(pages.add(PROFILE, page=f"{number}.html"), encoding="utf-8")
    assert windows_in(tmp_path / "2.html") == ([{}, {}, {}], 3)
    assert windows_in(tmp_path / "3.html") == ([{"page": "0.html"}, {}, {}, {}], 3)


def test_a_page_lies_beside_each_profile_of_rank_0_and_loggers_keep_it(tmp_path: Path) -> None:
    kept = MemorySink()
    files = RunFiles(output_file=None, folder=lambda: str(tmp_path), html=True)
    shown = LoggedOutput(
        ProfilerConfig(),
        loggers=kept,
        console=StandardOutputSink(),
        files=files,
        text_file=False,
        x_axis=lambda step: step,
    )
    for _ in range(2):
        shown.write_profile(PROFILE, step=7)
    assert names(tmp_path) == {"profile.json", "profile.html", "profile-2.json", "profile-2.html"}
    assert windows_in(tmp_path / "profile.html") == ([{}], 1)
    assert windows_in(tmp_path / "profile-2.html") == ([{}, {}], 2)
    assert kept.files == [f"{tmp_path}/profile.html", f"{tmp_path}/profile-2.html"]
    (window,) = kept.windows.values()
    assert window.tag == "flops_profiler/window/3" and json.loads(window.figures)["profile_step"] == 3
    assert Profile.from_json(gzip.decompress(window.packed).decode()) == PROFILE


def test_without_the_page_neither_it_nor_the_tabs_data_is_written(tmp_path: Path) -> None:
    kept = MemorySink()
    output(tmp_path, loggers=kept, html=False).write_profile(PROFILE, step=7)
    assert kept.files == [] and kept.windows == {} and names(tmp_path) == {"profile.json"}


def test_the_console_shows_a_report_that_no_file_was_named_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output(tmp_path, output_file=str(tmp_path / "flops.txt")).write_profile(PROFILE, step=7)
    assert capsys.readouterr().out == ""
    output(tmp_path).write_profile(PROFILE, step=7)
    assert capsys.readouterr().out == TEXT


def test_one_line_has_the_figures_and_the_places_of_a_report_and_no_place_where_it_is_not(tmp_path: Path) -> None:
    said: list[str] = []
    output(tmp_path, announce=said.append).write_profile(PROFILE, step=7)
    output(tmp_path, loggers=MemorySink(), announce=said.append).write_profile(PROFILE, step=7)
    (tmp_path / "a file").write_text("")
    output(tmp_path / "a file", announce=said.append).write_profile(PROFILE, step=7)
    figures = f"FLOPs of step 3: {FIGURES}"
    assert said == [
        f"{figures} The report is in {tmp_path}/profile.txt, every number is in {tmp_path}/profile.json",
        f"{figures} The loggers show the report as the text flops_profiler/profile, "
        f"every number is in {tmp_path}/profile-2.json",
    ]


def test_loggers_get_everything_at_the_x_axis_of_the_run(tmp_path: Path) -> None:
    loggers = Scalars()
    reading: Any = SimpleNamespace(seconds=2.0, data_wait_sec=1.0, batches=4, steps=4, samples=8, tokens=UNKNOWN_TOKENS)
    shown = output(tmp_path, loggers=loggers)
    shown.write_profile(PROFILE, step=7)
    shown.write_reading(
        reading, dp_size=1, tokens=None, model_flops=None, model_flops_peak_sec=None, useful_flops_peak_sec=None, step=9
    )
    assert loggers.steps == [700, 900]


def test_another_rank_writes_its_own_files_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = RunFiles(output_file=None, folder=lambda: str(tmp_path), rank=12)
    RankOutput(files).write_profile(PROFILE, step=7)
    assert names(tmp_path) == {"profile.rank12.json"}
    assert (tmp_path / "profile.rank12.json").read_text() == PROFILE.to_json()
    assert capsys.readouterr().out == ""


def test_a_run_that_leaves_no_files_still_writes_the_one_that_was_named(tmp_path: Path) -> None:
    files = RunFiles(output_file=str(tmp_path / "flops.txt"), folder=lambda: None)
    files.write_profile(PROFILE, "text", keep_text=True)
    assert names(tmp_path) == {"flops.txt"}


@pytest.mark.parametrize("rank", [0, 2])
def test_throughput_has_a_file_beside_a_profile_or_where_nothing_else_was_asked_for(rank: int, tmp_path: Path) -> None:
    summary = ThroughputSummary(
        schema_version=1,
        batches=4,
        reader_ratio=None,
        reader_cost_sec=None,
        batch_cost_sec=Spread(average=0.5, maximum=0.5, minimum=0.5),
        ips=None,
        ips_unit="samples/s",
    )
    for folder, timer_only, profiled in (("a", False, False), ("b", False, True), ("c", True, False)):
        place = str(tmp_path / folder)
        files = RunFiles(output_file=None, folder=lambda: place, rank=rank, timer_only=timer_only)  # noqa: B023
        if profiled:
            files.write_profile(PROFILE, "text", keep_text=False)
        files.write_throughput(summary)
    of_rank = "" if rank == 0 else ".rank2"
    assert not (tmp_path / "a").exists()
    assert names(tmp_path / "b") == {f"profile{of_rank}.json", f"throughput{of_rank}.json"}
    assert names(tmp_path / "c") == {f"throughput{of_rank}.json"}


def test_a_report_that_nothing_keeps_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    kept_nowhere = LoggedOutput(
        ProfilerConfig(),
        loggers=Scalars(),
        console=MemorySink(),
        files=RunFiles(output_file=None, folder=lambda: None),
        text_file=True,
        x_axis=lambda step: step,
        announce=said.append,
        nowhere="nothing keeps it",
    )
    kept_nowhere.write_profile(PROFILE, step=7)
    kept_nowhere.write_profile(PROFILE, step=9)
    assert said == [f"FLOPs of step 3: {FIGURES} Nothing keeps it"]
