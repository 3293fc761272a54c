"""What vendors say one device can do: dense peaks by dtype, without sparsity, and the bandwidth of its memory.

The figures are those of the vendors' datasheets and white papers, each row with its source. Where a sheet's headline
assumes 2:4 sparsity, half of it stands here; tensor-core rates are those with float32 accumulation, which is what
PyTorch asks for. A figure that the vendor does not publish for exactly this device, or publishes in two versions, is
left out: no utilization is better than a wrong one. A name that stands for two chips or two boards (GeForce RTX 2060,
3050, 3080, ``MI250X / MI250``) has no row, and neither has one that is a whole card or half of one as the driver is
set (Intel Data Center GPU Max).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

_TERA = 1e12
_GIGA = 1e9


class Device(NamedTuple):
    """A device as ``torch.cuda.get_device_name`` writes it, and what it can do."""

    name: str
    """Pattern of the whole name without the vendor's. Nothing may follow: a longer name is another chip, or a slice of
    this one (``MIG 1g.10gb``, ``L40S-24Q``, ``Laptop GPU``)."""
    peaks: Mapping[str, float]
    """Dense TFLOP/s by dtype."""
    gigabytes_per_sec: float | None
    """Of its memory; None where it is not published, or in two versions."""
    source: str
    """Where the vendor says so."""


def _tensor(half: float, **others: float) -> dict[str, float]:
    """Peaks of a device whose bfloat16 and float16 rates are the same."""
    return {"bfloat16": half, "float16": half, **others}


def _turing(float32: float, half: float, int8: float) -> dict[str, float]:
    """Volta's and Turing's tensor cores take float16 alone; bfloat16 is emulated and has no published rate."""
    return {"float16": half, "float32": float32, "int8": int8}


def _geforce_20(sms: int, mhz: int) -> dict[str, float]:
    """64 float32 lanes in an SM; tensor cores do 512 FLOPs a cycle with float32 accumulation, 2,048 in int8."""
    clock = sms * mhz * 1e-6
    return _turing(round(clock * 128, 1), round(clock * 512, 1), round(clock * 2048, 1))


def _geforce(sms: int, mhz: int, *, float8: bool = True) -> dict[str, float]:
    """Since Ampere 128 float32 lanes in an SM; tensor cores do as much in tf32, twice in half precision, and so on."""
    clock = sms * mhz * 1e-6
    lanes, eight_bits = round(clock * 256, 1), {"float8": round(clock * 1024, 1)} if float8 else {}
    return _tensor(round(clock * 512, 1), tf32=lanes, float32=lanes, int8=round(clock * 2048, 1), **eight_bits)


_A100 = _tensor(312.0, tf32=156.0, float32=19.5, int8=624.0)
_H100_SXM = _tensor(989.4, tf32=494.7, float32=66.9, float8=1978.9, int8=1978.9)
_H100_PCIE = _tensor(756.0, tf32=378.0, float32=51.2, float8=1513.0, int8=1513.0)
_H100_NVL = _tensor(835.5, tf32=417.5, float32=60.0, float8=1670.5, int8=1670.5)
_MI300X = _tensor(1307.4, tf32=653.7, float32=163.4, float8=2614.9, int8=2614.9)

_V100_SHEET = "NVIDIA V100 datasheet, specifications"
_A100_SHEET = "NVIDIA A100 datasheet, system specifications"
_H100_SHEET = "NVIDIA H100 datasheet, product specifications"
_TURING_PAPER = "NVIDIA Turing white paper, rates per SM; SMs and boost clock of the product page, reference board"
_GA102_PAPER = "NVIDIA Ampere GA102 white paper, rates per SM; SMs and boost clock of the product page"
_ADA_PAPER = "NVIDIA Ada white paper, rates per SM; SMs and boost clock of the product page"
_BLACKWELL_PAPER = "NVIDIA RTX Blackwell white paper, rates per SM; SMs and boost clock of the product page"

# fmt: off
DEVICES = (
    # Volta
    Device(r"V100-SXM2-(16|32)GB", {"float16": 125.0, "float32": 15.7}, 900.0, _V100_SHEET),
    Device(r"V100-PCIE-(16|32)GB", {"float16": 112.0, "float32": 14.0}, 900.0, _V100_SHEET),
    Device(r"V100S-PCIE-32GB", {"float16": 130.0, "float32": 16.4}, 1134.0, _V100_SHEET),
    Device(r"V100-DGXS-(16|32)GB",
           {"float16": 125.0, "float32": 15.7}, 900.0,
           "NVIDIA DGX Station datasheet: 500 TFLOPS of four; float32 of 80 SMs at 1,530 MHz, as the driver reports"),
    Device(r"V100-SXM3-32GB", {"float16": 125.0}, None, "NVIDIA DGX-2 datasheet: 2 PFLOPS of sixteen"),
    Device(r"TITAN V", {"float16": 110.0}, 652.8, "NVIDIA TITAN V product page: 110 deep learning TFLOPS"),
    # Turing
    Device(r"T4", _turing(8.1, 65.0, 130.0), None, "NVIDIA T4 datasheet; its memory is published as 300 and as 320"),
    Device(r"TITAN RTX", _turing(16.3, 130.5, 261.0), 672.0, "NVIDIA Turing white paper, TU102 table"),
    Device(r"Quadro RTX (6000|8000)", _turing(16.3, 130.5, 261.0), 672.0, "NVIDIA Turing white paper, Quadro tables"),
    Device(r"Quadro RTX 5000", _turing(11.2, 89.2, 178.4), 448.0, "NVIDIA Quadro RTX 5000 datasheet"),
    Device(r"Quadro RTX 4000", _turing(7.1, 57.0, 113.9), 416.0, "NVIDIA Quadro RTX 4000 datasheet"),
    Device(r"GeForce RTX 2080 Ti", _geforce_20(68, 1545), 616.0, _TURING_PAPER),
    Device(r"GeForce RTX 2080 SUPER", _geforce_20(48, 1815), 496.0, _TURING_PAPER),
    Device(r"GeForce RTX 2080", _geforce_20(46, 1710), 448.0, _TURING_PAPER),
    Device(r"GeForce RTX 2070 SUPER", _geforce_20(40, 1770), 448.0, _TURING_PAPER),
    Device(r"GeForce RTX 2070", _geforce_20(36, 1620), 448.0, _TURING_PAPER),
    Device(r"GeForce RTX 2060 SUPER", _geforce_20(34, 1650), 448.0, _TURING_PAPER),
    # Ampere
    Device(r"A100-(SXM4|PCIE)-40GB", _A100, 1555.0, _A100_SHEET),
    Device(r"A100-SXM4?-80GB", _A100, 2039.0, _A100_SHEET),
    Device(r"A100 80GB PCIe", _A100, 1935.0, _A100_SHEET),
    Device(r"A100-PG509-\d+", _A100, None, f"{_A100_SHEET}: a board for one customer"),
    Device(r"A100-PCIE-80GB", _A100, None, _A100_SHEET),
    Device(r"A100-SXM-64GB", _tensor(358.0, tf32=179.0, float32=22.4), None,
           "M. Turisini et al.: Leonardo (2023), its A100 of 124 SMs; 16 bits by the A100 white paper, twice tf32"),
    Device(r"A800-SXM4-80GB", _A100, 2039.0, "NVIDIA A800 datasheet, system specifications"),
    Device(r"A800 80GB PCIe", _A100, 1935.0, "NVIDIA A800 datasheet, system specifications"),
    Device(r"A40", _tensor(149.7, tf32=74.8, float32=37.4, int8=299.3), 696.0, "NVIDIA A40 datasheet"),
    Device(r"A30", _tensor(165.0, tf32=82.0, float32=10.3, int8=330.0), 933.0, "NVIDIA A30 datasheet"),
    Device(r"A10", _tensor(125.0, tf32=62.5, float32=31.2, int8=250.0), 600.0, "NVIDIA A10 datasheet"),
    Device(r"A10G", _tensor(70.0, tf32=35.0, int8=140.0), 600.0,
           "NVIDIA A10G datasheet for AWS; its float32 is quoted as 31.5 and as 35"),
    Device(r"A16", _tensor(17.9, tf32=9.0, float32=4.5, int8=35.9), None,
           "NVIDIA A16 datasheet: of four; its memory is published as 200 and as 232"),
    Device(r"A2", _tensor(18.0, tf32=9.0, float32=4.5, int8=36.0), 200.0, "NVIDIA A2 datasheet"),
    Device(r"RTX A6000", _tensor(154.8, tf32=77.4, float32=38.7, int8=309.7), 768.0, "NVIDIA RTX A6000 datasheet"),
    Device(r"RTX A5500", _tensor(136.4, tf32=68.2, float32=34.1, int8=272.8), 768.0, "NVIDIA RTX A5500 datasheet"),
    Device(r"RTX A5000", _tensor(111.1, tf32=55.5, float32=27.8, int8=222.2), 768.0, "NVIDIA RTX A5000 datasheet"),
    Device(r"RTX A4500", _tensor(94.6, tf32=47.3, float32=23.7, int8=189.2), 640.0, "NVIDIA RTX A4500 datasheet"),
    Device(r"RTX A4000", _tensor(76.7, tf32=38.3, float32=19.2, int8=153.4), 448.0, "NVIDIA RTX A4000 datasheet"),
    Device(r"GeForce RTX 3090 Ti", _geforce(84, 1860, float8=False), 1008.0, _GA102_PAPER),
    Device(r"GeForce RTX 3090", _tensor(71.0, tf32=35.6, float32=35.6, int8=284.0), 936.0,
           "NVIDIA Ampere GA102 white paper"),
    Device(r"GeForce RTX 3080 Ti", _geforce(80, 1665, float8=False), 912.0, _GA102_PAPER),
    Device(r"GeForce RTX 3070 Ti", _geforce(48, 1770, float8=False), 608.0, _GA102_PAPER),
    Device(r"GeForce RTX 3070", _geforce(46, 1725, float8=False), 448.0, _GA102_PAPER),
    Device(r"GeForce RTX 3060 Ti", _geforce(38, 1665, float8=False), None, _GA102_PAPER),
    Device(r"GeForce RTX 3060", _geforce(28, 1777, float8=False), None, _GA102_PAPER),
    # Ada
    Device(r"L4", _tensor(121.0, tf32=60.0, float32=30.3, float8=242.0, int8=242.0), 300.0, "NVIDIA L4 datasheet"),
    Device(r"L20", _tensor(119.5, tf32=59.8, float32=59.8, float8=239.0, int8=239.0), 864.0, "NVIDIA L20 datasheet"),
    Device(r"L40", _tensor(181.0, tf32=90.5, float32=90.5, float8=362.0, int8=362.0), 864.0, "NVIDIA L40 datasheet"),
    Device(r"L40S", _tensor(362.0, tf32=183.0, float32=91.6, float8=733.0, int8=733.0), 864.0, "NVIDIA L40S datasheet"),
    Device(r"RTX 6000 Ada Generation", _tensor(364.2, tf32=182.1, float32=91.1, float8=728.5, int8=728.5), 960.0,
           "NVIDIA RTX 6000 Ada datasheet"),
    Device(r"RTX 5000 Ada Generation", _tensor(261.1, tf32=130.6, float32=65.3, float8=522.2, int8=522.2), 576.0,
           "NVIDIA RTX 5000 Ada datasheet: 1,044.4 TFLOPS in sparse float8"),
    Device(r"RTX 4000 Ada Generation", _tensor(106.9, tf32=53.4, float32=26.7, float8=213.8, int8=213.8), 360.0,
           "NVIDIA RTX 4000 Ada datasheet: 427.6 TFLOPS in sparse float8"),
    Device(r"GeForce RTX 4090", _tensor(165.2, tf32=82.6, float32=82.6, float8=330.3, int8=660.6), 1008.0,
           "NVIDIA Ada white paper, appendix"),
    Device(r"GeForce RTX 4080 SUPER", _geforce(80, 2550), 736.0, _ADA_PAPER),
    Device(r"GeForce RTX 4080", _geforce(76, 2505), 716.8, _ADA_PAPER),
    Device(r"GeForce RTX 4070 Ti SUPER", _geforce(66, 2610), 672.0, _ADA_PAPER),
    Device(r"GeForce RTX 4070 Ti", _geforce(60, 2610), 504.0, _ADA_PAPER),
    Device(r"GeForce RTX 4070 SUPER", _geforce(56, 2475), 504.0, _ADA_PAPER),
    Device(r"GeForce RTX 4070", _geforce(46, 2475), None, _ADA_PAPER),
    Device(r"GeForce RTX 4060 Ti", _geforce(34, 2535), 288.0, _ADA_PAPER),
    Device(r"GeForce RTX 4060", _geforce(24, 2460), 272.0, _ADA_PAPER),
    # Hopper
    Device(r"H100 80GB HBM3|H100 SXM5( 80GB)?", _H100_SXM, 3350.0, _H100_SHEET),
    Device(r"H100 PCIe", _H100_PCIE, 2000.0, "NVIDIA H100 PCIe datasheet"),
    Device(r"H100 NVL", _H100_NVL, 3900.0, _H100_SHEET),
    Device(r"H800", _H100_SXM, 3350.0, "NVIDIA H800 datasheet, SXM column"),
    Device(r"H800 PCIe", _H100_PCIE, 2000.0, "NVIDIA H800 datasheet, PCIe column"),
    Device(r"H200", _H100_SXM, 4800.0, "NVIDIA H200 datasheet, SXM column"),
    Device(r"H200 NVL", _H100_NVL, 4800.0, "NVIDIA H200 datasheet, NVL column"),
    Device(r"GH200( \d+GB)?", _H100_SXM, None, "NVIDIA GH200 datasheet; its two memories have one name"),
    Device(r"H20", _tensor(148.0, tf32=74.0, float32=44.0, float8=296.0, int8=296.0), None,
           "NVIDIA H20 datasheet; its memory is published in two versions"),
    # Blackwell. float32 is published as 75 and as 80 for the B200, as 80 and as 90 for the Grace superchips; the memory
    # of B100 and B200 as 7.7 and as 8 TB/s; int8 of the 300s per board only.
    Device(r"B100", _tensor(1750.0, tf32=875.0, float32=60.0, float8=3500.0, int8=3500.0, float4=7000.0), None,
           "NVIDIA HGX B100 datasheet: an eighth, and half of it without sparsity"),
    Device(r"B200", _tensor(2250.0, tf32=1125.0, float8=4500.0, int8=4500.0, float4=9000.0), None,
           "NVIDIA DGX B200 and HGX B200 datasheets: an eighth, and half of it without sparsity"),
    Device(r"GB200", _tensor(2500.0, tf32=1250.0, float8=5000.0, int8=5000.0, float4=10000.0), 8000.0,
           "NVIDIA GB200 datasheet: 16 TB/s of two"),
    Device(r"B300( SXM6 AC)?", _tensor(2250.0, tf32=1125.0, float8=4500.0), None, "NVIDIA HGX B300 datasheet"),
    Device(r"GB300", _tensor(2500.0, tf32=1250.0, float8=5000.0), None, "NVIDIA GB300 datasheet"),
    Device(r"RTX PRO 6000 Blackwell Workstation Edition",
           _tensor(503.8, tf32=251.9, float32=125.9, float8=1007.6, int8=1007.6, float4=2000.0), 1792.0,
           "NVIDIA RTX PRO 6000 Blackwell Workstation datasheet: 4,000 TOPS in sparse float4; 188 SMs at 2,617 MHz"),
    Device(r"RTX PRO 6000 Blackwell Server Edition",
           _tensor(500.0, tf32=250.0, float32=120.0, float8=1000.0, float4=2000.0), 1597.0,
           "NVIDIA RTX PRO 6000 Blackwell Server datasheet: 4, 2 and 1 PFLOPS in sparse float4, float8 and float16"),
    Device(r"GB10", {"float32": 31.0, "float4": 500.0}, 273.0,
           "NVIDIA DGX Spark datasheet: 1 PFLOP in sparse float4; float32 by Hot Chips 2025"),
    Device(r"RTX PRO 6000 Blackwell Max-Q Workstation Edition",
           _tensor(438.9, tf32=219.4, float32=109.7, float8=877.8, int8=877.8, float4=1755.5), 1792.0,
           "NVIDIA RTX PRO 6000 Blackwell Max-Q datasheet: 3,511 TOPS in sparse float4; 188 SMs at 2,280 MHz"),
    Device(r"GeForce RTX 5090", _tensor(209.5, tf32=104.8, float32=104.8, float8=419.0, int8=838.0), 1792.0,
           "NVIDIA RTX Blackwell white paper, appendix"),
    Device(r"GeForce RTX 5080", _geforce(84, 2617), 960.0, _BLACKWELL_PAPER),
    Device(r"GeForce RTX 5070 Ti", _geforce(70, 2452), 896.0, _BLACKWELL_PAPER),
    Device(r"GeForce RTX 5070", _geforce(48, 2512), 672.0, _BLACKWELL_PAPER),
    Device(r"GeForce RTX 5060 Ti", _geforce(36, 2572), 448.0, _BLACKWELL_PAPER),
    Device(r"GeForce RTX 5060", _geforce(30, 2497), 448.0, _BLACKWELL_PAPER),
    # AMD. float32 is the matrix rate. A MI250X shows as two devices, so half of the sheet's is one device's.
    Device(r"Instinct MI100", {"bfloat16": 92.3, "float16": 184.6, "float32": 46.1, "int8": 184.6}, 1228.8,
           "AMD Instinct MI100 brochure"),
    Device(r"Instinct MI210", {"bfloat16": 181.0, "float16": 181.0, "float32": 45.3, "int8": 181.0}, 1638.4,
           "AMD Instinct MI210 brochure"),
    Device(r"Instinct MI250X", {"bfloat16": 191.5, "float16": 191.5, "float32": 47.85, "int8": 191.5}, 1638.4,
           "AMD Instinct MI250X data sheet: half of 383, 95.7 and 3,276.8"),
    Device(r"Instinct MI250", {"bfloat16": 181.05, "float16": 181.05, "float32": 45.25, "int8": 181.05}, 1638.4,
           "AMD Instinct MI250 data sheet: half of 362.1, 90.5 and 3,276.8"),
    Device(r"Instinct MI300A", _tensor(980.6, tf32=490.3, float32=122.6, float8=1961.2, int8=1961.2), 5300.0,
           "AMD Instinct MI300A data sheet"),
    Device(r"Instinct MI300X( OAM| VF)?", _MI300X, 5300.0, "AMD Instinct MI300X data sheet"),
    Device(r"Instinct MI325X( OAM)?", _MI300X, 6000.0, "AMD Instinct MI325X data sheet"),
    Device(r"Instinct MI350X( OAM)?",
           {"bfloat16": 2300.0, "float16": 2300.0, "float32": 144.2, "float8": 4600.0, "int8": 4600.0}, 8000.0,
           "AMD Instinct MI350X data sheet"),
    Device(r"Instinct MI355X( OAM)?",
           {"bfloat16": 2500.0, "float16": 2500.0, "float32": 157.3, "float8": 5000.0, "int8": 5000.0}, 8000.0,
           "AMD Instinct MI355X data sheet"),
    # Intel. Gaudi 3 is published with 1,835 and with 1,678, the memory of Gaudi 2 as 2.45 and as 2.46 TB/s.
    Device(r"GAUDI2", {"bfloat16": 432.0, "float8": 865.0}, None, "Intel Gaudi 2 white paper"),
)
# fmt: on

_VENDOR = re.compile(r"^\s*(?:(?:NVIDIA|Tesla|AMD)\s+)*", re.IGNORECASE)
_MIG = re.compile(r"\bMIG\b", re.IGNORECASE)
_VIRTUAL = re.compile(r"(?:\bGRID\b|-\d+[ABCQ]\b|-\d+-\d+C\b)", re.IGNORECASE)
"""Profiles of virtual GPUs: ``A40-48Q``, ``GRID V100D-8C``, ``A100-4-20C``."""


@lru_cache(maxsize=256)
def device_named(name: str) -> Device | None:
    """The row of the device that torch calls *name*; None if there is none. It never takes another device's."""
    bare = _VENDOR.sub("", name).strip()
    return next((device for device in DEVICES if re.fullmatch(device.name, bare, re.IGNORECASE)), None)


