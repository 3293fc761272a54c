"""Engines that accelerate makes are profiled: it says itself where steps end, and silences DeepSpeed by infinity."""

from __future__ import annotations

import importlib.util
import math
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_flops.adapters.deepspeed_context import is_reading_due
from tests.deepspeed.launching import INSTALLED, launch, profile_in

pytestmark = pytest.mark.skipif(
    not INSTALLED or importlib.util.find_spec("accelerate") is None, reason="needs deepspeed and accelerate"
)

# Two micro-batches of eight rows through layers of 64·128 and 128·10; the rows need no gradient.
FORWARD = 2 * 2 * 8 * (64 * 128 + 128 * 10)
BACKWARD = 2 * 2 * 8 * (64 * 128 + 2 * 128 * 10)
WAYS = ["by_block", "by_block_of_auto", "by_block_of_zero_2", "attached", "as_a_loop"]


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_accelerate_made_is_counted_exactly_and_trains_as_without(way: str) -> None:
    returned: dict[str, Any] = launch("scenarios_accelerate", ranks=1).only(way)
    assert returned["every"] == "inf"  # as accelerate sets it in every config
    assert (returned["same"], returned["left"], returned["logged"]) == (True, [], [])
    profile = profile_in(returned)
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD) == (303_104, 344_064)
    assert (profile.counted_steps, len(profile.timed_steps)) == ((3,), 5)
    assert (profile.micro_steps, profile.samples) == (2, 16)
    assert profile.timing is not None and profile.timing.data_wait_sec is not None


def test_an_engine_and_another_loop_both_hear_their_backwards() -> None:
    returned = launch("scenarios_accelerate", ranks=1).only("beside_another_loop")
    assert (returned["same"], returned["left"], returned["logged"]) == (True, [], [])
    assert all(seconds is not None and seconds > 0 for seconds in returned["backwards"])


def test_the_report_is_in_the_file_and_throughput_is_of_the_whole_run() -> None:
    returned = launch("scenarios_accelerate", ranks=1).only("by_block")
    assert "fwd flops per GPU:" in returned["printed"] and "303.1 K" in returned["printed"]
    # A step was counted, two are for the trace, and more may have run while that was analyzed.
    assert returned["batches"] in range(2, 2 * (16 - 3) + 1, 2)


@pytest.mark.parametrize(
    ("every", "due"), [(4, [4, 8, 12, 16]), (5.0, [5, 10, 15]), *((no, [10]) for no in (math.inf, math.nan, None, 0))]
)
def test_throughput_is_written_as_often_as_deepspeed_prints_or_every_ten_steps(every: Any, due: list[int]) -> None:
    engines = (SimpleNamespace(steps_per_print=lambda: every, global_steps=step) for step in range(1, 17))
    assert [engine.global_steps for engine in engines if is_reading_due(engine)] == due
