"""Exchanges profiles between two ranks of a gloo process group; run by test_processes.

``python -m tests.ranks.exchange_me FOLDER [kill RANK]``: each rank that survives writes what became of it into
``FOLDER/rank{N}.json``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as torch_distributed

from lightning_flops.run.ranks import Ranks
from lightning_flops.schema.profile import Profile
from tests.report import jobs
from tests.report.windows import build_profile

RANK = int(os.environ.get("RANK", "0"))
STEP = 3
SOON = 0.3
"""Seconds that rank 0 waits for a rank that says nothing."""

distributed: Any = torch_distributed  # which does not say what of it is public


def profile(step: int = STEP) -> Profile:
    """This rank's profile: of 100 samples on rank 0, and of 50 on rank 1."""
    window = jobs.uneven()[RANK]
    return replace(build_profile(window, config=jobs.CONFIG), profile_step=step)


def join(**changed: Any) -> Ranks:
    distributed.barrier()
    return Ranks(rank=RANK, world_size=2, config=replace(jobs.CONFIG, **changed))


def collected(ranks: Ranks, within_sec: float = 60.0) -> list[dict[str, Any]]:
    """What rank 0 reports in the end."""
    found = [
        {
            "step": one.profile_step,
            "absences": {absence.rank: absence.reason for absence in one.ranks.absences},
            "forward": one.ranks.flops.forward,
        }
        for one in ranks.finish(within_sec)
        if one.ranks is not None
    ]
    ranks.close()
    return found


def the_group_is_gone() -> list[dict[str, Any]]:
    ranks = join()
    if RANK == 0:
        ranks.await_reports(profile())
    leave_group()
    ranks.send(profile())
    return collected(ranks)


def the_group_is_made_anew() -> list[dict[str, Any]]:
    """After a scenario that left none, a group is destroyed and made anew at the same port, in the middle of a run."""
    begin()
    ranks = join()
    leave_group()
    begin()
    assert all_reduced() == 3
    ranks.send(profile()) if RANK else ranks.await_reports(profile())
    return collected(ranks, SOON)


def leave_group() -> None:
    """End the group; its server, which is rank 0's, is gone for both: rank 1 must not find it when it begins anew."""
    distributed.barrier()
    distributed.destroy_process_group()
    mark = Path(sys.argv[1], f"gone{next(groups_left)}")
    if RANK == 0:
        mark.touch()
    while not mark.exists():
        time.sleep(0.01)


groups_left = itertools.count()


def begin() -> None:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))


def all_reduced() -> int:
    total = torch.tensor([RANK + 1])
    distributed.all_reduce(total)
    return int(total.item())


SCENARIOS: tuple[Callable[[], list[dict[str, Any]]], ...] = (the_group_is_gone, the_group_is_made_anew)


def killed(victim: int) -> list[dict[str, Any]]:
    """A rank dies in its window."""
    ranks = join()
    distributed.barrier()
    if victim == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SOON)
    ranks.send(profile()) if RANK else ranks.await_reports(profile())
    return collected(ranks, SOON)


def main(folder: str, *arguments: str) -> None:
    begin()
    results: dict[str, Any] = {}
    if arguments[:1] == ("kill",):
        results["killed"] = killed(int(arguments[1]))
    else:
        for scenario in SCENARIOS:
            results[scenario.__name__] = scenario()
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(results))
    with contextlib.suppress(Exception):
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
