"""What a device can do, as far as advice depends on it. Nothing is claimed of an unknown device."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TENSOR_CORES_SINCE = (7, 0)
_TURING = (7, 5)
_BFLOAT16_SINCE = (8, 0)
_TF32_SINCE = (8, 0)

_OF_ANOTHER_VENDOR = re.compile(r"AMD|Radeon|Instinct|gfx\d", re.I)
"""ROCm fills the fields of a compute capability with numbers of its own."""

_TURING_WITH_TENSOR_CORES = re.compile(r"\bRTX\b|\bT4G?\b")
"""The same compute capability has chips without (GeForce GTX 16, T600, MX450)."""

_PINNING = ("cuda", "xpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAbilities:
    """What advice may count on; false and empty where it is not known."""

    tensor_core_dtypes: tuple[str, ...] = ()
    """16-bit dtypes that its tensor cores take, the one to train in first."""
    tf32: bool = False
    pins_memory: bool = False
    """Copies from pinned host memory are faster."""


UNKNOWN_DEVICE = DeviceAbilities()


def device_abilities(
    *, device_type: str | None, name: str | None, compute_capability: tuple[int, int] | None
) -> DeviceAbilities:
    """What a device of this name can do.

    Args:
        device_type: torch's name of the kind of device; None if not known.
        name: the device's own; None if not known.
        compute_capability: CUDA's; None for other devices, and if not known.
    """
    pins_memory = device_type in _PINNING
    if compute_capability is None or device_type not in (None, "cuda") or _OF_ANOTHER_VENDOR.search(name or ""):
        return DeviceAbilities(pins_memory=pins_memory)
    tensor_core_dtypes: tuple[str, ...] = ()
    if compute_capability >= _BFLOAT16_SINCE:
        tensor_core_dtypes = ("bfloat16", "float16")
    elif compute_capability >= _TENSOR_CORES_SINCE and (
        compute_capability != _TURING or _TURING_WITH_TENSOR_CORES.search(name or "")
    ):
        tensor_core_dtypes = ("float16",)
    return DeviceAbilities(
        tensor_core_dtypes=tensor_core_dtypes,
        tf32=compute_capability >= _TF32_SINCE,
        pins_memory=pins_memory,
    )
