"""transformers' Trainer on two ranks, gloo: DistributedDataParallel, and DeepSpeed's ZeRO-1 and ZeRO-3."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lightning_flops import Profile
from tests.ranks import DEEPSPEED_ON_CPU, EVERYTHING, run_ranks
from tests.transformers.tiny import BATCH, gpt2_flops, new_gpt2

RANKS = 2
NO_DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
ZERO = [pytest.param(stage, marks=[pytest.mark.slow, NO_DEEPSPEED]) for stage in ("1", "3")]
pytestmark = pytest.mark.timeout(280)

Seen = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank of a kind of training saw, and the folder; the stages of ZeRO are of one launch."""

    @cache
    def launched(*stages: str) -> tuple[Seen, Path]:
        folder = tmp_path_factory.mktemp("ranks")
        program = ["-m", "tests.transformers.ranks_me", str(folder), *stages]
        environment = None if stages == ("ddp",) else DEEPSPEED_ON_CPU
        imports = EVERYTHING if stages == ("ddp",) else ()
        run_ranks(program, ranks=RANKS, folder=folder, timeout_sec=240, environment=environment, imports=imports)
        return [json.loads((folder / f"seen{rank}.json").read_text()) for rank in range(RANKS)], folder

    return lambda stage: launched("ddp") if stage == "ddp" else launched("1", "3")


@pytest.mark.parametrize("stage", ["ddp", *ZERO])
def test_rank_0_reports_of_both_ranks(stage: str, ran: Any) -> None:
    """Under DDP each rank has four batches of an epoch: a group of three, and a last one of one, which is counted."""
    ranks, _ = ran(stage)
    profile = Profile.from_json(ranks[0][f"profiled {stage}"]["profiles"][0])
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
def test_training_is_the_same_bits_nothing_is_left_and_rank_0_alone_writes(stage: str, ran: Any) -> None:
    ranks, folder = ran(stage)
    for seen in ranks:
        plain, profiled = seen[f"plain {stage}"], seen[f"profiled {stage}"]
        kind = "DistributedDataParallel" if stage == "ddp" else "DeepSpeedEngine"
        assert (plain["wrapped"], profiled["builtin_ran"]) == (kind, False)
        for what in ("losses", "weights", "random_state"):
            assert profiled[what] == plain[what], what
        assert (profiled["left"], profiled["logged"]) == ([], [])  # of the Trainer's own history
    files = sorted(path.name for path in (folder / f"profiled{stage}" / "lightning_flops").iterdir())
    assert files == ["profile.html", "profile.json", "profile.txt", "throughput.json"]
