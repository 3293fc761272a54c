"""What vendors say one device can do: dense peaks by dtype, without sparsity, and the bandwidth of its memory.

The figures are those of the vendors' datasheets and white papers, each row with its source. Where a sheet's headline
assumes 2:4 sparsity, half of it stands here; tensor-core rates are those with float32 accumulation, which is what
PyTorch asks for. A figure that the vendor does not publish for exactly this device, or publishes in two versions, is
left out: no utilization is better than a wrong one. A name that stands for two chips or boards (``MI250X / MI250``) has
no row, but where SMs separate them. What has none can be measured: ``lightning-flops peak``.

Looked for in November 2026, and left out: MI308X, Ascend 910B2 and Data Center GPU Max, of which no page of a vendor
was found with dense rates; RTX PRO 4000, 4500 and 5000 Blackwell, of which only others' pages were found, with two
clocks for one card (66.9 and 73.7 TFLOP/s in float32); float4 of the B300, which is published in two versions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple


class Device(NamedTuple):
    """A device as ``torch.cuda.get_device_name`` writes it, and what it can do."""

    name: str  # pattern of the whole name without the vendor's: a longer one is another chip, or a slice of this one
    peaks: Mapping[str, float]  # dense FLOP/s by dtype
    memory_bytes_per_sec: float | None  # None where it is not published, or in two versions


# A device a line: its name's pattern, TFLOP/s by dtype (``half``: bfloat16 and float16), GB/s, and the source, where
# "datasheet" is the vendor's of this very device. Where SMs stand, they and the boost clock are of the product page, of
# the reference board, and their rates are of the generation's white paper.
_TABLE = r"""
# Their tensor cores take float16 alone; bfloat16 is emulated and has no published rate.
# V100-DGXS: float32 of 80 SMs at 1,530 MHz, as the driver reports.
[Up to Turing]          float16  float32   int8  GB/s
V100-(SXM2|DGXS)-(16|32)GB      125     15.7      -   900  V100 and DGX Station datasheets
V100-PCIE-(16|32)GB             112       14      -   900  V100 datasheet, specifications
V100S-PCIE-32GB                 130     16.4      -  1134  V100 datasheet, specifications
# Pascal has no tensor cores: float32 as published, and its float16 rate is not with float32 accumulation.
P100-PCIE-16GB                    -      9.3      -   732  P100 datasheet, PCIe column
P100-PCIE-12GB                    -      9.3      -   549  P100 datasheet, PCIe column
P100-SXM2-16GB                    -     10.6      -   732  P100 datasheet, NVLink column
TITAN V                         110        -      -  652.8  product page: 110 deep learning TFLOPS
TITAN RTX                     130.5     16.3    261   672  Turing white paper, TU102 table
T4                               65      8.1    130     -  datasheet; its memory is published as 300 and as 320
Quadro RTX (6000|8000)        130.5     16.3    261   672  Turing white paper, Quadro tables
Quadro RTX 5000                89.2     11.2  178.4   448  datasheet
Quadro RTX 4000                  57      7.1  113.9   416  datasheet
GeForce RTX 2080 Ti            53.8     13.4  215.2   616  68 SMs at 1,545 MHz
GeForce RTX 2080 SUPER         44.6     11.2  178.4   496  48 SMs at 1,815 MHz
GeForce RTX 2080               40.3     10.1  161.1   448  46 SMs at 1,710 MHz
GeForce RTX 2070 SUPER         36.2      9.1    145   448  40 SMs at 1,770 MHz
GeForce RTX 2070               29.9      7.5  119.4   448  36 SMs at 1,620 MHz
GeForce RTX 2060 SUPER         28.7      7.2  114.9   448  34 SMs at 1,650 MHz
[Ampere]                         half  tf32  float32   int8  GB/s
A100-(SXM4|PCIE)-40GB             312   156     19.5    624  1555  A100 datasheet, system specifications
A[18]00-SXM4?-80GB                312   156     19.5    624  2039  A100 and A800 datasheets
A[18]00 80GB PCIe                 312   156     19.5    624  1935  A100 and A800 datasheets
A800 40GB Active                311.9  155.9     19.5  623.7  1555  datasheet: 623.8 in sparse float16
A100-PG509-\d+|A100-PCIE-80GB     312   156     19.5    624     -  A100 datasheet; its memory is not
A100-SXM-64GB                     358   179     22.4      -     -  Turisini et al.: Leonardo (2023), its 124 SMs
A40                             149.7  74.8     37.4  299.3   696  datasheet
A30                               165    82     10.3    330   933  datasheet
A10                               125  62.5     31.2    250   600  datasheet
A10G                               70    35        -    140   600  datasheet; float32: two versions
A16                              17.9     9      4.5   35.9     -  datasheet, of four; memory: two versions
A2                                 18     9      4.5     36   200  datasheet
RTX A6000                       154.8  77.4     38.7  309.7   768  datasheet
RTX A5500                       136.4  68.2     34.1  272.8   768  datasheet
RTX A5000                       111.1  55.5     27.8  222.2   768  datasheet
RTX A4500                        94.6  47.3     23.7  189.2   640  datasheet
RTX A4000                        76.7  38.3     19.2  153.4   448  datasheet
RTX A2000( 12GB)?                  32    16        8   63.9   288  datasheet: 63.9 in sparse float16
GeForce RTX 3090                   71  35.6     35.6    284   936  Ampere GA102 white paper
GeForce RTX 3090 Ti                80    40       40    320  1008  84 SMs at 1,860 MHz
GeForce RTX 3080 Ti              68.2  34.1     34.1  272.8   912  80 SMs at 1,665 MHz
GeForce RTX 3080 \(68 SMs\)      59.5  29.8     29.8    238   760  Ampere GA102 white paper
GeForce RTX 3080 \(70 SMs\)      61.3  30.6     30.6  245.1   912  of 12 GB: 70 SMs at 1,710 MHz
GeForce RTX 3070 Ti              43.5  21.7     21.7    174   608  48 SMs at 1,770 MHz
GeForce RTX 3070                 40.6  20.3     20.3  162.5   448  46 SMs at 1,725 MHz
GeForce RTX 3060                 25.5  12.7     12.7  101.9     -  28 SMs at 1,777 MHz
GeForce RTX 3060 Ti              32.4  16.2     16.2  129.6     -  38 SMs at 1,665 MHz
[Ada]                       half   tf32  float32  float8   int8   GB/s
L4                           121     60     30.3     242    242    300  datasheet
L20                        119.5   59.8     59.8     239    239    864  datasheet
L40                          181   90.5     90.5     362    362    864  datasheet
L40S                         362    183     91.6     733    733    864  datasheet
RTX 6000 Ada Generation    364.2  182.1     91.1   728.5  728.5    960  datasheet
RTX 5000 Ada Generation    261.1  130.6     65.3   522.2  522.2    576  datasheet: 1,044.4 in sparse float8
RTX 4000 Ada Generation    106.9   53.4     26.7   213.8  213.8    360  datasheet: 427.6 in sparse float8
RTX 4500 Ada Generation    158.5   79.2     39.6     317    317    432  datasheet: 634 in sparse float8
RTX 2000 Ada Generation       48     24       12      96     96    224  datasheet: 191.9 in sparse float8
GeForce RTX 4090           165.2   82.6     82.6   330.3  660.6   1008  Ada white paper, appendix
GeForce RTX 4080 SUPER     104.4   52.2     52.2   208.9  417.8    736  80 SMs at 2,550 MHz
GeForce RTX 4080            97.5   48.7     48.7   194.9  389.9  716.8  76 SMs at 2,505 MHz
GeForce RTX 4070 Ti SUPER   88.2   44.1     44.1   176.4  352.8    672  66 SMs at 2,610 MHz
GeForce RTX 4070 Ti         80.2   40.1     40.1   160.4  320.7    504  60 SMs at 2,610 MHz
GeForce RTX 4070 SUPER        71   35.5     35.5   141.9  283.9    504  56 SMs at 2,475 MHz
GeForce RTX 4070            58.3   29.1     29.1   116.6  233.2      -  46 SMs at 2,475 MHz
GeForce RTX 4060 Ti         44.1   22.1     22.1    88.3  176.5    288  34 SMs at 2,535 MHz
GeForce RTX 4060            30.2   15.1     15.1    60.5  120.9    272  24 SMs at 2,460 MHz
[Hopper]         half   tf32  float32  float8    int8  GB/s
H100 80GB HBM3|H100 SXM5( 80GB)?|H800  989.4  494.7     66.9  1978.9  1978.9  3350  H100 and H800 datasheets, SXM column
H[18]00 PCIe      756    378     51.2    1513    1513  2000  H100 and H800 datasheets, PCIe column
H100 NVL        835.5  417.5       60  1670.5  1670.5  3900  H100 datasheet, product specifications
H200            989.4  494.7     66.9  1978.9  1978.9  4800  datasheet, SXM column
H200 NVL        835.5  417.5       60  1670.5  1670.5  4800  H200 datasheet, NVL column
GH200( \d+GB)?  989.4  494.7     66.9  1978.9  1978.9     -  datasheet; its two memories have one name
H20               148     74       44     296     296     -  datasheet; its memory: two versions
# float32 is published as 75 and as 80 for the B200, as 80 and as 90 for the Grace superchips; the memory of the
# B200 as 7.7 and as 8 TB/s; int8 of the 300s per board only. RTX PRO: 188 SMs at 2,617 MHz, Max-Q 2,280.
# B200: half of an eighth of the board's sparse rate. GB10: 1,000 in sparse float4; float32 by Hot Chips 2025.
[Blackwell]           half   tf32  float32  float8    int8  float4  GB/s
B100                  1750    875       60    3500    3500    7000     -  HGX B100 datasheet: an eighth
B200                  2250   1125        -    4500    4500    9000     -  DGX and HGX datasheets: an eighth
GB200                 2500   1250        -    5000    5000   10000  8000  datasheet: 16 TB/s of two
# HGX B300's float4 is published as 105 and as 108 PFLOPS of eight.
B300( SXM6 AC)?       2250   1125        -    4500       -       -     -  HGX datasheet
GB300                 2500   1250        -    5000       -   15000     -  NVL72 datasheet: 1,080 PFLOPS of 72
RTX PRO 6000 Blackwell Workstation Edition  503.8  251.9    125.9  1007.6  1007.6    2000  1792  datasheet: 4,000 sparse
RTX PRO 6000 Blackwell Server Edition    500    250      120    1000       -    2000  1597  datasheet: 4,000 sparse
GB10                     -      -       31       -       -     500   273  DGX Spark datasheet, Hot Chips 2025
RTX PRO 6000 Blackwell Max-Q Workstation Edition  438.9  219.4    109.7   877.8   877.8  1755.5  1792  datasheet: 3,511
GeForce RTX 5090     209.5  104.8    104.8     419     838       -  1792  RTX Blackwell white paper, appendix
GeForce RTX 5080     112.6   56.3     56.3   225.1   450.2       -   960  84 SMs at 2,617 MHz
GeForce RTX 5070 Ti   87.9   43.9     43.9   175.8   351.5       -   896  70 SMs at 2,452 MHz
GeForce RTX 5070      61.7   30.9     30.9   123.5   246.9       -   672  48 SMs at 2,512 MHz
GeForce RTX 5060 Ti   47.4   23.7     23.7    94.8   189.6       -   448  36 SMs at 2,572 MHz
GeForce RTX 5060      38.4   19.2     19.2    76.7   153.4       -   448  30 SMs at 2,497 MHz
# float32 is the matrix rate. A MI250 or MI250X shows as two devices, so half of the sheet's is one device's.
[AMD]                       bfloat16  float16   tf32  float32  float8    int8    GB/s
Instinct MI100                  92.3    184.6      -     46.1       -   184.6  1228.8  brochure
Instinct MI210                   181      181      -     45.3       -     181  1638.4  brochure
Instinct MI250X                191.5    191.5      -    47.85       -   191.5  1638.4  data sheet: 383, 95.7, 3,276.8
Instinct MI250                181.05   181.05      -    45.25       -  181.05  1638.4  data sheet: 362.1, 90.5, 3,276.8
Instinct MI300A                980.6    980.6  490.3    122.6  1961.2  1961.2    5300  data sheet
Instinct MI300X( OAM| VF)?    1307.4   1307.4  653.7    163.4  2614.9  2614.9    5300  data sheet
Instinct MI325X( OAM)?        1307.4   1307.4  653.7    163.4  2614.9  2614.9    6000  data sheet
Instinct MI350X( OAM)?          2300     2300      -    144.2    4600    4600    8000  data sheet
Instinct MI355X( OAM)?          2500     2500      -    157.3    5000    5000    8000  data sheet
# Gaudi 3 is published with 1,835 and with 1,678, the memory of Gaudi 2 as 2.45 and as 2.46 TB/s.
[Intel]  bfloat16  float8  GB/s
GAUDI2        432     865     -  Gaudi 2 white paper
"""


def _rows() -> Iterator[Device]:
    block: list[str] = []
    for line in _TABLE.splitlines():
        cells = re.split(r"\s{2,}", line)
        if line.startswith("["):
            block = cells
        elif line and not line.startswith("#"):
            figures = {name: float(cell) for name, cell in zip(block[1:], cells[1:], strict=False) if cell != "-"}
            gigabytes = figures.pop("GB/s", None)
            if half := figures.pop("half", None):
                figures |= {"bfloat16": half, "float16": half}
            peaks = {dtype: float(round(tera * 1e12)) for dtype, tera in figures.items()}
            yield Device(cells[0], peaks, None if gigabytes is None else float(round(gigabytes * 1e9)))


DEVICES = tuple(_rows())

_VENDOR = re.compile(r"^\s*(?:(?:NVIDIA|Tesla|AMD)\s+)*", re.IGNORECASE)
# ``H100 80GB HBM3 MIG 1g.10gb``, and virtual GPUs: ``A40-48Q``, ``GRID V100D-8C``, ``A100-4-20C``.
_PART = re.compile(r"\bMIG\b|\bGRID\b|-\d+[ABCQ]\b|-\d+-\d+C\b", re.IGNORECASE)


def name_of_chip(properties: Any) -> str:
    """The name in torch's *properties* of a device, with its SMs where they alone separate two chips of one name."""
    name = str(properties.name)
    return f"{name} ({properties.multi_processor_count} SMs)" if name.endswith("GeForce RTX 3080") else name


