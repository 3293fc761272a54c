"""Exchanges profiles between two ranks of a gloo process group, of which one dies; run by test_processes.

``python -m tests.ranks.exchange_me FOLDER RANK``: the rank that survives writes what became of it into
``FOLDER/rank{N}.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed as torch_distributed

from lightning_flops.run.ranks import Ranks
from tests.report import jobs
from tests.report.windows import build_profile

RANK = int(os.environ.get("RANK", "0"))
STEP = 3
SOON = 0.3
"""Seconds that rank 0 waits for a rank that says nothing."""

distributed: Any = torch_distributed  # which does not say what of it is public


def main(folder: str, victim: str) -> None:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    distributed.barrier()
    ranks = Ranks(rank=RANK, world_size=2, config=jobs.CONFIG)
    distributed.barrier()
    if int(victim) == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SOON)
    profile = replace(build_profile(jobs.uneven()[RANK], config=jobs.CONFIG), profile_step=STEP)
    ranks.send(profile) if RANK else ranks.await_reports(profile)
    found = ranks.finish(SOON)
    ranks.close()
    merged = found[0].ranks if found else None
    absences = [] if merged is None else [[rank, why] for why, of in merged.absences.items() for rank in of]
    Path(folder, f"rank{RANK}.json").write_text(json.dumps(absences))
    with contextlib.suppress(Exception):
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
