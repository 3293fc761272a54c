"""The floor of a step that does not run: what its operators and collectives take of a device and its links at least."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_flops.analysis.counts import FlopCounts, flops_by_phase
from lightning_flops.analysis.devices import devices_called
from lightning_flops.analysis.memory import build_memory_report
from lightning_flops.analysis.rates import COPY
from lightning_flops.records import FlopRecord
from lightning_flops.schema.plan import Collective, Plan, PlannedCollective, PlannedRank, PlannedRun

_HOUR = 3600.0
_USUAL_MFU = 0.4  # of large trainings that their authors have described


def build_plan(
    planned: PlannedRank,
    *,
    stages: Sequence[PlannedRank] = (),
    microbatches: int = 1,
    at: Mapping[str, int] = {},
    device: str = "",
    peak_flops_per_sec: float | Mapping[str, float] | None = None,
    memory_bytes_per_sec: float | None = None,
    measured: Mapping[str, float] = {},
    links: Mapping[str, float] = {},
    node_size: int = 8,
    steps: int | None = None,
    price: float | None = None,
) -> Plan:
    """The plan of one rank by the figures of its *device* and *links*, bytes/s by dimension, or ``nvlink`` and ``net``.

    Figures are those given, else the greatest of the vendor's of this name and *measured* ones. A link is ``nvlink``
    where all ranks of a group are among the *node_size* of one node. *price* is of a device hour. *stages* are all
    those of the pipeline of the rank, which take so many *microbatches* in a step.
    """
    record = planned.flops
    dtypes = sorted({cell.dtype for cell in record.cells if cell.flops})
    name, peaks, bandwidth = _figures(device, dtypes, peak_flops_per_sec, memory_bytes_per_sec, measured)
    rows = [_collective(planned.mesh, one, sizes, links, node_size) for one, sizes in planned.collectives.items()]
    floors = _floors(record, device, peaks, bandwidth or math.inf, rows)
    idle, used = len(stages) - 1, {"pp"}.union(*(row.dim.split("+") for _, row in rows))
    return Plan(
        mesh=planned.mesh,
        rank=planned.rank,
        at=at,
        flops=flops_by_phase(record.cells),
        lower_bound=FlopCounts(record).is_lower_bound,
        params=sum(one.params for one in stages or [planned]),
        local_params=planned.local_params,
        memory=build_memory_report(planned.tensors) if planned.tensors else None,
        collectives=tuple(sorted((row for _, row in rows), key=lambda row: -row.bytes)),
        unused=tuple(dim for dim, size in planned.mesh.items() if size > 1 and dim not in used),
        device=name,
        peaks_flops_per_sec=peaks,
        memory_bytes_per_sec=bandwidth,
        **floors,
        stages=tuple(flops_by_phase(one.flops.cells) for one in stages),
        bubble=idle / (microbatches + idle) if stages else None,
        runs=_runs(steps, floors, math.prod(planned.mesh.values()), price),
        notes=(
            *record.notes,
            *[
                "The bubble is of stages that take equally long, under GPipe or 1F1B. The floor is of this stage, "
                "without a bubble and without what stages send each other. Memory is GPipe's, which holds all "
                "microbatches."
            ][: len(stages)],
            *[
                "Operators with FLOPs read their inputs from memory and write their outputs there; what has none takes "
                "no time. Tensors that stay in a cache can go below that, and nothing below the arithmetic."
                if bandwidth
                else "The bandwidth of the device's memory is not known: the floor is that of arithmetic alone."
            ][: "floor_sec" in floors],
        ),
    )


def stages_with(rank: int, mesh: Mapping[str, int]) -> range:
    """The ranks that are the stages of the pipeline, along ``pp``, to which *rank* belongs."""
    names, sizes = list(mesh), list(mesh.values())
    apart = math.prod(sizes[names.index("pp") + 1 :])
    first = rank - rank // apart % mesh["pp"] * apart
    return range(first, first + mesh["pp"] * apart, apart)


def _figures(
    device: str,
    dtypes: Sequence[str],
    given: float | Mapping[str, float] | None,
    bandwidth: float | None,
    measured: Mapping[str, float],
) -> tuple[str, dict[str, float], float | None]:
    """What *device* is called, its known peaks, and its memory's *bandwidth*: those given, else the greatest."""
    known = devices_called(device)
    several = f" (of {len(known)} devices of this name the greatest figures)" if len(known) > 1 else ""
    of_memory = [row.memory_bytes_per_sec or 0.0 for row in known]
    tables = [measured, *(row.peaks for row in known)]
    own = given if isinstance(given, Mapping) else dict.fromkeys(dtypes, given)
    found = {dtype: own.get(dtype) or max(one.get(dtype, 0.0) for one in tables) for dtype in dtypes}
    peaks = {dtype: peak for dtype, peak in found.items() if peak}
    return f"{device}{several}", peaks, bandwidth or max(of_memory, default=measured.get(COPY)) or None


