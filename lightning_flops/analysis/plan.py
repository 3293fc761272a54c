"""The floor of a step that does not run: what its operators and collectives take of a device and its links at least."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_flops.analysis.devices import devices_called
from lightning_flops.analysis.flop_counts import FlopCounts, flops_by_phase
from lightning_flops.analysis.memory import build_memory_report
from lightning_flops.analysis.peaks import COPY
from lightning_flops.errors import ConfigError
from lightning_flops.records import FlopRecord
from lightning_flops.schema.plan import Plan, PlannedCollective, PlannedRank, PlannedRun

_HOUR = 3600.0
_USUAL_MFU = 0.4  # of large trainings that their authors have described

_NO_BANDWIDTH = "The bandwidth of the device's memory is not known: the floor is that of arithmetic alone."
_OF_OPERATORS = (
    "Operators with FLOPs read their inputs from memory and write their outputs there; what has none takes no time. "
    "Tensors that stay in a cache can go below that, and nothing below the arithmetic."
)

_OF_STAGES = (
    "The bubble is of stages that take equally long, under GPipe or 1F1B. The floor is of this stage, without a bubble "
    "and without what stages send each other. Memory is GPipe's, which holds all microbatches."
)


class Figures(NamedTuple):
    """What one device can do."""

    name: str
    peaks: Mapping[str, float]  # dense FLOP/s by dtype
    peak: float | None  # in all others; None: not known
    memory_bytes_per_sec: float | None


def figures_of(
    device: str | None,
    peaks: float | Mapping[str, float] | None,
    memory_bytes_per_sec: float | None,
    measured: Mapping[str, float],
) -> Figures:
    """The figures of *device*: those given, else the vendor's, of which a short name has the greatest, else *measured*.

    Raises:
        ConfigError: no such device is known, and no peak was given.
    """
    name = device or ""
    rows = devices_called(name) if name else ()
    if name and not (rows or measured or peaks is not None):
        raise ConfigError(f"device must be one whose figures are known, as H100 or A100-SXM4-80GB, got {name}")
    bandwidth = memory_bytes_per_sec or max(
        filter(None, (row.memory_bytes_per_sec for row in rows)), default=measured.get(COPY)
    )
    if isinstance(peaks, (int, float)):
        return Figures(name, {}, peaks, bandwidth)
    found = dict(measured)
    for row in rows:
        found |= {dtype: max(rate, found.get(dtype, 0.0)) for dtype, rate in row.peaks.items()}
    several = f" (of {len(rows)} devices of this name the greatest figures)" if len(rows) > 1 else ""
    return Figures(f"{name}{several}", {**found, **(peaks or {})}, None, bandwidth)


def build_plan(
    planned: PlannedRank,
    figures: Figures,
    *,
    stages: Sequence[PlannedRank] = (),
    microbatches: int = 1,
    at: Mapping[str, int] = {},
    links: Mapping[str, float] = {},
    node_size: int = 8,
    steps: int | None = None,
    price: float | None = None,
) -> Plan:
    """The plan of one rank by *figures* of its device and *links*, bytes/s by dimension, or of ``nvlink`` and ``net``.

    A link is ``nvlink`` where all ranks of a group are among the *node_size* of one node. *price* is of a device hour.
    *stages* are all those of the pipeline of the rank, which take so many *microbatches* in a step.
    """
    record, unavailable, floors = planned.flops, dict[str, str](), dict[str, float]()
    notes = [*record.notes, *[_OF_STAGES][: len(stages)]]
    peaks, missing = _peaks_in(record, figures)
    rows, by_link = _collectives(planned, links, node_size)
    if missing:
        known = figures.name or peaks
        unavailable["floor_sec"] = f"no peak in {', '.join(missing)} is known" if known else "no device was given"
    else:
        floors = _compute_sec(record, peaks, figures)
        floors["floor"] = max(floors["operators"], *by_link.values(), 0.0)
        floors["at_40_percent"] = floors["useful"] / _USUAL_MFU
        notes.append(_NO_BANDWIDTH if figures.memory_bytes_per_sec is None else _OF_OPERATORS)
    communication = None if any(one.floor_sec is None for one in rows) else math.fsum(by_link.values())
    if communication is None:
        unavailable["communication_sec"] = "the bandwidth of a link was not given"
    elif floors:
        floors["exposed"] = floors["operators"] + communication
    idle, floor = len(stages) - 1, floors.get("floor")
    devices = math.prod(planned.mesh.values())
    return Plan(
        mesh=planned.mesh,
        rank=planned.rank,
        at=at,
        flops=flops_by_phase(record.cells),
        lower_bound=FlopCounts(record).is_lower_bound,
        params=planned.params,
        local_params=planned.local_params,
        memory=None if planned.tensors is None else build_memory_report(planned.tensors),
        collectives=rows,
        device=figures.name,
        peaks_flops_per_sec=peaks,
        memory_bytes_per_sec=figures.memory_bytes_per_sec,
        arithmetic_sec=floors.get("arithmetic"),
        operators_sec=floors.get("operators"),
        communication_sec=communication,
        floor_sec=floor,
        exposed_floor_sec=floors.get("exposed"),
        mfu_at_most=floors["useful"] / floor if floor else None,
        stages=tuple(flops_by_phase(one.flops.cells) for one in stages),
        bubble=idle / (microbatches + idle) if stages else None,
        run=None if steps is None else _run(steps, floor, floors.get("at_40_percent"), devices, price),
        unavailable=unavailable,
        notes=tuple(notes),
    )


def stages_with(rank: int, mesh: Mapping[str, int]) -> range:
    """The ranks that are the stages of the pipeline, along ``pp``, to which *rank* belongs."""
    names, sizes = list(mesh), list(mesh.values())
    apart = math.prod(sizes[names.index("pp") + 1 :])
    first = rank - rank // apart % mesh["pp"] * apart
    return range(first, first + mesh["pp"] * apart, apart)


def _peaks_in(record: FlopRecord, figures: Figures) -> tuple[Mapping[str, float], list[str]]:
    """The peak of each dtype that has FLOPs, and the dtypes whose peak is not known."""
    dtypes = sorted({cell.dtype for cell in record.cells if cell.flops})
    found = {dtype: figures.peaks.get(dtype, figures.peak) for dtype in dtypes}
    peaks = {dtype: peak for dtype, peak in found.items() if peak is not None}
    return peaks, [dtype for dtype in dtypes if dtype not in peaks]


def _compute_sec(record: FlopRecord, peaks: Mapping[str, float], figures: Figures) -> dict[str, float]:
    """Least seconds of all arithmetic, of all operators that have FLOPs, and of the model's own FLOPs alone."""
    arithmetic = operators = useful = 0.0
    for cell in record.cells:
        if not cell.flops:  # a GPU's kernels, or a compiler's, may do it in passing
            continue
        peak = peaks.get(cell.dtype, math.inf)
        computing = (cell.flops - cell.skipped) / peak
        moving = (cell.bytes_read + cell.bytes_written) / (figures.memory_bytes_per_sec or math.inf)
        arithmetic += computing
        operators += max(computing, moving)
        if cell.phase in ("forward", "backward"):
            useful += cell.flops / peak
    return {"arithmetic": arithmetic, "operators": operators, "useful": useful}


