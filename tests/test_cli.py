from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_flops import __version__
from lightning_flops.analysis.trace import analyze_traces, load_trace
from lightning_flops.cli import main
from lightning_flops.report.trace_text import render_traces

TRACES = Path(__file__).parent / "data" / "traces"
RANKS = [str(TRACES / f"two_ranks_known_answers.rank{rank}.pt.trace.json") for rank in (0, 1)]


def run(*arguments: str, program: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, started as ``python -m lightning_flops`` or by a *program*."""
    start = ["-m", "lightning_flops"] if program is None else ["-c", program]
    return subprocess.run([sys.executable, *start, *arguments], capture_output=True, text=True, timeout=120)


def test_a_trace_is_printed_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", RANKS[0]]) == 0
    assert capsys.readouterr() == (render_traces(analyze_traces([load_trace(RANKS[0])])), "")


def test_several_traces_are_compared_rank_by_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *RANKS]) == 0
    assert "rank 1 computes longest" in capsys.readouterr().out


def test_json_holds_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--json", *RANKS]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [trace["source"] for trace in found["traces"]] == RANKS
    assert found["ranks"]["straggler"] == 1
    assert found["traces"][0]["device_metrics"][0]["occupancy_percent"] == 22.0


def test_rows_of_long_tables_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--rows", "1", RANKS[0]]) == 0
    assert "(2 more)" in capsys.readouterr().out
    assert main(["trace", "--rows", "0", RANKS[0]]) == 0
    assert "more)" not in capsys.readouterr().out


def test_children_of_operators_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--children", RANKS[0]]) == 0
    assert "\n  ampere_sgemm_128x64_nn" in capsys.readouterr().out


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
    assert main(["trace", RANKS[0], str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"lightning-flops: {path}: ")
    assert words in err
    assert err.count("\n") == 1


def test_two_files_of_one_rank_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", RANKS[0], RANKS[0]]) == 1
    assert "are both of rank 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["trace"], ["unknown"], ["trace", "--rows", "-1", "x"], ["trace", "--rows", "few", "x"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: lightning-flops" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"lightning-flops {__version__}\n"


def test_the_module_is_the_command() -> None:
    done = run("trace", RANKS[0])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == render_traces(analyze_traces([load_trace(RANKS[0])]))
    assert run("trace", "/nowhere/trace.json").returncode == 1


def test_traces_are_read_without_torch_or_a_framework() -> None:
    blocked = ("torch", "lightning", "pytorch_lightning", "deepspeed", "tensorboard")
    program = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"  # importing one raises
        "from lightning_flops.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = run("trace", *RANKS, program=program)
    assert (done.returncode, done.stderr) == (0, "")
    assert "rank 1 computes longest" in done.stdout


def test_a_missing_numpy_is_named_with_what_installs_it() -> None:
    program = (
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numpy':\n"
        "            raise ModuleNotFoundError('no numpy', name='numpy')\n"
        "sys.meta_path.insert(0, Without())\n"
        "from lightning_flops.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = run("trace", RANKS[0], program=program)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "lightning-flops: reading traces needs numpy: pip install 'lightning-flops[trace]'\n"


def test_a_reader_that_closes_early_is_no_error() -> None:
    command = [
        sys.executable,
        "-m",
        "lightning_flops",
        "trace",
        "--json",
        str(TRACES / "resnet50_num_workers_0.pt.trace.json.gz"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "{\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=120) == 0


def test_a_terminal_without_unicode_gets_the_text() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_flops", "trace", str(TRACES / "resnet50_num_workers_0.pt.trace.json.gz")],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"SM efficiency" in done.stdout
