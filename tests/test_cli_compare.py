"""``lightning-flops compare`` and ``show``: what they print, and what they end with."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from lightning_flops import Comparison, LightningFlopsError, Profile, compare_profiles, render_text
from lightning_flops.cli import main
from lightning_flops.report.compare_text import render_comparison
from tests.analysis.slowed import slowed
from tests.analysis.trace_events import memory
from tests.golden_files import REWRITE_VARIABLE
from tests.report import compared

A, B = compared.run(), compared.slow_loader()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the logs of two runs, before and after."""
    for name, profile in (("before", A), ("after", B), ("untimed", compared.run(straying=()))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "profile.json").write_text(profile.to_json())
    monkeypatch.chdir(tmp_path)
    return tmp_path


TRACES = Path(__file__).parent / "data" / "traces"
RANKS = [TRACES / f"two_ranks_known_answers.rank{rank}.pt.trace.json" for rank in (0, 1)]
RESNET = TRACES / "resnet50_num_workers_0.pt.trace.json.gz"
PAGE = Path(__file__).parent.parent / "docs" / "compare.md"

SOURCES = ("before/profile.json", "after/profile.json")


def test_a_page_is_written_beside_what_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "before", "after", "--html", "new/difference.html"]) == 0
    comparison = compare_profiles(A, B, sources=SOURCES)
    assert capsys.readouterr() == (render_comparison(comparison), "")
    assert (folder / "new" / "difference.html").read_text(encoding="utf-8") == comparison.to_html()
    assert main(["compare", "--json", *SOURCES]) == 0
    assert Comparison.from_json(capsys.readouterr().out) == comparison


def test_the_page_shows_what_the_command_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wider = compared.wider(data_wait_ms=3.5)
    (folder / "after" / "profile.json").write_text(wider.to_json())
    assert main(["compare", "before", "after"]) == 0
    printed = capsys.readouterr().out
    text = PAGE.read_text()
    shown = text.split("```text\n", 1)[1].split("```", 1)[0]
    if os.environ.get(REWRITE_VARIABLE) == "1":
        PAGE.write_text(text.replace(f"```text\n{shown}```", f"```text\n{printed}```", 1))
        shown = printed
    assert shown == printed


def test_conditions_end_with_1_if_one_holds(capsys: pytest.CaptureFixture[str]) -> None:
    ratio = r"global_step_sec B/A is 1\.182, by noise between 1\.1\d+ and 1\.2\d+"
    for limit, status, verdict, why in (("1.05", 1, "holds", ""), ("1.18", 0, "does not hold", ": within noise")):
        condition = f"global_step_sec > {limit}"
        options = ["--quiet", "--fail-if", condition, "--fail-if", "params > 1"]
        assert main(["compare", *options, "before", "after"]) == status
        out, err = capsys.readouterr()
        first, second = err.replace("lightning-flops compare: --fail-if ", "").splitlines()
        assert re.fullmatch(rf"'{condition}' {verdict}: {ratio}{why}", first)
        assert out == "" and second == "'params > 1' does not hold: params B/A is 1"


