"""Networks inside wrappers: the same counts, under the names they have without the wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .case import BATCH, FIRST, INPUTS, SECOND, Example, Family, Parts, two_layers

FAMILY = Family("wrapped")


def perceptron(build: Callable[[], Example], recompute: int = 0) -> Example:
    """What the perceptron costs, wrapped or not; *recompute* is the first layer's."""
    return build().costs(
        FIRST + SECOND,
        FIRST + 2 * SECOND,
        recompute,
        by_module={
            "": (FIRST + SECOND, FIRST + 2 * SECOND, recompute),
            "0": (FIRST, FIRST, recompute),
            "2": (SECOND, 2 * SECOND),
        },
    )


def wrapped_by(wrap: Callable[[nn.Module], nn.Module]) -> Example:
    """The perceptron inside a wrapper that needs no process group."""
    return perceptron(lambda: Example(wrap(two_layers(nn.ReLU())), torch.randn(BATCH, INPUTS)))


_GROUPS: list[object] = []
"""Every group that was used, kept until the process ends.

The last reference to a group joins gloo's threads, with the interpreter locked; a thread that is just then giving back
what it reduced waits for that lock, and both wait forever. Long after its last reduction a group ends in peace.
"""


def on_one_rank(wrap: Callable[[nn.Module], nn.Module]) -> Example:
    """The perceptron inside a wrapper, in a process group of one."""

    def build() -> Example:
        distributed.init_process_group(
            "gloo",
            store=distributed.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )
        _GROUPS.append(distributed.group.WORLD)
        try:
            model = wrap(two_layers(nn.ReLU()))
        except BaseException:
            distributed.destroy_process_group()
            raise
        return Example(model, torch.randn(BATCH, INPUTS), teardown=leave)

    return perceptron(build)


def leave() -> None:
    """Ends the group of one, and forgets what was compiled in it."""
    torch._dynamo.reset()
    distributed.destroy_process_group()


def one_rank_mesh() -> DeviceMesh:
    """The group of one as a mesh."""
    return init_device_mesh("cpu", (1,))


# DDP calls the network "module".
FAMILY.put("distributed_data_parallel", lambda: on_one_rank(nn.parallel.DistributedDataParallel))


@FAMILY.network
def distributed_data_parallel_finding_unused() -> Example:
    """DDP walks the graph before the backward, and finds the spare parameter."""

    def wrap(model: nn.Module) -> nn.Module:
        model.register_parameter("spare", nn.Parameter(torch.zeros(2)))
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

    return on_one_rank(wrap)


@FAMILY.network
def fully_sharded() -> Example:
    """FSDP2 turns the parameters into distributed tensors and gathers them around each use."""

    def wrap(model: nn.Module) -> nn.Module:
        mesh = one_rank_mesh()
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    return on_one_rank(wrap)


@FAMILY.network
def tensor_parallel() -> Example:
    """Distributed tensors multiply their local parts: on one rank, all of it."""

    def wrap(model: nn.Module) -> nn.Module:
        return parallelize_module(model, one_rank_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})

    return on_one_rank(wrap)


# The first step of a static graph runs its reduction after the backward.
FAMILY.put(
    "distributed_data_parallel_over_a_static_graph",
    lambda: on_one_rank(lambda model: nn.parallel.DistributedDataParallel(model, static_graph=True)),
)


@FAMILY.network
def flattened_and_sharded() -> Example:
    """FSDP1 wraps every layer, and calls what it wraps "_fsdp_wrapped_module"."""

    def wrap(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy([nn.Linear]),
            sharding_strategy=ShardingStrategy.NO_SHARD,  # what it becomes on one rank anyway
        )

    return on_one_rank(wrap)


@FAMILY.network
def fully_sharded_and_compiled() -> Example:
    """FSDP2 around layers that are compiled in place."""

    def wrap(model: nn.Module) -> nn.Module:
        mesh = one_rank_mesh()
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                layer.compile(backend="aot_eager")
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    return on_one_rank(wrap)


# Without a GPU DataParallel only calls the network, which it calls "module".
FAMILY.put("data_parallel", lambda: wrapped_by(nn.DataParallel))


@FAMILY.network
def checkpoint_wrapped() -> Example:
    """The wrapper's own name is left out; the first product is repeated, the last one saves its factors before it."""

    def wrap(model: nn.Module) -> nn.Module:
        return checkpoint_wrapper(model, checkpoint_impl=CheckpointImpl.NO_REENTRANT)

    return perceptron(lambda: Example(wrap(two_layers(nn.ReLU())), torch.randn(BATCH, INPUTS)), recompute=FIRST)


@FAMILY.network
def module_that_is_called_module() -> Example:
    """A user's own attribute of a wrapper's name stays in the name."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    model = Parts(forward, module=two_layers(nn.ReLU()))
    return Example(model, torch.randn(BATCH, INPUTS)).costs(
        FIRST + SECOND,
        FIRST + 2 * SECOND,
        by_module={
            "module": (FIRST + SECOND, FIRST + 2 * SECOND),
            "module.0": (FIRST, FIRST),
            "module.2": (SECOND, 2 * SECOND),
        },
    )
