"""The private names of torch for tracers and fake tensors, which torch keeps apart from the stack of modes."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch

from lightning_flops.measure.torch_private.needed import take

_keys: Any = take("torch._C:_TorchDispatchModeKey")
_mode_of_key: Any = take("torch._C:_get_dispatch_mode")
_FakeTensorMode: Any = take("torch._subclasses.fake_tensor:FakeTensorMode")


def is_traced() -> bool:
    """Whether a tracer may be recording what runs."""
    return any(_mode_of_key(key) is not None for key in (_keys.FAKE, _keys.PROXY, _keys.FUNCTIONAL))


def new_fake_mode() -> Any:
    """A mode in which operators make tensors without values."""
    return _FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode() -> Any:
    """Torch's mode in which operators make fake tensors, as while something is traced; None: none is on."""
    return _mode_of_key(_keys.FAKE)


@functools.cache
def is_fake(tensor_type: type) -> bool:
    """Whether tensors of this type hold no data: fake and functional ones; known by name, so nothing is imported."""
    return any(
        cls.__name__ in ("FakeTensor", "FunctionalTensor") and cls.__module__.startswith("torch._subclasses")
        for cls in tensor_type.__mro__
    )


@functools.cache
def unwraps_subclass(tensor_type: type) -> bool:
    """Whether operators on this tensor subclass are counted on the tensors inside it.

    A DTensor's local shard, a nested tensor's values, a quantized tensor's parts: what runs are the operators that its
    ``__torch_dispatch__`` calls, on their shapes. A fake tensor has nothing inside.
    """
    dispatch = getattr(tensor_type, "__torch_dispatch__", None)
    if dispatch is None or dispatch is cast("Any", torch.Tensor).__torch_dispatch__:  # plain tensors: no such method
        return False
    return not is_fake(tensor_type)


tree_map_only: Any = take("torch.utils._pytree:tree_map_only")
"""Maps a function over what containers hold of a type."""


def stored(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices of the elements that a COO tensor stores, a row for each sparse dimension, and the elements."""
    return tensor._indices(), tensor._values()
