"""Which module of one run is which of another: by name, and renamed ones by the structure of what is below them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from lightning_flops.analysis.module_names import parent_name
from lightning_flops.schema.modules import ModuleProfile


def match_modules(a: Sequence[ModuleProfile], b: Sequence[ModuleProfile]) -> dict[str, str]:
    """Partners among the modules *a* and *b*, the name in A by the name in B; each has at most one.

    Both are in tree order, the root first. First the same name and class: the root and most modules. Then the same
    *structure*: the tree of classes, settings, parameters and FLOPs below and including the module, under any name;
    where its parents are partners, else anywhere if it has parameters. What lies in a tree that is paired is paired
    with it. Last the same name, whatever the class.
    """
    kinds: dict[Hashable, int] = {}
    kind_a, kind_b = _kinds(a, kinds), _kinds(b, kinds)
    below_a, below_b = _children(a), _children(b)
    class_a = {one.name: one.type_name for one in a}
    found = {one.name: one.name for one in b if not one.name or class_a.get(one.name) == one.type_name}
    taken = set(found.values())
    for in_place in (True, False):
        free: defaultdict[tuple[int, str | None], list[str]] = defaultdict(list)
        for name in reversed([one.name for one in a if one.name not in taken]):
            free[kind_a[name], parent_name(name) if in_place else None].append(name)
        for module in b:
            place = found.get(parent_name(module.name)) if in_place else None
            if module.name in found or ((place is None) if in_place else not module.params):
                continue
            candidates = free[kind_b[module.name], place]
            while candidates and candidates[-1] in taken:
                candidates.pop()
            waiting = [(candidates.pop(), module.name)] if candidates else []
            while waiting:  # what is below them, child by child; both have equally many
                one, other = waiting.pop()
                if one not in taken and other not in found:
                    found[other] = one
                    taken.add(one)
                waiting += zip(below_a.get(one, ()), below_b.get(other, ()), strict=True)
    for module in b:
        if module.name in class_a and module.name not in found and module.name not in taken:
            found[module.name] = module.name
    return found


def _children(modules: Sequence[ModuleProfile]) -> dict[str, list[str]]:
    children: dict[str, list[str]] = {}
    for module in modules:
        if module.name:
            children.setdefault(parent_name(module.name), []).append(module.name)
    return children


def _kinds(modules: Sequence[ModuleProfile], kinds: dict[Hashable, int]) -> dict[str, int]:
    """A number for the tree of each module, the same for equal trees."""
    found: dict[str, int] = {}
    children = _children(modules)
    for one in reversed(modules):  # those below a module come after it
        below = tuple(found[name] for name in children.get(one.name, ()))
        kind = (one.type_name, one.extra_repr, one.params, one.total, one.alias_of is None, below)
        found[one.name] = kinds.setdefault(kind, len(kinds))
    return found
