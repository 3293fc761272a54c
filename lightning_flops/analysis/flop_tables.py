"""FLOPs of a step: by bucket, by dtype with the peak that goes with it, and by operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

from lightning_flops.analysis.flop_counts import FlopCounts, flops_by_phase, grouped
from lightning_flops.records import OperatorCell
from lightning_flops.schema.step import DtypeFlops, OperatorProfile, Roofline, StepFlops


def total_flops(counts: FlopCounts, *, recompute_fwd_factor: float) -> StepFlops:
    """FLOPs of all counted steps together."""
    total = counts.total
    skipped = counts.skipped
    return StepFlops(
        forward=total.forward,
        backward=total.backward,
        recompute=total.recompute,
        optimizer=total.optimizer,
        skipped=skipped,
        without_backward=counts.without_backward,
        backward_estimated=counts.estimated_backward(recompute_fwd_factor),
        model=total.forward + total.backward,
        hardware=total.total - skipped,
    )


def mean_flops(total: StepFlops, *, steps: int) -> StepFlops:
    """*total* over *steps* counted steps as that of one, each figure to the nearest whole FLOP."""
    names = [field.name for field in fields(StepFlops)]
    return StepFlops(**{name: _rounded(getattr(total, name), steps) for name in names})


def flops_by_dtype(cells: Sequence[OperatorCell], *, peak_of: Callable[[str], float | None]) -> tuple[DtypeFlops, ...]:
    """FLOPs in each dtype that has any, most first, with the peak that *peak_of* knows."""
    model: defaultdict[str, int] = defaultdict(int)
    hardware: defaultdict[str, int] = defaultdict(int)
    for cell in cells:
        if cell.flops:
            hardware[cell.dtype] += cell.flops - cell.skipped
            model[cell.dtype] += cell.flops if cell.phase in ("forward", "backward") else 0
    return tuple(
        DtypeFlops(dtype=dtype, model=model[dtype], hardware=hardware[dtype], peak_flops_per_sec=peak_of(dtype))
        for dtype in sorted(hardware, key=lambda dtype: (-hardware[dtype], dtype))
    )


def flops_by_operator(cells: Sequence[OperatorCell], rooflines: Mapping[str, Roofline]) -> tuple[OperatorProfile, ...]:
    """Each operator that ran and has a place in the counts, most FLOPs first."""
    operators = [
        OperatorProfile(
            operator=operator,
            calls=sum(cell.calls for cell in group),
            flops=flops_by_phase(group),
            dtypes=tuple(sorted({cell.dtype for cell in group if cell.flops})),
            bytes_read=sum(cell.bytes_read for cell in group),
            bytes_written=sum(cell.bytes_written for cell in group),
            roofline=rooflines.get(operator),
        )
        for operator, group in grouped(cells, lambda cell: cell.operator).items()
    ]
    return tuple(sorted(operators, key=lambda one: (-one.flops.total, one.operator)))


def _rounded(total: int, steps: int) -> int:
    return (2 * total + steps) // (2 * steps)
