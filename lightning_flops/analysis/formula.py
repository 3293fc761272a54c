"""FLOPs as an exact polynomial of a batch's sizes, fitted on counted steps and checked by more of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from math import gcd, lcm, prod
from typing import NamedTuple

from lightning_flops.records import BucketFlops

CHECKS = 2
"""Counted steps of other sizes that a formula must agree with, to the last FLOP, beyond those that determine it."""

_MOST_TERMS = 30
_MOST_ROWS = 40
"""Sizes that are counted in vain before the search for a formula ends: real steps that have one show it long before."""

Powers = tuple[int, ...]
"""A term: the power of each size that varies, then those of R and of Q, which are 0 or 1."""


class Sizes(NamedTuple):
    """What the FLOPs of a step may depend on."""

    batches: tuple[tuple[int, ...], ...]
    """For each batch of the step, the axes of all its tensors; the first one counts samples."""
    real: int | None = None
    """R: tokens that are no padding, of all batches together; None if not known."""
    squares: int | None = None
    """Q: the squares of the sequences' lengths, added up; None if not known."""
    steps: int = 1
    """Steps with these batches that are added up; R and Q are their sums."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """The axes that varied in the counted batches; axes that were always equal are one size."""

    varying: tuple[tuple[int, ...], ...]
    """For each size the places of its axes."""
    constant: Mapping[int, int]
    """Places of all other axes, with their one value."""

    @classmethod
    def of(cls, batches: Sequence[tuple[int, ...]]) -> _Columns:
        columns: dict[tuple[int, ...], list[int]] = {}
        for place, column in enumerate(zip(*batches, strict=True)):
            columns.setdefault(column, []).append(place)
        return cls(
            tuple(tuple(places) for column, places in columns.items() if len(set(column)) > 1),
            {place: column[0] for column, places in columns.items() if len(set(column)) == 1 for place in places},
        )

    @property
    def has_batch(self) -> bool:
        """Whether the number of samples varies; it is the first size then."""
        return bool(self.varying) and self.varying[0][0] == 0

    def sizes_of(self, batch: tuple[int, ...]) -> tuple[int, ...] | None:
        """The sizes of *batch*; None if it differs from the counted ones in anything else."""
        if len(batch) != len(self.constant) + sum(map(len, self.varying)):
            return None
        if any(batch[place] != size for place, size in self.constant.items()):
            return None
        if any(batch[places[0]] != batch[place] for places in self.varying for place in places[1:]):
            return None
        return tuple(batch[places[0]] for places in self.varying)


class _Sum(NamedTuple):
    """Numerators of the terms' coefficients over one denominator."""

    numerators: tuple[int, ...]
    denominator: int

    def at(self, terms: Sequence[int]) -> int | None:
        """The sum for these values of the terms; None unless it is a whole number."""
        whole, rest = divmod(sum(map(int.__mul__, self.numerators, terms)), self.denominator)
        return None if rest else whole


