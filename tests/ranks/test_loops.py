"""Loops of people's own on two ranks of gloo: with torch alone, under accelerate, under Fabric."""

from __future__ import annotations

import pytest

from tests.ranks.launching import launch, profile_in
from tests.ranks.scenarios_loops import BATCH, MIDDLE, NARROW, SCENARIOS, WIDE

pytestmark = pytest.mark.timeout(280)

FIRST, SECOND = 2 * BATCH * WIDE * MIDDLE, 2 * BATCH * MIDDLE * NARROW
FORWARD, BACKWARD = FIRST + SECOND, FIRST + 2 * SECOND
PARAMS = WIDE * MIDDLE + MIDDLE + MIDDLE * NARROW + NARROW

FRAMEWORKS = {"ddp": "torch", "accelerate": "accelerate", "fabric": "lightning.fabric"}
MICRO_STEPS = {"ddp": 1, "accelerate": 3, "fabric": 3}
STRATEGIES = {
    "ddp": "DistributedDataParallel",
    "accelerate": "DistributedDataParallel",
    "fabric": "DDPStrategy",
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_rank_counts_its_own_work_and_rank_0_reports_on_both(scenario: str) -> None:
    returned = launch("scenarios_loops", ranks=2)(scenario)
    micro_steps = MICRO_STEPS[scenario]
    for rank, result in enumerate(returned):
        profile = profile_in(result)
        assert (profile.flops.forward, profile.flops.backward) == (micro_steps * FORWARD, micro_steps * BACKWARD)
        assert (profile.samples, profile.micro_steps, profile.params) == (micro_steps * BATCH, micro_steps, PARAMS)
        assert (profile.context.rank, profile.context.world_size, profile.context.dp_size) == (rank, 2, 2)
        assert profile.context.framework == FRAMEWORKS[scenario]
        assert profile.context.strategy == STRATEGIES[scenario]
        assert profile.context.accumulate == micro_steps
    assert profile_in(returned[0]).ranks is not None
    assert all(result["same"] for result in returned)


def test_accelerates_trackers_get_the_scalars_and_fabrics_loggers_the_text_too() -> None:
    launched = launch("scenarios_loops", ranks=2)
    accelerate = launched("accelerate")[0]
    # One file of events is the tracker's, one is ours, for TensorBoard's tab.
    assert accelerate["events"] == 2 and accelerate["files"][0].endswith("/profile.json")
    fabric = launched("fabric")[0]
    assert "flops_profiler/fwd_flops" in fabric["csv"] and fabric["events"] == 1
