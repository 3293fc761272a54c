"""Which files a run's reports lie in, on rank 0 and on the others, and what loggers and the console get."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_flops.config import ProfilerConfig
from lightning_flops.run.output import LoggedOutput
from lightning_flops.schema.profile import Profile
from lightning_flops.sinks.console import to_standard_output
from lightning_flops.sinks.services import Services
from tests.report.windows import build_profile, mlp_window

PROFILE = build_profile(mlp_window(), config=ProfilerConfig())


class Board:
    """A writer of TensorBoard's that keeps what it is given, by tag."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        self.kept[tag] = value

    add_text = add_scalar


def output(folder: Path, *loggers: Board) -> LoggedOutput:
    return LoggedOutput(
        ProfilerConfig(),
        loggers=Services(loggers),
        console=to_standard_output,
        folder=lambda: str(folder),
        text_file=True,
        announce=lambda sentence: None,
        nowhere="",
    )


def show(to: LoggedOutput, profile: Profile = PROFILE) -> None:
    to.report(profile)(7)


def names(folder: Path) -> list[str]:
    return sorted(re.sub("tfevents.*", "tfevents", str(path.relative_to(folder))) for path in folder.rglob("*.*"))


def test_a_runs_files_lie_in_a_folder_of_ours_and_nothing_of_the_users_is_touched(tmp_path: Path) -> None:
    for name in ("profile.html", "profile.txt", "profile.json", "events.out.tfevents.1"):
        (tmp_path / name).write_text("mine")
    show(output(tmp_path, Board()))
    ours = tmp_path / "lightning_flops"
    assert names(ours) == ["events.out.tfevents", "profile.html", "profile.json"]
    assert (ours / "profile.json").read_text() == PROFILE.to_json()
    assert {path.read_text() for path in tmp_path.glob("*.*")} == {"mine"}
    show(output(ours))  # a folder of that name is taken as it is
    assert not (ours / "lightning_flops").exists()


def test_each_window_is_written_over_the_one_before_and_another_run_has_names_of_its_own(tmp_path: Path) -> None:
    first = output(tmp_path)
    for step in (3, 4, 5):
        show(first, replace(PROFILE, profile_step=step))
    show(output(tmp_path))
    ours = tmp_path / "lightning_flops"
    assert names(ours) == [f"profile{run}.{suffix}" for run in ("-2", "") for suffix in ("html", "json", "txt")]
    assert json.loads((ours / "profile.json").read_text())["profile_step"] == 5
    assert json.loads((ours / "profile-2.json").read_text())["profile_step"] == 3


def windows_in(page: Path) -> tuple[list[int], int]:
    """The steps of a page's windows, and how many profiles are in it."""
    text = page.read_text(encoding="utf-8")
    (found,) = re.findall('id="document">(.*)</script>', text)
    (run,) = json.loads(found)["runs"]
    return [one["profile_step"] for one in run["windows"]], text.count('<script type="text/plain" id="view-0-')


def test_neither_the_page_nor_the_tabs_files_grow_with_the_windows(tmp_path: Path) -> None:
    shown, ours = output(tmp_path, Board()), tmp_path / "lightning_flops"
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


def test_a_full_disk_costs_one_warning_and_the_loggers_still_get_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    board, real = Board(), Path.open

    def no_space(path: Path, mode: str = "r", *more: Any, **others: Any) -> Any:
        if "x" in mode:
            raise OSError(28, "No space left on device")
        return real(path, mode, *more, **others)

    with monkeypatch.context() as full:
        full.setattr(Path, "open", no_space)
        show(output(tmp_path, board))
    assert names(tmp_path) == []
    assert board.kept["flops_profiler/profile"] and board.kept["flops_profiler/fwd_flops"]
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


def test_a_package_of_our_folders_name_gets_no_reports(tmp_path: Path) -> None:
    """Of a clone of this project whose logs lie in its root, the package is no folder of logs."""
    package = tmp_path / "lightning_flops"
    package.mkdir()
    (package / "__init__.py").write_text("")
    show(output(tmp_path))
    assert [one.name for one in package.iterdir()] == ["__init__.py"]
    assert "profile.json" in {one.name for one in (tmp_path / "lightning_flops_logs").iterdir()}
