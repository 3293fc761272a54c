"""Modules: their children and parameters, torch's hooks, and what torch's wrappers do with a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """The modules that *module* holds, by name; None under a name that holds none."""
    return module._modules


def holds(module: nn.Module, child: str) -> bool:
    """Whether *module* holds a module under this name; False if its ``__init__`` did not finish."""
    return vars(module).get("_modules", {}).get(child) is not None


def parameters_of(module: nn.Module) -> Mapping[str, nn.Parameter | None]:
    """The parameters that *module* itself holds, by name; None under a name that holds none."""
    return module._parameters


# ---- wrappers

TORCHS_WRAPPERS: dict[str, tuple[tuple[str, str], ...]] = {
    "_orig_mod": (("torch._dynamo.eval_frame", "OptimizedModule"),),
    "module": (
        ("torch.nn.parallel.distributed", "DistributedDataParallel"),
        ("torch.nn.parallel.data_parallel", "DataParallel"),
        ("torch.optim.swa_utils", "AveragedModel"),
    ),
    "_fsdp_wrapped_module": (("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),),
    "_checkpoint_wrapped_module": (
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper"),
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "OffloadWrapper"),
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"),
    ),
}
"""Name of the child that a wrapper of torch's wraps -> (module, class) of the wrappers that call it so."""


def is_replica(module: nn.Module) -> bool:
    """Whether *module* is a copy that DataParallel made, for one device and one forward."""
    return bool(getattr(module, "_is_replica", False))


# ---- FullyShardedDataParallel


class FlatParts(NamedTuple):
    """What a flat parameter tells about its original parameters; the first three fields are in one order."""

    infos: Sequence[Any]
    """``module`` and ``param_name`` of each."""
    shapes: Sequence[torch.Size]
    shards: Sequence[Any]
    """``numel_in_shard`` of each on this rank."""
    shared: Sequence[Any]
    """Other names of some: ``module``, and ``prim_module`` and ``prim_param_name`` of the first name."""
    originals: Sequence[torch.Tensor] | None
    """The parameters themselves, where they are left to see."""


def flat_parameter(wrapper: nn.Module) -> Any:
    """The flat parameter of a FullyShardedDataParallel; None where it holds none.

    Raises:
        AttributeError: this torch keeps it in another way.
    """
    handle: Any = wrapper._handle
    return None if handle is None else handle.flat_param


def flat_parts(flat: Any) -> FlatParts:
    """What a flat parameter was made of.

    Raises:
        AttributeError: this torch keeps it in another way.
    """
    return FlatParts(flat._param_infos, flat._shapes, flat._shard_param_infos, flat._shared_param_infos, flat._params)
