"""Every step's FLOPs under DeepSpeed, though all steps have other lengths; and where none has, what checks show."""

from __future__ import annotations

from typing import Any

from tests.checks import CONFIRMED, REFUTED
from tests.deepspeed.launching import launch


def test_every_step_under_deepspeed() -> None:
    found: dict[str, Any] = launch("scenarios_lengths", ranks=1).only("lengths")
    assert found["left"] == []
    assert found["known"] == found["keys"]
    assert found["model_flops"] == found["truth"]
    assert found["counted"] > 13


def test_checks_of_steps_of_one_shape() -> None:
    found = launch("scenarios_lengths", ranks=1)
    assert found.only("confirmed") == {**CONFIRMED, "same": True}
    assert found.only("refuted") == {**REFUTED, "same": True}
