"""Bandwidth of devices' memory: what each vendor says one device can move between it and its memory.

A figure that the vendor does not publish for exactly this device, or publishes in two versions, is left out (T4: 300
and 320; H20 and the GH200's two memories), as for peaks: no roof is better than a wrong one. A user's own figure
(``memory_bytes_per_sec``) wins over this table.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lightning_flops.analysis.peak_flops import without_vendor

_GIGA = 1e9


class _Memory(NamedTuple):
    """A device as ``torch.cuda.get_device_name`` writes it, and the GB/s of its memory."""

    name: str
    """Pattern of the whole name without the vendor's, as in the table of peaks."""
    gigabytes_per_sec: float
    source: str
    """The vendor's sheet."""


_MEMORIES = (
    _Memory(r"V100-(SXM2|PCIE)-(16|32)GB", 900.0, "NVIDIA V100 datasheet"),
    _Memory(r"V100S-PCIE-32GB", 1134.0, "NVIDIA V100 datasheet"),
    _Memory(r"A100-(SXM4|PCIE)-40GB", 1555.0, "NVIDIA A100 datasheet"),
    _Memory(r"A100-SXM4-80GB", 2039.0, "NVIDIA A100 datasheet"),
    _Memory(r"A100 80GB PCIe", 1935.0, "NVIDIA A100 datasheet"),
    _Memory(r"A40", 696.0, "NVIDIA A40 datasheet"),
    _Memory(r"A30", 933.0, "NVIDIA A30 datasheet"),
    _Memory(r"A10", 600.0, "NVIDIA A10 datasheet"),
    _Memory(r"RTX A6000", 768.0, "NVIDIA RTX A6000 datasheet"),
    _Memory(r"GeForce RTX 3090", 936.0, "NVIDIA Ampere GA102 white paper"),
    _Memory(r"L4", 300.0, "NVIDIA L4 datasheet"),
    _Memory(r"L40S?", 864.0, "NVIDIA L40 and L40S datasheets"),
    _Memory(r"RTX 6000 Ada Generation", 960.0, "NVIDIA RTX 6000 Ada datasheet"),
    _Memory(r"GeForce RTX 4090", 1008.0, "NVIDIA Ada white paper"),
    _Memory(r"H100 80GB HBM3", 3350.0, "NVIDIA H100 datasheet"),
    _Memory(r"H100 PCIe", 2000.0, "NVIDIA H100 PCIe datasheet"),
    _Memory(r"H100 NVL", 3900.0, "NVIDIA H100 datasheet"),
    _Memory(r"H200( NVL)?", 4800.0, "NVIDIA H200 datasheet"),
    _Memory(r"B200", 8000.0, "NVIDIA DGX B200 datasheet: 64 TB/s of eight"),
    _Memory(r"GB200", 8000.0, "NVIDIA GB200 datasheet: 16 TB/s of two"),
    _Memory(r"GeForce RTX 5090", 1792.0, "NVIDIA RTX Blackwell white paper"),
    # A MI250X shows as two devices, so half of the sheet's 3,276.8 is one device's.
    _Memory(r"Instinct MI250X", 1638.4, "AMD Instinct MI250X data sheet"),
    _Memory(r"Instinct MI300X( OAM)?", 5300.0, "AMD Instinct MI300X data sheet"),
    _Memory(r"Instinct MI325X( OAM)?", 6000.0, "AMD Instinct MI325X data sheet"),
    _Memory(r"Instinct MI35[05]X( OAM)?", 8000.0, "AMD Instinct MI350 series data sheets"),
)


def memory_bytes_per_sec(device_name: str) -> float | None:
    """Bandwidth of one device's memory in bytes/s.

    Args:
        device_name: the name that ``torch.cuda.get_device_name`` reports, such as ``"NVIDIA A100-SXM4-80GB"``.

    Returns:
        None if it is not known. An unknown device never takes another's figure.
    """
    name = without_vendor(device_name)
    for memory in _MEMORIES:
        if re.fullmatch(memory.name, name, re.IGNORECASE):
            return float(round(memory.gigabytes_per_sec * _GIGA))
    return None
