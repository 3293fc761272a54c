"""The example of several processes runs as it stands, by the commands of its page, and prints what the page shows.

``REWRITE_GOLDEN_FILES=1`` with the slow tests writes the output into the page anew; read what changed.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lightning_flops import Profile
from tests.golden_files import REWRITE_VARIABLE
from tests.ranks import REPOSITORY

PAGE = REPOSITORY / "docs" / "distributed.md"
LEFT_OUT = "[...]"

BATCH = 32
FIRST, SECOND, HEAD = (2 * BATCH * inputs * outputs for inputs, outputs in ((64, 256), (256, 64), (64, 10)))
PARAMS = (64 * 256 + 256) + (256 * 64 + 64) + (64 * 10 + 10)


@functools.cache
def train(*flags: str) -> tuple[str, Profile]:
    """What two processes print, and the job's profile."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
                *(str(REPOSITORY / "examples" / "train_ddp.py"), *flags),
            ],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "PYTHONIOENCODING": "utf-8",
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            },
            capture_output=True,
            encoding="utf-8",
            timeout=250,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (path,) = Path(folder).rglob("profile*.json")
        return done.stdout, Profile.from_json(path.read_text())


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("strategy", "shared", "copies"),
    [
        (None, 1, 2),
        pytest.param("fsdp2", 1, 2, marks=pytest.mark.slow),
        pytest.param("tensor", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_one_report_comes_out_for_both_processes(strategy: str | None, shared: int, copies: int) -> None:
    printed, profile = train(*([] if strategy is None else ["--strategy", strategy]))
    assert printed.count("Profile Summary at step ") == 1
    assert "All 2 ranks answered." in printed
    assert profile.flops.forward == (FIRST + SECOND) // shared + HEAD
    assert profile.flops.backward == (FIRST + 2 * SECOND) // shared + 2 * HEAD
    job = profile.ranks
    assert job is not None
    assert job.flops.model == 2 * profile.flops.model
    assert job.params == PARAMS


# ---- the page

SHOWN_OF_HEALTHY = (
    ("Profile Summary", "On:"),
    ("-- All ranks --", "Straggler:"),
    ("of each rank, a global step", "global step   "),
    ("of the traced step of", "waiting for other ranks"),
)
SHOWN_OF_SLOW = (("The other ranks wait", "of a step."),)
"""First and last line of each part of the output that the page shows, by what they have in them."""


def blocks() -> dict[str, str]:
    """What the page shows of the output of each command that it names."""
    found = re.findall(r"```bash\n(torchrun [^\n]+)\n```.*?```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return dict(found)


def flags_of(command: str) -> list[str]:
    launcher, _, flags = command.partition(" examples/train_ddp.py")
    assert launcher == "torchrun --nproc-per-node 2"
    return shlex.split(flags)


def shown(printed: str, parts: tuple[tuple[str, str], ...]) -> str:
    """The *parts* of what was printed, with a line between them for what is left out."""
    lines, kept, end = printed.splitlines(), [], 0
    for first, last in parts:
        begin = next(place for place in range(end, len(lines)) if first in lines[place])
        if begin > end:
            kept.append(LEFT_OUT)
        end = 1 + next(place for place in range(begin, len(lines)) if last in lines[place])
        kept += lines[begin:end]
    return "\n".join([*kept, LEFT_OUT]) + "\n"


COUNTS = re.compile(
    r"world size|data parallel|model parallel|batch size|params|fwd |bwd |recomputed|optimizer +0 |model FLOPs"
)


def told(block: str) -> list[str]:
    """The lines of tables in *block*: those that are of counts alone whole, of the others what stands first."""
    rows = [line for line in block.splitlines() if re.search(r"\S {2,}\S", line)]
    # A column is as wide as its widest cell, which may be a time.
    cells = [re.split(r" {2,}", line.strip()) for line in rows]
    return ["  ".join(row if COUNTS.match(line) else row[:1]) for line, row in zip(rows, cells, strict=True)]


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("part", "cause"),
    [
        (None, None),
        pytest.param("data", "its data wait takes ", marks=pytest.mark.slow),
        pytest.param("forward", "mostly in network.second", marks=pytest.mark.slow),
    ],
)
def test_the_page_shows_what_its_commands_print(part: str | None, cause: str | None) -> None:
    flags = "" if part is None else f" --slow-rank 1 --slow-part {part}"
    command = f"torchrun --nproc-per-node 2 examples/train_ddp.py{flags}"
    now = shown(train(*flags_of(command))[0], SHOWN_OF_HEALTHY if part is None else SHOWN_OF_SLOW)
    if os.environ.get(REWRITE_VARIABLE) == "1":
        before, found, after = PAGE.read_text().partition(f"{command}\n```")
        assert found, command
        PAGE.write_text(
            before + found + re.sub(r"```text\n.*?```", lambda _: f"```text\n{now}```", after, count=1, flags=re.DOTALL)
        )
    block = blocks()[command]
    assert sorted(told(block)) == sorted(told(now))  # collectives stand in the order of their times
    for text in (block, now):
        words = " ".join(text.split())
        assert cause is None or ("for rank 1:" in words and cause in words)
