"""transformers' Trainer on two ranks, gloo: DistributedDataParallel, and DeepSpeed's ZeRO-1 and ZeRO-3."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.ranks import EVERYTHING
from tests.ranks.launching import launch, profile_in
from tests.transformers.tiny import BATCH, gpt2_flops, new_gpt2

RANKS = 2
NO_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
ZERO = [pytest.param(stage, marks=[pytest.mark.slow, NO_DEEPSPEED]) for stage in ("1", "3")]
pytestmark = pytest.mark.timeout(280)


def ran(stage: str) -> list[Any]:
    """What each rank saw of a kind of training; those by ZeRO are of one launch."""
    names, imports = ("ddp", EVERYTHING) if stage == "ddp" else ("1,3", ())
    return launch(f"tests.transformers.scenarios_ranks:{names}", ranks=RANKS, imports=imports)(stage)


@pytest.mark.parametrize("stage", ["ddp", *ZERO])
def test_rank_0_reports_of_both_ranks(stage: str) -> None:
    """Under DDP each rank has four batches of an epoch: a group of three, and a last one of one, which is counted."""
    profile = profile_in(ran(stage)[0])
    context, one = profile.context, gpt2_flops(BATCH)
    accumulate, counted, strategy = (3, 1, "DistributedDataParallel") if stage == "ddp" else (2, 2, f"ZeRO-{stage}")
    assert (context.rank, context.world_size, context.dp_size, context.accumulate) == (0, RANKS, RANKS, accumulate)
    assert (context.strategy, profile.profile_step) == (strategy, 1 if stage == "ddp" else 2)
    assert (profile.micro_steps, profile.samples) == (counted, counted * BATCH)
    assert (profile.flops.forward, profile.flops.backward) == (counted * one.forward, counted * one.backward)
    assert profile.params == sum(one.numel() for one in new_gpt2().parameters())
    assert profile.ranks is not None and profile.ranks.answered == RANKS
    assert profile.ranks.flops.forward == RANKS * counted * one.forward
    assert profile.job_rates.samples_per_sec is not None and profile.job_rates.tokens_per_sec is not None


@pytest.mark.parametrize("stage", ["ddp", *ZERO])
def test_training_is_the_same_bits_nothing_is_left_and_rank_0_alone_writes(stage: str) -> None:
    for rank, seen in enumerate(ran(stage)):
        plain, profiled = seen["plain"], seen["profiled"]
        kind = "DistributedDataParallel" if stage == "ddp" else "DeepSpeedEngine"
        assert (plain["wrapped"], profiled["builtin_ran"]) == (kind, False)
        for what in ("losses", "weights", "random_state"):
            assert profiled[what] == plain[what], what
        assert (profiled["left"], profiled["logged"]) == ([], [])  # of the Trainer's own history
        assert seen["files"] == ([] if rank else ["profile.html", "profile.json", "profile.txt", "throughput.json"])