@pytest.mark.parametrize(("how", "status"), [([], 3), (["--starved", "fail"], 1), (["--starved", "pass"], 0)])
def test_a_starved_run_leaves_conditions_on_the_wall_clock_open(
    how: list[str], status: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = compared.run(processor=compared.processor(8, lost=0.25))
    (folder / "after" / "profile.json").write_text(busy.to_json())
    assert main(["compare", "--quiet", *how, "--fail-if", "global_step_sec > 1.05", "before", "after"]) == status
    said = capsys.readouterr().err
    assert "is inconclusive: global_step_sec B/A is 1, but B had to wait for processors\n" in said
    # What is exact is judged all the same, and goes before.
    assert main(["compare", "--quiet", "--fail-if", "params >= 1", "--fail-if", "mfu < 1", "before", "after"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["before", "untimed"], "the steps cannot be compared: untimed/profile.json has no timed step"),
        (["before", "nowhere"], "nowhere: there is no such file or folder"),
        (
            ["before", str(RESNET)],
            "a trace and before/profile.json a profile: a trace's steps ran under torch.profiler",
        ),
        (
            ["--fail-if", "tokens_per_sec < 1", "before", "after"],
            "tokens_per_sec cannot be compared: not known in A: how",
        ),
        (
            ["--fail-if", "speed > 1", "before", "after"],
            "--fail-if speed > 1: speed cannot be compared: it is none of global_step_sec, samples_per_sec, "
            "tokens_per_sec, mfu, hfu, forward_flops, backward_flops, hardware_flops, data_wait_ratio, cpu_time_sec, "
            "params\n",
        ),
    ],
)
def test_what_cannot_be_compared_ends_with_2_and_the_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def traces(folder: Path) -> Path:
    """Beside the logs: a folder with the traces of two ranks, and one in which a kernel is slower."""
    for name, times in (("ranks", 1), ("slow", 2)):
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("of the user")
        for rank, source in enumerate(RANKS):
            slowed(source, folder / name / f"rank{rank}.pt.trace.json.gz", kernel="ampere_sgemm", times=times)
    return folder


def test_two_folders_of_ranks_traces_are_compared(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--json", "ranks", "slow", "--html", "new/difference.html"]) == 0
    page = (traces / "new" / "difference.html").read_text(encoding="utf-8")
    assert "<title>ranks and slow compared</title>" in page
    comparison = Comparison.from_json(capsys.readouterr().out)
    assert (comparison.a.source, comparison.b.source) == ("ranks", "slow")
    assert comparison.a.about == comparison.b.about and comparison.a.about.endswith(", 2 ranks, 3 steps")
    slower = comparison.tables["kernels"][0]
    # One call of 4 ms in a step, then of 8.
    assert (slower.name, slower.a_ns, slower.b_ns) == ("ampere_sgemm_128x64_nn", 4_000_000, 8_000_000)


def test_conditions_hold_for_figures_of_traces(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, allocated in (("a.json", 2_000), ("b.json", 2_000), ("larger.json", 3_000)):
        trace = json.loads(RANKS[0].read_bytes())
        (first, *_) = (event for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep#"))
        total = {"Addr": 0xA, "Total Allocated": allocated}
        trace["traceEvents"].append(memory(first["ts"] + 10, allocated, device=0, **total))
        (traces / name).write_text(json.dumps(trace))
    for condition, runs, status, said in (
        ("device_memory_peak_bytes > 1", ("a.json", "b.json"), 0, "does not hold: device_memory_peak_bytes B/A is 1\n"),
        (
            "device_memory_peak_bytes > 1.4",
            ("a.json", "larger.json"),
            1,
            "holds: device_memory_peak_bytes B/A is 1.5\n",
        ),
        ("global_step_sec > 1", ("ranks", "slow"), 2, "global_step_sec cannot be compared: single steps are not known"),
    ):
        assert main(["compare", "--fail-if", condition, *runs]) == status
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("path", ["before", "before/profile.json"])
def test_a_file_or_a_folder_of_logs_is_shown(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert Profile.load(path) == A == Profile.load(Path(path))
    assert main(["show", path]) == 0
    assert capsys.readouterr() == (str(A), "")
    assert main(["show", "--detailed", path]) == 0
    assert capsys.readouterr().out == render_text(A, detailed=True)
    assert main(["show", "--peak", "1400e9", path]) == 0
    assert "of 1.4 TFLOP/s (float32), as given." in capsys.readouterr().out.replace("\n  ", " ")


def test_what_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LightningFlopsError, match="nowhere: there is no such file or folder"):
        Profile.load("nowhere")
    assert main(["show", "nowhere"]) == 2
    assert capsys.readouterr() == ("", "lightning-flops: nowhere: there is no such file or folder\n")
