"""DeepSpeed through the Trainer's arguments: its steps, its block, and its own profiler, which stands down."""

from __future__ import annotations

import importlib.util
import json
import math
from typing import Any

import pytest

from lightning_flops import Profile
from tests.ranks import DEEPSPEED_ON_CPU, run_ranks
from tests.transformers.tiny import BATCH, gpt2_flops

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
    pytest.mark.timeout(280),
    pytest.mark.slow,
]

Seen = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each training came to, by name; one process runs them all."""
    folder = tmp_path_factory.mktemp("deepspeed")
    program = ["-m", "tests.transformers.deepspeed_me", str(folder)]
    run_ranks(program, ranks=1, folder=folder, timeout_sec=240, environment=DEEPSPEED_ON_CPU)
    found: Seen = json.loads((folder / "seen.json").read_text())
    return found


def profile_of(run: dict[str, Any]) -> Profile:
    (text,) = run["profiles"]
    return Profile.from_json(text)


@pytest.mark.parametrize(("name", "step"), [("no block", 1), ("block", 2), ("arguments", 1)])
def test_a_step_of_the_engine_is_counted_and_its_parts_are_told_apart(name: str, step: int, seen: Seen) -> None:
    profile = profile_of(seen[name])
    assert profile.profile_step == step
    one = gpt2_flops(BATCH)
    assert (profile.flops.forward, profile.flops.backward) == (2 * one.forward, 2 * one.backward)
    assert (profile.micro_steps, profile.samples) == (2, 2 * BATCH)
    assert profile.context.strategy == "ZeRO-1"
    timing = profile.timing
    assert timing is not None
    parts = (
        *(timing.data_wait_sec, timing.seconds_of("transfer"), timing.forward_sec),
        *(timing.backward_sec, timing.optimizer_sec, timing.seconds_of("other")),
    )
    known = [part for part in parts if part is not None]
    assert len(known) == len(parts) and min(known) > 0
    assert sum(known) == pytest.approx(timing.global_step_sec, rel=1e-9)


def test_the_block_is_honoured_and_arguments_win_over_it(seen: Seen) -> None:
    assert profile_of(seen["block"]).settings.module_depth == 1
    assert profile_of(seen["arguments"]).profile_step == 1


def test_deepspeeds_own_profiler_stands_down_and_is_as_it_was_afterwards(seen: Seen) -> None:
    for name in ("block", "arguments"):
        assert (seen[name]["builtin_ran"], seen[name]["builtin_is_on"]) == (False, True), name


def test_a_block_that_is_off_or_wrong_profiles_nothing_and_says_so(seen: Seen) -> None:
    assert seen["off"]["profiles"] == seen["wrong"]["profiles"] == []
    (off,) = [message for message in seen["off"]["messages"] if message.startswith("WARNING")]
    assert off == "WARNING: flops_profiler.enabled is not true: this training is not profiled"
    (wrong,) = [message for message in seen["wrong"]["messages"] if message.startswith("WARNING")]
    assert wrong.startswith("WARNING: this training is not profiled: flops_profiler.top_modules must be")


def test_losses_weights_and_random_numbers_are_the_same_bits_and_nothing_is_left(seen: Seen) -> None:
    assert (seen["plain"]["engine"], seen["plain"]["steps_per_print"]) == ("DeepSpeedEngine", math.inf)
    for name, run in seen.items():
        assert run["left"] == [], name
        for what in ("losses", "weights", "random_state"):
            assert run[what] == seen["plain"][what], (name, what)
