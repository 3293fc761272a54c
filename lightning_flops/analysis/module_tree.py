"""The profiled model as a tree: what each module is, how often it ran, and its FLOPs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.analysis.names import parent_name, with_those_above, with_those_below
from lightning_flops.records import OUTSIDE, ModuleRecord, PhaseBytes, PhaseFlops, UncountedOperator
from lightning_flops.schema.step import ModuleProfile, ModuleTimes


def build_modules(
    records: Iterable[ModuleRecord], counts: FlopCounts, times: Mapping[str, ModuleTimes] | None = None
) -> tuple[ModuleProfile, ...]:
    """Every module in tree order: each before those below it, siblings in the order of *records*.

    A module that was created while the step ran is not in these. If it did work, it is added after its siblings, so
    that no FLOPs are lost from the tree.
    """
    times = times or {}
    by_name = {record.name: record for record in records}
    record, own, moved = counts.record, counts.own_by_module(), counts.own_bytes_by_module()
    for name in (*by_name, *(cell.module for cell in record.cells), *record.module_calls):
        for above in with_those_above(name) if name != OUTSIDE else ():
            by_name.setdefault(above, ModuleRecord(name=above, type_name=""))
    places = {name: place for place, name in enumerate(by_name)}  # siblings keep their order
    no_flops, no_bytes = PhaseFlops(), PhaseBytes()
    total, total_bytes = with_those_below(own, no_flops), with_those_below(moved, no_bytes)
    return tuple(
        ModuleProfile(
            name=name,
            type_name=by_name[name].type_name,
            extra_repr=by_name[name].extra_repr,
            params=by_name[name].params,
            calls=record.module_calls.get(name, 0),
            own=own.get(name, no_flops),
            total=total.get(name, no_flops),
            total_bytes=total_bytes.get(name, no_bytes),
            alias_of=by_name[name].alias_of,
            times=times.get(name),
        )
        for name in sorted(by_name, key=lambda name: [places[above] for above in with_those_above(name)][::-1])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNode:
    """A module with the modules right below it; one node may stand for several equal neighbours."""

    module: ModuleProfile
    children: tuple[ModuleNode, ...] = ()
    last: ModuleProfile | None = None  # of the equal neighbours that it stands for; None if it stands for itself alone
    size: int = 1  # modules in the tree below and including *module*, nothing folded
    called: bool = False  # a call of *module*, or of one below it, was seen


def lower_bound_modules(uncounted: Mapping[str, UncountedOperator]) -> frozenset[str]:
    """Names of the modules whose FLOPs are lower bounds: those in which such an operator ran, and all around them."""
    inside = {name for operator in uncounted.values() if operator.may_have_flops for name in operator.modules}
    return frozenset(above for name in inside - {OUTSIDE} for above in with_those_above(name))


def depth_shown(modules: Iterable[ModuleProfile], *, limit: int) -> int:
    """Deepest level that a report shows: *limit*, or the deepest of *modules* where that is less or *limit* is -1."""
    deepest = max((module.depth for module in modules), default=0)
    return deepest if limit < 0 else min(limit, deepest)


def heaviest_types(
    modules: Iterable[ModuleProfile], *, depth: int, weight: Callable[[ModuleProfile], float]
) -> list[tuple[str, float]]:
    """The classes of modules at *depth* levels below the root that weigh anything, and how much, the heaviest first."""
    sums: defaultdict[str, float] = defaultdict(int)
    for module in modules:
        if module.depth == depth:
            sums[module.type_name] += weight(module)
    return sorted(((name, size) for name, size in sums.items() if size), key=lambda item: -item[1])


def module_tree(modules: Sequence[ModuleProfile]) -> ModuleNode | None:
    """The tree of *modules*, given in tree order; runs of equal neighbours named 0, 1, 2 … are folded into their first.

    Two neighbours are equal when their whole trees are: types, settings, parameters, calls, FLOPs and aliases. Bytes
    and times may differ. None without modules.
    """
    if not modules:
        return None
    children: defaultdict[str, list[ModuleProfile]] = defaultdict(list)
    for module in modules:
        if module.name:
            children[parent_name(module.name)].append(module)
    numbers: dict[object, int] = {}  # a number for every different tree, so that comparing two trees is comparing ints
    tree_numbers: dict[str, int] = {}
    nodes: dict[str, ModuleNode] = {}

    def run_of(place: int, module: ModuleProfile) -> object:
        """What equal neighbours that are numbered one after the other have in common."""
        number = module.short_name
        return (tree_numbers[module.name], int(number) - place) if number.isdecimal() else number

    for module in reversed(modules):  # those below a module come after it
        below = children[module.name]
        runs = [list(run) for _, run in groupby(enumerate(below), key=lambda item: run_of(*item))]
        shown = (module.type_name, module.extra_repr, module.params, module.calls, module.total, module.alias_of)
        trees_below = tuple((child.short_name, tree_numbers[child.name]) for child in below)
        tree_numbers[module.name] = numbers.setdefault((shown, trees_below), len(numbers))
        nodes[module.name] = ModuleNode(
            module=module,
            children=tuple(replace(nodes[run[0][1].name], last=run[-1][1] if len(run) > 1 else None) for run in runs),
            size=1 + sum(nodes[child.name].size for child in below),
            called=module.calls > 0 or any(nodes[child.name].called for child in below),
        )
    return nodes[modules[0].name]
