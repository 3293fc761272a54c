"""Sums over a ``FlopRecord``: FLOPs and bytes by module, operator and dtype; and the modules as a tree.

A module has its qualified name: ``""`` is the root, dots lead down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar, get_args

from lightning_flops.records import (
    OUTSIDE,
    Amount,
    FlopPhase,
    FlopRecord,
    Key,
    ModuleRecord,
    OperatorCell,
    PhaseBytes,
    PhaseFlops,
    UncountedOperator,
    summed,
)
from lightning_flops.schema import codec
from lightning_flops.schema.step import ModuleProfile, ModuleTimes

_Item = TypeVar("_Item")


def parent_name(name: str) -> str:
    """Name of the module around *name*; the root is its own parent."""
    return name.rpartition(".")[0]


def pattern_of(name: str) -> str:
    """*name* with a star for each number in it: what repeated layers have in common."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def with_those_above(name: str) -> Iterator[str]:
    """Yield *name*, then those of the modules around it, the root last; ``OUTSIDE`` has nothing around it."""
    yield name
    while name and name != OUTSIDE:
        name = parent_name(name)
        yield name


def with_those_below(own: Mapping[str, Amount], nothing: Amount) -> dict[str, Amount]:
    """What each module has of its *own* and what those below it have, added up, beginning with *nothing*."""
    return summed(((above, amount) for name, amount in own.items() for above in with_those_above(name)), nothing)


def rows_of_both(a: Sequence[ModuleProfile], b: Sequence[ModuleProfile]) -> list[tuple[str | None, str | None]]:
    """The names of the modules *b*, each with its partner's in *a* if it has one, then of those that are gone.

    Both are in tree order, the root first. First the same name and class: the root and most modules. Then renamed ones:
    the longest runs of the same classes, settings, parameters and FLOPs, where a module without parameters goes with
    its parent alone. Last the same name, whatever the class.
    """
    class_a = {one.name: one.type_name for one in a}
    found = {one.name: one.name for one in b if not one.name or class_a.get(one.name) == one.type_name}
    left_a, left_b = ([one for one in modules if one.name not in found] for modules in (a, b))
    kinds_a, kinds_b = (
        [(one.type_name, one.extra_repr, one.params, one.total) for one in left] for left in (left_a, left_b)
    )
    for place_a, place_b, length in SequenceMatcher(None, kinds_a, kinds_b, autojunk=False).get_matching_blocks():
        for mine, other in zip(left_a[place_a : place_a + length], left_b[place_b : place_b + length], strict=True):
            if mine.params or found.get(parent_name(other.name)) == parent_name(mine.name):
                found[other.name] = mine.name
    left = class_a.keys() - set(found.values())
    partners = {one.name: one.name for one in b if one.name in left} | found
    gone = class_a.keys() - set(partners.values())
    return [*((partners.get(one.name), one.name) for one in b), *((one.name, None) for one in a if one.name in gone)]


class FlopCounts(codec.Printed):
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
        """The phases, and whether they are all."""
        parts = [f"{phase}={getattr(self.total, phase):,}" for phase in get_args(FlopPhase) if phase != "outside"]
        return f"<FlopCounts {', '.join(parts)}{', a lower bound' if self.is_lower_bound else ''}>"

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
        """FLOPs, among these, that fused masked attention does not execute.

        With ``causal_attention="half"`` it is negative where more is executed than the half that is counted.
        """
        return sum(cell.skipped for cell in self.record.cells)

    @property
    def model_flops(self) -> int:
        """Forward plus backward: what the model's arithmetic asks for, the numerator of MFU."""
        return self.forward + self.backward

    @property
    def hardware_flops(self) -> int:
        """Model FLOPs, recompute and optimizer, the numerator of HFU."""
        return self.total.total

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
        return {name: flops for name, flops in own.items() if name != OUTSIDE or flops.total}

    def by_operator(self) -> dict[str, PhaseFlops]:
        """FLOPs of each operator, such as ``aten.mm``; operators without FLOPs are left out."""
        return self._flops_by(lambda cell: cell.operator)

    def by_module_and_operator(self) -> dict[str, dict[str, PhaseFlops]]:
        """FLOPs of each module with everything below it, by operator; what has no FLOPs is left out."""
        cells = (cell for cell in self.record.cells if cell.flops)
        inside = grouped(((name, cell) for cell in cells for name in with_those_above(cell.module)), itemgetter(0))
        return {
            name: FlopCounts(FlopRecord(cells=tuple(cell for _, cell in of))).by_operator()
            for name, of in inside.items()
        }

    def by_dtype(self) -> dict[str, PhaseFlops]:
        """FLOPs by the dtype of the arithmetic, such as ``bfloat16`` or ``tf32``."""
        return self._flops_by(lambda cell: cell.dtype)

    def _flops_by(self, key: Callable[[OperatorCell], str]) -> dict[str, PhaseFlops]:
        groups = grouped((cell for cell in self.record.cells if cell.flops), key)
        return {name: flops_by_phase(group) for name, group in groups.items()}


def flops_by_phase(cells: Iterable[OperatorCell]) -> PhaseFlops:
    """FLOPs of *cells* together."""
    return PhaseFlops(**summed(((cell.phase, cell.flops) for cell in cells), 0))


