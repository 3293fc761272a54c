"""An engine under the profiler pickles and copies as it does without, or is refused in the same words."""

from __future__ import annotations

import pytest

from tests.deepspeed.engines_truth import BACKWARD, FORWARD
from tests.deepspeed.launching import launch, profile_in


@pytest.mark.parametrize("stage", [0, 1])
def test_an_engine_and_what_it_trains_with_pickle_and_copy_as_without_the_profiler(stage: int) -> None:
    returned = launch("scenarios_one_rank", ranks=1).only(f"copied_in_every_state_{stage}")
    assert returned["differences"] == [] and returned["same"]
    assert set(returned["states"]) >= {"waiting", "counting", "settling", "timing", "tracing", "closed"}
    assert returned["looked at"] == (1 + 3 * 8 + 1) * (13 * 3 + 2 + 3)  # moments, things, ways; functions, copies
    assert set(returned["copied"]) >= {
        *(f"{way} of loader" for way in ("pickle", "cloudpickle", "deepcopy")),
        *(f"copy of {thing}" for thing in ("engine", "module", "optimizer")),
        "deepcopy of module.forward",
    }
    assert returned["left"] == []
    profile = profile_in(returned)
    assert (profile.counted_steps, profile.flops.forward, profile.flops.backward) == ((2,), FORWARD, BACKWARD)
