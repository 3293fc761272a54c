"""Launches the scenarios of a module once, however many tests ask for what they returned."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_flops.analysis.profile import Profile
from tests.ranks import DEEPSPEED_ON_CPU, run_ranks

INSTALLED = importlib.util.find_spec("deepspeed") is not None
OLD = INSTALLED and importlib.metadata.version("deepspeed").startswith("0.16.")

NOT_IN_0_16 = {
    "checkpointed": "its checkpointing wants streams, which a CPU has not",
    "sequences": "has no groups of its own for sequences",
    "automatic_tensor_parallel": "cuts the models of some libraries only",
}
"""What keeps a scenario from running under DeepSpeed 0.16."""


class Launched:
    """What the scenarios returned on every rank, and what the ranks printed."""

    def __init__(self, results: list[dict[str, Any]], printed: list[str]) -> None:
        self._results = results
        self.printed = printed

    def __call__(self, scenario: str) -> list[Any]:
        """What *scenario* returned on each rank, rank 0 first."""
        if OLD and scenario in NOT_IN_0_16:
            pytest.skip(f"DeepSpeed 0.16 {NOT_IN_0_16[scenario]}")
        returned = []
        for rank, results in enumerate(self._results):
            result = results.get(scenario, {"failed": f"never ran; {list(results)} did"})
            assert "failed" not in result, f"rank {rank}: {result['failed']}"
            returned.append(result["returned"])
        return returned

    def only(self, scenario: str) -> Any:
        """What *scenario* returned on the only rank."""
        (returned,) = self(scenario)
        return returned


@functools.cache
def launch(module: str, *, ranks: int, timeout_sec: float = 270.0) -> Launched:
    """Run every scenario of *module* on *ranks* ranks of one process group."""
    with tempfile.TemporaryDirectory() as folder:
        printed = run_ranks(
            ["-W", "ignore", "-m", "tests.deepspeed.worker", f"tests.deepspeed.{module}", folder],
            ranks=ranks,
            folder=Path(folder),
            timeout_sec=timeout_sec,
            environment=DEEPSPEED_ON_CPU,
        )
        results = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return Launched(results, printed)


def profile_in(returned: Mapping[str, Any]) -> Profile:
    """The profile that a scenario returned as JSON."""
    assert returned["profile"] is not None, f"no profile; logged: {returned.get('logged')}"
    return Profile.from_json(returned["profile"])
