"""Launches the scenarios of a module once under DeepSpeed, however many tests ask for what they returned."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from typing import Any

import pytest

from tests.ranks import DEEPSPEED, DEEPSPEED_ON_CPU
from tests.ranks.launching import Launched, launch_worker, profile_in

INSTALLED = importlib.util.find_spec("deepspeed") is not None
OLD = INSTALLED and importlib.metadata.version("deepspeed").startswith("0.16.")

NOT_IN_0_16 = {
    "checkpointed": "its checkpointing wants streams, which a CPU has not",
    "sequences": "has no groups of its own for sequences",
    "automatic_tensor_parallel": "cuts the models of some libraries only",
}
"""What keeps a scenario from running under DeepSpeed 0.16."""


class LaunchedDeepSpeed(Launched):
    """What the scenarios returned; a test that asks for one that this DeepSpeed cannot run is skipped."""

    def __call__(self, scenario: str) -> list[Any]:
        """What *scenario* returned on each rank, rank 0 first."""
        if OLD and scenario in NOT_IN_0_16:
            pytest.skip(f"DeepSpeed 0.16 {NOT_IN_0_16[scenario]}")
        return super().__call__(scenario)


@functools.cache
def launch(module: str, *, ranks: int, timeout_sec: float = 270.0) -> LaunchedDeepSpeed:
    """Run every scenario of *module* on *ranks* ranks of one process group."""
    launched = launch_worker(
        "tests.deepspeed.worker",
        f"tests.deepspeed.{module}",
        ranks=ranks,
        timeout_sec=timeout_sec,
        environment=DEEPSPEED_ON_CPU,
        imports=DEEPSPEED,
    )
    return LaunchedDeepSpeed(launched.results, launched.printed)


__all__ = ["INSTALLED", "NOT_IN_0_16", "OLD", "LaunchedDeepSpeed", "launch", "profile_in"]
