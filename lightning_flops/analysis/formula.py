"""FLOPs as an exact polynomial of a batch's sizes, fitted on counted steps and checked by more of them.

``FlopsFormula`` finds it before any run, by counting batches of sizes that are chosen here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from itertools import product
from math import gcd, lcm, prod
from operator import mul
from typing import Literal, NamedTuple

from lightning_flops.records import BucketFlops, FlopRecord, summed
from lightning_flops.schema import codec
from lightning_flops.schema.plan import FormulaReport, FormulaSize, FormulaTerm, SizedFlops
from lightning_flops.signals import Quiet

CHECKS = 2  # counted steps of other sizes that a formula must agree with, beyond those that determine it
_MOST_TERMS = 30
_MOST_ROWS = 40  # sizes that are counted in vain before the search ends: steps that have a formula show it long before

Powers = tuple[int, ...]  # a term: the power of each size that varies, then those of R and of Q, which are 0 or 1


class Sizes(NamedTuple):
    """What the FLOPs of a step may depend on."""

    batches: tuple[tuple[int, ...], ...]  # for each batch, the axes of all its tensors; the first one counts samples
    real: int | None = None  # R: tokens that are no padding, of all batches together; None if not known
    squares: int | None = None  # Q: the squares of the sequences' lengths, added up; None if not known
    steps: int = 1  # steps with these batches that are added up; R and Q are their sums


class _Solved(NamedTuple):
    terms: tuple[Powers, ...]
    denominator: int  # of all coefficients, whose numerators stand below
    sums: Mapping[tuple[str, str], tuple[int, ...]]  # by bucket and dtype
    # Further terms, which were sums of the others in all counted steps: only where they are, the FLOPs are known.
    dependent: Mapping[Powers, tuple[int, ...]]


class Formula:
    """The polynomial of steps whose batches hold the same tensors, once enough of them were counted."""

    def __init__(self) -> None:
        self.solved: _Solved | None = None  # None: there is no formula, or none yet
        self.by_tokens = False  # FLOPs depend on R or Q, and not on the shapes alone
        # Places of the sizes that vary, among the axes of a batch; axes that were always equal are one size.
        self.varying: tuple[int, ...] = ()
        # For each size from the least counted one to the greatest, in steps of the greatest common distance.
        self.ranges: tuple[range, ...] = ()
        self.refused = False  # the counted steps follow no formula of their sizes, as far as the search went
        self.rows: dict[Sizes, BucketFlops] = {}  # counted steps, all of which the formula agrees with
        # What each axis must be: so large, as it never varied, or (None) as large as the first one of its size, here.
        self._axes: list[tuple[int | None, int]] = []

    @property
    def has_batch(self) -> bool:
        """Whether the number of samples varies; it is the first size then."""
        return self.varying[:1] == (0,)

    # ---- predictions

    def flops(self, sizes: Sizes) -> BucketFlops | None:
        """FLOPs of steps of these *sizes*, also beyond the counted ones; None where no formula gives them."""
        batches, solved = self._batches(sizes), self.solved
        if batches is None or solved is None or (self.by_tokens and (sizes.real is None or sizes.squares is None)):
            return None
        values, whole = [_value(term, batches, sizes) for term in solved.terms], solved.denominator
        found = {key: sum(map(mul, one, values)) for key, one in solved.sums.items()}
        dependent = (
            sum(map(mul, one, values)) == whole * _value(term, batches, sizes) for term, one in solved.dependent.items()
        )
        if any(value % whole for value in found.values()) or not all(dependent):
            return None
        return {key: value // whole for key, value in found.items() if value}

    def covers(self, sizes: Sizes) -> bool:
        """Whether *sizes* lie between counted ones, in whole steps of their greatest common distance."""
        batches = self._batches(sizes)
        return batches is not None and all(
            size in one for batch in batches for size, one in zip(batch, self.ranges, strict=True)
        )

    def useful(self, sizes: Sizes) -> BucketFlops | None:
        """FLOPs with R in the place of B·S and Q in that of B·S²: FLOPs without padding; None if unknown.

        S is the one size beside the batch, and B·S are the tokens: the caller knows that.
        """
        batches, solved, lengths = self._batches(sizes), self.solved, len(self.varying) - self.has_batch
        if batches is None or solved is None or sizes.real is None or sizes.squares is None:
            return None
        powers = [(term[0] if self.has_batch else 1, term[-3] if lengths else 0) for term in solved.terms]
        if lengths > 1 or not (lengths or self.by_tokens) or any(length and batch != 1 for batch, length in powers):
            return None
        samples = 1 if self.has_batch else self._axes[0][0] or 1
        whole, by_length = samples * solved.denominator, {1: sizes.real, 2: sizes.squares}
        # Without a length, as in R and Q themselves, a term stays what it is.
        parts = [
            by_length.get(length, samples * _value(term, batches, sizes))
            for term, (_, length) in zip(solved.terms, powers, strict=True)
        ]
        return {key: round(Fraction(sum(map(mul, one, parts)), whole)) for key, one in solved.sums.items()}

    def _batches(self, sizes: Sizes) -> list[tuple[int, ...]] | None:
        """The sizes of each batch; None if one differs from the counted ones in anything else."""
        if self.solved is None or any(len(batch) != len(self._axes) for batch in sizes.batches):
            return None
        expected = [[batch[place] if size is None else size for size, place in self._axes] for batch in sizes.batches]
        if any(list(batch) != one for batch, one in zip(sizes.batches, expected, strict=True)):
            return None
        return [tuple([batch[place] for place in self.varying]) for batch in sizes.batches]

    # ---- how it is found

    def add(self, sizes: Sizes, flops: BucketFlops) -> None:
        """Learn from a counted step of these *sizes*, whose *flops* are by phase and dtype."""
        flops, known = {key: value for key, value in flops.items() if value}, self.rows.get(sizes)
        if self.refused or known == flops:
            return
        if self.flops(sizes) == flops:
            if len(self.rows) < _MOST_ROWS:
                self.rows[sizes] = flops
            pairs = zip(self.ranges, zip(*self._batches(sizes) or (), strict=True), strict=True)
            self.ranges = tuple(_spanning([*one[:2], one[-1], *column]) for one, column in pairs)
            return
        self.rows[sizes] = flops
        if known is not None or (not self._fits() and len(self.rows) >= _MOST_ROWS):
            self.solved, self.by_tokens, self.refused = None, False, True
            self.rows.clear()

    def _fits(self) -> bool:
        """Search for a formula of all counted steps."""
        self.solved, self.by_tokens = None, False
        batches = [batch for sizes in self.rows for batch in sizes.batches]
        if len(self.rows) <= CHECKS or len(set(map(len, batches))) > 1:
            return False
        columns = list(zip(*batches, strict=True))
        self._axes = [(one[0] if len(set(one)) == 1 else None, columns.index(one)) for one in columns]
        self.varying = tuple(dict.fromkeys(place for size, place in self._axes if size is None))
        tokens = all(sizes.real is not None and sizes.squares is not None for sizes in self.rows)
        for terms in _families(len(self.varying), has_batch=self.has_batch, tokens=tokens):
            if len(terms) <= _MOST_TERMS and (found := _solve(self.rows, self.varying, terms)) is not None:
                self.solved, self.by_tokens = found, any(any(one[-2:]) for one in (*found.terms, *found.dependent))
                self.ranges = tuple(_spanning(columns[place]) for place in self.varying)
                return True
        return False


def _spanning(values: Sequence[int]) -> range:
    least = min(values)
    return range(least, max(values) + 1, gcd(*(value - least for value in values)) or 1)


def _value(term: Powers, batches: Sequence[tuple[int, ...]], sizes: Sizes) -> int:
    """*term* added up over a step's batches."""
    *powers, real, squares = term
    if real or squares:
        return (sizes.real if real else sizes.squares) or 0
    return int(sizes.steps * sum([prod(map(pow, batch, powers)) for batch in batches]))


