"""Sums over a ``FlopRecord``: FLOPs and bytes by module, operator and dtype."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from fractions import Fraction
from typing import Any, TypeVar, get_args

from lightning_flops.analysis.names import with_those_above, with_those_below
from lightning_flops.records import (
    OUTSIDE,
    FlopPhase,
    FlopRecord,
    ModuleRecord,
    OperatorCell,
    PhaseBytes,
    PhaseFlops,
    UncountedOperator,
)
from lightning_flops.schema import codec

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


class FlopCounts:
    """FLOPs that were counted, by phase, module, operator and dtype; a multiply-add is two. ``print`` shows a table.

    A function in the place of the *record* is asked for each answer: over a running counter, answers are of the moment.
    One in the place of the *modules*, for the table, is kept until a caller asks, so it must not hold the model.
    """

    def __init__(
        self,
        record: FlopRecord | Callable[[], FlopRecord],
        modules: tuple[ModuleRecord, ...] | Callable[[], tuple[ModuleRecord, ...]] = (),
    ) -> None:
        self._record = record
        self._modules = modules

    @property
    def record(self) -> FlopRecord:
        """The record that the sums are over."""
        return self._record if isinstance(self._record, FlopRecord) else self._record()

    @property
    def modules(self) -> tuple[ModuleRecord, ...]:
        """What the modules are; empty if they could not be described."""
        if isinstance(self._modules, tuple):
            return self._modules
        try:
            self._modules = self._modules()
        except Exception:  # it calls methods of the user's modules
            self._modules = ()
        return self._modules

    def settle(self) -> None:
        """Reads the record a last time: the answers stay, and what was counted is no longer held."""
        self._record = self.record

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: the answers, and no model."""
        return {"_record": self.record, "_modules": self.modules}

    def __repr__(self) -> str:
        """The four phases, and whether they are all."""
        total = self.total
        parts = [f"{phase}={getattr(total, phase):,}" for phase in get_args(FlopPhase)]
        return f"<FlopCounts {', '.join(parts)}{', a lower bound' if self.is_lower_bound else ''}>"

    def __str__(self) -> str:
        """A table by module, ending in a line break."""
        return str(codec.above("report.text").render_text(self))

    def _repr_html_(self) -> str:
        """For a notebook: the table by module, its upper levels if it is long."""
        return str(codec.above("report.text").render_html(self))

    @property
    def total(self) -> PhaseFlops:
        """All modules and operators together, work outside the root included."""
        return flops_by_phase(self.record.cells)

    @property
    def forward(self) -> int:
        """Model FLOPs of the forward pass."""
        return self.total.forward

    @property
    def backward(self) -> int:
        """Model FLOPs that autograd ran."""
        return self.total.backward

    @property
    def recompute(self) -> int:
        """FLOPs executed a second time: activation checkpointing, and what fused attention's backward repeats."""
        return self.total.recompute

    @property
    def optimizer(self) -> int:
        """FLOPs inside optimizer steps and gradient-accumulation hooks."""
        return self.total.optimizer

    @property
    def skipped(self) -> int:
        """FLOPs, among the four phases', that fused masked attention does not execute.

        With ``causal_attention="half"`` it is negative where more is executed than the half that is counted.
        """
        return sum(cell.skipped for cell in self.record.cells)

    @property
    def model_flops(self) -> int:
        """Forward plus backward: what the model's arithmetic asks for, the numerator of MFU."""
        return self.forward + self.backward

    @property
    def hardware_flops(self) -> int:
        """All four phases, the numerator of HFU."""
        return self.total.total

    @property
    def executed_flops(self) -> int:
        """All four phases less what fused masked attention skips: what the kernels execute."""
        return self.hardware_flops - self.skipped

    @property
    def bytes(self) -> PhaseBytes:
        """Bytes that all operators read and wrote, views left out."""
        return bytes_by_phase(self.record.cells)

    @property
    def uncounted(self) -> Mapping[str, UncountedOperator]:
        """Operators that ran and are in no sum, by name."""
        return self.record.uncounted

    @property
    def is_lower_bound(self) -> bool:
        """Whether an operator that may have FLOPs could not be counted, so that every sum is a lower bound."""
        return any(operator.may_have_flops for operator in self.record.uncounted.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """What the counter could not do, in sentences."""
        return self.record.notes

    def by_module(self) -> dict[str, PhaseFlops]:
        """FLOPs of each module with everything below it, by qualified name.

        The root is ``""``. Work that belongs to no module of the root stands under ``"(outside)"``, if there is any.
        """
        return with_those_below(self.own_by_module(), PhaseFlops())

    def own_by_module(self) -> dict[str, PhaseFlops]:
        """FLOPs of each module without those of the modules below it."""
        record = self.record
        own = {name: PhaseFlops() for name in ("", *record.module_calls)}
        own |= {name: flops_by_phase(cells) for name, cells in grouped(record.cells, lambda cell: cell.module).items()}
        if OUTSIDE in own and not own[OUTSIDE].total:
            del own[OUTSIDE]
        return own

    def own_bytes_by_module(self) -> dict[str, PhaseBytes]:
        """Bytes read and written by each module without those of the modules below it."""
        return {name: bytes_by_phase(of) for name, of in grouped(self.record.cells, lambda one: one.module).items()}

    def by_operator(self) -> dict[str, PhaseFlops]:
        """FLOPs of each operator, such as ``aten.mm``; operators without FLOPs are left out."""
        return self._flops_by(lambda cell: cell.operator)

    def by_module_and_operator(self) -> dict[str, dict[str, PhaseFlops]]:
        """FLOPs of each module with everything below it, by operator; what has no FLOPs is left out."""
        cells: dict[str, list[OperatorCell]] = {}
        for cell in self.record.cells:
            for name in with_those_above(cell.module) if cell.flops else ():
                cells.setdefault(name, []).append(cell)
        by_operator = {name: grouped(of, lambda cell: cell.operator) for name, of in cells.items()}
        return {name: {one: flops_by_phase(of) for one, of in rows.items()} for name, rows in by_operator.items()}

    def by_dtype(self) -> dict[str, PhaseFlops]:
        """FLOPs by the dtype of the arithmetic, such as ``bfloat16`` or ``tf32``."""
        return self._flops_by(lambda cell: cell.dtype)

    def _flops_by(self, key: Callable[[OperatorCell], str]) -> dict[str, PhaseFlops]:
        groups = grouped((cell for cell in self.record.cells if cell.flops), key)
        return {name: flops_by_phase(group) for name, group in groups.items()}

    def estimated_backward(self, recompute_fwd_factor: float = 0.0) -> int:
        """Backward FLOPs by the rule of thumb: twice the forward, plus *recompute_fwd_factor* times the forward.

        Stands for backward and recompute together.
        """
        return round((2 + Fraction(recompute_fwd_factor)) * self.forward)


def flops_by_phase(cells: Iterable[OperatorCell]) -> PhaseFlops:
    """FLOPs of *cells* together."""
    return PhaseFlops.summed((cell.phase, cell.flops) for cell in cells)


def bytes_by_phase(cells: Iterable[OperatorCell]) -> PhaseBytes:
    """Bytes that *cells* read and wrote together."""
    return PhaseBytes.summed((cell.phase, cell.bytes_read + cell.bytes_written) for cell in cells)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """*items* that have the same *key*, in their order."""
    groups: dict[_Key, list[_Item]] = {}
    for one in items:
        groups.setdefault(key(one), []).append(one)
    return groups
