"""Two processes of a gloo group exchange what they measured: one dies, and the other does not hang.

``python -m tests.ranks.test_processes VICTIM`` is one of them; it prints which ranks its reports miss, and why.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as torch_distributed

from lightning_flops.run.ranks import Ranks
from tests.ranks import run_ranks
from tests.report import jobs
from tests.report.windows import build_profile

SOON = 0.3
"""Seconds that rank 0 waits for a rank that says nothing."""

distributed: Any = torch_distributed  # which does not say what of it is public


def exchange(rank: int, victim: int) -> None:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    distributed.barrier()
    ranks = Ranks(rank=rank, world_size=2, config=jobs.CONFIG)
    distributed.barrier()
    if victim == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SOON)
    profile = build_profile(jobs.uneven()[rank], config=jobs.CONFIG)
    ranks.hurry(SOON)
    job = ranks.exchange(profile).ranks
    ranks.close()
    missing = [] if job is None else [(of, why) for why, all_of in job.absences.items() for of in all_of]
    sys.stdout.write(f"{missing}\n")
    with contextlib.suppress(Exception):
        distributed.destroy_process_group()


@pytest.mark.parametrize("victim", [0, 1])
def test_the_other_rank_ends_when_one_dies(victim: int, tmp_path: Path) -> None:
    """Rank 0 has the store, so that its death takes the store from rank 1."""
    program = ["-W", "ignore", "-m", "tests.ranks.test_processes", str(victim)]
    printed = run_ranks(program, ranks=2, folder=tmp_path, timeout_sec=100.0, ends_with={victim: -9})
    missing = [] if victim == 0 else [(1, "no answer within 0.3 s, when training ended")]
    assert str(missing) in printed[1 - victim].splitlines()


if __name__ == "__main__":
    exchange(int(os.environ["RANK"]), int(sys.argv[1]))
