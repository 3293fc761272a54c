"""Trains two ranks to whom SLURM's variables tell their places; run by test_faults.

``python -m tests.ranks.launch_me FOLDER``.
"""

from __future__ import annotations

import os
import sys

from lightning_flops import FlopsProfilerCallback
from tests.lightning.nets import loader, new_net, new_trainer


def place_by_slurm() -> None:
    """What ``srun`` tells a process, in place of what torchrun does."""
    rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    os.environ |= {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": ranks,
        "SLURM_NTASKS_PER_NODE": ranks,
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
    }


def main(folder: str) -> None:
    callback = FlopsProfilerCallback(profile_step=1, timing_steps=2, trace=False)
    run = new_trainer("lightning.pytorch", folder, callback, strategy="ddp", devices=2)
    run.fit(new_net("lightning.pytorch"), loader(24))


if __name__ == "__main__":
    place_by_slurm()
    main(sys.argv[1])
