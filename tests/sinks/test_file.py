"""A report file is there whole or not at all, wherever it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from lightning_flops.sinks.file import FreePaths, write_text_file


def test_the_text_is_written_with_a_newline_at_its_end(tmp_path: Path) -> None:
    write_text_file(tmp_path / "report.txt", "1 × 2")
    assert (tmp_path / "report.txt").read_bytes() == "1 × 2\n".encode()


def test_a_second_text_replaces_the_first(tmp_path: Path) -> None:
    write_text_file(tmp_path / "report.txt", "a long first report\n")
    write_text_file(tmp_path / "report.txt", "second\n")
    assert (tmp_path / "report.txt").read_text() == "second\n"


def test_missing_folders_are_created(tmp_path: Path) -> None:
    path = tmp_path / "run 1" / "[logs]" / "report.txt"
    write_text_file(path, "x")
    assert path.read_text() == "x\n"


def test_a_url_is_written_through_fsspec() -> None:
    write_text_file("memory://runs/7/report.txt", "x")
    with fsspec.open("memory://runs/7/report.txt") as file:
        assert file.read() == b"x\n"


def test_a_local_file_url_is_a_local_file(tmp_path: Path) -> None:
    write_text_file(f"file://{tmp_path}/report.txt", "x")
    assert (tmp_path / "report.txt").read_text() == "x\n"


def test_nothing_but_the_report_is_left_in_the_folder(tmp_path: Path) -> None:
    write_text_file(tmp_path / "report.txt", "x")
    assert os.listdir(tmp_path) == ["report.txt"]


def test_a_write_that_fails_leaves_the_old_report_and_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.txt"
    write_text_file(path, "old")

    def full_disk(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: .*report\.txt"):
        write_text_file(path, "new")
    assert path.read_text() == "old\n"
    assert os.listdir(tmp_path) == ["report.txt"]


def test_a_link_stays_a_link_to_the_new_report(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    target, link = tmp_path / "shared" / "report.txt", tmp_path / "report.txt"
    target.write_text("old")
    link.symlink_to(target)
    write_text_file(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new\n"


def test_an_existing_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    path.write_text("old")
    path.chmod(0o640)
    write_text_file(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_device_is_written_to_and_not_replaced() -> None:
    write_text_file("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_an_error_names_a_file_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        write_text_file(tmp_path, "x")
    assert str(tmp_path) in str(caught.value)


def test_an_error_names_the_file_whose_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    path = tmp_path / "runs" / "report.txt"
    with pytest.raises(OSError) as caught:
        write_text_file(path, "x")
    assert str(path) in str(caught.value)


def test_a_url_that_nothing_opens_is_an_os_error_that_names_it() -> None:
    with pytest.raises(OSError, match=r"cannot write nowhere://report\.txt: ValueError: Protocol not known: nowhere"):
        write_text_file("nowhere://report.txt", "x")


def test_a_free_name_is_the_first_that_no_file_has(tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    assert FreePaths().free(path) == path
    for name in ("profile.json", "profile-2.json", "profile-4.json"):
        (tmp_path / name).write_text("")
    assert FreePaths().free(path) == str(tmp_path / "profile-3.json")


def test_no_name_is_asked_for_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that profiles often asks once for each file that it writes, and once for each that was there."""
    asked: list[str] = []
    exists = LocalFileSystem.exists

    def heard(self: Any, path: str, **kwargs: Any) -> bool:
        asked.append(Path(path).name)
        return bool(exists(self, path, **kwargs))

    monkeypatch.setattr(LocalFileSystem, "exists", heard)
    (tmp_path / "profile.json").write_text("")
    paths = FreePaths()
    for _ in range(4):
        Path(paths.free(str(tmp_path / "profile.json"))).write_text("")
    assert asked == ["profile.json", *(f"profile-{number}.json" for number in range(2, 6))]
    assert sorted(os.listdir(tmp_path)) == sorted(asked)


def test_a_name_that_another_run_has_taken_meanwhile_is_passed_over(tmp_path: Path) -> None:
    paths, path = FreePaths(), str(tmp_path / "profile.json")
    assert paths.free(path) == path
    (tmp_path / "profile-2.json").write_text("another run's")
    assert paths.free(path) == str(tmp_path / "profile-3.json")


def test_a_file_that_another_run_writes_at_the_same_time_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs look, find the name free, and write: each has a file of its own."""
    path = str(tmp_path / "profile.json")
    monkeypatch.setattr(LocalFileSystem, "exists", lambda *_, **__: False)
    assert FreePaths().write_text(path, "of one") == path
    assert FreePaths().write_text(path, "of another") == str(tmp_path / "profile-2.json")
    paths = FreePaths()
    assert paths.write_text(path, "of a third") == str(tmp_path / "profile-3.json")
    assert paths.write_text(path, "and its next") == str(tmp_path / "profile-4.json")
    read = {one.name: one.read_text() for one in tmp_path.iterdir()}
    assert read == {
        "profile.json": "of one\n",
        "profile-2.json": "of another\n",
        "profile-3.json": "of a third\n",
        "profile-4.json": "and its next\n",
    }


def test_a_new_file_is_written_where_files_have_no_second_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    path = str(tmp_path / "profile.json")
    paths = FreePaths()
    assert paths.write_text(path, "first") == path
    assert paths.write_text(path, "second") == str(tmp_path / "profile-2.json")
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {
        "profile.json": "first\n",
        "profile-2.json": "second\n",
    }


def test_a_new_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    path = f"{tmp_path}/runs/profile.json"
    with pytest.raises(OSError) as caught:
        FreePaths().write_text(path, "x")
    assert path in str(caught.value)
    assert FreePaths().write_text("memory://new/profile.json", "x") == "memory://new/profile.json"
    assert FreePaths().write_text("memory://new/profile.json", "y") == "memory://new/profile-2.json"
