"""Torch's fake process group, in which one process is any rank of a job, and the ranks that an operator's group has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import distributed as torch_distributed
from torch.distributed.device_mesh import DeviceMesh

from lightning_flops.errors import LightningFlopsError
from lightning_flops.measure.torch_private.needed import is_fake, modes_off, schema_of, take

distributed: Any = torch_distributed  # which does not say what of it is public


@contextmanager
def one_rank(rank: int, world_size: int) -> Iterator[None]:
    """Inside, this process is *rank* of a job whose collectives return at once, and meshes may be cut on fake tensors.

    Raises:
        LightningFlopsError: the process has a process group already, or torch has no fake one.
    """
    store = take("torch.testing._internal.distributed.fake_pg:FakeStore", None)
    if store is None:
        raise LightningFlopsError("a job is planned in torch's fake process group, which this torch does not have")
    if distributed.is_initialized():
        raise LightningFlopsError("a job is planned in a process group of its own, and this process has one already")
    distributed.init_process_group("fake", rank=rank, world_size=world_size, store=store())
    try:
        _forget_meshes()  # of the process's own past
        with _meshes_hold_values():
            yield
    finally:
        distributed.destroy_process_group()
        _forget_meshes()


_forget_meshes: Any = take("torch.distributed.tensor.debug:_clear_sharding_prop_cache", lambda: None)
"""Empties the caches of DTensor's compiled code, which compares no meshes: what it holds names groups that are gone."""


@contextmanager
def _meshes_hold_values() -> Iterator[None]:
    """Inside, what a mesh computes of its own ranks is computed on real tensors, whatever mode is on.

    A mesh is no other's equal then: torch would use what it has cached of one whose groups are gone.
    """
    before = {name: method for name, method in vars(DeviceMesh).items() if isinstance(method, FunctionType)}
    number = object()
    for name, method in before.items():
        setattr(DeviceMesh, name, _without_modes(method))
    DeviceMesh.__hash__ = lambda mesh: hash((before["__hash__"](mesh), number))  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(DeviceMesh, name, method)


def _without_modes(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with modes_off():
            return method(*args, **kwargs)

    return call


@contextmanager
def modules_move() -> Iterator[None]:
    """Inside, ``Module.to`` works on fake tensors, of which torch swaps none that anything refers to weakly."""
    swap: Any = torch.utils.swap_tensors

    def put(tensor: Any, other: Any) -> None:
        kind: type = type(tensor.data)
        if is_fake(kind):
            tensor.data, tensor.fake_device = other.data, other.fake_device
        else:
            swap(tensor, other)

    vars(torch.utils)["swap_tensors"] = put
    try:
        yield
    finally:
        vars(torch.utils)["swap_tensors"] = swap


_group_named: Any = take("torch.distributed.distributed_c10d:_resolve_process_group", None)


def ranks_of(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """The ranks, of the whole job, that take part in this call of an operator of ``torch.distributed``."""
    arguments = schema_of(function).arguments
    given = {one.name: value for one, value in zip(arguments, args, strict=False)} | dict(kwargs)
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


def buckets_of(tensors: list[torch.Tensor], limits: list[int]) -> int:
    """Into how many buckets of these sizes DistributedDataParallel puts *tensors*; 1 where this torch does not say."""
    return 1 if _assign is None else len(_assign(tensors, limits)[0])
