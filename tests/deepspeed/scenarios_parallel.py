"""What is launched on two and on four ranks; ``fresh_groups`` parts the scenarios, which share one process each."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from deepspeed.utils import groups

from tests.deepspeed.launching import NOT_IN_0_16, OLD


def possible(scenario: str) -> bool:
    """Whether the DeepSpeed that is installed can run *scenario*."""
    return not (OLD and scenario in NOT_IN_0_16)


def fresh(scenario: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """*scenario* as if no engine had been made in this process; DeepSpeed keeps its groups for the process."""

    @functools.wraps(scenario)
    def run() -> dict[str, Any]:
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
