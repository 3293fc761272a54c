"""The example of several processes runs as it stands, by the commands of its page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_flops import Profile
from tests.analysis.in_memory import known
from tests.ranks import REPOSITORY, environment_of_ranks

BATCH = 32
FIRST, SECOND, HEAD = (2 * BATCH * inputs * outputs for inputs, outputs in ((64, 256), (256, 64), (64, 10)))
PARAMS = (64 * 256 + 256) + (256 * 64 + 64) + (64 * 10 + 10)


def train(folder: Path, *flags: str) -> tuple[str, Profile]:
    """What two processes print, and the job's profile."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(REPOSITORY / "examples" / "train_ddp.py"), *flags],
        cwd=folder,
        env=environment_of_ranks({"PYTHONIOENCODING": "utf-8", "CUDA_VISIBLE_DEVICES": ""}),
        capture_output=True,
        encoding="utf-8",
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.rglob("profile*.json")
    return done.stdout, Profile.from_json(path.read_text())


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("strategy", "shared"),
    [("ddp", 1), pytest.param("fsdp2", 1, marks=pytest.mark.slow), pytest.param("tensor", 2, marks=pytest.mark.slow)],
)
def test_one_report_comes_out_for_both_processes(strategy: str, shared: int, temporary: Path) -> None:
    printed, profile = train(temporary, "--strategy", strategy)
    assert printed.count("Profile Summary at step ") == 1
    assert "All 2 ranks answered." in printed
    assert profile.flops.forward == (FIRST + SECOND) // shared + HEAD
    assert profile.flops.backward == (FIRST + 2 * SECOND) // shared + 2 * HEAD
    job = known(profile.ranks)
    assert (job.flops.model, job.params) == (2 * profile.flops.model, PARAMS)


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(("part", "named"), [("data", ("data wait", None)), ("forward", ("forward", "network.second"))])
def test_the_rank_that_sleeps_is_named_and_where(part: str, named: tuple[str, str | None], temporary: Path) -> None:
    printed, profile = train(temporary, "--slow-rank", "1", "--slow-part", part)
    (found,) = known(profile.ranks).stragglers
    assert (found.rank, (found.part, found.module)) == (1, named)
    assert profile.advice[0].rule == "straggler" and "for rank 1:" in " ".join(printed.split())
