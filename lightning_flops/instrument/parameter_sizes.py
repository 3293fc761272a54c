"""How large a parameter is as a part of the whole model, and how much of it this rank holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lightning_flops.instrument.deepspeed_groups import expert_parallel_size, tensor_parallel_size_of_process


def parameter_sizes(parameter: torch.Tensor) -> tuple[int, bool, int]:
    """(size in the whole model, whether it is trained, size held in this rank's memory) of *parameter*.

    A rank that holds one shard of a parameter, or experts of its own, answers for all ranks that hold the others; of
    copies that several pipeline stages hold only the first stage's counts, so that stages add up to the model.
    """
    trainable = bool(parameter.requires_grad)
    if is_lazy(parameter):
        return 0, trainable, 0
    size, local = _unsharded_size(parameter)
    if getattr(parameter, "ds_pipe_replicated", False):
        return 0, trainable, local
    return _model_parallel_size(parameter, size), trainable, local


def _unsharded_size(parameter: torch.Tensor) -> tuple[int, int]:
    """(size with the shards of data-parallel ranks, or a DTensor's, put together; size of this rank's shard)."""
    local = parameter.numel()
    # ZeRO-3 empties a parameter while it is not in use and keeps its full size beside it, the shard in ds_tensor.
    partitioned = getattr(parameter, "ds_numel", None)
    if isinstance(partitioned, int):
        shard = getattr(parameter, "ds_tensor", None)
        return partitioned, shard.numel() if isinstance(shard, torch.Tensor) else local
    to_local = getattr(parameter, "to_local", None)
    if callable(to_local):
        # A DTensor's own size is the global one. Its local tensor is read without autograd's or anybody's notice.
        shard = getattr(parameter, "_local_tensor", None)
        if isinstance(shard, torch.Tensor):
            return local, shard.numel()
    return local, local


def _model_parallel_size(parameter: torch.Tensor, size: int) -> int:
    """*size* of what one rank of a tensor- or expert-parallel group has, put together over the group."""
    # Megatron's mark, which DeepSpeed's automatic tensor parallelism sets as well.
    if getattr(parameter, "tensor_model_parallel", False):
        whole = _whole_shape(getattr(parameter, "ds_autotp_universal_checkpoint_meta", None))
        # Where nobody kept the whole shape, shards are taken to be equally large.
        size = size * tensor_parallel_size_of_process() if whole is None else math.prod(whole)
    return size * expert_parallel_size(parameter)


def _whole_shape(meta: Any) -> tuple[int, ...] | None:
    """The shape before DeepSpeed cut the parameter, unevenly perhaps, if it kept it."""
    shape = meta.get("logical_shape") if isinstance(meta, Mapping) else None
    if not isinstance(shape, (tuple, list)) or not all(isinstance(length, int) for length in shape):
        return None
    return tuple(shape)
