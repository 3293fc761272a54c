"""SIGTERM, SIGINT and SIGKILL in every state of a run: a program ends as without us, and no file is half there."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.forks import run_fork
from tests.ranks import LIGHTNING

PROGRAMS = {
    # How each ends by itself at SIGTERM and SIGINT; None: it does not outlive the signal.
    "loop": (None, "KeyboardInterrupt"),
    "lightning": ("SIGTERMException", "SystemExit"),
}
STATES = ("waiting", "counting", "settling", "timing", "tracing", "report", "finish")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_signal_ends_the_program_as_without_us(
    program: str, state: str, number: signal.Signals, tmp_path: Path
) -> None:
    done = run_fork(
        ["-W", "ignore", "-m", "tests.run.signal_me", program, state, str(int(number))],
        folder=tmp_path,
        imports=LIGHTNING,
        timeout_sec=100.0,
        environment={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert (tmp_path / "sent").exists(), done.stderr
    ends = dict(zip((signal.SIGTERM, signal.SIGINT), PROGRAMS[program], strict=True)).get(number)
    if ends is None:
        assert done.returncode == -number, done.stderr
    else:
        ends = "itself" if (number, state) == (signal.SIGTERM, "finish") else ends  # the training is over
        assert done.stdout.splitlines()[-1] == f"ended by {ends}, left []", done.stderr
    for path in tmp_path.rglob("lightning_flops/*"):
        assert path.suffix != ".draft" or number == signal.SIGKILL
        if path.suffix == ".json":
            json.loads(path.read_text())
