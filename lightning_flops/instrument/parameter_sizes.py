"""How large a parameter is as a part of the whole model, and how much of it this rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_flops.instrument.deepspeed_groups import expert_parallel_size, tensor_parallel_size_of_process
from lightning_flops.instrument.torch_private.modules import flat_parameter, flat_parts
from lightning_flops.instrument.torch_private.tensors import local_shard


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """One parameter as it was before FullyShardedDataParallel put it into a flat one."""

    key: tuple[int, int]
    """The same for every module that shares the parameter, and for no other parameter."""
    shape: tuple[int, ...]
    trainable: bool
    local: int
    """Elements that this rank's shard has of it."""
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


class FlatParameters:
    """What torch's FullyShardedDataParallel has made of a model's parameters; nothing in a model without it.

    It puts the parameters of some modules into a flat one and gives each rank a part of that, wherever the cuts fall.
    With ``use_orig_params`` the old parameters are left to see, as views of this rank's part (empty ones, too);
    without, they are gone. How large they were, only the flat parameter tells, which the wrapper holds.

    Args:
        whole: the model in all its wrappers; those around it hold flat parameters as well as those inside.
        note: told in a sentence what cannot be known; under a torch that keeps this in another way, most of it.
    """

    def __init__(self, whole: nn.Module, *, note: Callable[[str], object]) -> None:
        self._pieces: dict[nn.Module, list[FlatPiece]] = {}
        self._made_of: set[int] = set()
        wrappers = [module for module in whole.modules() if _is_fsdp(module)]
        try:
            for wrapper in wrappers:
                flat = flat_parameter(wrapper)
                if flat is not None:
                    self._add(flat)
        except Exception as error:
            self._pieces.clear()
            self._made_of.clear()
            note(
                "Parameters are those of this rank's shards: what FullyShardedDataParallel made them of could not be "
                f"read ({type(error).__name__}: {error})."
            )

    def _add(self, flat: Any) -> None:
        self._made_of.add(id(flat))
        parts = flat_parts(flat)
        originals = parts.originals
        self._made_of.update(map(id, originals or ()))
        pieces = {}
        for index, (info, shape, shard) in enumerate(zip(parts.infos, parts.shapes, parts.shards, strict=True)):
            piece = FlatPiece(
                key=(id(flat), index),
                shape=tuple(shape),
                trainable=bool((flat if originals is None else originals[index]).requires_grad),
                local=shard.numel_in_shard or 0,
                dtype=flat.dtype,
            )
            pieces[info.module, info.param_name] = piece
            self._pieces.setdefault(info.module, []).append(piece)
        for shared in parts.shared:
            self._pieces.setdefault(shared.module, []).append(pieces[shared.prim_module, shared.prim_param_name])

    def of(self, module: nn.Module) -> list[FlatPiece]:
        """What *module* itself had for parameters that are in a flat one now."""
        return self._pieces.get(module, [])

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether *parameter* is a flat one, or what is left of one that is in it."""
        return id(parameter) in self._made_of


def _is_fsdp(module: nn.Module) -> bool:
    """Whether *module* is a FullyShardedDataParallel; told by its class's name, so that nothing is imported for it."""
    return any(
        (kind.__name__, kind.__module__)
        == ("FullyShardedDataParallel", "torch.distributed.fsdp.fully_sharded_data_parallel")
        for kind in type(module).__mro__
    )


def parameter_sizes(parameter: torch.Tensor) -> tuple[int, bool, int]:
    """(size in the whole model, whether it is trained, size held in this rank's memory) of *parameter*.

    A rank that holds one shard of a parameter answers for the ranks that hold the other shards, and likewise for
    experts. If several pipeline stages hold a copy of it, only the first stage counts it, so that stages add up to the
    model.
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
    shard = local_shard(parameter)
    return local, local if shard is None else shard.numel()  # a DTensor's own size is the global one


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
