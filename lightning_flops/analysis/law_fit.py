"""Fits a linear law exactly: which of its unknowns the equations settle, and which of them were checked by others.

All arithmetic is that of fractions, so an equation either agrees to the last FLOP or it does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from lightning_flops.records import BucketFlops

NEEDED_CHECKS = 2
"""At least so many equations beyond those that settle the unknowns must agree before a law is believed."""

_ZERO = Fraction(0)


@dataclass(slots=True)
class _Row:
    """An equation with the earlier ones subtracted from it, so that it begins with 1 at *pivot*."""

    pivot: int
    features: list[Fraction]
    made_of: dict[int, Fraction]
    """How much of each equation of the basis is in it."""


class ExactFit:
    """Equations ``features · unknowns = values``, one by one; the same features stand for several values.

    An equation whose features are no sum of those before it joins the basis. Any other one is a check: it must give
    what the basis gives. Equations of the basis that meet in a check belong together. What no check has met is not
    believed, however many checks there are elsewhere.

    Args:
        width: number of features.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.agrees = True
        """Whether every check has given what the basis gives."""
        self._rows: list[_Row] = []
        self._basis: list[tuple[Sequence[int], BucketFlops]] = []
        self._group: list[int] = []
        """For each equation of the basis, the group of those that belong together."""
        self._checks: list[tuple[int, int]] = []
        """For each check, an equation of the basis that it has met, and its number among the equations."""
        self._members: list[tuple[int | None, int]] = []
        self._seen: set[tuple[Sequence[int], ...]] = set()

    def add(self, features: Sequence[int], values: BucketFlops, *, beside: Sequence[int] = ()) -> None:
        """One more equation. One that was given before only repeats a check that is known.

        Args:
            features: what the values are said to depend on.
            values: of one step.
            beside: what they may depend on as well. That they do not is a check, too: of the same features with others.
        """
        rest, made_of = self._reduced(features)
        number, identity = len(self._members), (tuple(features), tuple(beside))
        pivot = next((column for column, value in enumerate(rest) if value), None)
        if pivot is not None:
            self._join_basis(features, values, rest, made_of, pivot)
            self._members.append((len(self._basis) - 1, number))
            self._seen.add(identity)
            return
        self.agrees = self.agrees and self._sums(made_of) == {key: value for key, value in values.items() if value}
        met = [one for one, share in made_of.items() if share]
        self._members.append((met[0] if met else None, number))
        if identity in self._seen or not met:
            return
        self._seen.add(identity)
        self._checks.append((met[0], number))
        kept = self._group[met[0]]
        merged = {self._group[one] for one in met}
        self._group = [kept if group in merged else group for group in self._group]

    def _join_basis(
        self,
        features: Sequence[int],
        values: BucketFlops,
        rest: list[Fraction],
        made_of: dict[int, Fraction],
        pivot: int,
    ) -> None:
        first = rest[pivot]
        shares = {one: -share / first for one, share in made_of.items()}
        shares[len(self._basis)] = 1 / first
        self._rows.append(_Row(pivot, [value / first for value in rest], shares))
        self._basis.append((tuple(features), dict(values)))
        self._group.append(len(self._basis))

    def _reduced(self, features: Sequence[int]) -> tuple[list[Fraction], dict[int, Fraction]]:
        """What is left of *features* without the basis, and how much of each equation of the basis was in them."""
        rest = [Fraction(value) for value in features]
        made_of: dict[int, Fraction] = {}
        for row in self._rows:
            factor = rest[row.pivot]
            if factor:
                rest = [one - factor * other for one, other in zip(rest, row.features, strict=True)]
                for one, share in row.made_of.items():
                    made_of[one] = made_of.get(one, _ZERO) + factor * share
        return rest, made_of

    def _sums(self, made_of: Mapping[int, Fraction]) -> dict[tuple[str, str], Fraction]:
        sums: dict[tuple[str, str], Fraction] = {}
        for one, share in made_of.items():
            for key, value in self._basis[one][1].items():
                sums[key] = sums.get(key, _ZERO) + share * value
        return {key: value for key, value in sums.items() if value}

    def believed(self) -> Believed | None:
        """The equations that belong together and were checked often enough; None without any."""
        if not self.agrees:
            return None
        parts, basis = [], []
        for group in dict.fromkeys(self._group):
            checks = sum(self._group[met] == group for met, _ in self._checks)
            if checks < NEEDED_CHECKS:
                continue
            members = [self._basis[one] for one, its in enumerate(self._group) if its == group]
            basis += members
            parts.append(
                Part(
                    constraints=_solve(members, self.width).constraints,
                    equations=tuple(
                        number for one, number in self._members if one is not None and self._group[one] == group
                    ),
                    checks=checks,
                )
            )
        if not parts:
            return None
        parts.sort(key=lambda part: len(part.equations), reverse=True)
        return Believed(solution=_solve(basis, self.width), parts=tuple(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Unknowns that give the values of some equations."""

    unknowns: Mapping[tuple[str, str], tuple[Fraction, ...]]
    """For each value an unknown for each feature. If the equations leave a choice, as many as possible are zero."""
    constraints: tuple[tuple[int, ...], ...]
    """The features of every sum of the equations, multiplied with one of these and added up, give zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Equations that belong together, and were checked by others of them."""

    constraints: tuple[tuple[int, ...], ...]
    """As those of a ``Solution``, of the sums of these equations alone."""
    equations: tuple[int, ...]
    """Their numbers, those that checked others included."""
    checks: int
    """How many of them checked others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Believed:
    """A law that was settled by some equations and checked by others."""

    solution: Solution
    """It gives the values of all its equations."""
    parts: tuple[Part, ...]
    """The law is believed for sums of the equations of one part. No check has joined the equations of two parts. The
    part with most equations comes first."""


def _solve(equations: Sequence[tuple[Sequence[int], BucketFlops]], width: int) -> Solution:
    """Solve *equations*, whose features are independent of one another."""
    keys = list(dict.fromkeys(key for _, values in equations for key in values))
    rows = [
        [*map(Fraction, features), *(Fraction(values.get(key, 0)) for key in keys)] for features, values in equations
    ]
    pivots: list[int] = []
    for column in range(width):
        done = len(pivots)
        found = next((index for index in range(done, len(rows)) if rows[index][column]), None)
        if found is None:
            continue
        rows[done], rows[found] = rows[found], rows[done]
        first = rows[done][column]
        rows[done] = [value / first for value in rows[done]]
        for index, row in enumerate(rows):
            if index != done and (factor := row[column]):
                rows[index] = [one - factor * other for one, other in zip(row, rows[done], strict=True)]
        pivots.append(column)
    unknowns = {}
    for place, key in enumerate(keys):
        found_values = dict(zip(pivots, (row[width + place] for row in rows), strict=True))
        unknowns[key] = tuple(found_values.get(column, _ZERO) for column in range(width))
    constraints = []
    for column in range(width):
        if column in pivots:
            continue
        free = [_ZERO] * width
        free[column] = Fraction(1)
        for pivot, row in zip(pivots, rows, strict=True):
            free[pivot] = -row[column]
        scale = common_denominator(free)
        constraints.append(tuple(int(value * scale) for value in free))
    return Solution(unknowns=unknowns, constraints=tuple(constraints))


def common_denominator(values: Sequence[Fraction]) -> int:
    """The least number that makes each of *values* whole."""
    return math.lcm(*(value.denominator for value in values))
