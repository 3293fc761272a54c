"""Two and four ranks under every strategy of Lightning's that runs without a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tests.ranks.strategies import (
    Attention,
    ContextParallel,
    Net,
    SequenceTask,
    ShardedOnCpu,
    Task,
    loader,
    twice,
)
from tests.ranks.strategies_truth import BATCH, TOKENS, WIDTH


def fresh(make: Callable[[], Task]) -> Callable[[], Task]:
    """*make* with the same weights each time."""

    def run() -> Task:
        torch.manual_seed(3)
        return make()

    return run


def net_task(prepare: Callable[[Any], None] = lambda task: None, **settings: Any) -> Callable[[], Task]:
    """Makes a task that trains a ``Net``."""
    return fresh(lambda: Task(Net(**settings), prepare))


def shard(task: Any) -> None:
    """FSDP2: each layer by itself, then what is left."""
    mesh = task.device_mesh["data_parallel"]
    for layer in (task.net.first, task.net.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(task.net, mesh=mesh)


def split(task: Any) -> None:
    """Tensor parallelism: rows of the first layer, the same columns of the second; every rank has the whole head."""
    plan = {"first": ColwiseParallel(use_local_output=False), "second": RowwiseParallel()}
    parallelize_module(task.net, task.device_mesh["tensor_parallel"], plan)


def split_sequences(task: Any) -> None:
    """Tensor parallelism whose norm is computed on parts of the sequences, and a head in parts as well."""
    plan = {
        "first": ColwiseParallel(),
        "second": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(task.net, task.device_mesh["tensor_parallel"], plan)


def split_and_shard(task: Any) -> None:
    """Rows and columns of the first two layers on two ranks, each of them and the rest sharded over two more."""
    split(task)
    shard(task)


def parallel(data: int, tensor: int) -> Callable[[], Any]:
    """A strategy of so many ranks with different data, and so many that share their tensors."""
    return partial(ModelParallelStrategy, data_parallel_size=data, tensor_parallel_size=tensor)


TRACED = {"trace": True}
OF_TOKENS: dict[str, Any] = {
    "data": lambda: loader(shape=(TOKENS, WIDTH), batch=BATCH),
    "window": {"tokens_per_sample": TOKENS},
}
LAYERS = {nn.Linear}
TWO: dict[str, Callable[[], dict[str, Any]]] = {
    "ddp_accumulating": partial(twice, strategy=DDPStrategy, task=net_task(), accumulate_grad_batches=3, window=TRACED),
    "fsdp1": partial(
        twice, strategy=partial(ShardedOnCpu, auto_wrap_policy=LAYERS), task=net_task(hidden=5), window=TRACED
    ),
    "fsdp2": partial(twice, strategy=parallel(2, 1), task=net_task(shard, hidden=5), window=TRACED),
    "tensors": partial(twice, strategy=parallel(1, 2), task=net_task(split), window=TRACED),
    "sequences": partial(twice, strategy=parallel(1, 2), task=net_task(split_sequences), **OF_TOKENS),
    "contexts": partial(
        twice,
        strategy=partial(ContextParallel, data=1, context=2),
        task=fresh(lambda: SequenceTask(Attention())),
        **OF_TOKENS,
    ),
}
FOUR: dict[str, Callable[[], dict[str, Any]]] = {
    "fsdp1_hybrid": partial(
        twice,
        strategy=partial(ShardedOnCpu, mesh=(2, 2), auto_wrap_policy=LAYERS, sharding_strategy="HYBRID_SHARD"),
        task=net_task(),
    ),
    "fsdp2_tensors": partial(twice, strategy=parallel(2, 2), task=net_task(split_and_shard), window=TRACED),
}
"""Each rank shares data, weights or sequences with one rank and not another."""

SCENARIOS = TWO if os.environ["WORLD_SIZE"] == "2" else FOUR
