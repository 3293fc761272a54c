"""``lightning-flops report``: the files it finds, where it writes the page, what it says of files it cannot read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightning_flops.cli import main
from lightning_flops.report.html_page import bundled, packed, profile_view, render_page
from lightning_flops.schema import codec
from lightning_flops.schema.profile import Profile, ProfiledRun
from lightning_flops.sinks.profile_files import read_runs
from tests.page import samples
from tests.report.test_text import profile_of

FIRST, SECOND = (Profile.from_json(profile_of(name).to_json()) for name in ("mlp", "untimed"))
RANKS = Profile.from_json(samples.many_ranks().to_json())  # as a file has it: a whole number is a float in some fields


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Two runs, one of which was profiled eleven times, has a predict loop, and files that are something else."""
    run, other = (tmp_path / "logs" / "digits" / version for version in ("version_0", "version_1"))
    run.mkdir(parents=True)
    other.mkdir()
    first = ("profile.json", *(f"profile-{number}.json" for number in range(2, 11)))
    for name in (*first, "profile.predict.json", "profile.rank1.json"):
        (run / name).write_text(FIRST.to_json())
    (run / "profile-11.json").write_text(SECOND.to_json())
    (other / "profile.json").write_text(RANKS.to_json())
    for name in ("throughput.json", "profile.txt", "my_profile.json", "profile-x.json", "events.out.tfevents.1"):
        (run / name).write_text("{}")
    return tmp_path / "logs"


def test_every_run_of_a_folder_is_found_with_its_windows_in_their_order(logs: Path) -> None:
    runs = {run.name: run for run in read_runs(str(logs))}
    assert {name: len(run.windows) for name, run in runs.items()} == {
        "digits/version_0": 11,
        "digits/version_0 predict": 1,
        "digits/version_0 rank1": 1,
        "digits/version_1": 1,
    }
    assert runs["digits/version_0"].windows[-1] == SECOND  # the eleventh is not taken for the second
    assert runs["digits/version_1"].windows == (RANKS,)
    assert not any(run.problems for run in runs.values())
    assert [run.name for run in read_runs(str(logs / "digits" / "version_1"))] == ["version_1"]


def test_a_page_lies_beside_its_file_in_its_folder_or_where_it_is_asked_for(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = logs / "digits" / "version_0" / "profile-11.json"
    assert main(["report", str(path)]) == 0
    page = path.with_suffix(".html")
    assert capsys.readouterr() == (f"{page}\n", "")
    assert page.read_text() == render_page([ProfiledRun(name="profile-11.json", windows=(SECOND,))])
    assert main(["report", str(logs), "-o", str(logs / "new" / "page.html")]) == 0
    assert not (logs / "profile.html").exists()
    assert (logs / "new" / "page.html").read_text().count('<script type="text/plain"') == 14
    monkeypatch.chdir(tmp_path)
    assert main(["report", f"file://{logs}"]) == 0
    assert (tmp_path / "profile.html").is_file() and not (logs / "profile.html").exists()
    assert main(["report", str(logs), "-o", str(logs / "digits")]) == 2  # a folder


def test_a_damaged_file_costs_a_line_and_no_other_window(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = logs / "digits" / "version_0" / "profile-2.json"
    damaged.write_text(FIRST.to_json()[:-100])
    assert main(["report", str(logs)]) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"lightning-flops: {damaged}: the profile cannot be read") and said.count("\n") == 1
    assert "profile-2.json: the profile cannot be read" in (logs / "profile.html").read_text()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("nowhere", None, "there is no such file or folder"),
        ("nosuch://a", None, "cannot be read: ValueError: Protocol not known"),
        ("", None, "no profile.json is in this folder or below it"),
        ("broken.json", b"{", "the profile cannot be read"),
        ("trace.json", b'{"traceEvents": []}', "`schema_version`; `lightning-flops trace` reads traces"),
        ("binary.json", b"\xff\xfe\x00", "this is no profile (not UTF-8); `lightning-flops trace` reads traces"),
    ],
)
def test_what_is_no_profile_ends_with_a_reason(
    name: str, content: bytes | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = name if "://" in name else str(tmp_path / name).rstrip("/")
    if content is not None:
        Path(path).write_bytes(content)
    assert main(["report", path]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"lightning-flops: {path}: ") and reason in said.err
    assert not list(tmp_path.rglob("*.html"))


def test_the_page_is_one_file_that_names_no_other() -> None:
    page = RANKS.to_html()
    assert page == Profile.from_json(RANKS.to_json()).to_html()
    without_scripts = page.replace(bundled("page.js"), "").replace(bundled("style.css"), "")
    assert not re.findall(r"""(?:src|href|action|url)\s*[=(]""", without_scripts)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert re.fullmatch(
        r"default-src 'none'; script-src 'sha256-[\w+/=]{44}'; style-src 'sha256-[\w+/=]{44}'; "
        r"base-uri 'none'; form-action 'none'",
        policy[1],
    )


def test_ten_thousand_modules_are_a_page_of_little_data() -> None:
    # A browser opens it in half a second; what takes that time grows with this data.
    view = codec.dump(profile_view(samples.of_modules(10_000)), indented=False)
    assert len(view) < 5_500_000 and len(packed(json.loads(view))) < 250_000
