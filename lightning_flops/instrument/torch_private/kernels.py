"""Kernels that are written in Python: which operator has one, and how to call it as if no mode were active."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from lightning_flops.instrument.torch_private.dispatch import DispatchMode, push, remove
from lightning_flops.instrument.torch_private.names import take

_written_in_python: Any = take("torch.library:_impls")
"""Kernels registered from Python, by ``namespace/operator/key``."""
_key_of_device: Any = take("torch._C:_dispatch_key_for_device")
_has_kernel: Any = take("torch._C:_dispatch_has_kernel_for_dispatch_key")
_keys: Any = take("torch._C:DispatchKey")
_key_set: Any = take("torch._C:DispatchKeySet")
_as_before_modes: Any = take("torch._C:_RestorePythonTLSSnapshot")
"""Inside, the dispatcher is as it was when the operator was called, above any mode."""
_below_autograd: Any = take("torch._C:_AutoDispatchBelowAutograd")
_include_key: Any = take("torch._C:_dispatch_tls_set_dispatch_key_included")


def _slot(function: Any) -> str:
    name: str = function.name()
    return name.replace("::", "/", 1)


def keys_of_python_kernel(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The dispatch key of an operator's Python kernel for the device that these arguments are on.

    None if there is no such kernel, or where it takes more than ordinary tensors.
    """
    devices = set()
    for tensor in _tensors((*args, *kwargs.values())):
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            return None
        devices.add(tensor.device.type)
    if len(devices) > 1:
        devices.discard("cpu")  # single numbers may lie there
    if len(devices) != 1 or ("cuda" in devices and torch.cuda.is_current_stream_capturing()):
        return None
    try:
        key = _key_of_device(devices.pop())
        slot = _slot(function)
        if f"{slot}/{key}" not in _written_in_python and (
            _has_kernel(function.name(), key) or f"{slot}/CompositeExplicitAutograd" not in _written_in_python
        ):
            return None
        return _key_set(getattr(_keys, key))
    except (AttributeError, RuntimeError):
        return None  # a device that the dispatcher has no key for


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def run_python_kernel(
    function: Any, keys: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *modes: DispatchMode
) -> Any:
    """Calls the kernel from within a mode's handler as torch would call it without any mode, with *modes* on."""
    with _as_called(function, modes):
        return function.redispatch(keys, *args, **kwargs)


@contextmanager
def _as_called(function: Any, modes: tuple[DispatchMode, ...]) -> Iterator[None]:
    # What a custom operator has for autograd switches autograd off for the kernel. It is off from where it is made on.
    has_autograd = f"{_slot(function)}/Autograd" in _written_in_python
    with _as_before_modes(), _below_autograd() if has_autograd else nullcontext():
        for mode in modes:
            push(mode)
        if not modes:
            for key in (_keys.Python, _keys.PythonTLSSnapshot):
                _include_key(key, False)
        try:
            yield
        finally:
            for mode in reversed(modes):
                remove(mode)
