"""The predicted memory of a training step, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_flops.records import MemoryKind
from lightning_flops.schema import codec


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMoment:
    """When most is held."""

    part: str  #: Of the step: ``forward``, ``backward`` or ``optimizer``.
    module: str  #: Whose code runs then; ``(outside)`` of none of the model's.
    operator: str  #: The operator that allocates the last of it.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """What one module's own code allocates, without the modules inside it."""

    name: str  #: Its qualified name.
    kept_bytes: int  #: Kept by one forward for its backward.
    #: Activations and temporary tensors that are held at the peak.
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointedBlocks:
    """What it saves to repeat equal blocks in the backward (``torch.utils.checkpoint``)."""

    names: tuple[str, ...]  #: Of the blocks.
    peak_bytes: int  #: Of the step with them.
    recompute_flops: int  #: What the backward then repeats.
    model_flops: int  #: Forward and backward of the step.


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch that fits, and the line that the peak follows there."""

    size: int  #: 0: not one sample fits.
    peak_bytes: int | None = None  #: With it; None where none fits, and of a step that ran.
    #: What one more sample adds to that; None where none fits, no more can be run, and of a step that ran.
    bytes_per_sample: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport(codec.Json):
    """Peak memory of a training step, predicted or followed: what is held then, and who allocates it."""

    VERSION = 1
    schema_version: int = VERSION  #: Version of the JSON; another one has other fields.
    peak_bytes: int  #: Most that tensors hold.
    batch_size: int | None  #: First axis of the batch's first tensor.
    at_peak: Mapping[MemoryKind, int]  #: Bytes of each kind at the peak, the most first.
    when: PeakMoment  #: When that is.
    modules: tuple[ModuleMemory, ...]  #: Those that keep most first.
    flops: int  #: Model FLOPs of the step.
    available_bytes: int | None  #: What may be held; None: it is not known.
    #: None: it was not asked for. Of a step that ran, as if all grew with the batch but parameters, gradients and
    #: what the optimizer holds, which is at most what fits.
    largest: LargestBatch | None
    checkpointed: CheckpointedBlocks | None  #: None: no blocks repeat, or it was not asked for.
    notes: tuple[str, ...]  #: What is not in it.
