"""What is known before a step runs: its peak memory, from the lives of its tensors, and the floor of one rank's step.

The floor is what a step's operators and collectives take of a device and its links at least.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.counts import FlopCounts, flops_by_phase, with_those_below
from lightning_flops.analysis.devices import devices_called
from lightning_flops.analysis.rates import COPY
from lightning_flops.errors import ConfigError, LightningFlopsError
from lightning_flops.records import FlopRecord, MemoryKind, StepTensors, TensorLife, summed
from lightning_flops.schema import codec
from lightning_flops.schema.plan import (
    CheckpointedBlocks,
    Collective,
    LargestBatch,
    MemoryReport,
    ModuleMemory,
    PeakMoment,
    Plan,
    PlannedCollective,
    PlannedRank,
    PlannedRun,
)
from lightning_flops.signals import Quiet
from lightning_flops.units import shown

_NO_AXIS = "the batch has no tensor with an axis, so it has no size"
_SPAN = 8  # what a sample more takes is known by a batch larger by this share of it

#: Runs two steps in this batch size, None for its own, and with checkpoints around the modules of these names.
Steps = Callable[[int | None, Collection[str]], StepTensors]


class MemoryPrediction(codec.Printed):
    """Memory of a training step that did not run, to the byte of its tensors.

    ``print`` shows it as a table. What comes on top of tensors (CUDA's context, workspaces of cuBLAS, NCCL's buffers,
    fragmentation) is not in it.

    Attributes:
        peak_bytes: most that tensors hold in two steps.
        at_peak: bytes of each kind at the peak: parameters, gradients, optimizer, activations, batch, temporary.
        modules: what each module keeps for its backward, and what it has at the peak; those that keep most first.
        when: the part of the step, the module and the operator in which the peak is.
        notes: what is not in it.
    """

    def __init__(self, steps: Steps, batch_size: int | None = None, checkpointed: Collection[str] = ()) -> None:
        self._steps, self._checkpointed = steps, checkpointed
        self._tensors = steps(batch_size, checkpointed)
        self._report = report = build_memory_report(self._tensors)
        self.peak_bytes: int = report.peak_bytes
        self.at_peak: Mapping[MemoryKind, int] = report.at_peak
        self.modules: tuple[ModuleMemory, ...] = report.modules
        self.when: PeakMoment = report.when
        self.notes: tuple[str, ...] = report.notes

    def at(self, *, batch: int) -> MemoryPrediction:
        """The prediction for a batch of this size.

        Raises:
            ConfigError: *batch* is no integer above zero, or the batch has no axis.
            LightningFlopsError: the model refuses this size.
        """
        if self._report.batch_size is None:
            raise ConfigError(_NO_AXIS)
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            raise ConfigError(f"batch must be an integer >= 1, got {shown(batch)}")
        return MemoryPrediction(self._steps, batch, self._checkpointed)

    def largest_batch(self, available_bytes: float) -> int:
        """The largest batch whose peak is at most *available_bytes*; 0: none.

        Both it and the next larger one are run on fake tensors, so it is what bisection finds.

        Raises:
            ConfigError: *available_bytes* is no number above zero, or the batch has no axis.
        """
        return self._largest(available_bytes).size

    def report(
        self, *, available_bytes: float | None = None, largest: bool = False, checkpoints: bool = False
    ) -> MemoryReport:
        """All of it, with the *largest* batch that fits into *available_bytes*, and what checkpoints save."""
        return replace(
            self._report,
            available_bytes=None if available_bytes is None else int(available_bytes),
            largest=self._largest(available_bytes) if largest else None,
            checkpointed=self._saved() if checkpoints else None,
        )

    def to_json(self) -> str:
        """The report as JSON."""
        return self._report.to_json()

    def _largest(self, available: float | None) -> LargestBatch:
        if not isinstance(available, (int, float)) or isinstance(available, bool) or not 0 < available < math.inf:
            raise ConfigError(f"available_bytes must be a number above 0, got {shown(available)}")

        if self._report.batch_size is None:
            raise ConfigError(_NO_AXIS)

        @cache
        def peak(size: int) -> float:
            with Quiet(LightningFlopsError):
                return MemoryPrediction(self._steps, size, self._checkpointed).peak_bytes
            return math.inf  # the model refuses it

        high = max(self._report.batch_size, 1)
        while peak(high) <= available:
            high *= 2
        size = bisect_right(range(1, high), available, key=peak)
        if not size:
            return LargestBatch(size=0)
        further = 1 + size // _SPAN  # an allocator rounds, so that one sample may add nothing, or far too much
        more = (peak(size + further) - peak(size)) / further
        return LargestBatch(
            size=size, peak_bytes=int(peak(size)), bytes_per_sample=None if more == math.inf else round(more)
        )

    def _saved(self) -> CheckpointedBlocks | None:
        """Of the equal blocks that keep most, what it saves to repeat them."""
        if not self._tensors.blocks:
            return None
        kept = with_those_below({one.name: one.kept_bytes for one in self.modules}, 0)
        names = max(self._tensors.blocks, key=lambda names: sum(kept.get(name, 0) for name in names))
        other = MemoryPrediction(self._steps, self._report.batch_size, names)
        return CheckpointedBlocks(
            names=names,
            peak_bytes=other.peak_bytes,
            recompute_flops=other._tensors.flops.recompute,
            model_flops=self._report.flops,
        )


def build_memory_report(tensors: StepTensors) -> MemoryReport:
    """Peak, kinds and modules of the steps that were followed, and the rows that fit if that can be known."""
    lives, size, available = tensors.lives, tensors.batch_size, tensors.available_bytes
    events = 1 + max(life.died or life.born for life in lives)  # there is a parameter or a tensor of the batch
    held, growing = _held(lives, events), _held(filter(_goes_with_batch, lives), events)
    moment = int(held.argmax())
    (*_, last) = (life for life in lives if life.born == moment)
    alive = [life for life in lives if life.born <= moment and (life.died is None or life.died > moment)]
    kinds = summed(((life.kind, life.size) for life in alive), 0)
    at_peak = summed(((life.module, life.size) for life in alive if life.kind in ("activations", "temporary")), 0)
    by_forward = (life for life in lives[tensors.before_forward :] if life.part != "backward")
    kept = summed(((life.module, life.size) for life in by_forward if life.kind == "activations"), 0)
    modules = [
        ModuleMemory(name=name, kept_bytes=kept.get(name, 0), peak_bytes=at_peak.get(name, 0))
        for name in {**kept, **at_peak}
    ]
    grows = growing > 0
    return MemoryReport(
        peak_bytes=int(held[moment]),
        batch_size=size,
        at_peak=dict(sorted(kinds.items(), key=lambda item: -item[1])),
        when=PeakMoment(part=last.part, module=last.module, operator=last.operator),
        modules=tuple(sorted(modules, key=lambda one: (-one.kept_bytes, -one.peak_bytes))),
        flops=tensors.flops.forward + tensors.flops.backward,
        available_bytes=available,
        largest=LargestBatch(size=int(size * np.min((available - (held - growing)[grows]) / growing[grows])))
        if size and available and grows.any()
        else None,
        checkpointed=None,
        notes=tensors.notes,
    )


def _held(lives: Iterable[TensorLife], events: int) -> npt.NDArray[np.int64]:
    """Bytes that *lives* hold after each of so many *events*."""
    changes = np.zeros(events, dtype=np.int64)
    for life in lives:
        changes[life.born] += life.size
        if life.died is not None:
            changes[life.died] -= life.size
    return changes.cumsum()


def _goes_with_batch(life: TensorLife) -> bool:
    """Whether it is taken for twice as large in a batch twice as large: gradients of weights that are made are, too."""
    return life.kind in ("activations", "batch") or (life.kind == "temporary" and life.part != "optimizer")


# ---- the floor

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
        runs=() if steps is None else _runs(steps, floors, math.prod(planned.mesh.values()), price),
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
    by_link = summed(((link, row.floor_sec or 0.0) for link, row in rows), 0.0)
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
    places = zip(mesh, np.unravel_index(ranks, tuple(mesh.values())), strict=True)
    dims, total = [dim for dim, of_ranks in places if len({*of_ranks}) > 1], sum(sizes)
    between = "nvlink" if len({rank // node_size for rank in ranks}) == 1 else "net"
    link = min((dim for dim in dims if dim in links), key=links.__getitem__, default=between)
    seconds = _ring_share(kind, len(ranks)) * total / links[link] if link in links else None
    return link, PlannedCollective(
        kind=kind, dim="+".join(dims), size=len(ranks), calls=len(sizes), bytes=total, floor_sec=seconds
    )


def _ring_share(kind: str, size: int) -> float:
    """What one of *size* ranks sends in a ring, as a share of the call's bytes."""
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (size - 1) / size
    return 2 * (size - 1) / size if kind == "all_reduce" else float(size > 1)


def _runs(steps: int, floors: Mapping[str, float], devices: int, price: float | None) -> tuple[PlannedRun, ...]:
    """So many *steps* at the floor, if there is one, and at the share of the peak that is usual, if that is slower."""
    floor = floors.get("floor_sec", math.inf)
    usual = floor * floors.get("mfu_at_most", 0.0) / _USUAL_MFU
    paces = {"the floor": floor, "40% of the peak": usual}
    hours = {at: steps * step_sec / _HOUR for at, step_sec in paces.items() if floor <= step_sec < math.inf}
    return tuple(
        PlannedRun(
            at=at,
            steps=steps,
            hours=one,
            device_hours=one * devices,
            price=None if price is None else price * one * devices,
        )
        for at, one in hours.items()
    )
