"""Runs the scenarios of some modules in one process group of DeepSpeed's; a process of it is one rank.

``python -m tests.deepspeed.worker MODULE+MODULE FOLDER``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import deepspeed
from deepspeed.utils import groups

from tests.deepspeed.launching import ON_BOTH, ON_FOUR, PARALLEL
from tests.deepspeed.scenario import SCENARIOS
from tests.ranks.worker import run_scenarios


def fresh(scenario: Callable[[], Any]) -> Callable[[], Any]:
    """*scenario* as if no engine had been made in this process; DeepSpeed keeps its groups for the process."""

    def run() -> Any:
        for name, value in vars(groups).items():
            if isinstance(value, dict) and name.endswith(("_GROUP", "_GROUP_RANKS")):
                value.clear()
            elif name in ("mpu", "mesh_device") or (name.endswith("_PARALLEL_GROUP") and name != "_WORLD_GROUP"):
                setattr(groups, name, None)
        sequences: Any = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
        if sequences is not None:
            sequences._SEQUENCE_PARALLEL_GROUP = sequences._SEQUENCE_DATA_PARALLEL_GROUP = None
        return scenario()

    return run


def main(modules: str, folder: str) -> None:
    # Its operators for shared memory would be compiled first, for a minute; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for module in modules.split("+"):
        importlib.import_module(f"tests.deepspeed.{module}")
    if modules == PARALLEL:
        four = deepspeed.comm.get_world_size() == 4
        names = (*ON_FOUR, *ON_BOTH) if four else [name for name in SCENARIOS if name not in ON_FOUR]
        scenarios = {name: fresh(SCENARIOS[name]) for name in names}
        SCENARIOS.clear()
        SCENARIOS.update(scenarios)
    run_scenarios("tests.deepspeed.scenario", folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
