"""The tutorial: its program runs, and its commands say what the page says of them, as many lines as it has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lightning_flops.cli import main
from tests.forks import run_fork
from tests.pages import LEFT_OUT, REPOSITORY, blocks, on_page

PAGE = REPOSITORY / "docs" / "tutorial.md"


def printed(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command of the page prints, which must end well."""
    program, *arguments = shlex.split(command)
    if program == "python":
        run = run_fork(["-W", "ignore", *arguments], folder=folder, imports=("torch", "numpy"), environment={})
        assert run.returncode == 0, run.stderr
        return "".join(line for line in run.stderr.splitlines(True) if line.startswith("lightning-flops: "))
    assert main(arguments) == 0
    return "".join(capsys.readouterr())


def test_the_tutorial_is_what_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (program,) = blocks(PAGE, "python")
    (tmp_path / "train.py").write_text(program.text)
    said = []
    for command, output in zip(blocks(PAGE, "bash"), blocks(PAGE, "text"), strict=True):
        said.append(printed(command.text, tmp_path, capsys))
        cut = output.text.rstrip().endswith(LEFT_OUT)
        lines = said[-1].splitlines()[: len(output.text.splitlines()) - cut]
        on_page(output, "\n".join([*lines, *([LEFT_OUT] * cut), ""]))
    slow, report, fixed, compared, verdicts = said
    for line, folder in ((slow, "slow"), (fixed, "fixed")):
        # Forward 2 x 32 x 1024 x (64 + 8), backward 2 x 32 x 1024 x (64 + 2 x 8).
        figures = r"lightning-flops: FLOPs of step 5: 9\.96 MFLOPs and .* a step, .* samples/s \(wall clock\)\."
        assert re.fullmatch(rf"{figures} Page: {folder}/lightning_flops/profile\.html\n", line)
    assert re.search(r"^data wait [5-9]\d\.\d% █", report, re.MULTILINE)
    assert re.search(r"^By cause: .*less waiting -", compared, re.MULTILINE) and "Most of it: data wait -" in compared
    assert [re.sub(r" B/A is .*", "", line) for line in verdicts.splitlines()] == [
        "lightning-flops compare: --fail-if 'hardware_flops > 1' does not hold: hardware_flops",
        "lightning-flops compare: --fail-if 'cpu_time_sec > 1.5' does not hold: cpu_time_sec",
    ]