def bytes_by_phase(cells: Iterable[OperatorCell]) -> PhaseBytes:
    """Bytes that *cells* read and wrote together."""
    return PhaseBytes(**summed(((cell.phase, cell.bytes_read + cell.bytes_written) for cell in cells), 0))


def grouped(items: Iterable[_Item], key: Callable[[_Item], Key]) -> dict[Key, list[_Item]]:
    """*items* that have the same *key*, in their order."""
    groups: dict[Key, list[_Item]] = {}
    for one in items:
        groups.setdefault(key(one), []).append(one)
    return groups


def build_modules(
    records: Iterable[ModuleRecord], counts: FlopCounts, times: Mapping[str, ModuleTimes] | None = None
) -> tuple[ModuleProfile, ...]:
    """Every module in tree order: each before those below it, siblings in the order of *records*.

    A module that was created while the step ran is not in these. If it did work, it is added after its siblings, so
    that no FLOPs are lost from the tree.
    """
    by_name = {record.name: record for record in records}
    record, own = counts.record, counts.own_by_module()
    moved = {name: bytes_by_phase(of) for name, of in grouped(record.cells, lambda one: one.module).items()}
    for name in (*by_name, *(cell.module for cell in record.cells), *record.module_calls):
        for above in with_those_above(name) if name != OUTSIDE else ():
            by_name.setdefault(above, ModuleRecord(name=above, type_name=""))
    places = {name: place for place, name in enumerate(by_name)}  # siblings keep their order
    total, total_bytes = with_those_below(own, PhaseFlops()), with_those_below(moved, PhaseBytes())
    return tuple(
        ModuleProfile(
            name=name,
            type_name=by_name[name].type_name,
            extra_repr=by_name[name].extra_repr,
            params=by_name[name].params,
            calls=record.module_calls.get(name, 0),
            own=own.get(name, PhaseFlops()),
            total=total.get(name, PhaseFlops()),
            total_bytes=total_bytes.get(name, PhaseBytes()),
            alias_of=by_name[name].alias_of,
            times=(times or {}).get(name),
        )
        for name in sorted(by_name, key=lambda name: [places[above] for above in with_those_above(name)][::-1])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNode:
    """A module with the modules right below it; one node may stand for several equal neighbours."""

    module: ModuleProfile
    alike: tuple[ModuleProfile, ...]  # the equal neighbours that it stands for, of which *module* is the first
    children: tuple[ModuleNode, ...] = ()
    size: int = 1  # modules in the tree below and including *module*, nothing folded
    called: bool = False  # a call of *module*, or of one below it, was seen


def lower_bound_modules(uncounted: Mapping[str, UncountedOperator]) -> frozenset[str]:
    """Names of the modules whose FLOPs are lower bounds: those in which such an operator ran, and all around them."""
    inside = {name for operator in uncounted.values() if operator.may_have_flops for name in operator.modules}
    return frozenset(above for name in inside - {OUTSIDE} for above in with_those_above(name))


def heaviest_types(
    modules: Iterable[ModuleProfile], *, depth: int, weight: Callable[[ModuleProfile], float]
) -> list[tuple[str, float]]:
    """The classes of modules at *depth* levels below the root that weigh anything, and how much, the heaviest first."""
    sums = summed(((module.type_name, weight(module)) for module in modules if module.depth == depth), 0)
    return sorted(((name, size) for name, size in sums.items() if size), key=lambda item: -item[1])


def module_tree(modules: Sequence[ModuleProfile]) -> ModuleNode | None:
    """The tree of *modules*, given in tree order; runs of equal neighbours named 0, 1, 2 … are folded into their first.

    Two neighbours are equal when their whole trees are: types, settings, parameters, calls, FLOPs and aliases. Bytes
    and times may differ. None without modules.
    """
    if not modules:
        return None
    children = grouped((one for one in modules if one.name), lambda one: parent_name(one.name))
    numbers: dict[object, int] = {}  # a number for every different tree, so that comparing two trees is comparing ints
    tree_numbers: dict[str, int] = {}
    nodes: dict[str, ModuleNode] = {}

    for module in reversed(modules):  # those below a module come after it
        below = children.get(module.name, [])
        # What equal neighbours that are numbered one after the other have in common.
        alike: list[object] = [
            (tree_numbers[one.name], int(one.short_name) - place) if one.short_name.isdecimal() else one.short_name
            for place, one in enumerate(below)
        ]
        runs = [[one for _, one in run] for _, run in groupby(zip(alike, below, strict=True), key=itemgetter(0))]
        shown = (module.type_name, module.extra_repr, module.params, module.calls, module.total, module.alias_of)
        trees_below = tuple((child.short_name, tree_numbers[child.name]) for child in below)
        tree_numbers[module.name] = numbers.setdefault((shown, trees_below), len(numbers))
        nodes[module.name] = ModuleNode(
            module=module,
            alike=(module,),
            children=tuple(replace(nodes[run[0].name], alike=tuple(run)) for run in runs),
            size=1 + sum(nodes[child.name].size for child in below),
            called=module.calls > 0 or any(nodes[child.name].called for child in below),
        )
    return nodes[modules[0].name]
