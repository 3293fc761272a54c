"""Which module of one run is which of another: by name, and renamed ones by the structure of what is below them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence

from lightning_flops.analysis.module_names import parent_name
from lightning_flops.schema.step import ModuleProfile


def match_modules(a: Sequence[ModuleProfile], b: Sequence[ModuleProfile]) -> dict[str, str]:
    """Partners among the modules *a* and *b*, the name in A by the name in B; each has at most one.

    Both are in tree order, the root first. First the same name and class: the root and most modules. Then the same
    *structure*: the tree of classes, settings, parameters and FLOPs below and including the module, under any name;
    where its parents are partners, else anywhere if it has parameters. Last the same name, whatever the class.
    """
    numbers: dict[Hashable, int] = {}
    kind_a, kind_b = _kinds(a, numbers), _kinds(b, numbers)
    class_a = {one.name: one.type_name for one in a}
    found = {one.name: one.name for one in b if not one.name or class_a.get(one.name) == one.type_name}
    taken = set(found.values())
    free: defaultdict[tuple[int, str | None], deque[str]] = defaultdict(deque)
    for name in class_a:
        if name not in taken:
            free[kind_a[name], parent_name(name)].append(name)
            free[kind_a[name], None].append(name)
    for module in b:
        parent = found.get(parent_name(module.name))
        places = [*([parent] if parent is not None else []), *([None] if module.params else [])]
        for place in places if module.name not in found else ():
            candidates = free[kind_b[module.name], place]
            while candidates and candidates[0] in taken:
                candidates.popleft()
            if candidates:
                found[module.name] = candidates.popleft()
                taken.add(found[module.name])
                break
    for module in b:
        if module.name in class_a and module.name not in taken:
            found.setdefault(module.name, module.name)
    return found


def _kinds(modules: Sequence[ModuleProfile], numbers: dict[Hashable, int]) -> dict[str, int]:
    """A number for the tree of each module, the same for equal trees."""
    found: dict[str, int] = {}
    below: defaultdict[str, list[int]] = defaultdict(list)
    for one in reversed(modules):  # those below a module come after it
        kind = (one.type_name, one.extra_repr, one.params, one.total, one.alias_of is None, tuple(below[one.name]))
        found[one.name] = numbers.setdefault(kind, len(numbers))
        if one.name:
            below[parent_name(one.name)].append(found[one.name])
    return found
