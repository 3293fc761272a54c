"""DeepSpeed through the Trainer's arguments on two ranks, gloo: ZeRO-1 and ZeRO-3."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from lightning_flops import Profile
from lightning_flops.schema.throughput import ThroughputSummary
from tests.ranks import DEEPSPEED_ON_CPU, run_ranks
from tests.transformers.tiny import BATCH, LENGTH, gpt2_flops, length_of, new_gpt2

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
    pytest.mark.timeout(280),
    pytest.mark.slow,
]

RANKS, STAGES, ACCUMULATED, EPOCHS, BATCHES = 2, (1, 3), 2, 6, 8

Seen = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed_ranks")
    program = ["-m", "tests.transformers.deepspeed_ranks_me", str(folder)]
    run_ranks(program, ranks=RANKS, folder=folder, timeout_sec=240, environment=DEEPSPEED_ON_CPU)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Seen]:
    return [json.loads((folder / f"seen{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("stage", STAGES)
def test_rank_0_reports_of_both_ranks_the_step_that_the_block_names(stage: int, ranks: list[Seen]) -> None:
    (text,) = ranks[0][f"profiled {stage}"]["profiles"]
    profile = Profile.from_json(text)
    context = profile.context
    assert (context.rank, context.world_size, context.dp_size, context.accumulate) == (0, RANKS, RANKS, ACCUMULATED)
    assert (context.strategy, profile.profile_step, profile.samples) == (f"ZeRO-{stage}", 2, ACCUMULATED * BATCH)
    one = gpt2_flops(BATCH)
    assert (profile.flops.forward, profile.flops.backward) == (
        ACCUMULATED * one.forward,
        ACCUMULATED * one.backward,
    )
    assert profile.params == sum(one.numel() for one in new_gpt2().parameters())
    assert profile.ranks is not None
    assert (profile.ranks.answered, profile.ranks.samples) == (RANKS, RANKS * ACCUMULATED * BATCH)
    assert profile.ranks.flops.forward == RANKS * ACCUMULATED * one.forward
    assert profile.job_rates.samples_per_sec is not None
    assert profile.job_rates.tokens_per_sec is not None


@pytest.mark.parametrize("stage", STAGES)
def test_the_whole_runs_flops_and_tokens_are_known(stage: int, ranks: list[Seen]) -> None:
    (text,) = ranks[0][f"profiled {stage}"]["throughputs"]
    summary = ThroughputSummary.from_json(text)
    batches = EPOCHS * BATCHES // RANKS
    one = gpt2_flops(BATCH)
    assert summary.model_flops == batches * (one.forward + one.backward)
    assert summary.steps_counted + summary.steps_by_formula + summary.steps_estimated == batches // ACCUMULATED
    assert summary.tokens == batches * BATCH * LENGTH
    # The ranks share the sentences of an epoch in an order that is drawn.
    of_ranks = [ThroughputSummary.from_json(seen[f"profiled {stage}"]["throughputs"][0]) for seen in ranks]
    real = EPOCHS * sum(length_of(index) for index in range(BATCHES * BATCH))
    assert sum(one.real_tokens or 0 for one in of_ranks) == real


@pytest.mark.parametrize("stage", STAGES)
def test_losses_weights_and_random_numbers_are_the_same_bits_and_nothing_is_left(stage: int, ranks: list[Seen]) -> None:
    for seen in ranks:
        plain, profiled = seen[f"plain {stage}"], seen[f"profiled {stage}"]
        assert (plain["engine"], profiled["builtin_ran"]) == ("DeepSpeedEngine", False)
        for what in ("losses", "weights", "random_state"):
            assert profiled[what] == plain[what], what
        assert profiled["left"] == []


def test_only_rank_0_writes_and_logs(ranks: list[Seen], folder: Path) -> None:
    for stage in STAGES:
        assert "flops_profiler/fwd_flops" in ranks[0][f"profiled {stage}"]["logged"]
        assert ranks[1][f"profiled {stage}"]["logged"] == []
        files = sorted(path.name for path in (folder / f"profiled{stage}" / "lightning_flops").iterdir())
        assert files == ["profile.html", "profile.json", "profile.txt", "throughput.json"]
