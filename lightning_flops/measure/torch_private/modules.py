"""Modules and tensors: what they hold, what torch's wrappers do with a model, which part of a tensor a rank has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_flops.measure.torch_private.dispatch import modes_off
from lightning_flops.measure.torch_private.names import take


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """The modules that *module* holds, by name; None under a name that holds none."""
    return module._modules


def holds(module: nn.Module, child: str) -> bool:
    """Whether *module* holds a module under this name; False if its ``__init__`` did not finish."""
    return vars(module).get("_modules", {}).get(child) is not None


def is_replica(module: nn.Module) -> bool:
    """Whether *module* is a copy that DataParallel made, for one device and one forward."""
    return bool(getattr(module, "_is_replica", False))


WRAPPERS: Mapping[str, frozenset[str]] = {
    "_orig_mod": frozenset({"OptimizedModule"}),
    "module": frozenset(
        {"DistributedDataParallel", "DataParallel", "AveragedModel", "DeepSpeedEngine", "_FabricModule"}
    ),
    "_fsdp_wrapped_module": frozenset({"FullyShardedDataParallel"}),
    "_checkpoint_wrapped_module": frozenset({"CheckpointWrapper", "OffloadWrapper", "ActivationWrapper"}),
    "_forward_module": frozenset({"_FabricModule"}),
    "_original_module": frozenset({"_FabricModule"}),
}
"""Name of the child that a wrapper wraps -> classes of torch, DeepSpeed and Lightning that call it so."""

_WITH_WRAPPERS = ("torch", "deepspeed", "lightning", "lightning_fabric")
"""Packages that wrap models."""


def wraps(module: nn.Module, child: str) -> bool:
    """Whether *module* is a wrapper, and its child of this name is the module that it wraps.

    The wrapper's class, or one of its base classes, decides, and never the child's name alone. We compare classes by
    name, so that no framework is imported for this.
    """
    return child in WRAPPERS and any(
        cls.__name__ in WRAPPERS[child] and cls.__module__.partition(".")[0] in _WITH_WRAPPERS
        for cls in type(module).__mro__
    )


class FlatPiece(NamedTuple):
    """One parameter as it was before FullyShardedDataParallel put it into a flat one."""

    key: tuple[int, int]
    """One value for every module that shares the parameter, and for no other parameter."""
    shape: tuple[int, ...]
    trainable: bool
    local: int
    """Elements that this rank's shard has of it."""
    dtype: torch.dtype


def flat_parts(wrapper: nn.Module) -> tuple[list[torch.Tensor], list[tuple[nn.Module, FlatPiece]]]:
    """What a FullyShardedDataParallel has made of parameters, and what these were, each with its module.

    With ``use_orig_params`` the old parameters are left to see, as views of this rank's part (empty ones, too);
    without, they are gone.

    Raises:
        AttributeError: this torch keeps it in another way.
    """
    handle: Any = wrapper._handle
    if handle is None:
        return [], []
    flat = handle.flat_param
    originals = flat._params or ()
    named = {}
    for index, (info, shape, shard) in enumerate(
        zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True)
    ):
        trainable = bool((originals[index] if originals else flat).requires_grad)
        piece = FlatPiece((id(flat), index), tuple(shape), trainable, shard.numel_in_shard or 0, flat.dtype)
        named[info.module, info.param_name] = piece
    pieces = [(module, piece) for (module, _), piece in named.items()]
    pieces += [(one.module, named[one.prim_module, one.prim_param_name]) for one in flat._shared_param_infos]
    return [flat, *originals], pieces


# ---- tensors

tree_map_only: Any = take("torch.utils._pytree:tree_map_only")
"""Maps a function over what containers hold of a type."""


def stored(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices of the elements that a COO tensor stores, a row for each sparse dimension, and the elements."""
    return tensor._indices(), tensor._values()


def nested_sizes(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    """Shapes of the tensors in a nested tensor with strides."""
    return [tuple(map(int, row)) for row in tensor._nested_tensor_size().tolist()]


def on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of *tensor*, which ZeRO-3 or a DTensor may have split; ZeRO-3 keeps the part in ds_tensor."""
    shard = getattr(tensor, "ds_tensor", None)
    if isinstance(shard, torch.Tensor):
        tensor = shard
    to_local: Any = getattr(tensor, "to_local", None)
    if not callable(to_local):
        return tensor
    # Neither autograd nor a subclass sees this reading.
    shard = getattr(tensor, "_local_tensor", None)
    if shard is None:
        with modes_off(), torch.no_grad():
            shard = to_local()
    return shard if isinstance(shard, torch.Tensor) else tensor