def _floors(
    record: FlopRecord,
    device: str,
    peaks: Mapping[str, float],
    bandwidth: float,
    rows: Sequence[tuple[str, PlannedCollective]],
) -> dict[str, Any]:
    """The least seconds of a step by the names that a plan has for them, those alone that are known, and why not more.

    FLOPs are those that kernels execute, whatever a mask lets a count leave out: no share of a peak passes 1. Different
    links may carry at the same time.
    """
    by_link: defaultdict[str, float] = defaultdict(float)
    for link, row in rows:
        by_link[link] += row.floor_sec or 0.0
    why, found = dict[str, str](), dict[str, Any]()
    if all(row.floor_sec is not None for _, row in rows):
        found["communication_sec"] = math.fsum(by_link.values())
    else:
        why["communication_sec"] = "the bandwidth of a link was not given"
    computing = [cell for cell in record.cells if cell.flops]  # a GPU's kernels, or a compiler's, may do the rest too
    if missing := ", ".join(sorted({cell.dtype for cell in computing} - {*peaks})):
        why["floor_sec"] = f"no peak in {missing} is known" if device or peaks else "no device was given"
        return found | {"unavailable": why}
    least = [(cell.flops - cell.skipped) / peaks[cell.dtype] for cell in computing]
    moving = [(cell.bytes_read + cell.bytes_written) / bandwidth for cell in computing]
    operators = math.fsum(map(max, least, moving))
    of_model = [sec for cell, sec in zip(computing, least, strict=True) if cell.phase in ("forward", "backward")]
    floor = max(operators, *by_link.values(), 0.0)
    found |= {"arithmetic_sec": math.fsum(least), "operators_sec": operators, "floor_sec": floor, "unavailable": why}
    if not why:
        found["exposed_floor_sec"] = operators + found["communication_sec"]
    return found | ({"mfu_at_most": math.fsum(of_model) / floor} if floor else {})


def _collective(
    mesh: Mapping[str, int], one: Collective, sizes: Sequence[int], links: Mapping[str, float], node_size: int
) -> tuple[str, PlannedCollective]:
    """The link that *one* collective takes, and what calls of these *sizes* take of it."""
    kind, ranks = one
    dims, total = _dims(ranks, mesh), sum(sizes)
    between = "nvlink" if len({rank // node_size for rank in ranks}) == 1 else "net"
    link = min((dim for dim in dims if dim in links), key=links.__getitem__, default=between)
    seconds = _ring_share(kind, len(ranks)) * total / links[link] if link in links else None
    return link, PlannedCollective(
        kind=kind, dim="+".join(dims), size=len(ranks), calls=len(sizes), bytes=total, floor_sec=seconds
    )


def _dims(ranks: tuple[int, ...], mesh: Mapping[str, int]) -> list[str]:
    """The dimensions of *mesh* in which *ranks* have different places."""
    places = np.unravel_index(ranks, tuple(mesh.values()))
    return [dim for dim, of_ranks in zip(mesh, places, strict=True) if len({*of_ranks}) > 1]


def _ring_share(kind: str, size: int) -> float:
    """What one of *size* ranks sends in a ring, as a share of the call's bytes."""
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (size - 1) / size
    return 2 * (size - 1) / size if kind == "all_reduce" else float(size > 1)


def _runs(steps: int | None, floors: Mapping[str, float], devices: int, price: float | None) -> tuple[PlannedRun, ...]:
    """So many *steps* at the floor, if there is one, and at the share of the peak that is usual, if that is slower."""
    runs, floor = list[PlannedRun](), floors.get("floor_sec", math.inf)
    usual = floor * floors.get("mfu_at_most", 0.0) / _USUAL_MFU
    for at, step_sec in (("the floor", floor), ("40% of the peak", usual)):
        if steps is not None and floor <= step_sec < math.inf:
            hours = steps * step_sec / _HOUR
            cost = None if price is None else price * hours * devices
            runs.append(PlannedRun(at=at, steps=steps, hours=hours, device_hours=hours * devices, price=cost))
    return tuple(runs)
