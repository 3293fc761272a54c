"""Four ranks, under strategies in each of which some share data, weights or sequences with one rank and not another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from tests.ranks.scenarios_two_strategies import net_task, shard, split
from tests.ranks.strategies import ShardedOnCpu, twice


def split_and_shard(task: Any) -> None:
    """Rows and columns of the first two layers on two ranks, each of them and the rest sharded over two more."""
    split(task)
    shard(task)


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "fsdp1_hybrid": partial(
        twice,
        strategy=partial(ShardedOnCpu, mesh=(2, 2), auto_wrap_policy={nn.Linear}, sharding_strategy="HYBRID_SHARD"),
        task=net_task(),
    ),
    "fsdp2_tensors": partial(
        twice,
        strategy=partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=2),
        task=net_task(split_and_shard),
        window={"trace": True},
    ),
}
