"""What is launched on two and on four ranks; ``fresh_groups`` parts the scenarios, which share one process each."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from deepspeed.utils import groups


def fresh(scenario: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """*scenario* as if no engine had been made in this process; DeepSpeed keeps its groups for the process."""

    @functools.wraps(scenario)
    def run() -> dict[str, Any]:
        for name in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP"):
            for suffix in ("", "_RANKS"):
                getattr(groups, name + suffix).clear()
        for name in ("mpu", "mesh_device", "_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP"):
            setattr(groups, name, None)
        groups._DATA_PARALLEL_GROUP = None
        sequences: Any = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
        if sequences is not None:
            sequences._SEQUENCE_PARALLEL_GROUP = sequences._SEQUENCE_DATA_PARALLEL_GROUP = None
        return scenario()

    return run