def peak_of(device: Device, dtype: str) -> float | None:
    """Its dense peak in one dtype, in FLOP/s; None where the row has none."""
    peak = device.peaks.get(dtype)
    return None if peak is None else float(round(peak * _TERA))


def memory_bytes_per_sec(device_name: str) -> float | None:
    """Bandwidth in bytes/s of the memory of the device that torch calls so; None where it is not known."""
    device = device_named(device_name)
    if device is None or device.gigabytes_per_sec is None:
        return None
    return float(round(device.gigabytes_per_sec * _GIGA))


def why_no_peak(name: str, dtype: str) -> str:
    """Why there is no peak of the device that torch calls *name* in *dtype*, without a full stop."""
    if _MIG.search(name):
        return "a MIG slice: its share of the device's peak is not published"
    if _VIRTUAL.search(name):
        return "a virtual GPU: its share of the device's peak is not published"
    if device_named(name) is None:
        return f"no figure is known for a device called {name}"
    return f"no rate in {dtype} is published for {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAbilities:
    """What advice may count on of a device; false and empty where it is not known."""

    tensor_core_dtypes: tuple[str, ...] = ()
    """16-bit dtypes that its tensor cores take, the one to train in first."""
    tf32: bool = False
    pins_memory: bool = False
    """Copies from pinned host memory are faster."""


