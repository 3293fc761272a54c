"""Modules: their children and parameters, torch's hooks, and what torch's wrappers do with a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_flops.instrument.torch_private.names import Attribute, take, take_later

_CHILDREN = Attribute(
    "torch.nn:Module",
    "_modules",
    "does not show a module's children by name: one that a module holds under two names has the first one alone",
)

_PARAMETERS = Attribute(
    "torch.nn:Module",
    "_parameters",
    "does not show a module's own parameters: they are asked by name, and nothing is lost by that",
    reported=False,
)


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """The modules that *module* holds, by name; None under a name that holds none."""
    try:
        children: Mapping[str, nn.Module | None] = _CHILDREN.of(module)
    except AttributeError:
        return dict(module.named_children())
    return children


def holds(module: nn.Module, child: str) -> bool:
    """Whether *module* holds a module under this name; False if its ``__init__`` did not finish.

    Unlike ``children_of`` it calls no method of the module.
    """
    return _CHILDREN.name.missing or vars(module).get("_modules", {}).get(child) is not None


def parameters_of(module: nn.Module) -> Mapping[str, nn.Parameter | None]:
    """The parameters that *module* itself holds, by name; None under a name that holds none."""
    parameters: Mapping[str, nn.Parameter | None] | None = _PARAMETERS.get(module, None)
    if parameters is None:
        return dict(module.named_parameters(recurse=False, remove_duplicate=False))
    return parameters


_global_hooks: Any = take(
    "torch.nn.modules.module:_global_forward_hooks",
    None,
    "does not show its global hooks: after a forward that raised, the profiler's own stay until a module runs",
    reported=False,
)


def is_last_global_hook(handle: Any) -> bool:
    """Whether torch calls the hook of this handle last after a forward; False if that cannot be known."""
    return bool(_global_hooks) and next(reversed(_global_hooks)) == handle.id


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

_WRAPPED = {
    (module, kind): Attribute(
        f"{module}:{kind}",
        child,
        f"does not show what {kind} wraps where it did: names of modules begin with the name that it gives",
    )
    for child, wrappers in TORCHS_WRAPPERS.items()
    if child.startswith("_")
    for module, kind in wrappers
    if kind != "ActivationWrapper"  # the base class of the two before it
}


def look_at_wrapper(module: nn.Module) -> bool:
    """Says what is lost if *module* is a wrapper of torch's that keeps what it wraps under another name.

    Returns:
        Whether *module*'s class is that of a wrapper, so that others of this class are to be looked at.
    """
    kind = type(module)
    wrapped = _WRAPPED.get((kind.__module__, kind.__name__))
    if wrapped is None:
        return False
    wrapped.get(module, None)
    return True


def _marks_replicas(code: Any) -> None:
    if "_is_replica" not in code.co_names:
        raise AttributeError("DataParallel's copies are not marked")


REPLICATE = "_replicate_for_data_parallel"
"""Method of a module that copies it, with its attributes, for one device and one forward."""

_marking: Any = take_later(
    f"torch.nn:Module.{REPLICATE}.__code__",
    None,
    "does not mark the copies that DataParallel makes: their FLOPs stand outside of the model",
    works=_marks_replicas,
)


def is_replica(module: nn.Module) -> bool:
    """Whether *module* is a copy that DataParallel made, for one device and one forward."""
    _marking()
    return bool(getattr(module, "_is_replica", False))


_COMMUNICATION_HOOKS = Attribute(
    "torch.nn.parallel:DistributedDataParallel",
    "_comm_hooks",
    "does not show DistributedDataParallel's communication hooks: it is not said which of them compute",
)


def communication_hooks(module: nn.Module) -> Sequence[tuple[Any, Any]]:
    """The communication hooks of a DistributedDataParallel, each with its state; none of any other module."""
    if not isinstance(module, DistributedDataParallel):
        return ()
    return _COMMUNICATION_HOOKS.get(module, None) or ()


# ---- FullyShardedDataParallel

_FSDP = "torch.distributed.fsdp:FullyShardedDataParallel"
_FLAT = "torch.distributed.fsdp:FlatParameter"
_FLAT_LOSS = (
    "does not show what FullyShardedDataParallel made of the parameters: parameters are those of this rank's shards"
)


def _of_flat(owner: str, attribute: str) -> Attribute:
    return Attribute(owner, attribute, _FLAT_LOSS, reported=False)  # the note of that profile says it


_HANDLE = _of_flat(_FSDP, "_handle")
_ORIGINALS = _of_flat(_FLAT, "_params")
_INFOS = _of_flat(_FLAT, "_param_infos")
_SHAPES = _of_flat(_FLAT, "_shapes")
_SHARDS = _of_flat(_FLAT, "_shard_param_infos")
_SHARED = _of_flat(_FLAT, "_shared_param_infos")


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
    handle = _HANDLE.of(wrapper)
    return None if handle is None else handle.flat_param


def flat_parts(flat: Any) -> FlatParts:
    """What a flat parameter was made of.

    Raises:
        AttributeError: this torch keeps it in another way.
    """
    return FlatParts(_INFOS.of(flat), _SHAPES.of(flat), _SHARDS.of(flat), _SHARED.of(flat), _ORIGINALS.of(flat))
