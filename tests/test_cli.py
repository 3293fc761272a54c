from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from lightning_flops.cli import main
from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.report.trace_text import render_traces
from lightning_flops.trace import load_trace
from tests.analysis.in_memory import analyze_traces
from tests.forks import run_fork

TRACES = Path(__file__).parent / "data" / "traces"
RANKS = [str(TRACES / f"two_ranks_known_answers.rank{rank}.pt.trace.json") for rank in (0, 1)]


def test_a_folder_stands_for_the_traces_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in RANKS:
        (tmp_path / Path(file).name).write_bytes(Path(file).read_bytes())
    (tmp_path / "profile.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("of the user")
    assert main(["trace", "--json", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [Path(trace["source"]).name for trace in found["traces"]] == [Path(file).name for file in RANKS]
    (tmp_path / "empty").mkdir()
    assert main(["trace", str(tmp_path / "empty")]) == 2
    assert "no trace (.json, .json.gz) is in this folder" in capsys.readouterr().err


def test_json_holds_every_table_and_text_as_many_rows_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--json", *RANKS]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [trace["source"] for trace in found["traces"]] == RANKS
    assert [one["compute_over_median"] for one in found["ranks"]["ranks"]] == [5000 / 5250, 5500 / 5250]
    assert found["traces"][0]["device_metrics"][0]["occupancy_percent"] == 22.0
    for rows, cut in (("1", True), ("0", False)):
        assert main(["trace", "--rows", rows, RANKS[0]]) == 0
        assert ("(and 2 more)" in capsys.readouterr().out) == cut


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "the file is empty"),
        ('{"traceEvents": [{"ph": "X"', "the file ends in the middle"),
        ('{"a": 1}', 'a JSON object without a list "traceEvents"'),
    ],
)
def test_a_file_that_cannot_be_read_is_named_on_standard_error(
    content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    assert main(["trace", RANKS[0], str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"lightning-flops: {path}: ")
    assert words in err
    assert err.count("\n") == 1


def test_two_files_of_one_rank_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(Path(RANKS[0]).read_bytes())
    assert main(["trace", RANKS[0], str(copy)]) == 2
    said = f"lightning-flops: {RANKS[0]} and {copy} are both of rank 0: give one trace for each rank\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(
    "arguments", [[], ["trace"], ["unknown"], ["trace", "--rows", "-1", "x"], ["trace", "--rows", "few", "x"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: lightning-flops" in capsys.readouterr().err


def test_the_module_is_the_command() -> None:
    done = run_fork(["-m", "lightning_flops", "trace", RANKS[0]], folder=Path.cwd())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == render_traces(analyze_traces([load_trace(RANKS[0])], formulas=recorded_work))


def test_a_reader_that_closes_early_is_no_error() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from lightning_flops.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    trace = TRACES / "resnet50_num_workers_0.pt.trace.json.gz"
    command = [sys.executable, "-c", program, "trace", "--json", str(trace)]
    # Unbuffered, Python would take a write that the pipe took a part of for a whole one.
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "{\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=120) == 0


def test_ctrl_c_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightning_flops.trace.many.analyze_file", Mock(side_effect=KeyboardInterrupt))
    assert main(["trace", RANKS[0]]) == 130
    assert capsys.readouterr() == ("", "")
