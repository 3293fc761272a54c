"""A fit while somebody has replaced the clocks of ``time``: their readings are theirs, and our times are true."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_flops.schema.profile import Profile
from lightning_flops.schema.throughput import ThroughputSummary
from tests.forks import REPOSITORY, run_fork
from tests.lightning import replaced_clock_me as me


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two fits came to, in a process in which nothing of ours was imported before the clocks were replaced."""
    folder = tmp_path_factory.mktemp("run")
    run = run_fork(["-W", "ignore", "-m", "tests.lightning.replaced_clock_me", str(folder)], folder=REPOSITORY)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads((folder / me.FOUND).read_text())
    return found


def test_losses_are_the_same(fits: dict[str, Any]) -> None:
    assert len(fits["plain"]["losses"]) == me.BATCHES
    assert fits["profiled"]["losses"] == fits["plain"]["losses"]


@pytest.mark.parametrize("run", ["plain", "profiled"])
def test_every_reading_of_the_replaced_clocks_is_lightnings(fits: dict[str, Any], run: str) -> None:
    # Its monitor reads one as training begins, and one at each batch.
    assert fits[run]["readings"] == {"perf_counter": 1 + me.BATCHES}
    assert fits[run]["logged"] == [me.STEP * batch for batch in range(1, 1 + me.BATCHES)]


def test_the_profile_has_true_times(fits: dict[str, Any]) -> None:
    profile = Profile.from_json(fits["profile"])
    assert profile.flops.forward == profile.flops.backward == 2 * me.BATCH * me.IN * me.OUT
    assert profile.timing is not None
    steps = [step for part in profile.timing.parts for step in part.steps_sec]
    assert all(seconds >= 0.0 for seconds in steps)
    assert 0.0 < sum(steps) < fits["profiled"]["took_sec"]
    assert profile.traced is not None
    assert profile.notes == ()


def test_the_whole_run_has_true_times(fits: dict[str, Any]) -> None:
    costs = ThroughputSummary.from_json(fits["throughput"]).batch_cost_sec
    assert 0.0 < costs.minimum <= costs.average <= costs.maximum < fits["profiled"]["took_sec"]
