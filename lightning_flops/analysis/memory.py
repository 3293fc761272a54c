"""Peak memory of a training step from the lives of its tensors, and of batches in other sizes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt

from lightning_flops.errors import ConfigError, LightningFlopsError
from lightning_flops.records import MemoryKind, StepTensors, TensorLife
from lightning_flops.schema import codec
from lightning_flops.schema.plan import CheckpointedBlocks, LargestBatch, MemoryReport, ModuleMemory, PeakMoment
from lightning_flops.signals import Quiet
from lightning_flops.units import shown

_NO_AXIS = "the batch has no tensor with an axis, so it has no size"
_SPAN = 8  # what a sample more takes is known by a batch larger by this share of it

Steps = Callable[[int | None, Collection[str]], StepTensors]
"""Runs two steps in this batch size, None for its own, and with checkpoints around the modules of these names."""


class MemoryPrediction:
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

    def __str__(self) -> str:
        """The report as text, ending in a line break."""
        return str(codec.above("report.text").render_text(self._report))

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
        known = None if more == math.inf else round(more)
        return LargestBatch(size=size, peak_bytes=int(peak(size)), bytes_per_sample=known)

    def _saved(self) -> CheckpointedBlocks | None:
        """Of the equal blocks that keep most, what it saves to repeat them."""

        def held(names: tuple[str, ...]) -> int:
            inside = tuple(f"{name}." for name in names)
            return sum(one.kept_bytes for one in self.modules if f"{one.name}.".startswith(inside))

        if not self._tensors.blocks:
            return None
        names = max(self._tensors.blocks, key=held)
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
    kinds, kept, at_peak = Counter[MemoryKind](), Counter[str](), Counter[str]()
    for life in lives:
        if life.born <= moment and (life.died is None or life.died > moment):
            kinds[life.kind] += life.size
            if life.kind in ("activations", "temporary"):
                at_peak[life.module] += life.size
    for life in lives[tensors.before_forward :]:
        if life.kind == "activations" and life.part != "backward":
            kept[life.module] += life.size
    modules = [ModuleMemory(name=name, kept_bytes=kept[name], peak_bytes=at_peak[name]) for name in {**kept, **at_peak}]
    grows = growing > 0
    return MemoryReport(
        peak_bytes=int(held[moment]),
        batch_size=size,
        at_peak=dict(kinds.most_common()),
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
