"""Kernels that are written in Python: which operator has one, and how to call it as if no mode were active."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from lightning_flops.instrument.torch_private.dispatch import DispatchMode, push, remove
from lightning_flops.instrument.torch_private.names import optional


class _Parts(NamedTuple):
    """The parts of torch that such a call needs."""

    written_in_python: Any
    """Kernels registered from Python, by ``namespace/operator/key``."""
    key_of_device: Any
    has_kernel: Any
    keys: Any
    key_set: Any
    as_called: Any
    """Inside, the dispatcher is as it was when the operator was called, above any mode."""
    below_autograd: Any
    include_key: Any


_PARTS = tuple(
    optional(path)
    for path in (
        "torch.library:_impls",
        "torch._C:_dispatch_key_for_device",
        "torch._C:_dispatch_has_kernel_for_dispatch_key",
        "torch._C:DispatchKey",
        "torch._C:DispatchKeySet",
        "torch._C:_RestorePythonTLSSnapshot",
        "torch._C:_AutoDispatchBelowAutograd",
        "torch._C:_dispatch_tls_set_dispatch_key_included",
    )
)


@functools.cache
def _parts() -> _Parts | None:
    parts = [part() for part in _PARTS]
    return None if any(part is None for part in parts) else _Parts(*parts)


def _slot(function: Any) -> str:
    name: str = function.name()
    return name.replace("::", "/", 1)


def keys_of_kernel(function: Any, device_type: str) -> Any:
    """The dispatch key under which an operator's Python kernel for this device stands; None if there is none."""
    parts = _parts()
    if parts is None:
        return None
    try:
        key = parts.key_of_device(device_type)
        slot = _slot(function)
        if f"{slot}/{key}" not in parts.written_in_python and (
            parts.has_kernel(function.name(), key) or f"{slot}/CompositeExplicitAutograd" not in parts.written_in_python
        ):
            return None
        return parts.key_set(getattr(parts.keys, key))
    except (AttributeError, RuntimeError):
        return None  # a device that the dispatcher has no key for


def keys_of_python_kernel(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The same for the device that these arguments are on; None too where it takes more than ordinary tensors."""
    devices = set()
    for tensor in _tensors((*args, *kwargs.values())):
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            return None
        devices.add(tensor.device.type)
    if len(devices) > 1:
        devices.discard("cpu")  # single numbers may lie there
    if len(devices) != 1 or ("cuda" in devices and torch.cuda.is_current_stream_capturing()):
        return None
    return keys_of_kernel(function, devices.pop())


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
    parts = _parts()
    assert parts is not None  # or there were no keys to call this with
    # What a custom operator has for autograd switches autograd off for the kernel. It is off from where it is made on.
    has_autograd = f"{_slot(function)}/Autograd" in parts.written_in_python
    with parts.as_called(), parts.below_autograd() if has_autograd else nullcontext():
        for mode in modes:
            push(mode)
        if not modes:
            for key in (parts.keys.Python, parts.keys.PythonTLSSnapshot):
                parts.include_key(key, False)
        try:
            yield
        finally:
            for mode in reversed(modes):
                remove(mode)
