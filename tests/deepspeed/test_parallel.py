"""Pipelines, ranks that share experts, sequences or weights, and Lightning's DeepSpeedStrategy."""

from __future__ import annotations

import pytest

from tests.deepspeed.launching import INSTALLED, ON_BOTH, ON_FOUR, PARALLEL, launch
from tests.deepspeed.scenario import each, holds

pytestmark = pytest.mark.skipif(not INSTALLED, reason="needs deepspeed")


@each(PARALLEL, but=ON_FOUR)
def test_on_two_ranks(name: str) -> None:
    holds(launch(PARALLEL, ranks=2)(name))


@pytest.mark.parametrize("name", [*ON_FOUR, *ON_BOTH])
def test_on_four_ranks(name: str) -> None:
    holds(launch(PARALLEL, ranks=4)(name))


@each("scenarios_lightning")
def test_under_lightning(name: str) -> None:
    holds(launch("scenarios_lightning", ranks=2)(name))
