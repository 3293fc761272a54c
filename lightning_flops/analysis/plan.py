"""The floor of a step that does not run: what its operators and collectives take of a device and its links at least."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_flops.analysis.counts import FlopCounts, flops_by_phase
from lightning_flops.analysis.devices import devices_called
from lightning_flops.analysis.memory import build_memory_report
from lightning_flops.analysis.rates import COPY
from lightning_flops.records import FlopRecord
from lightning_flops.schema.plan import Plan, PlannedCollective, PlannedRank, PlannedRun

_HOUR = 3600.0
_USUAL_MFU = 0.4  # of large trainings that their authors have described

_NO_BANDWIDTH = "The bandwidth of the device's memory is not known: the floor is that of arithmetic alone."
_OF_OPERATORS = (
    "Operators with FLOPs read their inputs from memory and write their outputs there; what has none takes no time. "
    "Tensors that stay in a cache can go below that, and nothing below the arithmetic."
)

_SECONDS = (  # fields of a plan that are None where a figure of the device is not known
    "arithmetic_sec",
    "operators_sec",
    "communication_sec",
    "floor_sec",
    "exposed_floor_sec",
    "mfu_at_most",
)

_OF_STAGES = (
    "The bubble is of stages that take equally long, under GPipe or 1F1B. The floor is of this stage, without a bubble "
    "and without what stages send each other. Memory is GPipe's, which holds all microbatches."
)


def build_plan(
    planned: PlannedRank,
    *,
    stages: Sequence[PlannedRank] = (),
    microbatches: int = 1,
    at: Mapping[str, int] = {},
    device: str | None = None,
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
    known = devices_called(device) if device else ()
    several = f" (of {len(known)} devices of this name the greatest figures)" if len(known) > 1 else ""
    of_memory = [row.memory_bytes_per_sec or 0.0 for row in known]
    bandwidth = memory_bytes_per_sec or max(of_memory, default=measured.get(COPY)) or None
    dtypes = sorted({cell.dtype for cell in record.cells if cell.flops})
    peaks = _peaks_in(dtypes, peak_flops_per_sec, [measured, *(row.peaks for row in known)])
    rows, by_link = _collectives(planned, links, node_size)
    times: dict[str, Any] = dict.fromkeys(_SECONDS)
    unavailable: dict[str, str] = {}
    if any(one.floor_sec is None for one in rows):
        unavailable["communication_sec"] = "the bandwidth of a link was not given"
    else:
        times["communication_sec"] = math.fsum(by_link.values())
    notes = [*record.notes, *[_OF_STAGES][: len(stages)]]
    if missing := [dtype for dtype in dtypes if dtype not in peaks]:
        has_figures = device or peaks
        unavailable["floor_sec"] = f"no peak in {', '.join(missing)} is known" if has_figures else "no device was given"
    else:
        notes.append(_NO_BANDWIDTH if bandwidth is None else _OF_OPERATORS)
        times |= _floor(record, peaks, bandwidth or math.inf, by_link, times["communication_sec"])
    idle, devices = len(stages) - 1, math.prod(planned.mesh.values())
    return Plan(
        mesh=planned.mesh,
        rank=planned.rank,
        at=at,
        flops=flops_by_phase(record.cells),
        lower_bound=FlopCounts(record).is_lower_bound,
        params=sum(one.params for one in stages or [planned]),
        local_params=planned.local_params,
        memory=None if planned.tensors is None else build_memory_report(planned.tensors),
        collectives=rows,
        device=f"{device or ''}{several}",
        peaks_flops_per_sec=peaks,
        memory_bytes_per_sec=bandwidth,
        **times,
        stages=tuple(flops_by_phase(one.flops.cells) for one in stages),
        bubble=idle / (microbatches + idle) if stages else None,
        runs=() if steps is None else _runs(steps, times, devices, price),
        unavailable=unavailable,
        notes=tuple(notes),
    )


def stages_with(rank: int, mesh: Mapping[str, int]) -> range:
    """The ranks that are the stages of the pipeline, along ``pp``, to which *rank* belongs."""
    names, sizes = list(mesh), list(mesh.values())
    apart = math.prod(sizes[names.index("pp") + 1 :])
    first = rank - rank // apart % mesh["pp"] * apart
    return range(first, first + mesh["pp"] * apart, apart)


def _peaks_in(
    dtypes: Sequence[str], given: float | Mapping[str, float] | None, tables: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """The peak of each dtype: the *given* one, else the greatest of *tables*; those that are known."""
    own = given if isinstance(given, Mapping) else dict.fromkeys(dtypes, given)
    found = {dtype: own.get(dtype) or max(one.get(dtype, 0.0) for one in tables) for dtype in dtypes}
    return {dtype: peak for dtype, peak in found.items() if peak}


def _floor(
    record: FlopRecord,
    peaks: Mapping[str, float],
    bandwidth: float,
    by_link: Mapping[str, float],
    communication: float | None,
) -> dict[str, float | None]:
    """The least seconds of a step, with what is sent hidden and exposed, by the names that a plan has for them."""
    arithmetic, operators, of_model = _compute_sec(record, peaks, bandwidth)
    floor = max(operators, *by_link.values(), 0.0)
    return {
        "arithmetic_sec": arithmetic,
        "operators_sec": operators,
        "floor_sec": floor,
        "exposed_floor_sec": None if communication is None else operators + communication,
        "mfu_at_most": of_model / floor if floor else None,
    }


def _compute_sec(record: FlopRecord, peaks: Mapping[str, float], bandwidth: float) -> tuple[float, float, float]:
    """Least seconds of all arithmetic, of all operators that have FLOPs, and of the model's own arithmetic alone.

    FLOPs are those that kernels execute, whatever a mask lets a count leave out: no share of a peak passes 1.
    """
    arithmetic = operators = of_model = 0.0
    for cell in record.cells:
        if not cell.flops:  # a GPU's kernels, or a compiler's, may do it in passing
            continue
        computing = (cell.flops - cell.skipped) / peaks[cell.dtype]
        arithmetic += computing
        operators += max(computing, (cell.bytes_read + cell.bytes_written) / bandwidth)
        of_model += computing if cell.phase in ("forward", "backward") else 0.0
    return arithmetic, operators, of_model


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


def _runs(steps: int, times: Mapping[str, float | None], devices: int, price: float | None) -> tuple[PlannedRun, ...]:
    """So many *steps* at the floor, and at the share of the peak that is usual."""
    floor, share = times["floor_sec"], times["mfu_at_most"] or 0.0
    runs = list[PlannedRun]()
    if floor is None:
        return ()
    for at, step_sec in (("the floor", floor), ("40% of the peak", floor * share / _USUAL_MFU)):
        hours = steps * step_sec / _HOUR
        of_all = hours * devices
        cost = None if price is None else price * of_all
        runs.append(PlannedRun(at=at, steps=steps, hours=hours, device_hours=of_all, price=cost))
    return tuple(runs)
