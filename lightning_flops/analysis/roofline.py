"""Modules and operators held against the device: FLOPs at its peak, and what its memory's bandwidth lets them reach.

S. Williams, A. Waterman, D. Patterson: Roofline, Communications of the ACM 52 (2009).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_flops.analysis.flop_counts import flops_by_phase, grouped
from lightning_flops.analysis.module_names import with_those_above
from lightning_flops.analysis.rates import MOST_OF_PEAK, mean, peak_seconds, per_second, ratio
from lightning_flops.records import OUTSIDE, OperatorCell
from lightning_flops.schema.step import OperatorProfile
from lightning_flops.schema.trace import TracedStep

_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """What the device can do."""

    peaks: Mapping[str, float]
    """Dense peak in FLOP/s by dtype, where it is known."""
    memory_bytes_per_sec: float | None


@dataclass(slots=True)
class Work:
    """FLOPs by dtype of a module or an operator, the backward with what it repeats of the forward, and its bytes."""

    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)
    bytes: int = 0

    def add(self, cell: OperatorCell) -> None:
        """Adds what *cell* did."""
        side = self.forward if cell.phase == "forward" else self.backward
        side[cell.dtype] += cell.flops
        self.bytes += cell.bytes_read + cell.bytes_written

    def attainable(self, roof: Roof) -> float | None:
        """FLOP/s: the least of the peak of its dtypes and FLOPs / bytes x the memory's bandwidth."""
        flops = self.forward + self.backward
        peak_sec = peak_seconds(flops, roof.peaks)
        if not self.bytes or peak_sec is None or roof.memory_bytes_per_sec is None:
            return None
        return per_second(amount=flops.total(), seconds=max(peak_sec, self.bytes / roof.memory_bytes_per_sec))


def work_of_modules(cells: Iterable[OperatorCell]) -> dict[str, Work]:
    """What each module did, with the modules inside it, by qualified name; without optimizers'."""
    works: defaultdict[str, Work] = defaultdict(Work)
    for cell in cells:
        if cell.phase != "optimizer" and cell.module != OUTSIDE:
            for name in with_those_above(cell.module):
                works[name].add(cell)
    return works


def build_operators(
    cells: Sequence[OperatorCell], traced: TracedStep | None, roof: Roof, *, counted_steps: int
) -> tuple[tuple[OperatorProfile, ...], tuple[str, ...]]:
    """Each operator that ran and has a place in the counts, most FLOPs first, and notes on rates that cannot be.

    Args:
        cells: what each operator did in each module, over *counted_steps*.
        traced: the traced step; seconds are only taken from it where it ran an operator as often as the counted step.
        roof: of the device.
        counted_steps: how many steps the cells are of.
    """
    seconds_of: dict[str, tuple[float, float]] = {}
    if traced is not None:
        seconds_of = {name.replace("::", ".", 1): (one.calls, one.total_sec) for name, one in traced.operators.items()}
    operators, beyond = [], {}
    for name, group in grouped(cells, lambda cell: cell.operator).items():
        work, calls, flops = Work(), sum(cell.calls for cell in group), flops_by_phase(group)
        for cell in group:
            work.add(cell)
        traced_calls, seconds = seconds_of.get(name, (0, 0.0))
        achieved = None
        if flops.total and traced_calls * counted_steps == calls:
            achieved = per_second(amount=mean(total=flops.total, steps=counted_steps), seconds=seconds)
            peak_sec = mean(total=peak_seconds(work.forward + work.backward, roof.peaks), steps=counted_steps)
            if (share := ratio(part=peak_sec, whole=seconds)) is not None and share > MOST_OF_PEAK:
                achieved, beyond[name] = None, share
        operator = OperatorProfile(
            operator=name,
            calls=calls,
            flops=flops,
            dtypes=tuple(sorted({cell.dtype for cell in group if cell.flops})),
            bytes=work.bytes,
            achieved_flops_per_sec=achieved,
            attainable_flops_per_sec=work.attainable(roof) if flops.total else None,
        )
        operators.append(operator)
    return tuple(sorted(operators, key=lambda one: (-one.flops.total, one.operator))), beyond_peak(beyond)


def beyond_peak(shares: Mapping[str, float]) -> tuple[str, ...]:
    """A note on rates that no device can reach, by how many times the peak they would be; none without any."""
    if not shares:
        return ()
    listed = [f"{name} ({share:,.1f} times)" for name, share in shares.items()]
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return (
        f"Left out, as they would be beyond the device's peak: FLOP/s of {', '.join(listed[:_NAMED])}{more}. Time is "
        "missing in the trace, or the peak is not the device's.",
    )
