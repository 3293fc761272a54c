"""Ranks that share sequences or weights: how many see different data, and what the whole model has."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_flops.report.text import render_text
from lightning_flops.schema.profile import Profile
from tests.deepspeed.launching import INSTALLED, launch, profile_in

pytestmark = pytest.mark.skipif(not INSTALLED, reason="needs deepspeed")

# As scenarios_groups says it, which imports DeepSpeed.
SAMPLES, TOKENS, WIDTH, CLASSES = 3, 6, 8, 3


def profiles(scenario: str, ranks: int = 2) -> list[Profile]:
    launched = launch("scenarios_two_parallel" if ranks == 2 else "scenarios_four_parallel", ranks=ranks)
    return [profile_in(returned) for returned in launched(scenario)]


@pytest.mark.parametrize(("scenario", "ranks"), [("sequences", 2), ("sequences", 4), ("mesh_of_sequences", 2)])
def test_ranks_that_share_sequences_count_their_samples_and_tokens_once(scenario: str, ranks: int) -> None:
    for profile in profiles(scenario, ranks):
        context = profile.context
        assert (context.world_size, context.dp_size, context.sp_size, context.tp_size) == (ranks, ranks // 2, 2, 1)
        assert (profile.samples, profile.tokens) == (SAMPLES, SAMPLES * TOKENS)
        assert profile.timing is not None
        pairs = ranks // 2
        assert profile.rates.samples_per_sec == pairs * SAMPLES / profile.timing.global_step_sec
        assert profile.rates.tokens_per_sec == pairs * SAMPLES * TOKENS / profile.timing.global_step_sec


def test_flops_of_ranks_that_share_sequences_are_of_their_tokens_and_of_their_heads() -> None:
    for profile in profiles("sequences"):
        # Half of the tokens through the projection; the whole sequence for one of the two heads, four wide.
        projection = 2 * (SAMPLES * TOKENS // 2) * WIDTH * 3 * WIDTH
        attention = 2 * 2 * SAMPLES * 1 * TOKENS * TOKENS * 4
        assert {module.name: module.total.forward for module in profile.modules if module.total.forward} == {
            "": projection + attention,
            "qkv": projection,
            "attention": attention,
            "attention.local_attn": attention,
        }
        assert profile.params == 3 * WIDTH * WIDTH


def test_the_report_names_the_ranks_that_share_a_sequence_and_puts_their_flops_together() -> None:
    profile = profiles("sequences")[0]
    lines = render_text(profile, detailed=True).splitlines()
    assert any("rank 0 of 2 (sp 2)" in line for line in lines)
    (whole,) = (line for line in lines if line.startswith("fwd flops of model = fwd flops per GPU * mp_size * sp_size"))
    assert f"{2 * profile.flops.forward / 1e3:.2f} K" in whole


def test_weights_that_deepspeed_cut_count_whole_and_the_others_once() -> None:
    block = (WIDTH * 4 * WIDTH + 4 * WIDTH) + (4 * WIDTH * WIDTH + WIDTH)
    rest = 2 * WIDTH + (WIDTH * CLASSES + CLASSES)
    for profile in profiles("automatic_tensor_parallel"):
        params: dict[str, Any] = {module.name: module.params for module in profile.modules}
        assert (params["mlp"], params["norm"], params["head"]) == (block, 2 * WIDTH, WIDTH * CLASSES + CLASSES)
        assert profile.params == profile.trainable_params == block + rest
        # Each rank has half of both weights and of the first bias.
        assert profile.local_params == rest + (2 * WIDTH * 4 * WIDTH + 4 * WIDTH) // 2 + WIDTH


def test_flops_of_a_tensor_parallel_rank_are_those_of_its_shards() -> None:
    for profile in profiles("automatic_tensor_parallel"):
        shard = 2 * SAMPLES * WIDTH * 4 * WIDTH // 2
        forwards = {module.name: module.total.forward for module in profile.modules}
        assert forwards["mlp.up_proj"] == forwards["mlp.down_proj"] == shard
        assert profile.flops.forward == 2 * shard + 2 * SAMPLES * WIDTH * CLASSES


@pytest.mark.parametrize("scenario", ["automatic_tensor_parallel", "tensor_parallel_unit"])
def test_tensor_parallel_ranks_see_the_same_data(scenario: str) -> None:
    for profile in profiles(scenario):
        context = profile.context
        assert (context.world_size, context.dp_size, context.tp_size) == (2, 1, 2)
        assert profile.timing is not None
        assert profile.rates.samples_per_sec == SAMPLES / profile.timing.global_step_sec
        lines = render_text(profile, detailed=True).splitlines()
        assert f"model parallel size:{'':51} 2" in lines and f"data parallel size:{'':52} 1" in lines
        assert any("rank " in line and "(tp 2)" in line for line in lines)


def test_a_shard_that_megatron_marked_counts_once_for_each_rank() -> None:
    for profile in profiles("tensor_parallel_unit"):
        shard = WIDTH * (CLASSES // 2 + 1)
        assert (profile.params, profile.local_params) == (WIDTH * WIDTH + 2 * shard, WIDTH * WIDTH + shard)
