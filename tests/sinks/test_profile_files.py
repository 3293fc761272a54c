"""Where a profile is read from: a file, a folder of logs, a URL."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from lightning_flops.errors import LightningFlopsError
from lightning_flops.schema.profile import Profile, Spread, ThroughputSummary
from lightning_flops.sinks.profile_files import KINDS, read_report, read_runs, traces_at
from tests.report.compared import run
from tests.report.test_text import profile_of

PROFILE = run()


def throughput(batches: int) -> ThroughputSummary:
    cost = Spread(average=1.0, maximum=1.0, minimum=1.0)
    return ThroughputSummary(
        batches=batches, reader_ratio=None, reader_cost_sec=None, batch_cost_sec=cost, ips=cost, ips_unit="batches/s"
    )


def write(path: Path, profile: Profile | ThroughputSummary, *, at: float | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profile.to_json(), encoding="utf-8")
    if at is not None:
        os.utime(path, (at, at))
    return path


def test_a_profile_of_a_model_that_was_not_described_is_read(tmp_path: Path) -> None:
    undescribed = replace(profile_of("unknown"), modules=())
    assert read_profile(write(tmp_path / "profile.json", undescribed))[0] == undescribed


def numbered(number: int) -> Profile:
    return run(notes=(f"{number}",))


def read_profile(path: str | Path) -> tuple[Profile, str]:
    return read_report(path, "profile")


def number_at(path: Path) -> str:
    return read_profile(path)[0].notes[0]


def test_a_file_is_read_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "before.json", PROFILE)
    assert read_profile(path) == (PROFILE, str(path))
    monkeypatch.chdir(tmp_path)
    assert read_profile("before.json") == (PROFILE, "before.json")


def test_a_pipe_is_read_as_a_file_is(tmp_path: Path) -> None:
    with subprocess.Popen(["cat", str(write(tmp_path / "profile.json", PROFILE))], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pipe = f"/dev/fd/{process.stdout.fileno()}"
        assert traces_at(pipe) is None and read_profile(pipe) == (PROFILE, pipe)


def test_a_folder_stands_for_its_own_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "logs" / "deeper" / "profile.json", numbered(2), at=2e9)
    write(tmp_path / "logs" / "profile.json", numbered(1), at=1e9)
    assert number_at(tmp_path / "logs") == "1"
    monkeypatch.chdir(tmp_path)
    assert read_profile("logs")[1] == "logs/profile.json"
    assert read_profile("logs/")[0].notes == ("1",)


def test_of_folders_below_it_the_last_that_was_written(tmp_path: Path) -> None:
    for number, moment in ((0, 1e9), (1, 3e9), (2, 2e9)):
        write(tmp_path / f"version_{number}" / "profile.json", numbered(number), at=moment)
    assert number_at(tmp_path) == "1"


def test_of_several_windows_the_last_and_of_several_loops_the_training(tmp_path: Path) -> None:
    for name, number in (
        ("profile.json", 1),
        ("profile-2.json", 2),
        ("profile-10.json", 10),
        ("profile.predict.json", 11),
        ("profile.predict-12.json", 12),
        ("profile.rank3.json", 13),
        ("throughput.json", 14),
    ):
        write(tmp_path / name, numbered(number), at=1e9)
    assert number_at(tmp_path) == "10"
    os.utime(tmp_path / "profile.predict.json", (2e9, 2e9))  # that was written later
    assert number_at(tmp_path) == "10"
    os.utime(tmp_path / "profile.predict.json", (1e9, 1e9))
    for name in ("profile.json", "profile-2.json", "profile-10.json"):
        (tmp_path / name).unlink()
    assert number_at(tmp_path) == "12"


def test_a_run_without_a_profile_stands_for_its_throughput(tmp_path: Path) -> None:
    for name, batches in (("throughput.json", 1), ("throughput-2.json", 2), ("throughput.predict.json", 3)):
        write(tmp_path / "timed" / "lightning_flops" / name, throughput(batches), at=1e9)
    for kinds in (KINDS, KINDS[1:]):
        found, file = read_report(tmp_path / "timed", *kinds)
        assert (found, Path(file).name) == (throughput(2), "throughput-2.json")
        assert read_report(tmp_path / "timed" / "lightning_flops" / "throughput.json", *kinds)[0] == throughput(1)
    renamed = write(tmp_path / "before.json", throughput(4))
    assert read_report(renamed, *KINDS) == (throughput(4), str(renamed))
    assert traces_at(str(tmp_path / "timed")) is None and traces_at(str(renamed)) is None  # it ends as traces' files do

    write(tmp_path / "both" / "throughput.json", throughput(5), at=2e9)
    write(tmp_path / "both" / "profile.json", numbered(1), at=1e9)
    assert read_report(tmp_path / "both", *KINDS)[0] == numbered(1)
    assert read_report(tmp_path / "both", "throughput")[0] == throughput(5)


def test_what_is_no_profile_or_no_throughput_is_named(tmp_path: Path) -> None:
    timed, profiled = write(tmp_path / "throughput.json", throughput(1)), write(tmp_path / "p" / "a.json", PROFILE)
    for refuses in (read_profile, read_runs):
        with pytest.raises(LightningFlopsError, match="this is the throughput of a run, and its profile is needed"):
            refuses(str(timed))
    for path, why in (
        (profiled, "this is the profile of a run, and its throughput is needed here"),
        (profiled.parent, "no throughput.json is in this folder or below it"),
    ):
        with pytest.raises(LightningFlopsError, match=re.escape(why)):
            read_report(path, "throughput")
    with pytest.raises(LightningFlopsError, match=r"no profile\.json or throughput\.json is in this folder"):
        read_report(profiled.parent, *KINDS)


def test_a_url_is_read_as_a_path_is() -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/runs/main/profile.json", PROFILE.to_json().encode())
    try:
        assert read_profile("memory://runs/main/profile.json") == (PROFILE, "memory://runs/main/profile.json")
        found, shown = read_profile("memory://runs")
        assert found == PROFILE and shown == "memory:///runs/main/profile.json"
    finally:
        files.rm("/runs", recursive=True)


def test_the_folder_of_our_files_is_no_folder_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "version_0" / "lightning_flops" / "profile.json", numbered(1), at=1e9)
    write(tmp_path / "version_0" / "deeper" / "lightning_flops" / "profile.json", numbered(2), at=2e9)
    write(tmp_path / "lightning_flops" / "profile.predict.json", numbered(3), at=3e9)
    assert number_at(tmp_path / "version_0") == "1"
    assert [run.name for run in read_runs(str(tmp_path))] == [
        f"{tmp_path.name} predict",
        "version_0",
        "version_0/deeper",
    ]


def test_what_is_no_file_is_passed_over_and_a_link_to_one_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "profile.json")  # reading it would wait for ever
    with pytest.raises(LightningFlopsError, match=r"no profile\.json is in this folder"):
        read_runs(str(tmp_path))
    (tmp_path / "profile-2.json").symlink_to(write(tmp_path / "kept" / "other.json", numbered(2)))
    assert number_at(tmp_path) == "2"
