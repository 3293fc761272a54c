"""Runs every scenario of one module in one process group of DeepSpeed's; a process of it is one rank."""

from __future__ import annotations

import sys

import deepspeed

from tests.ranks.worker import run_scenarios

if __name__ == "__main__":
    # Its operators for shared memory would be compiled first, for a minute; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    run_scenarios(sys.argv[1], sys.argv[2])
