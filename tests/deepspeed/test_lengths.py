"""Every step's FLOPs under DeepSpeed, though all steps have other lengths."""

from __future__ import annotations

from typing import Any

from tests.deepspeed.launching import launch


def test_every_step_under_deepspeed() -> None:
    found: dict[str, Any] = launch("scenarios_lengths", ranks=1).only("lengths")
    assert found["left"] == []
    assert found["known"] == found["keys"]
    assert found["model_flops"] == found["truth"]
    assert found["counted"] > 13