UNKNOWN_DEVICE = DeviceAbilities()
# ROCm fills the fields of a compute capability with numbers of its own.
_OF_ANOTHER_VENDOR = re.compile(r"AMD|Radeon|Instinct|gfx\d", re.IGNORECASE)
# Turing's compute capability, 7.5, has chips without tensor cores: GeForce GTX 16, T600, MX450.
_TURING_WITH_TENSOR_CORES = re.compile(r"\bRTX\b|\bT4G?\b")


def device_abilities(
    *, device_type: str | None, name: str | None, compute_capability: tuple[int, int] | None
) -> DeviceAbilities:
    """What a device of this *name*, torch's *device_type* and CUDA's *compute_capability* can do, as far as known."""
    pins_memory, capability = device_type in ("cuda", "xpu"), compute_capability
    if capability is None or device_type not in (None, "cuda") or _OF_ANOTHER_VENDOR.search(name or ""):
        return DeviceAbilities(pins_memory=pins_memory)
    multiplies = capability >= (7, 0) and (capability != (7, 5) or _TURING_WITH_TENSOR_CORES.search(name or ""))
    dtypes = ("bfloat16", "float16") if capability >= (8, 0) else ("float16",) if multiplies else ()
    return DeviceAbilities(tensor_core_dtypes=dtypes, tf32=capability >= (8, 0), pins_memory=pins_memory)


