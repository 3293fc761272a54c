"""Which files a run's reports lie in, on rank 0 and on the others, and what loggers and the console get."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_flops.config import ProfilerConfig
from lightning_flops.report.text import render_text
from lightning_flops.run.output import LoggedOutput, RunFiles
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.throughput import Spread, ThroughputSummary
from lightning_flops.sinks.console import to_standard_output
from tests.memory_sink import MemorySink
from tests.report.windows import build_profile, mlp_window

PROFILE = build_profile(mlp_window(), config=ProfilerConfig())
TEXT = render_text(PROFILE)
SHORT = "1.4 GFLOPs and 20 ms a step, 5,000 samples/s"
SUMMARY = ThroughputSummary(
    schema_version=1,
    batches=4,
    reader_ratio=None,
    reader_cost_sec=None,
    batch_cost_sec=Spread(average=0.5, maximum=0.5, minimum=0.5),
    ips=None,
    ips_unit="samples/s",
)


def output(
    folder: Path | None,
    *,
    loggers: MemorySink | None = None,
    text_file: bool = True,
    output_file: str | None = None,
    announce: Callable[[str], None] = lambda sentence: None,
    html: bool = True,
    part: str = "",
    nowhere: str = "",
) -> LoggedOutput:
    return LoggedOutput(
        ProfilerConfig(output_file=output_file, html=html),
        loggers=loggers or MemorySink(has_board=False),
        console=to_standard_output,
        folder=lambda: None if folder is None else str(folder),
        text_file=text_file,
        announce=announce,
        nowhere=nowhere,
        part=part,
    )


def show(to: LoggedOutput, profile: Profile = PROFILE) -> None:
    to.report(profile)(7)


def names(folder: Path) -> list[str]:
    return sorted(re.sub("tfevents.*", "tfevents", str(path.relative_to(folder))) for path in folder.rglob("*.*"))


def test_a_runs_files_lie_in_a_folder_of_ours_and_nothing_of_the_users_is_touched(tmp_path: Path) -> None:
    for name in ("profile.html", "profile.txt", "profile.json", "events.out.tfevents.1"):
        (tmp_path / name).write_text("mine")
    show(output(tmp_path, loggers=MemorySink()))
    ours = tmp_path / "lightning_flops"
    assert names(ours) == ["events.out.tfevents", "profile.html", "profile.json"]
    assert (ours / "profile.json").read_text() == PROFILE.to_json()
    assert {path.read_text() for path in tmp_path.glob("*.*")} == {"mine"}
    show(output(ours))  # a folder of that name is taken as it is
    assert not (ours / "lightning_flops").exists()


def test_a_package_of_our_folders_name_gets_no_reports(tmp_path: Path) -> None:
    (tmp_path / "lightning_flops").mkdir()
    (tmp_path / "lightning_flops" / "__init__.py").write_text("")
    show(output(tmp_path, html=False))
    assert names(tmp_path) == [
        *("lightning_flops/__init__.py", "lightning_flops_logs/profile.json", "lightning_flops_logs/profile.txt")
    ]


def test_each_window_is_written_over_the_one_before_and_another_run_has_names_of_its_own(tmp_path: Path) -> None:
    first = output(tmp_path)
    for step in (3, 4, 5):
        show(first, replace(PROFILE, profile_step=step))
    show(output(tmp_path))
    ours = tmp_path / "lightning_flops"
    assert names(ours) == [f"profile{run}.{suffix}" for run in ("-2", "") for suffix in ("html", "json", "txt")]
    assert json.loads((ours / "profile.json").read_text())["profile_step"] == 5
    assert json.loads((ours / "profile-2.json").read_text())["profile_step"] == 3


def test_a_number_is_free_where_no_file_of_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "lightning_flops").mkdir()
    (tmp_path / "lightning_flops" / "profile.html").write_text("mine")
    (tmp_path / "lightning_flops" / "throughput-2.json").write_text("another run's")
    show(output(tmp_path, text_file=False))
    assert names(tmp_path / "lightning_flops") == [
        *("profile-3.html", "profile-3.json", "profile.html", "throughput-2.json"),
    ]


def windows_in(page: Path) -> tuple[list[int], int]:
    """The steps of a page's windows, and how many profiles are in it."""
    text = page.read_text(encoding="utf-8")
    (found,) = re.findall('id="document">(.*)</script>', text)
    (run,) = json.loads(found)["runs"]
    return [one["profile_step"] for one in run["windows"]], text.count('<script type="text/plain" id="view-0-')


def test_neither_the_page_nor_the_tabs_files_grow_with_the_windows(tmp_path: Path) -> None:
    shown, ours = output(tmp_path, loggers=MemorySink()), tmp_path / "lightning_flops"
    for step in range(12):
        show(shown, replace(PROFILE, profile_step=step))
    latest = list(range(4, 12))
    assert windows_in(ours / "profile.html") == (latest, 8)
    assert names(ours) == [*8 * ["events.out.tfevents"], "profile.html", "profile.json"]
    read = EventAccumulator(str(ours)).Reload()
    assert read.Tags()["tensors"] == [f"flops_profiler/window/{step}" for step in latest]
    (event,) = read.Tensors("flops_profiler/window/11")
    (packed,) = event.tensor_proto.string_val
    assert Profile.from_json(gzip.decompress(packed).decode()) == replace(PROFILE, profile_step=11)


def test_without_the_page_neither_it_nor_the_tabs_data_is_written(tmp_path: Path) -> None:
    show(output(tmp_path, loggers=MemorySink(), html=False))
    assert names(tmp_path) == ["lightning_flops/profile.json"]