@lru_cache(maxsize=256)
def device_named(name: str) -> Device | None:
    """The row of the device that torch calls *name*; None if there is none. It never takes another device's."""
    bare = _VENDOR.sub("", name).strip()
    return next((device for device in DEVICES if re.fullmatch(device.name, bare, re.IGNORECASE)), None)


def devices_called(name: str) -> tuple[Device, ...]:
    """The row of the device of this *name*; of a short one, as ``H100``, all rows whose names have it as first word."""
    bare = _VENDOR.sub("", name).strip()
    for family in ("", "GeForce ", "Instinct "):
        if (device := device_named(f"{family}{bare}")) is not None:
            return (device,)
    return tuple(
        device
        for device in DEVICES
        if any(re.fullmatch(re.split(r"[ (-]", one)[0], bare, re.I) for one in re.split(r"\|(?![^(]*\))", device.name))
    )


def why_no_peak(name: str, dtype: str) -> str:
    """Why there is no peak of the device that torch calls *name*, if it has one, in *dtype*, without a full stop."""
    if _PART.search(name):
        return "a MIG slice or a virtual GPU: its share of the device's peak is not published"
    if device_named(name) is not None:
        return f"no rate in {dtype} is published for {name}"
    return f"no figure is known for a device called {name}" if name else "no device of one known name ran the kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAbilities:
    """What advice may count on of a device; false and empty where it is not known."""

    tensor_core_dtypes: tuple[str, ...] = ()  # of 16 bits, the one to train in first; with bfloat16 they have TF32
    pins_memory: bool = False  # copies from pinned host memory are faster


# ROCm fills the fields of a compute capability with numbers of its own.
_OF_ANOTHER_VENDOR = re.compile(r"AMD|Radeon|Instinct|gfx\d", re.IGNORECASE)


def device_abilities(
    *, device_type: str | None, name: str | None, compute_capability: tuple[int, int] | None
) -> DeviceAbilities:
    """What a device of this *name*, torch's *device_type* and CUDA's *compute_capability* can do, as far as known."""
    is_nvidias = device_type in (None, "cuda") and not _OF_ANOTHER_VENDOR.search(name or "")
    capability = compute_capability if compute_capability is not None and is_nvidias else (0, 0)
    dtypes = ("bfloat16", "float16") if capability >= (8, 0) else ("float16",) if capability >= (7, 0) else ()
    return DeviceAbilities(tensor_core_dtypes=dtypes, pins_memory=device_type in ("cuda", "xpu"))
