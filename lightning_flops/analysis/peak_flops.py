"""Dense peaks of devices: what each vendor says one device can do in one dtype, without sparsity.

The figures are those of the vendors' datasheets and white papers. Where a sheet's headline assumes 2:4 sparsity, half
of it stands here; tensor-core rates are those with float32 accumulation, which is what PyTorch asks for. A figure that
the vendor does not publish, or publishes in two versions, is left out: no utilization is better than a wrong one. A
user's own figure (``peak_flops_per_sec``) wins over this table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_TERA = 1e12


class _Device(NamedTuple):
    """A device as ``torch.cuda.get_device_name`` writes it, and its dense peaks in TFLOP/s by dtype."""

    name: str
    """Pattern of the whole name without the vendor's. Nothing may follow: a longer name is another chip, or a slice of
    this one (``MIG 1g.10gb``, ``L40S-24Q``, ``Laptop GPU``)."""
    peaks: Mapping[str, float]


def _tensor(
    half: float, *, tf32: float, float32: float | None = None, float8: float | None = None, int8: float | None = None
) -> dict[str, float]:
    """Peaks of a device whose bfloat16 and float16 rates are the same."""
    peaks = {"bfloat16": half, "float16": half, "tf32": tf32, "float32": float32, "float8": float8, "int8": int8}
    return {dtype: peak for dtype, peak in peaks.items() if peak is not None}


_H100_SXM = _tensor(989.4, tf32=494.7, float32=66.9, float8=1978.9, int8=1978.9)
_H100_NVL = _tensor(835.5, tf32=417.5, float32=60.0, float8=1670.5, int8=1670.5)
_MI300X = _tensor(1307.4, tf32=653.7, float32=163.4, float8=2614.9, int8=2614.9)

_DEVICES = (
    # Volta and Turing tensor cores take float16 alone; bfloat16 is emulated and has no published rate.
    _Device(r"V100-SXM2-(16|32)GB", {"float16": 125.0, "float32": 15.7}),
    _Device(r"V100-PCIE-(16|32)GB", {"float16": 112.0, "float32": 14.0}),
    _Device(r"V100S-PCIE-32GB", {"float16": 130.0, "float32": 16.4}),
    _Device(r"T4", {"float16": 65.0, "float32": 8.1, "int8": 130.0}),
    # Ampere
    _Device(r"A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe", _tensor(312.0, tf32=156.0, float32=19.5, int8=624.0)),
    _Device(r"A40", _tensor(149.7, tf32=74.8, float32=37.4, int8=299.3)),
    _Device(r"A30", _tensor(165.0, tf32=82.0, float32=10.3, int8=330.0)),
    _Device(r"A10", _tensor(125.0, tf32=62.5, float32=31.2, int8=250.0)),
    _Device(r"A10G", _tensor(70.0, tf32=35.0, float32=31.5, int8=140.0)),
    _Device(r"RTX A6000", _tensor(154.8, tf32=77.4, float32=38.7, int8=309.7)),
    _Device(r"GeForce RTX 3090", _tensor(71.0, tf32=35.6, float32=35.6, int8=284.0)),
    # Ada
    _Device(r"L4", _tensor(121.0, tf32=60.0, float32=30.3, float8=242.0, int8=242.0)),
    _Device(r"L40", _tensor(181.0, tf32=90.5, float32=90.5, float8=362.0, int8=362.0)),
    _Device(r"L40S", _tensor(362.0, tf32=183.0, float32=91.6, float8=733.0, int8=733.0)),
    _Device(r"RTX 6000 Ada Generation", _tensor(364.2, tf32=182.1, float32=91.1, float8=728.5, int8=728.5)),
    _Device(r"GeForce RTX 4090", _tensor(165.2, tf32=82.6, float32=82.6, float8=330.3, int8=660.6)),
    # Hopper
    _Device(r"H100 80GB HBM3", _H100_SXM),
    _Device(r"H100 PCIe", _tensor(756.0, tf32=378.0, float32=51.2, float8=1513.0, int8=1513.0)),
    _Device(r"H100 NVL", _H100_NVL),
    _Device(r"H200", _H100_SXM),
    _Device(r"H200 NVL", _H100_NVL),
    _Device(r"GH200( \d+GB)?", _H100_SXM),
    _Device(r"H20", _tensor(148.0, tf32=74.0, float32=44.0, float8=296.0, int8=296.0)),
    # Blackwell. float32 of the Grace superchips is published as 80 and as 90, int8 of the 300s per board only.
    _Device(r"B200", _tensor(2250.0, tf32=1125.0, float32=75.0, float8=4500.0, int8=4500.0)),
    _Device(r"GB200", _tensor(2500.0, tf32=1250.0, float8=5000.0, int8=5000.0)),
    _Device(r"B300( SXM6 AC)?", _tensor(2250.0, tf32=1125.0, float8=4500.0)),
    _Device(r"GB300", _tensor(2500.0, tf32=1250.0, float8=5000.0)),
    _Device(r"GeForce RTX 5090", _tensor(209.5, tf32=104.8, float32=104.8, float8=419.0, int8=838.0)),
    # AMD. A MI250X shows as two devices, so half of the sheet's 383 and 95.7 (float32 matrix) is one device's.
    _Device(r"Instinct MI250X", {"bfloat16": 191.5, "float16": 191.5, "float32": 47.85, "int8": 191.5}),
    _Device(r"Instinct MI300X( OAM)?|Instinct MI325X( OAM)?", _MI300X),
    _Device(
        r"Instinct MI350X( OAM)?",
        {"bfloat16": 2300.0, "float16": 2300.0, "float32": 144.2, "float8": 4600.0, "int8": 4600.0},
    ),
    _Device(
        r"Instinct MI355X( OAM)?",
        {"bfloat16": 2500.0, "float16": 2500.0, "float32": 157.3, "float8": 5000.0, "int8": 5000.0},
    ),
)

_VENDOR = re.compile(r"(?:NVIDIA|Tesla|AMD)\s+", re.IGNORECASE)


def peak_flops_per_sec(device_name: str, dtype: str) -> float | None:
    """Dense peak of one device in one dtype, in FLOP/s.

    Args:
        device_name: the name that ``torch.cuda.get_device_name`` reports, such as ``"NVIDIA A100-SXM4-80GB"``.
        dtype: ``bfloat16``, ``float16``, ``tf32``, ``float32``, ``float8`` or ``int8``.

    Returns:
        None if the device, or its rate in that dtype, is not known. An unknown device never takes another's figure.
    """
    name = without_vendor(device_name)
    for device in _DEVICES:
        if re.fullmatch(device.name, name, re.IGNORECASE):
            peak = device.peaks.get(dtype)
            return None if peak is None else float(round(peak * _TERA))
    return None


def without_vendor(device_name: str) -> str:
    """The name of a device as the tables have it: without its vendor's."""
    name = device_name.strip()
    while vendor := _VENDOR.match(name):
        name = name[vendor.end() :]
    return name


def peak_for(*, device_name: str, dtype: str, given: float | Mapping[str, float] | None) -> float | None:
    """Peak of *dtype* that a profile uses: the user's figure where there is one, else the table's.

    Args:
        device_name: see ``peak_flops_per_sec``.
        dtype: see ``peak_flops_per_sec``.
        given: the setting ``peak_flops_per_sec``: one figure for all dtypes, some by dtype, or None.
    """
    if isinstance(given, Mapping):
        return given[dtype] if dtype in given else peak_flops_per_sec(device_name, dtype)
    return peak_flops_per_sec(device_name, dtype) if given is None else given
