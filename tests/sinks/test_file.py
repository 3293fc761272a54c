"""A report file is there whole or not at all, wherever it is."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from lightning_flops.sinks.file import numbered, remove_file, write_new_file, write_own_file, write_text_file


def test_a_text_replaces_the_one_before_and_ends_with_a_newline(tmp_path: Path) -> None:
    path = tmp_path / "run 1" / "[logs]" / "report.txt"  # folders are made
    for text in ("a long first report\n", "1 \u00d7 2"):
        write_text_file(path, text)
    write_text_file(f"file://{tmp_path}/report.txt", "x")
    assert path.read_bytes() == "1 \u00d7 2\n".encode() and (tmp_path / "report.txt").read_text() == "x\n"
    assert os.listdir(path.parent) == ["report.txt"]  # and nothing else is left there


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


def test_what_lies_there_keeps_what_it_is(tmp_path: Path) -> None:
    target, link = tmp_path / "shared.txt", tmp_path / "report.txt"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_text_file(link, "new")
    assert link.is_symlink() and target.read_text() == "new\n" and stat.S_IMODE(target.stat().st_mode) == 0o640
    write_text_file("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("name", ["", "a file/report.txt"])
def test_an_error_names_the_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    with pytest.raises(OSError) as caught:
        write_text_file(tmp_path / name, "x")
    assert str(tmp_path / name) in str(caught.value)


def test_a_url_that_nothing_opens_is_an_os_error_that_names_it() -> None:
    with pytest.raises(OSError, match=r"cannot write nowhere://report\.txt: ValueError: Protocol not known: nowhere"):
        write_text_file("nowhere://report.txt", "x")


def names(folder: Path) -> dict[str, str]:
    return {one.name: one.read_text() for one in folder.iterdir()}


def test_a_draft_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "precious").write_text("mine")
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    (tmp_path / ".guessed.draft").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        write_text_file(tmp_path / "report.txt", "y")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_new_file_has_the_first_name_that_is_free(tmp_path: Path) -> None:
    path, beside = str(tmp_path / "profile.json"), str(tmp_path / "profile.html")
    (tmp_path / "profile-2.html").write_text("of another")
    assert [write_new_file(path, [text], beside=[beside]) for text in (b"a", b"b")] == [1, 3]
    assert write_new_file(path, [b"c", b"d"]) == 2
    assert names(tmp_path) == {
        "profile.json": "a",
        "profile-2.html": "of another",
        "profile-3.json": "b",
        "profile-2.json": "cd",
    }
    assert numbered(path, 1) == path and numbered(path, 3) == str(tmp_path / "profile-3.json")


def test_a_file_that_another_process_writes_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"

    def content() -> Iterator[bytes]:
        path.write_text("of another")
        yield b"ours"

    assert write_new_file(str(path), content()) == 2
    assert names(tmp_path) == {"profile.json": "of another", "profile-2.json": "ours"}


def test_new_files_behind_a_url_and_their_removal() -> None:
    assert [write_new_file("memory://new/profile.json", [b"x", b"y"]) for _ in range(2)] == [1, 2]
    write_own_file("memory://new/profile.json", b"z")
    with fsspec.open("memory://new/profile.json") as file:
        assert file.read() == b"z"
    remove_file("memory://new/profile.json")
    remove_file("memory://new/profile.json")  # gone already
    assert write_new_file("memory://new/profile.json", [b"x"]) == 1


def test_a_link_that_leads_nowhere_has_the_name_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.symlink_to(tmp_path / "gone")
    assert write_new_file(str(path), [b"new"]) == 2
    assert path.is_symlink() and (tmp_path / "profile-2.json").read_bytes() == b"new"
