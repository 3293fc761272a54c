"""Which module of one run is which of another: by name, and renamed ones by the structure of what is below them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_flops.analysis.module_names import parent_name
from lightning_flops.schema.modules import ModuleProfile

MatchedBy = Literal["name", "structure", "shape"]


@dataclass(frozen=True, slots=True)
class Matches:
    """Pairs of modules by their names."""

    a_of_b: dict[str, str]
    """Name in A for each module of B that has a partner."""
    matched_by: dict[str, MatchedBy]
    """By the name in B: how the partner was found."""


def match_modules(a: Sequence[ModuleProfile], b: Sequence[ModuleProfile]) -> Matches:
    """Partners among the modules *a* and *b*; each has at most one.

    Each round is for what the rounds before it have left:

    1. the same name and class: of the root and of most modules;
    2. the same *structure*: the tree of classes, settings, parameters and FLOPs below and including the module, under
       any name. Such trees are paired in tree order, first those whose parents are partners, then any that have
       parameters;
    3. the same name, whatever the class;
    4. the same *shape*: the tree of classes alone, below parents that are partners.

    What lies in a tree that is paired is paired with it.

    Args:
        a: modules of run A in tree order, the root first.
        b: modules of run B, likewise.
    """
    return _Matching(a, b).found()


class _Tree:
    """The modules of one run, with a number for each different tree."""

    def __init__(
        self, modules: Sequence[ModuleProfile], structures: dict[Hashable, int], shapes: dict[Hashable, int]
    ) -> None:
        self.by_name = {module.name: module for module in modules}
        self.children: dict[str, list[str]] = {}
        for module in modules:
            if module.name:
                self.children.setdefault(parent_name(module.name), []).append(module.name)
        self.structure: dict[str, int] = {}
        self.shape: dict[str, int] = {}
        for module in reversed(modules):  # those below a module come after it
            below = self.children.get(module.name, ())
            structure = (
                module.type_name,
                module.extra_repr,
                module.params,
                module.total,
                module.alias_of is None,
                tuple(self.structure[name] for name in below),
            )
            shape = (module.type_name, module.alias_of is None, tuple(self.shape[name] for name in below))
            self.structure[module.name] = structures.setdefault(structure, len(structures))
            self.shape[module.name] = shapes.setdefault(shape, len(shapes))


class _Matching:
    def __init__(self, a: Sequence[ModuleProfile], b: Sequence[ModuleProfile]) -> None:
        structures: dict[Hashable, int] = {}
        shapes: dict[Hashable, int] = {}
        self._a, self._b = _Tree(a, structures, shapes), _Tree(b, structures, shapes)
        self._a_of_b: dict[str, str] = {}
        self._matched_by: dict[str, MatchedBy] = {}
        self._taken: set[str] = set()

    def found(self) -> Matches:
        """All four rounds."""
        self._by_name(same_class=True)
        self._by_key(self._a.structure, self._b.structure, matched_by="structure", anywhere=True)
        self._by_name(same_class=False)
        self._by_key(self._a.shape, self._b.shape, matched_by="shape", anywhere=False)
        return Matches(self._a_of_b, self._matched_by)

    def _pair(self, a: str, b: str, matched_by: MatchedBy) -> None:
        self._a_of_b[b] = a
        self._matched_by[b] = matched_by
        self._taken.add(a)

    def _pair_trees(self, a: str, b: str, matched_by: MatchedBy) -> None:
        """Pair *a* with *b*, and what is below them child by child; both have equally many."""
        waiting = [(a, b)]
        while waiting:
            one, other = waiting.pop()
            if one not in self._taken and other not in self._a_of_b:
                self._pair(one, other, matched_by)
            waiting += zip(self._a.children.get(one, ()), self._b.children.get(other, ()), strict=True)

    def _left(self, names: Iterable[str], taken: Iterable[str]) -> list[str]:
        taken = set(taken)
        return [name for name in names if name not in taken]

    def _by_name(self, *, same_class: bool) -> None:
        for name, module in self._b.by_name.items():
            partner = self._a.by_name.get(name)
            if partner is None or name in self._taken or name in self._a_of_b:
                continue
            if not name or not same_class or partner.type_name == module.type_name:
                self._pair(name, name, "name")

    def _by_key(self, a: dict[str, int], b: dict[str, int], *, matched_by: MatchedBy, anywhere: bool) -> None:
        """Pair trees of equal numbers among what is left: in the same place first, then anywhere."""
        for in_place in (True, False) if anywhere else (True,):
            free: defaultdict[tuple[int, str | None], list[str]] = defaultdict(list)
            for name in reversed(self._left(self._a.by_name, self._taken)):
                free[a[name], parent_name(name) if in_place else None].append(name)
            for name in self._left(self._b.by_name, self._a_of_b):
                if name in self._a_of_b:  # it went with a tree around it
                    continue
                place = self._a_of_b.get(parent_name(name)) if in_place else None
                if (place is None) if in_place else not self._b.by_name[name].params:
                    continue
                candidates = free[b[name], place]
                while candidates and candidates[-1] in self._taken:
                    candidates.pop()
                if candidates:
                    self._pair_trees(candidates.pop(), name, matched_by)
