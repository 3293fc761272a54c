"""transformers' Trainer on two ranks, gloo, DistributedDataParallel, accumulation of three."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_flops import Profile
from tests.ranks import EVERYTHING, run_ranks
from tests.transformers.tiny import BATCH, gpt2_flops, new_gpt2

pytestmark = pytest.mark.timeout(280)

RANKS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    program = ["-m", "tests.transformers.two_ranks_me", str(folder)]
    run_ranks(program, ranks=RANKS, folder=folder, timeout_sec=240, imports=EVERYTHING)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, dict[str, Any]]]:
    return [json.loads((folder / f"seen{rank}.json").read_text()) for rank in range(RANKS)]


def test_each_rank_counts_its_own_batches_and_rank_0_reports_of_both(ranks: list[dict[str, dict[str, Any]]]) -> None:
    """Each rank has four batches of an epoch: a group of three, and a last one of one."""
    profile = Profile.from_json(ranks[0]["profiled"]["profiles"][0])
    context = profile.context
    assert (context.rank, context.world_size, context.dp_size, context.accumulate) == (0, RANKS, RANKS, 3)
    assert context.strategy == "DistributedDataParallel"
    assert (profile.micro_steps, profile.samples) == (1, BATCH)
    assert (profile.flops.forward, profile.flops.backward) == (
        gpt2_flops(BATCH).forward,
        gpt2_flops(BATCH).backward,
    )
    assert profile.params == sum(one.numel() for one in new_gpt2().parameters())
    assert profile.ranks is not None
    assert profile.job_rates.samples_per_sec is not None
    assert profile.job_rates.tokens_per_sec is not None


def test_losses_weights_and_random_numbers_are_the_same_bits(ranks: list[dict[str, dict[str, Any]]]) -> None:
    for seen in ranks:
        plain, profiled = seen["plain"], seen["profiled"]
        assert plain["wrapped"] == "DistributedDataParallel"
        for what in ("losses", "weights", "random_state", "left"):
            assert profiled[what] == plain[what], what
        assert profiled["left"] == {}


def test_rank_0_writes_and_logs(ranks: list[dict[str, dict[str, Any]]], folder: Path) -> None:
    assert ranks[0]["profiled"]["logged"] == ranks[1]["profiled"]["logged"] == []  # of the Trainer's own history
    files = sorted(path.name for path in (folder / "profiled" / "lightning_flops").iterdir())
    assert files == ["profile.html", "profile.json", "profile.txt", "throughput.json"]