def _collectives(
    planned: PlannedRank, links: Mapping[str, float], node_size: int
) -> tuple[tuple[PlannedCollective, ...], Mapping[str, float]]:
    """The collectives, and the least seconds of each link; different links may carry at the same time."""
    rows: list[PlannedCollective] = []
    by_link: defaultdict[str, float] = defaultdict(float)
    for (kind, ranks), (calls, size) in planned.collectives.items():
        dims = _dims(ranks, planned.mesh)
        named = [dim for dim in dims if dim in links]
        in_node = len({rank // node_size for rank in ranks}) == 1
        link = min(named, key=links.__getitem__) if named else "nvlink" if in_node else "net"
        seconds = _ring_share(kind, len(ranks)) * size / links[link] if link in links else None
        by_link[link] += seconds or 0.0
        given: dict[str, Any] = {"kind": kind, "dim": "+".join(dims), "size": len(ranks), "calls": calls, "bytes": size}
        rows.append(PlannedCollective(**given, floor_sec=seconds))
    return tuple(sorted(rows, key=lambda row: -row.bytes)), by_link


def _dims(ranks: tuple[int, ...], mesh: Mapping[str, int]) -> list[str]:
    """The dimensions of *mesh* in which *ranks* have different places."""
    dims, stride = [], math.prod(mesh.values())
    for dim, size in mesh.items():
        stride //= size
        if len({rank // stride % size for rank in ranks}) > 1:
            dims.append(dim)
    return dims


def _ring_share(kind: str, size: int) -> float:
    """What one of *size* ranks sends in a ring, as a share of the call's bytes."""
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (size - 1) / size
    return 2 * (size - 1) / size if kind == "all_reduce" else float(size > 1)


def _run(steps: int, floor_sec: float | None, usual_sec: float | None, devices: int, price: float | None) -> PlannedRun:
    def of(step_sec: float | None) -> tuple[float | None, float | None, float | None]:
        if step_sec is None:
            return None, None, None
        hours = steps * step_sec / _HOUR
        return hours, hours * devices, None if price is None else hours * devices * price

    floor, usual = of(floor_sec), of(usual_sec)
    return PlannedRun(
        steps=steps,
        floor_hours=floor[0],
        floor_device_hours=floor[1],
        floor_price=floor[2],
        hours_at_40_percent=usual[0],
        device_hours_at_40_percent=usual[1],
        price_at_40_percent=usual[2],
    )
