"""Loops of people's own on two ranks of gloo: with torch alone, under accelerate, under Fabric."""

from __future__ import annotations

import pytest

from tests.ranks.launching import launch, profile_in
from tests.ranks.scenarios_loops import BATCH, BY_THEN, MIDDLE, NARROW, WIDE

pytestmark = pytest.mark.timeout(280)

FIRST, SECOND = 2 * BATCH * WIDE * MIDDLE, 2 * BATCH * MIDDLE * NARROW
FORWARD, BACKWARD = FIRST + SECOND, FIRST + 2 * SECOND
PARAMS = WIDE * MIDDLE + MIDDLE + MIDDLE * NARROW + NARROW


@pytest.mark.parametrize(
    ("scenario", "framework", "strategy", "micro_steps"),
    [
        ("ddp", "torch", "DistributedDataParallel", 1),
        ("accelerate", "accelerate", "DistributedDataParallel", 3),
        ("fabric", "lightning.fabric", "DDPStrategy", 3),
    ],
)
def test_ranks_count_and_rank_0_reports_on_both(scenario: str, framework: str, strategy: str, micro_steps: int) -> None:
    returned = launch("tests.ranks.scenarios_loops", ranks=2)(scenario)
    for rank, result in enumerate(returned):
        profile = profile_in(result)
        assert (profile.flops.forward, profile.flops.backward) == (micro_steps * FORWARD, micro_steps * BACKWARD)
        assert (profile.samples, profile.micro_steps, profile.params) == (micro_steps * BATCH, micro_steps, PARAMS)
        assert (profile.context.rank, profile.context.world_size, profile.context.dp_size) == (rank, 2, 2)
        context = profile.context
        assert (context.framework, context.strategy, context.accumulate) == (framework, strategy, micro_steps)
    assert profile_in(returned[0]).ranks is not None
    assert all(result["same"] for result in returned)


def test_the_loggers_of_fabric_get_the_text() -> None:
    assert launch("tests.ranks.scenarios_loops", ranks=2)("fabric")[0]["events"] == 1


def test_a_second_window_waits_for_the_report_of_the_first_on_every_rank_and_times_the_same_steps() -> None:
    zero, one = launch("tests.ranks.scenarios_loops", ranks=2)("two_windows")
    assert zero["timed"] == one["timed"]
    _, (begins, *_) = zero["timed"]
    assert begins >= BY_THEN  # and not at 12 + 1 + 2, when the loader's queue has drained
    assert zero["ranks"] == [[0, 1], [0, 1]]