def _families(sizes: int, *, has_batch: bool, tokens: bool) -> list[list[Powers]]:
    """Sets of terms, the likely and small ones first."""
    full = list(product(range(3), repeat=sizes - has_batch))
    few = [powers for powers in full if sum(powers) <= 2]
    batch: list[list[Powers]] = [[(1,)], [(0,), (1,)], [(0,), (1,), (2,)]] if has_batch else [[()]]
    plain = [[(*b, *one, 0, 0) for one in some for b in powers] for some in (few, full) for powers in batch]
    constant, *by_tokens = [((0,) * sizes) + one for one in ((0, 0), (1, 0), (0, 1))]
    return [*plain, *([*terms, *by_tokens] for terms in ([constant], *plain) if tokens)]


def _solve(rows: Mapping[Sizes, BucketFlops], varying: Sequence[int], terms: Sequence[Powers]) -> _Solved | None:
    """The formula of these *terms*; None if steps disagree, or too few are left to check it."""
    keys = sorted(set[tuple[str, str]]().union(*rows.values()))
    equations = []
    for sizes, flops in rows.items():
        batches = [tuple([batch[place] for place in varying]) for batch in sizes.batches]
        equations.append([_value(term, batches, sizes) for term in terms] + [flops.get(key, 0) for key in keys])
    basis = _reduced(equations, len(terms))
    if basis is None or len(rows) < len(basis) + CHECKS:
        return None
    whole = lcm(*(row[pivot] for pivot, row in basis.items()))
    scaled = {pivot: [one * (whole // row[pivot]) for one in row] for pivot, row in sorted(basis.items())}
    sums = [tuple([row[place] for row in scaled.values()]) for place in range(len(terms) + len(keys))]
    return _Solved(
        tuple([terms[pivot] for pivot in scaled]),
        whole,
        dict(zip(keys, sums[len(terms) :], strict=True)),
        {term: sums[place] for place, term in enumerate(terms) if place not in scaled},
    )


def _reduced(equations: Sequence[list[int]], width: int) -> dict[int, list[int]] | None:
    """A row for each pivot, which is 0 in all others; None if *equations* of so many unknowns contradict each other."""
    basis: dict[int, list[int]] = {}
    for row in equations:
        for pivot, reduced in basis.items():
            row = _without(row, pivot, reduced)
        pivot = next((place for place in range(width) if row[place]), width)
        if pivot < width:
            basis = {other: _without(reduced, pivot, row) for other, reduced in basis.items()} | {pivot: row}
        elif any(row):
            return None
    return basis


def _without(row: list[int], pivot: int, other: Sequence[int]) -> list[int]:
    """*row* less what of *other* makes its *pivot* 0, in whole numbers."""
    row = [a * other[pivot] - b * row[pivot] for a, b in zip(row, other, strict=True)]
    shared = gcd(*row) or 1
    return [a // shared for a in row]


_MOST_COUNTS = 40  # batches that are counted in search of a formula
_FAR = (4, 16)  # so many times the given batch is counted when a formula is found, so that it holds for large ones, too
_KEPT = 256  # latest answers that a report lists
_NO_POLYNOMIAL = (
    "no polynomial of the sizes gives the FLOPs of the batches that could be counted (strided convolutions and other "
    "roundings do this, and work that depends on the data): each size is counted by itself"
)


class FlopsFormula(codec.Printed):
    """FLOPs of one forward and backward of a model as an exact function of its batch's sizes.

    ``formula(batch=8, sequence=4096)`` gives the FLOPs for these sizes: by the formula, if they lie between sizes that
    were counted, else by counting a batch of these sizes on fake tensors. So FLOPs are exact for every size.
    """

    def __init__(
        self, sizes: Mapping[str, int], batch_names: Collection[str], count: Callable[[Mapping[str, int]], FlopRecord]
    ) -> None:
        # The fit takes the first size for the number of samples.
        self._names = sorted(sizes, key=lambda name: name not in batch_names)
        self._count = count
        self._counted: dict[tuple[int, ...], FlopRecord] = {}
        self._asked: dict[tuple[int, ...], SizedFlops] = {}
        example = tuple(sizes[name] for name in self._names)
        self._formula = self._searched(example, (1,) * len(example))
        if not self.holds:  # as with images and paddings
            wide = tuple(1 if name in batch_names else sizes[name] for name in self._names)
            self._formula = self._searched(example, wide)

    @property
    def holds(self) -> bool:
        """Whether there is a formula. Without one, every batch is counted."""
        return self._formula.solved is not None

    def __call__(self, **sizes: int) -> SizedFlops:
        """FLOPs of a forward and backward on a batch of these *sizes*, by name.

        Raises:
            TypeError: a size is missing, unknown or no integer above zero.
            Exception: whatever the model raises for a batch of these sizes, where it has to be counted.
        """
        if missing := [name for name in self._names if name not in sizes]:
            raise TypeError(f"formula() needs a size for {missing[0]}")
        for name, size in sizes.items():
            if name not in self._names:
                raise TypeError(f"formula() knows no size {name}, but {', '.join(self._names)}")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise TypeError(f"{name} must be an integer >= 1, got {size!r}")
        values = tuple(sizes[name] for name in self._names)
        is_between = values not in self._counted and self._formula.covers(Sizes((values,)))
        predicted = self._formula.flops(Sizes((values,))) if is_between else None
        flops = self._take(values, self._formula) if predicted is None else predicted
        buckets = summed(((bucket, value) for (bucket, _), value in flops.items()), 0)
        source: Literal["counted", "formula"] = "counted" if predicted is None else "formula"
        self._asked.pop(values, None)
        self._asked[values] = SizedFlops(sizes=dict(zip(self._names, values, strict=True)), source=source, **buckets)
        return self._asked[values]

    def report(self) -> FormulaReport:
        """The formula, and the sizes it was asked for."""
        formula, solved = self._formula, self._formula.solved or _Solved((), 1, {}, {})
        names = [self._names[place] for place in formula.varying if self.holds]
        return FormulaReport(
            reason=None if self.holds else _NO_POLYNOMIAL,
            sizes=tuple(
                FormulaSize(name=name, least=one[0], greatest=one[-1], apart=one.step)
                for name, one in zip(names, formula.ranges, strict=False)
            ),
            terms=tuple(
                FormulaTerm(
                    bucket=bucket,
                    dtype=dtype,
                    numerator=numerator // gcd(numerator, solved.denominator),
                    denominator=solved.denominator // gcd(numerator, solved.denominator),
                    powers={name: power for name, power in zip(names, powers, strict=False) if power},
                )
                for bucket, dtype in sorted(solved.sums, key=lambda key: (key[1], key[0] != "forward"))
                for powers, numerator in zip(solved.terms, solved.sums[bucket, dtype], strict=True)
                if numerator
            ),
            counted=len(self._counted),
            checks=len(formula.rows) - len(solved.terms) if self.holds else 0,
            lower_bound=any(
                operator.may_have_flops for record in self._counted.values() for operator in record.uncounted.values()
            ),
            asked=tuple(self._asked.values())[-_KEPT:],
        )

    def to_json(self) -> str:
        """The report as JSON."""
        return self.report().to_json()

    def _searched(self, example: tuple[int, ...], apart: tuple[int, ...]) -> Formula:
        """The formula of batches near the example, whose sizes are so far *apart*; then some that are much larger."""
        formula, numbers = Formula(), random.Random(0)
        self._take(example, formula)  # what it raises is raised
        for _ in range(_MOST_COUNTS):
            values = tuple(size + numbers.randrange(9) * one for size, one in zip(example, apart, strict=True))
            with Quiet(Exception):  # of the user's model, which may refuse a size
                self._take(values, formula)
            if formula.refused or (formula.solved and {one.step for one in formula.ranges} <= set(apart)):
                break
        for factor in _FAR if formula.solved is not None else ():
            with Quiet(Exception):
                self._take(tuple(factor * size for size in example), formula)
        return formula

    def _take(self, values: tuple[int, ...], formula: Formula) -> BucketFlops:
        if values not in self._counted:
            self._counted[values] = self._count(dict(zip(self._names, values, strict=True)))
        flops = self._counted[values].by_bucket()
        formula.add(Sizes((values,)), flops)
        return flops
