"""FLOPs of a step: by bucket, by dtype with the peak that goes with it, and by operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from lightning_flops.analysis.flop_counts import FlopCounts, flops_by_phase, grouped
from lightning_flops.records import OperatorCell, PhaseFlops, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """FLOPs of one global step on this rank; a multiply-add is two."""

    forward: int
    """Products of the forward, with every forward that runs inside a step."""
    backward: int
    """What autograd ran, less what it repeated of the forward."""
    recompute: int
    """What the backward repeated of the forward: activation checkpointing, fused attention's score matrix."""
    optimizer: int
    """Inside optimizer steps."""
    causal_skipped: int
    """Of the four phases' FLOPs, what fused causal attention does not execute."""
    without_backward: int
    """Of the forward's FLOPs, those that no backward can follow."""
    backward_estimated: int
    """(2 + recompute_fwd_factor) x (forward - without_backward): stands for backward and recompute together."""
    model: int
    """Forward + backward: the numerator of MFU."""
    hardware: int
    """All four phases - causal_skipped: what the kernels execute, the numerator of HFU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopSpread:
    """How far apart several counted steps lie, each phase for itself."""

    minimum: PhaseFlops
    """The least of each phase."""
    maximum: PhaseFlops
    """The most of each phase."""
    model_minimum: int
    """The least of forward + backward."""
    model_maximum: int
    """The most of forward + backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeFlops:
    """FLOPs in one dtype of arithmetic, over all counted steps."""

    dtype: str
    """Effective dtype of the arithmetic, such as ``bfloat16`` or ``tf32``."""
    model: int
    """Forward + backward."""
    hardware: int
    """What the kernels execute."""
    peak_flops_per_sec: float | None
    """Dense peak of one device in this dtype; None if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """One operator in all modules, over all counted steps."""

    operator: str
    """Name without overload, such as ``aten.mm``."""
    calls: int
    """How often it ran."""
    flops: PhaseFlops
    """By phase; a multiply-add is two."""
    dtypes: tuple[str, ...]
    """Dtypes of its arithmetic, sorted."""
    bytes_read: int
    """Its inputs."""
    bytes_written: int
    """Its outputs."""


def total_flops(counts: FlopCounts, *, recompute_fwd_factor: float) -> StepFlops:
    """FLOPs of all counted steps together."""
    total = counts.total
    skipped = counts.causal_skipped
    return StepFlops(
        forward=total.forward,
        backward=total.backward,
        recompute=total.recompute,
        optimizer=total.optimizer,
        causal_skipped=skipped,
        without_backward=counts.without_backward,
        backward_estimated=counts.estimated_backward(recompute_fwd_factor),
        model=total.forward + total.backward,
        hardware=total.total - skipped,
    )


def mean_flops(total: StepFlops, *, steps: int) -> StepFlops:
    """*total* over *steps* counted steps as that of one, each figure to the nearest whole FLOP."""
    names = [field.name for field in fields(StepFlops)]
    return StepFlops(**{name: _rounded(getattr(total, name), steps) for name in names})


def flop_spread(steps: Sequence[StepRecord]) -> FlopSpread | None:
    """Least and most FLOPs of *steps*; None if there are fewer than two, or one was not counted apart."""
    flops = [step.flops for step in steps if step.flops is not None]
    if len(flops) < 2 or len(flops) < len(steps):
        return None

    def each(choose: Callable[[list[int]], int]) -> PhaseFlops:
        return PhaseFlops(
            forward=choose([one.forward for one in flops]),
            backward=choose([one.backward for one in flops]),
            recompute=choose([one.recompute for one in flops]),
            optimizer=choose([one.optimizer for one in flops]),
        )

    model = [one.forward + one.backward for one in flops]
    return FlopSpread(minimum=each(min), maximum=each(max), model_minimum=min(model), model_maximum=max(model))


def flops_by_dtype(cells: Sequence[OperatorCell], *, peak_of: Callable[[str], float | None]) -> tuple[DtypeFlops, ...]:
    """FLOPs in each dtype that spent any, most first, with the peak that *peak_of* knows."""
    model: defaultdict[str, int] = defaultdict(int)
    hardware: defaultdict[str, int] = defaultdict(int)
    for cell in cells:
        if cell.flops:
            hardware[cell.dtype] += cell.flops - cell.causal_skipped
            model[cell.dtype] += cell.flops if cell.phase in ("forward", "backward") else 0
    return tuple(
        DtypeFlops(dtype=dtype, model=model[dtype], hardware=hardware[dtype], peak_flops_per_sec=peak_of(dtype))
        for dtype in sorted(hardware, key=lambda dtype: (-hardware[dtype], dtype))
    )


def flops_by_operator(cells: Sequence[OperatorCell]) -> tuple[OperatorProfile, ...]:
    """Each operator that ran and has a place in the counts, most FLOPs first."""
    operators = [
        OperatorProfile(
            operator=operator,
            calls=sum(cell.calls for cell in group),
            flops=flops_by_phase(group),
            dtypes=tuple(sorted({cell.dtype for cell in group if cell.flops})),
            bytes_read=sum(cell.bytes_read for cell in group),
            bytes_written=sum(cell.bytes_written for cell in group),
        )
        for operator, group in grouped(cells, lambda cell: cell.operator).items()
    ]
    return tuple(sorted(operators, key=lambda one: (-one.flops.total, one.operator)))


def _rounded(total: int, steps: int) -> int:
    return (2 * total + steps) // (2 * steps)