@dataclass(frozen=True, slots=True)
class Formula:
    """The fitted polynomial, with the sizes that it rests on."""

    columns: _Columns
    terms: tuple[Powers, ...]
    sums: Mapping[tuple[str, str], _Sum]
    """By bucket and dtype."""
    dependent: Mapping[Powers, _Sum] = field(default_factory=dict)
    """Further terms, which were sums of the others in all counted steps: only where they are, the FLOPs are known."""
    counted: tuple[Counter[int], ...] = ()
    """For each size, how many counted batches had it with each value."""

    def flops(self, sizes: Sizes) -> BucketFlops | None:
        """FLOPs of a step of these *sizes*, also beyond the counted ones; None where the formula says nothing."""
        batches = [self.columns.sizes_of(batch) for batch in sizes.batches]
        known = [batch for batch in batches if batch is not None]
        if len(known) < len(batches) or (self.by_tokens and (sizes.real is None or sizes.squares is None)):
            return None
        terms = [_value(term, known, sizes) for term in self.terms]
        if any(one.at(terms) != _value(term, known, sizes) for term, one in self.dependent.items()):
            return None
        found = {key: one.at(terms) for key, one in self.sums.items()}
        flops = {key: value for key, value in found.items() if value is not None}
        return flops if len(flops) == len(found) else None

    def covers(self, sizes: Sizes, *, without: bool = False) -> bool:
        """Whether *sizes* lie between counted ones, in whole steps of their greatest common distance.

        Args:
            sizes: of a step.
            without: *sizes* were counted once, which is left out.
        """
        taken = Counter[tuple[int, int]]()
        batches = [self.columns.sizes_of(batch) for batch in sizes.batches]
        if without:
            taken.update((place, size) for batch in batches for place, size in enumerate(batch or ()))
        ranges = []
        for place, counts in enumerate(self.counted):
            values = [size for size, number in counts.items() if number > taken[place, size]]
            if not values:
                return False
            least = min(values)
            apart = gcd(*(size - least for size in values)) or 1
            ranges.append(range(least, max(values) + 1, apart))
        return all(
            batch is not None and all(size in one for size, one in zip(batch, ranges, strict=True)) for batch in batches
        )

    @property
    def by_tokens(self) -> bool:
        """Whether FLOPs depend on R or Q, and not on the shapes alone."""
        return any(any(term[-2:]) for term in (*self.terms, *self.dependent))

    def useful(self, sizes: Sizes) -> BucketFlops | None:
        """The same with R in the place of B·S and Q in that of B·S²: FLOPs without padding; None if they do not tell.

        S is the one size beside the batch, and B·S are the tokens: the caller knows that.
        """
        batches = [self.columns.sizes_of(batch) for batch in sizes.batches]
        if sizes.real is None or sizes.squares is None or None in batches or len(self.columns.varying) > 2:
            return None
        has_batch = self.columns.has_batch
        if len(self.columns.varying) - has_batch > 1:
            return None
        samples = 1 if has_batch else self.columns.constant.get(0, 1)
        known = [batch for batch in batches if batch is not None]
        terms, parts = [], lcm(1, samples)
        for term in self.terms:
            power, length = (term[0] if has_batch else 1), (term[-3] if len(term) > 2 + has_batch else 0)
            if any(term[-2:]) or length == 0:
                terms.append(parts * _value(term, known, sizes))
            elif length > 2 or power != 1:
                return None
            else:
                terms.append((sizes.real if length == 1 else sizes.squares) * (parts // samples))
        found = {}
        for key, one in self.sums.items():
            found[key] = round(Fraction(sum(map(int.__mul__, one.numerators, terms)), one.denominator * parts))
        return found


def _value(term: Powers, batches: Sequence[tuple[int, ...]], sizes: Sizes) -> int:
    """*term* added up over a step's batches."""
    *powers, real, squares = term
    if real or squares:
        return (sizes.real if real else sizes.squares) or 0
    of_one: int = sum([prod([size**power for size, power in zip(batch, powers, strict=True)]) for batch in batches])
    return sizes.steps * of_one


def _families(columns: _Columns, *, tokens: bool) -> Iterator[list[Powers]]:
    """Sets of terms, the likely and small ones first."""
    number = len(columns.varying) - columns.has_batch
    full = list(product(range(3), repeat=number))
    linear = [powers for powers in full if sum(powers) <= 2]
    if columns.has_batch:
        plain = [[(1, *p) for p in linear], [(b, *p) for p in linear for b in (0, 1)]]
        plain += [[(1, *p) for p in full], [(b, *p) for p in full for b in (0, 1)]]
        plain += [[(b, *p) for p in full for b in (0, 1, 2)]]
    else:
        plain = [linear, full]
    for terms in plain:
        yield [(*term, 0, 0) for term in terms]
    if tokens:
        nothing = (0,) * len(columns.varying)
        of_tokens = [(*nothing, 1, 0), (*nothing, 0, 1)]
        yield [(*nothing, 0, 0), *of_tokens]
        for terms in plain:
            yield [*((*term, 0, 0) for term in terms), *of_tokens]


class FormulaFit:
    """Finds the formula of steps whose batches hold the same tensors."""

    def __init__(self) -> None:
        self.formula: Formula | None = None
        self._rows: dict[Sizes, BucketFlops] = {}
        self._ended = False

    @property
    def counted(self) -> int:
        """Steps of different sizes that the fit rests on."""
        return len(self._rows)

    @property
    def refused(self) -> bool:
        """Whether the counted steps follow no formula of their sizes, as far as the search went."""
        return self._ended

    def add(self, sizes: Sizes, flops: BucketFlops) -> None:
        """A step of these *sizes* was counted."""
        if self._ended:
            return
        flops = {key: value for key, value in flops.items() if value}
        if (known := self._rows.get(sizes)) is not None:
            self._end(known != flops)
            return
        formula = self.formula
        if formula is None or len(self._rows) < _MOST_ROWS:
            self._rows[sizes] = flops
        if formula is not None and _without_zeros(formula.flops(sizes)) == flops:
            self.formula = _with_counted(formula, sizes)
            return
        self._rows[sizes] = flops
        self.formula = self._fitted()
        self._end(self.formula is None and len(self._rows) >= _MOST_ROWS)

    def _end(self, ends: bool) -> None:
        if ends:
            self.formula, self._ended = None, True
            self._rows.clear()

    def _fitted(self) -> Formula | None:
        rows = list(self._rows)
        if len(rows) <= CHECKS or len({len(batch) for sizes in rows for batch in sizes.batches}) > 1:
            return None
        columns = _Columns.of([batch for sizes in rows for batch in sizes.batches])
        tokens = all(sizes.real is not None and sizes.squares is not None for sizes in rows)
        for terms in _families(columns, tokens=tokens):
            if len(terms) <= _MOST_TERMS and (found := _solve(self._rows, columns, terms)) is not None:
                for sizes in rows:
                    found = _with_counted(found, sizes)
                return found
        return None


def _without_zeros(flops: BucketFlops | None) -> BucketFlops | None:
    return None if flops is None else {key: value for key, value in flops.items() if value}


def _with_counted(formula: Formula, sizes: Sizes) -> Formula:
    """*formula*, which rests on a step of these *sizes*, too."""
    counted = formula.counted or tuple(Counter() for _ in formula.columns.varying)
    for batch in sizes.batches:
        for counts, size in zip(counted, formula.columns.sizes_of(batch) or (), strict=True):
            counts[size] += 1
    return Formula(formula.columns, formula.terms, formula.sums, formula.dependent, counted)


def _solve(rows: Mapping[Sizes, BucketFlops], columns: _Columns, terms: Sequence[Powers]) -> Formula | None:
    """The formula of these *terms*; None if steps disagree, or too few are left to check it."""
    keys = sorted({key for flops in rows.values() for key in flops})
    width = len(terms)
    basis: list[tuple[int, list[Fraction]]] = []  # reduced: one term's value is 1 in its row, and 0 in all others
    for sizes, flops in rows.items():
        batches = [columns.sizes_of(batch) or () for batch in sizes.batches]
        row = [Fraction(_value(term, batches, sizes)) for term in terms] + [Fraction(flops.get(key, 0)) for key in keys]
        for pivot, reduced in basis:
            row = _minus(row, row[pivot], reduced)
        pivot = next((place for place in range(width) if row[place]), width)
        if pivot == width:
            if any(row):
                return None
            continue
        row = [value / row[pivot] for value in row]
        basis = [(other, _minus(reduced, reduced[pivot], row)) for other, reduced in basis]
        basis.append((pivot, row))
    if len(rows) < len(basis) + CHECKS:
        return None
    basis.sort()
    pivots = {pivot for pivot, _ in basis}

    def sum_of(place: int) -> _Sum:
        parts = [reduced[place] for _, reduced in basis]
        whole = lcm(*(part.denominator for part in parts))
        return _Sum(tuple(int(part * whole) for part in parts), whole)

    return Formula(
        columns,
        tuple(terms[pivot] for pivot, _ in basis),
        {key: sum_of(width + number) for number, key in enumerate(keys)},
        {term: sum_of(place) for place, term in enumerate(terms) if place not in pivots},
    )


def _minus(row: list[Fraction], factor: Fraction, other: Iterable[Fraction]) -> list[Fraction]:
    return [a - factor * b for a, b in zip(row, other, strict=True)] if factor else row
