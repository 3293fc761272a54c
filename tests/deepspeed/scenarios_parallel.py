"""What is launched on two and on four ranks, stages or ranks that share experts, sequences or weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from deepspeed.utils import groups

from tests.deepspeed import scenarios_groups, scenarios_pipeline
from tests.deepspeed.launching import ON_BOTH, ON_FOUR
from tests.deepspeed.scenario import SCENARIOS


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


ALL = {name: fresh(run) for name, run in SCENARIOS.items()}
TWO = {name: run for name, run in ALL.items() if name not in ON_FOUR}
FOUR = {name: ALL[name] for name in (*ON_FOUR, *ON_BOTH)}

__all__ = ["FOUR", "TWO", "scenarios_groups", "scenarios_pipeline"]
