"""Launches the scenarios of a module once, however many tests ask for what they returned."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_flops.schema.profile import Profile
from tests.forks import once_in_a_run
from tests.ranks import DEEPSPEED_ON_CPU, LIGHTNING, run_ranks


class Launched:
    """What the scenarios returned on every rank."""

    def __init__(self, results: list[dict[str, Any]]) -> None:
        self.results = results

    def __call__(self, scenario: str) -> list[Any]:
        """What *scenario* returned on each rank, rank 0 first."""
        returned = []
        for rank, results in enumerate(self.results):
            result = results.get(scenario, {"failed": f"never ran; {list(results)} did"})
            assert "failed" not in result, f"rank {rank}: {result['failed']}"
            returned.append(result["returned"])
        return returned


@functools.cache
def launch(
    module: str, *, ranks: int, worker: str = "tests.ranks.worker", imports: tuple[str, ...] = LIGHTNING
) -> Launched:
    """Run every scenario of *module* on *ranks* ranks of one process group on the CPU, by the program *worker*."""

    def run() -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(
                ["-W", "ignore", "-m", worker, module, folder],
                ranks=ranks,
                folder=Path(folder),
                timeout_sec=270.0,
                environment=DEEPSPEED_ON_CPU,
                imports=imports,
            )
            return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(ranks)]

    # Several files of tests ask for the same module, and files are run by several processes.
    return Launched(once_in_a_run(f"{module} on {ranks}", run))


def profile_in(returned: Mapping[str, Any]) -> Profile:
    """The profile that a scenario returned as JSON."""
    assert returned["profile"] is not None, f"no profile; logged: {returned.get('logged')}"
    return Profile.from_json(returned["profile"])


def absences(profile: Profile) -> dict[int, str]:
    """Why which rank is not in the report."""
    assert profile.ranks is not None
    assert profile.ranks.world_size == profile.context.world_size
    return {rank: reason for reason, ranks in profile.ranks.absences.items() for rank in ranks}
