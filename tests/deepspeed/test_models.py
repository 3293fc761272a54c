"""Every model that is counted by hand, under DeepSpeed: each of 500 steps is right, or n/a; none is wrong."""

from __future__ import annotations

import pytest

from tests.deepspeed.launching import launch
from tests.deepspeed.scenarios_models import PARTS
from tests.every_step import Cell, what_must_hold
from tests.models_by_hand import MODELS, ByHand


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_step_is_right_or_not_known(model: ByHand) -> None:
    part = MODELS.index(model) % PARTS
    found = launch(f"scenarios_models_{part}", ranks=1).only(model.name)
    assert what_must_hold(Cell(**found), model) == []
