"""Four ranks, under strategies in each of which some share data, weights or sequences with one rank and not another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn

from tests.ranks.scenarios_two_strategies import fresh, net_task, shard, split
from tests.ranks.strategies import Attention, ContextParallel, SequenceTask, ShardedOnCpu, loader, twice
from tests.ranks.strategies_truth import TOKENS, WIDTH


def split_and_shard(task: Any) -> None:
    """Rows and columns of the first two layers on two ranks, each of them and the rest sharded over two more."""
    split(task)
    shard(task)


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "fsdp1": partial(twice, strategy=partial(ShardedOnCpu, auto_wrap_policy={nn.Linear}), task=net_task(hidden=5)),
    "fsdp1_hybrid": partial(
        twice,
        strategy=partial(ShardedOnCpu, mesh=(2, 2), auto_wrap_policy={nn.Linear}, sharding_strategy="HYBRID_SHARD"),
        task=net_task(),
    ),
    "fsdp2": partial(
        twice,
        strategy=partial(ModelParallelStrategy, data_parallel_size=4, tensor_parallel_size=1),
        task=net_task(shard, hidden=5),
    ),
    "fsdp2_tensors": partial(
        twice,
        strategy=partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=2),
        task=net_task(split_and_shard),
        window={"trace": True},
    ),
    "contexts": partial(
        twice,
        strategy=partial(ContextParallel, data=2, context=2),
        task=fresh(lambda: SequenceTask(Attention())),
        data=lambda: loader(shape=(TOKENS, WIDTH)),
        window={"tokens_per_sample": TOKENS},
    ),
}
