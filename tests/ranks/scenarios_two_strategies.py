"""Two ranks under every strategy of Lightning's that runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tests.ranks.strategies import (
    Attention,
    ContextParallel,
    HookedDdp,
    Net,
    SequenceTask,
    ShardedOnCpu,
    Task,
    loader,
    rank_and_size,
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


def shard_at_once(task: Any) -> None:
    """FSDP2 of the whole net, whose layers share a weight."""
    fully_shard(task.net, mesh=task.device_mesh["data_parallel"])


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


ddp = partial(twice, task=net_task())
fsdp2 = partial(twice, strategy=partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1))
tensor_parallel = partial(
    twice,
    strategy=partial(ModelParallelStrategy, data_parallel_size=1, tensor_parallel_size=2),
)

SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "ddp": partial(ddp, strategy=DDPStrategy, window={"trace": True}),
    "ddp_accumulating": partial(ddp, strategy=DDPStrategy, accumulate_grad_batches=3),
    "ddp_uneven": partial(
        ddp,
        strategy=DDPStrategy,
        # Six samples on rank 0, four on rank 1.
        data=lambda: loader(batch=6 - 2 * rank_and_size()[0]),
        use_distributed_sampler=False,
    ),
    "ddp_casting": partial(ddp, strategy=partial(HookedDdp, fp16_compress_hook)),
    "ddp_compressing": partial(
        ddp,
        strategy=lambda: HookedDdp(powerSGD_hook, PowerSGDState(None, start_powerSGD_iter=2)),
        window={"profile_step": 3},  # it compresses from the third step on
    ),
    "fsdp1": partial(
        twice,
        strategy=partial(ShardedOnCpu, auto_wrap_policy={nn.Linear}),
        task=net_task(hidden=5),
        window={"trace": True},
    ),
    "fsdp1_tied_flat": partial(
        twice, strategy=partial(ShardedOnCpu, use_orig_params=False), task=net_task(hidden=8, tied=True)
    ),
    "fsdp1_whole": partial(ddp, strategy=partial(ShardedOnCpu, sharding_strategy="NO_SHARD")),
    "fsdp2": partial(fsdp2, task=net_task(shard, hidden=5), window={"trace": True}),
    "fsdp2_accumulating": partial(fsdp2, task=net_task(shard), accumulate_grad_batches=3),
    "fsdp2_tied": partial(fsdp2, task=net_task(shard_at_once, hidden=8, tied=True)),
    "tensors": partial(tensor_parallel, task=net_task(split), window={"trace": True}),
    "tensors_uneven": partial(tensor_parallel, task=net_task(split, hidden=5)),
    "sequences": partial(
        tensor_parallel,
        task=net_task(split_sequences),
        data=lambda: loader(shape=(TOKENS, WIDTH)),
        window={"tokens_per_sample": TOKENS},
    ),
    "contexts": partial(
        twice,
        strategy=partial(ContextParallel, data=1, context=2),
        task=fresh(lambda: SequenceTask(Attention())),
        data=lambda: loader(shape=(TOKENS, WIDTH), batch=BATCH),
        window={"tokens_per_sample": TOKENS},
    ),
}
