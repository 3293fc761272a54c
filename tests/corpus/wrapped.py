"""Networks inside wrappers: the same counts, under the names they have without the wrapper."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .case import BATCH, FIRST, INPUTS, TWO_LAYERS, Example, Family, Parts, by_layer, two_layers

FAMILY = Family("wrapped")


def perceptron(build: Callable[[], Example], recompute: int = 0) -> Example:
    """What the perceptron costs, wrapped or not; *recompute* is the first layer's."""
    whole = (*TWO_LAYERS, recompute)
    return build().costs(*whole, by_module={"": whole, **by_layer("0", "2", recompute)})


_GROUPS: list[object] = []
"""Every group that was used, kept until the process ends.

The last reference to a group joins gloo's threads, with the interpreter locked; a thread that is just then giving back
what it reduced waits for that lock, and both wait forever. Long after its last reduction a group ends in peace.
"""


def on_one_rank(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Decorates what wraps the perceptron in a process group of one; the function's name becomes the network's."""

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

    FAMILY.put(wrap.__name__, lambda: perceptron(build))
    return wrap


def leave() -> None:
    """Ends the group of one, and forgets what was compiled in it."""
    torch._dynamo.reset()
    distributed.destroy_process_group()


def one_rank_mesh() -> DeviceMesh:
    """The group of one as a mesh."""
    return init_device_mesh("cpu", (1,))


@on_one_rank
def distributed_data_parallel(model: nn.Module) -> nn.Module:
    """DDP calls the network "module"."""
    return nn.parallel.DistributedDataParallel(model)


@on_one_rank
def distributed_data_parallel_finding_unused(model: nn.Module) -> nn.Module:
    """DDP walks the graph before the backward, and finds the spare parameter."""
    model.register_parameter("spare", nn.Parameter(torch.zeros(2)))
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


@on_one_rank
def fully_sharded(model: nn.Module) -> nn.Module:
    """FSDP2 turns the parameters into distributed tensors and gathers them around each use."""
    mesh = one_rank_mesh()
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@on_one_rank
def tensor_parallel(model: nn.Module) -> nn.Module:
    """Distributed tensors multiply their local parts: on one rank, all of it."""
    return parallelize_module(model, one_rank_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


@on_one_rank
def distributed_data_parallel_over_a_static_graph(model: nn.Module) -> nn.Module:
    """The first step of a static graph runs its reduction after the backward."""
    return nn.parallel.DistributedDataParallel(model, static_graph=True)


@on_one_rank
def flattened_and_sharded(model: nn.Module) -> nn.Module:
    """FSDP1 wraps every layer, and calls what it wraps "_fsdp_wrapped_module"."""
    return FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy([nn.Linear]),
        sharding_strategy=ShardingStrategy.NO_SHARD,  # what it becomes on one rank anyway
    )


@on_one_rank
def fully_sharded_and_compiled(model: nn.Module) -> nn.Module:
    """FSDP2 around layers that are compiled in place."""
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            layer.compile(backend="aot_eager")
    return fully_sharded(model)


@FAMILY.network
def data_parallel() -> Example:
    """Without a GPU DataParallel only calls the network, which it calls "module"."""
    return perceptron(lambda: Example(nn.DataParallel(two_layers(nn.ReLU())), torch.randn(BATCH, INPUTS)))


@FAMILY.network
def checkpoint_wrapped() -> Example:
    """The wrapper's own name is left out; the first product is repeated, the last one saves its factors before it."""
    model = checkpoint_wrapper(two_layers(nn.ReLU()), checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    return perceptron(lambda: Example(model, torch.randn(BATCH, INPUTS)), recompute=FIRST)


@FAMILY.network
def module_that_is_called_module() -> Example:
    """A user's own attribute of a wrapper's name stays in the name."""
    model = Parts(lambda self, x: self.module(x), module=two_layers(nn.ReLU()))
    return Example(model, torch.randn(BATCH, INPUTS)).costs(
        *TWO_LAYERS, by_module={"module": TWO_LAYERS, **by_layer("module.0", "module.2")}
    )