def test_a_report_that_no_logger_shows_gets_a_file_unless_one_was_named(tmp_path: Path) -> None:
    show(output(tmp_path / "a"))
    show(output(tmp_path / "b", loggers=MemorySink()))
    show(output(tmp_path / "c", output_file=str(tmp_path / "c" / "flops.txt")))
    assert (tmp_path / "a" / "lightning_flops" / "profile.txt").read_text() == TEXT
    assert [path.name for path in tmp_path.rglob("*.txt")].count("profile.txt") == 1
    assert (tmp_path / "c" / "flops.txt").read_text() == TEXT


@pytest.mark.parametrize(
    ("rank", "part", "stem"), [(0, "", "flops"), (3, "", "flops.rank3"), (0, "test", "flops.test")]
)
def test_a_named_file_is_written_over_and_has_the_rank_and_the_loop_in_its_name(
    rank: int, part: str, stem: str, tmp_path: Path
) -> None:
    files = RunFiles(ProfilerConfig(output_file=str(tmp_path / "flops.txt")), lambda: None, rank=rank, part=part)
    for text in ("first", "second"):
        files.write_profile(PROFILE, text, keep_text=True)
    assert names(tmp_path) == [f"{stem}.txt"]
    assert (tmp_path / f"{stem}.txt").read_text() == "second\n"


def test_the_console_shows_a_report_that_no_file_was_named_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(output(tmp_path, output_file=str(tmp_path / "flops.txt")))
    assert capsys.readouterr().out == ""
    show(output(tmp_path))
    assert capsys.readouterr().out == TEXT


def test_one_line_has_the_figures_and_the_one_place_with_most_of_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.chdir(tmp_path)
    show(output(tmp_path, announce=said.append))
    show(output(tmp_path, announce=said.append, html=False))
    show(output(tmp_path, loggers=MemorySink(), announce=said.append, html=False))
    show(output(None, announce=said.append, nowhere="Nothing keeps it."))
    assert [one.removeprefix(f"FLOPs of step 3: {SHORT}. ") for one in said] == [
        "Page: lightning_flops/profile.html",
        "Report: lightning_flops/profile-2.txt",
        "In the loggers, the text flops_profiler/profile",
        "Nothing keeps it.",
    ]


def test_the_line_comes_once_a_run_and_has_200_characters_and_the_whole_place(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / ("a long name " * 8)
    run = output(folder, announce=said.append)
    show(run)
    show(run)
    (line,) = said
    assert line.endswith(f"Page: {folder}/lightning_flops/profile.html") and len(line) <= max(
        200, len(str(folder)) + 60
    )


def test_loggers_get_everything_under_the_tags_of_the_loop(tmp_path: Path) -> None:
    kept = MemorySink()
    shown = output(tmp_path, loggers=kept, part="test")
    show(shown)
    shown.summary(SUMMARY)(10)
    assert shown.monitor_prefix == "flops_monitor/test"
    assert [*kept.scalars["flops_profiler/test/fwd_flops"]] == [7]
    assert {tag: [*texts] for tag, texts in kept.texts.items()} == {
        "flops_profiler/test/profile": [7],
        "flops_profiler/test/advice": [7],
        "flops_monitor/test/summary": [10],
    }
    ours = tmp_path / "lightning_flops"
    assert kept.files == [str(ours / "profile.test.html")]
    assert "throughput.test.json" in names(ours)


def test_other_ranks_write_files_of_their_own_if_all_ranks_is_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ProfilerConfig(all_ranks=True)
    RunFiles(config, lambda: str(tmp_path), rank=12).report(PROFILE)
    assert names(tmp_path / "lightning_flops") == ["profile.rank12.json"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("rank", [0, 2])
def test_throughput_has_a_file_beside_a_profile_or_where_nothing_else_was_asked_for(rank: int, tmp_path: Path) -> None:
    for folder, timer_only, profiled in (("a", False, False), ("b", False, True), ("c", True, False)):
        place = str(tmp_path / folder)
        files = RunFiles(ProfilerConfig(html=False, timer_only=timer_only), lambda: place, rank=rank)  # noqa: B023
        if profiled:
            files.write_profile(PROFILE, "text", keep_text=False)
        files.summary(SUMMARY)
        files.summary(SUMMARY)
    of_rank = "" if rank == 0 else ".rank2"
    assert not (tmp_path / "a").exists()
    ours = "lightning_flops"
    assert names(tmp_path / "b") == [f"{ours}/profile{of_rank}.json", f"{ours}/throughput{of_rank}.json"]
    assert names(tmp_path / "c") == [f"{ours}/throughput{of_rank}.json"]


def test_a_full_disk_costs_one_warning_and_the_loggers_still_get_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept, real = MemorySink(), Path.open

    def no_space(path: Path, mode: str = "r", *more: Any, **others: Any) -> Any:
        if "x" in mode:
            raise OSError(28, "No space left on device")
        return real(path, mode, *more, **others)

    with monkeypatch.context() as full:
        full.setattr(Path, "open", no_space)
        show(output(tmp_path, loggers=kept))
    assert names(tmp_path) == []
    assert kept.texts["flops_profiler/profile"] and kept.scalars["flops_profiler/fwd_flops"]
    (record,) = caplog.records  # of profile.json, profile.html and the tab's
    assert "the FLOPs report was not written: [Errno 28]" in record.getMessage()
    show(output(tmp_path))
    assert "lightning_flops/profile.json" in names(tmp_path)


def test_a_link_in_the_place_of_our_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    shown, ours = output(tmp_path), tmp_path / "lightning_flops"
    show(shown)
    (tmp_path / "precious").write_text("mine")
    (ours / "profile.json").unlink()
    (ours / "profile.json").symlink_to(tmp_path / "precious")
    show(shown)
    assert (tmp_path / "precious").read_text() == "mine" and not (ours / "profile.json").is_symlink()