_ALIKE: Mapping[tuple[tuple[int, int], int], str] = {
    ((7, 0), 80): "Tesla V100-SXM2-16GB",
    ((7, 5), 40): "Tesla T4",
    ((8, 0), 108): "NVIDIA A100-SXM4-80GB",
    ((8, 6), 72): "NVIDIA A10",
    ((8, 9), 58): "NVIDIA L4",
    ((8, 9), 142): "NVIDIA L40S",
    ((9, 0), 114): "NVIDIA H100 PCIe",
    ((9, 0), 132): "NVIDIA H100 80GB HBM3",
    ((10, 0), 148): "NVIDIA B200",
    ((9, 0), 104): "AMD Instinct MI250",
    ((9, 0), 110): "AMD Instinct MI250X",
    ((9, 4), 228): "AMD Instinct MI300A",
    ((9, 4), 304): "AMD Instinct MI300X",
    ((9, 5), 256): "AMD Instinct MI355X",
}
"""By compute capability and multiprocessors, the device of a row that has these."""


def device_like(name: str, capability: tuple[int, int] | None, multiprocessors: int | None) -> str | None:
    """The name of the device that one without a row is likely to be; None where it has a row, or nothing is known.

    Args:
        name: as torch has it; may be empty.
        capability: CUDA's, or what ROCm puts in its place.
        multiprocessors: how many of them it has.
    """
    if capability is None or multiprocessors is None or device_named(name) is not None:
        return None
    if _MIG.search(name) or _VIRTUAL.search(name):
        return None
    return _ALIKE.get((capability, multiprocessors))
