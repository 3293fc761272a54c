"""Torch's fake process group, in which one process is any rank of a job, and the ranks that an operator's group has."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from torch import distributed as torch_distributed
from torch.distributed.device_mesh import DeviceMesh

from lightning_flops.errors import LightningFlopsError
from lightning_flops.measure.torch_private.needed import is_fake, modes_off, schema_of, take
from lightning_flops.signals import Undo

distributed: Any = torch_distributed  # which does not say what of it is public


def one_rank(undo: Undo, rank: int, world_size: int) -> None:
    """From here on, this process is *rank* of a job whose collectives return at once, and all may be fake tensors.

    Raises:
        LightningFlopsError: the process has a process group already, or torch has no fake one.
    """
    store = take("torch.testing._internal.distributed.fake_pg:FakeStore", None)
    if store is None:
        raise LightningFlopsError("a job is planned in torch's fake process group, which this torch does not have")
    if distributed.is_initialized():
        raise LightningFlopsError("a job is planned in a process group of its own, and this process has one already")
    # The caches of DTensor's compiled code compare no meshes: what they hold names groups that are gone.
    forget_meshes: Any = take("torch.distributed.tensor.debug:_clear_sharding_prop_cache", lambda: None)
    forget_meshes()
    undo.callback(forget_meshes)
    distributed.init_process_group("fake", rank=rank, world_size=world_size, store=store())
    undo.callback(distributed.destroy_process_group)
    # What a mesh computes of its own ranks has values. It is no other's equal: torch would use what it has cached of
    # one whose groups are gone.
    number, hash_of = object(), vars(DeviceMesh)["__hash__"]
    for name, method in [*vars(DeviceMesh).items()]:
        if isinstance(method, FunctionType):
            undo.replace(DeviceMesh, name, modes_off()(method))
    undo.replace(DeviceMesh, "__hash__", lambda mesh: hash((hash_of(mesh), number)))
    # ``Module.to`` swaps tensors, and torch refuses those that anything refers to weakly, as its fake mode does.
    swap: Any = torch.utils.swap_tensors

    def put(tensor: Any, other: Any) -> None:
        kind: type = type(tensor.data)
        if is_fake(kind):
            tensor.data, tensor.fake_device = other.data, other.fake_device
        else:
            swap(tensor, other)

    undo.replace(torch.utils, "swap_tensors", put)


_group_named: Any = take("torch.distributed.distributed_c10d:_resolve_process_group", None)


def ranks_of(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """The ranks, of the whole job, that take part in this call of an operator of ``torch.distributed``."""
    given = {one.name: value for one, value in zip(schema_of(function).arguments, args, strict=False)} | dict(kwargs)
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        group = _group_named(group)
    elif not isinstance(group, distributed.ProcessGroup):
        group = distributed.ProcessGroup.unbox(group)
    return ranks_in(group)


def ranks_in(group: Any) -> tuple[int, ...]:
    """The ranks, of the whole job, in *group*; None: all."""
    return tuple(distributed.get_process_group_ranks(group))


_assign: Any = take("torch.distributed:_compute_bucket_assignment_by_size", None)


def buckets_of(tensors: list[torch.Tensor], limits: list[int]) -> list[int]:
    """Bytes of each bucket of these sizes for *tensors* of DistributedDataParallel; one where torch does not say."""
    buckets = [range(len(tensors))] if _assign is None else _assign(tensors, limits)[0]
    return [sum(tensors[place].nbytes for place in places) for places in buckets]
