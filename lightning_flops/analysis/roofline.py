"""The roofline of modules and operators: FLOPs per byte, FLOP/s achieved, FLOP/s attainable.

S. Williams, A. Waterman, D. Patterson: Roofline, Communications of the ACM 52 (2009).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_flops.analysis.flop_counts import grouped
from lightning_flops.analysis.module_names import with_those_above
from lightning_flops.analysis.rates import mean, per_second
from lightning_flops.records import OUTSIDE, OperatorCell
from lightning_flops.schema.modules import ModuleTimes
from lightning_flops.schema.step import Roofline
from lightning_flops.schema.trace import TracedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """What the device can do."""

    peak_of: Callable[[str], float | None]
    """Dense peak in FLOP/s for a dtype's name; None where it is not known."""
    memory_bytes_per_sec: float | None


def module_rooflines(
    cells: Iterable[OperatorCell], times: Mapping[str, ModuleTimes], roof: Roof, *, counted_steps: int
) -> dict[str, Roofline]:
    """The roofline of each module with FLOPs, with the modules inside it, by qualified name.

    Args:
        cells: what each operator did in each module, over *counted_steps*.
        times: of the modules in the traced step.
        roof: of the device.
        counted_steps: how many steps the cells are of.
    """
    work: defaultdict[str, _Work] = defaultdict(_Work)
    for cell in cells:
        if cell.phase != "optimizer" and cell.module != OUTSIDE:
            for name in with_those_above(cell.module):
                work[name].add(cell)
    return {
        name: one.roofline(roof, seconds=_seconds(times.get(name)), counted_steps=counted_steps)
        for name, one in work.items()
        if one.flops
    }


def operator_rooflines(
    cells: Sequence[OperatorCell], traced: TracedStep | None, roof: Roof, *, counted_steps: int
) -> dict[str, Roofline]:
    """The roofline of each operator with FLOPs, by its name.

    Args:
        cells: as in ``module_rooflines``.
        traced: the traced step; seconds are only taken from it where it ran an operator as often as the counted step.
        roof: of the device.
        counted_steps: how many steps the cells are of.
    """
    seconds: dict[str, tuple[float, float]] = {}
    if traced is not None:
        for name, one in traced.operators.items():
            seconds[name.replace("::", ".", 1)] = (one.calls, one.total_sec)
    found = {}
    for operator, group in grouped(cells, lambda cell: cell.operator).items():
        work = _Work()
        for cell in group:
            work.add(cell)
        if not work.flops:
            continue
        calls, spent_sec = seconds.get(operator, (0, 0.0))
        alike = calls * counted_steps == sum(cell.calls for cell in group)
        found[operator] = work.roofline(roof, seconds=spent_sec if alike else None, counted_steps=counted_steps)
    return found


class _Work:
    """FLOPs by dtype, and bytes."""

    def __init__(self) -> None:
        self._by_dtype: defaultdict[str, int] = defaultdict(int)
        self._bytes = 0

    @property
    def flops(self) -> int:
        return sum(self._by_dtype.values())

    def add(self, cell: OperatorCell) -> None:
        if cell.flops:
            self._by_dtype[cell.dtype] += cell.flops
        self._bytes += cell.bytes_read + cell.bytes_written

    def roofline(self, roof: Roof, *, seconds: float | None, counted_steps: int) -> Roofline:
        intensity = per_second(amount=self.flops, seconds=self._bytes)
        attainable = None
        peak_sec = [per_second(amount=flops, seconds=roof.peak_of(dtype)) for dtype, flops in self._by_dtype.items()]
        if intensity is not None and roof.memory_bytes_per_sec is not None and None not in peak_sec:
            least_sec = max(sum(one or 0.0 for one in peak_sec), self._bytes / roof.memory_bytes_per_sec)
            attainable = per_second(amount=self.flops, seconds=least_sec)
        return Roofline(
            flops_per_byte=intensity,
            achieved_flops_per_sec=per_second(amount=mean(total=self.flops, steps=counted_steps), seconds=seconds),
            attainable_flops_per_sec=attainable,
        )


def _seconds(times: ModuleTimes | None) -> float | None:
    """Forward and backward of one step together; None where one of them has FLOPs and no rate."""
    if times is None or (times.forward_flops_per_sec is None and times.backward_flops_per_sec is None):
        return None
    if times.backward_sec is None and times.clock == "borders":
        return None
    return times.forward_sec + (times.backward_sec or 0.0)
