"""Every model that is counted by hand, under DeepSpeed: each of 500 steps is right, or n/a; none is wrong."""

from __future__ import annotations

import pytest

from tests.deepspeed.launching import launch
from tests.every_step import Cell, what_must_hold
from tests.models_by_hand import MODELS, ByHand


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_step_is_right_or_not_known(model: ByHand) -> None:
    found = launch("scenarios_models", ranks=1, timeout_sec=840.0).only(model.name)
    assert what_must_hold(Cell(**found), model) == []
