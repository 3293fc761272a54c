from __future__ import annotations

import itertools
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lightning_flops import Comparison, Profile, compare_profiles, render_text
from lightning_flops.analysis.rates import COPY, measured_file, measured_peaks
from lightning_flops.cli import main
from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.measure.timing.processor_wait import ProcessorWatch
from lightning_flops.records import ProcessorLoss
from lightning_flops.report.trace_document import render_traces
from lightning_flops.schema.profile import ThroughputSummary
from lightning_flops.trace.read import load_trace
from tests.analysis.in_memory import analyze_traces, known
from tests.analysis.test_timing import run as timed_run
from tests.analysis.trace_events import RANKS, RESNET, slowed
from tests.fake_clock import FakeNow
from tests.forks import run_fork
from tests.pages import REPOSITORY, blocks, on_page
from tests.report import compared

FILES = [str(file) for file in RANKS]


def test_a_folder_stands_for_the_traces_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in FILES:
        (tmp_path / Path(file).name).write_bytes(Path(file).read_bytes())
    (tmp_path / "profile.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("of the user")
    assert main(["trace", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [Path(trace["source"]).name for trace in found["traces"]] == [Path(file).name for file in FILES]
    (tmp_path / "empty").mkdir()
    assert main(["trace", str(tmp_path / "empty")]) == 2
    assert "no trace (.json, .json.gz) is in this folder" in capsys.readouterr().err


def test_json_holds_every_table_and_text_as_many_rows_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--json", *FILES]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [trace["source"] for trace in found["traces"]] == FILES
    assert found["traces"][0]["device_metrics"][0]["occupancy_percent"] == 22.0
    for rows, cut in (("1", True), ("0", False)):
        assert main(["trace", "--rows", rows, FILES[0]]) == 0
        assert ("(and 2 more)" in capsys.readouterr().out) == cut


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trace"],
        ["unknown"],
        ["trace", "--rows", "-1", "x"],
        ["trace", "--rows", "few", "x"],
        ["show", "--peak", "bfloat16=312e12", "--peak", "float32=67e12", "x"],  # of which one would be dropped
        ["show", "--peak", "bfloat16=312e12", "--peak", "67e12", "x"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: lightning-flops" in capsys.readouterr().err


def test_the_module_is_the_command() -> None:
    done = run_fork(["-m", "lightning_flops", "trace", FILES[0]], folder=Path.cwd())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == render_traces(analyze_traces([load_trace(FILES[0])], formulas=recorded_work))


def test_a_reader_that_closes_early_is_no_error() -> None:
    code = "import sys; sys.modules['torch'] = None; from lightning_flops.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "trace", "--json", str(RESNET)]
    # Unbuffered, Python would take a write that the pipe took a part of for a whole one.
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "{\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=120) == 0


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("lightning_flops.analysis.trace_report.analyze_one", Mock(side_effect=KeyboardInterrupt))
    assert main(["trace", FILES[0]]) == 130
    assert capsys.readouterr() == ("", "")


# ---- ``lightning-flops peak``: what it measures, and where reports find it


def measure(waited: float, now: FakeNow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The command on a machine where this process waited so much of the time for a processor.

    By its clock a product takes 20 ms or 10, and a copy of 64 MiB 50 ms or 25.
    """
    product, copy = itertools.cycle([0.02, 0.01]), itertools.cycle([0.05, 0.025])
    monkeypatch.setattr(torch, "mm", lambda *given, out: now.sleep(next(product)))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *given: now.sleep(next(copy)))
    loss = ProcessorLoss(seconds=1.0, batches_sec=(), waited_share=waited)
    monkeypatch.setattr(ProcessorWatch, "loss", lambda watch: loss)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return main(["peak"])


def test_products_of_each_dtype_and_a_copy_are_measured_and_kept(
    now: FakeNow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(0.0, now, tmp_path, monkeypatch) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.endswith(f"It is kept in {measured_file(platform.node())}.\n")
    assert Path(measured_file(platform.node())).is_relative_to(tmp_path)
    found = measured_peaks(platform.node(), platform.machine())
    assert {"float32", "float64", COPY} <= set(found) and min(found.values()) > 1e6
    assert measured_peaks("elsewhere", platform.machine()) == {} == measured_peaks("", platform.machine())


def test_a_product_is_two_operations_for_each_of_its_multiplications_and_a_copy_reads_and_writes(
    now: FakeNow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest counts; the first size, 256 by 256, takes long enough."""
    assert measure(0.0, now, tmp_path, monkeypatch) == 0
    found = measured_peaks(platform.node(), platform.machine())
    assert found["float32"] == pytest.approx(2 * 256**3 / 0.01)
    assert found[COPY] == pytest.approx(2 * 2**26 / 0.025)


def test_what_was_measured_beside_other_programs_is_not_kept(
    now: FakeNow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(0.1, now, tmp_path, monkeypatch) == 1
    assert "for 10% of the time it waited for processors, so the figures are too low, and not kept" in (
        capsys.readouterr().err
    )
    assert not Path(measured_file(platform.node())).exists()


# ---- ``lightning-flops compare`` and ``show``: what they print, and what they end with

A, B = compared.run(), compared.slow_loader()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the logs of two runs, before and after."""
    for name, profile in (("before", A), ("after", B), ("untimed", compared.run(straying=()))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "profile.json").write_text(profile.to_json())
    monkeypatch.chdir(tmp_path)
    return tmp_path


SOURCES = ("before/profile.json", "after/profile.json")


def test_a_page_is_written_beside_what_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "before", "after", "--html", "new/difference.html"]) == 0
    comparison = compare_profiles(A, B, sources=SOURCES)
    assert capsys.readouterr() == (render_text(comparison), "")
    assert (folder / "new" / "difference.html").read_text(encoding="utf-8") == comparison.to_html()
    assert main(["compare", "--json", *SOURCES]) == 0
    assert Comparison.from_json(capsys.readouterr().out) == comparison


def test_the_page_shows_what_the_command_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wider = compared.wider(data_wait_ms=3.5)
    (folder / "after" / "profile.json").write_text(wider.to_json())
    assert main(["compare", "before", "after"]) == 0
    printed = capsys.readouterr().out
    assert on_page(blocks(REPOSITORY / "docs" / "compare.md", "text")[0], printed) == printed


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


@pytest.mark.parametrize(("how", "status"), [([], 3), (["--inconclusive", "fail"], 1), (["--inconclusive", "pass"], 0)])
def test_a_starved_run_leaves_conditions_on_the_wall_clock_open(
    how: list[str], status: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = compared.run(processor=compared.processor(8, lost=0.25))
    (folder / "after" / "profile.json").write_text(busy.to_json())
    assert main(["compare", "--quiet", *how, "--fail-if", "global_step_sec > 0.9", "before", "after"]) == status
    said = capsys.readouterr().err
    assert re.search("is inconclusive: global_step_sec B/A is 1, by .*, but B had to wait for processors\n", said)
    # Without these waits B is no slower, whatever they took.
    assert main(["compare", "--quiet", *how, "--fail-if", "global_step_sec > 1.05", "before", "after"]) == 0
    # What is exact is judged all the same, and goes before.
    assert main(["compare", "--quiet", "--fail-if", "params >= 1", "--fail-if", "mfu < 1", "before", "after"]) == 1


def test_several_runs_a_side_stand_on_both_sides_of_two_dashes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("again", "later"):
        (folder / name).mkdir()
        (folder / name / "profile.json").write_text((A if name == "again" else B).to_json())
    several = compare_profiles(
        [A, A], [B, B], sources=(["before/profile.json", "again/profile.json"], ["after", "later"])
    )
    condition = ["--fail-if", "global_step_sec > 1.18"]
    assert main(["compare", "--json", "before", "again", "--", "after", "later", *condition]) == 1
    out, err = capsys.readouterr()
    found = Comparison.from_json(out)
    assert (found.a.source, found.a.runs, found.b.runs) == ("before/profile.json and 1 more", 2, 2)
    assert found.step == several.step and found.step.noise_ns == 0
    assert "holds: global_step_sec B/A is 1.182\n" in err
    assert main(["compare", "before", "--json", "after"]) == 0  # an option may stand between two runs, as ever
    for wrong in (["before", "again", "after"], ["before", "again", "--"], ["before", "--", "after", "--", "later"]):
        assert main(["compare", *wrong]) == 2
        assert "give two runs, or the runs of each side with -- between them" in capsys.readouterr().err
    assert main(["compare", "before", "again", "--", "after", str(RESNET)]) == 2
    assert "is a trace: of traces one run a side is compared" in capsys.readouterr().err


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
def test_incomparable_runs_end_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_two_folders_of_ranks_traces_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, times in (("ranks", 1), ("slow", 2)):
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("of the user")
        for rank, source in enumerate(RANKS):
            slowed(source, folder / name / f"rank{rank}.pt.trace.json.gz", kernel="ampere_sgemm", times=times)
    assert main(["compare", "--json", "ranks", "slow", "--html", "new/difference.html"]) == 0
    page = (folder / "new" / "difference.html").read_text(encoding="utf-8")
    assert "<title>ranks and slow compared</title>" in page
    comparison = Comparison.from_json(capsys.readouterr().out)
    assert (comparison.a.source, comparison.b.source) == ("ranks", "slow")
    assert comparison.a.about == comparison.b.about and comparison.a.about.endswith(", 2 ranks, 3 steps")
    slower = comparison.tables["kernels"][0]
    # One call of 4 ms in a step, then of 8.
    assert (slower.name, slower.a_ns, slower.b_ns) == ("ampere_sgemm_128x64_nn", 4_000_000, 8_000_000)


@pytest.mark.parametrize("path", ["timed", "timed/throughput.json"])
def test_the_throughput_of_a_run_without_a_profile_is_shown(
    path: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = known(timed_run([(0.5, 0.5, 8), (0.5, 1.5, 8), (2.0, 3.0, 4)]))
    (folder / "timed").mkdir()
    (folder / "timed" / "throughput.json").write_text(summary.to_json())
    assert main(["show", path]) == 0
    printed = capsys.readouterr().out
    assert printed == str(summary)
    assert re.search(
        r"reader_cost +1\.000000 +2\.000000 +0\.500000\nbatch_cost +2\.666667 .*\nips +2\.500000 ", printed
    )
    assert main(["show", "--json", path]) == 0
    assert ThroughputSummary.from_json(capsys.readouterr().out) == summary


def test_runs_without_a_profile_are_compared_by_their_throughput(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, wait in (("before", 0.5), ("timed", 0.25)):  # the first has a profile, too
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "throughput.json").write_text(known(timed_run([(wait, 0.5, 8)] * 20)).to_json())
    conditions = ["--fail-if", "samples_per_sec > 1.3", "--fail-if", "reader_cost_sec > 1"]
    assert main(["compare", "--json", *conditions, "before", "timed/throughput.json"]) == 1
    out, err = capsys.readouterr()
    comparison = Comparison.from_json(out)
    assert (comparison.kind, comparison.a.source) == ("throughput", "before/throughput.json")
    assert "'samples_per_sec > 1.3' holds: samples_per_sec B/A is 1.333\n" in err
    assert "'reader_cost_sec > 1' does not hold: reader_cost_sec B/A is 0.5\n" in err
    assert main(["compare", "timed", "timed", "--", "before", "timed"]) == 0
    assert "by 2 and 2 runs" in capsys.readouterr().out.replace("\n", " ")
    assert main(["compare", "after", "timed"]) == 2
    assert "after: no throughput.json is in this folder or below it" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["before", "before/profile.json"])
def test_a_file_or_a_folder_of_logs_is_shown(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert Profile.load(path) == A == Profile.load(Path(path))
    assert main(["show", path]) == 0
    assert capsys.readouterr() == (str(A), "")
    assert main(["show", "--detailed", path]) == 0
    assert capsys.readouterr().out == render_text(A, detailed=True)
    assert main(["show", "--json", path]) == 0
    assert Profile.from_json(capsys.readouterr().out) == A
    assert main(["show", "--peak", "1400e9", path]) == 0
    assert "of 1.4 TFLOP/s (float32), as given." in capsys.readouterr().out.replace("\n  ", " ")
    assert main(["show", "--peak", "bf16=9e12,fp32=1400e9", path]) == 0
    assert "of 1.4 TFLOP/s (float32), as given." in capsys.readouterr().out.replace("\n  ", " ")


@pytest.mark.parametrize("command", ["show", "report", "compare", "compare after"])
@pytest.mark.parametrize(
    "place",
    [
        (("modules", 0, "name"), "other"),
        (("modules", 1, "times", "own_backward_sec"), 1e300),
        (("modules", 1, "total_bytes", "forward"), -1e9),
        (("timing", "global_step", "steps_sec"), []),
        (("budget", "wall_ns"), 0),
    ],
)
def test_a_profile_that_no_run_writes_is_one_line_that_names_its_file(
    command: str, place: tuple[tuple[str | int, ...], Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (*path, last), value = place
    content = json.loads(A.to_json())
    part: Any = content
    for one in path:
        part = part[one]
    assert last in part if isinstance(part, dict) else part[last]
    part[last] = int(value) if isinstance(part[last], int) else value
    Path("before/profile.json").write_text(json.dumps(content))
    arguments = [*command.split(), "before"] if "after" in command else [*command.split(), "before/profile.json"]
    assert main([*arguments, "after"] if command == "compare" else arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "before/profile.json: its figures do not fit together: " in line
