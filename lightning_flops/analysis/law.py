"""The FLOPs of a step as an exact law of its sizes: found from steps that were counted, believed where it was checked.

The sizes that vary are the law's variables. The batch enters to the first power, every other size to the second, and
so do their products: a matrix product is linear in each of its sizes, and attention is quadratic in the length. An
attention over packed sequences is linear in what the squares of their lengths add up to, which no size tells. Of
several sets of such terms the smallest that agrees with every counted step is the law.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import itemgetter, mul
from typing import Any

from lightning_flops.analysis.law_fit import NEEDED_CHECKS, Believed, ExactFit, Part, common_denominator
from lightning_flops.records import BatchTokens, BucketFlops
from lightning_flops.schema.law import NO_OTHER_SIZE

Sizes = tuple[int, ...]
"""Every size of one batch's tensors, in a fixed order."""

Column = tuple[int, ...]
"""The same figure of several steps."""

Powers = tuple[int, ...]
"""Of each variable, in one term."""

FLAG = -1
"""In place of an axis: what stands there is no size, but 0 or 1."""

TOKENS, SQUARES, LONGEST, TRAINED = -2, -3, -4, -5
"""In place of an axis: what stands there tells of the sequences in a batch. It is how many tokens they have, the
squares of their lengths added up, the longest length, or how many tokens are trained on."""

MOST_TERMS = 32
"""Laws of more terms are not looked for: they would need more counted steps than a run has to spare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A size that varies, and stands in several places of a batch, where it is always the same."""

    places: tuple[int, ...]
    """Indexes into ``Sizes``."""
    is_batch: bool = False
    """It counts samples."""
    axis: int = 0
    """``FLAG``, ``TOKENS``, ``SQUARES``, ``LONGEST`` or ``TRAINED`` if it is none of the sizes of tensors."""
    degree: int = 2
    """The highest power that FLOPs may have of it: twice the number of its axes in one tensor, and 1 of any other."""

    @property
    def is_flag(self) -> bool:
        """It is no size, but 0 or 1: whether something holds for the batch."""
        return self.axis == FLAG

    @property
    def is_amount(self) -> bool:
        """It adds up over the sequences of a batch."""
        return self.axis in (TOKENS, SQUARES, TRAINED)

    @property
    def is_of_lengths(self) -> bool:
        """It is such an amount, and goes by the lengths of the sequences."""
        return self.axis in (TOKENS, SQUARES)

    @property
    def is_size(self) -> bool:
        """It is a size of samples, and not their number."""
        return not self.is_batch and self.axis >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The sizes that a law is used for.

    They lie between the least and the greatest size that was counted, and have the same distances. If all counted sizes
    are multiples of 8, the law is used for multiples of 8 alone: nobody knows what a model does to other lengths.
    """

    counted: tuple[int, ...]
    """In rising order."""
    apart: int
    """Every difference between counted sizes is a multiple of this."""
    between: bool
    """Enough sizes were counted to use the law between them; otherwise it is used for them alone."""
    below: bool = False
    """It is used for all that are not greater than the greatest."""
    any_value: bool = False
    """It is used for every value."""

    @property
    def allowed(self) -> Container[int] | None:
        """The values that it is used for; None: all."""
        if self.any_value:
            return None
        if self.below:
            return range(self.counted[-1] + 1)
        if self.between:
            return range(self.counted[0], self.counted[-1] + 1, self.apart)
        return frozenset(self.counted)


class Monomials:
    """Computes the terms of a law from the values of its variables.

    Args:
        terms: the powers of each variable in each term.
    """

    def __init__(self, terms: Sequence[Powers]) -> None:
        self.terms = tuple(terms)
        # They are asked for all steps of new shapes: each product is one before it times one variable. Product 0 is 1.
        products: dict[tuple[int, ...], int] = {(): 0}
        self._made: list[tuple[int, int]] = []
        """For each product but the first, which product it is made from, and by which variable."""
        self._wanted: list[int] = []
        """For each term, its product."""
        for powers in self.terms:
            factors = tuple(place for place, power in enumerate(powers) for _ in range(power))
            for length in range(1, len(factors) + 1):
                if factors[:length] not in products:
                    products[factors[:length]] = len(products)
                    self._made.append((products[factors[: length - 1]], factors[length - 1]))
            self._wanted.append(products[factors])
        self._all_wanted = self._wanted == list(range(len(products)))

    def __len__(self) -> int:
        """How many terms there are."""
        return len(self.terms)

    def of_columns(self, columns: Sequence[Column], steps: int) -> list[Column]:
        """Values of the terms for several *steps*: a column for each term, given a column for each variable."""
        found: list[Column] = [(1,) * steps]
        for before, place in self._made:
            found.append(tuple(map(mul, found[before], columns[place])) if before else columns[place])
        return found if self._all_wanted else [found[number] for number in self._wanted]

    def summed(self, batches: Sequence[Sequence[int]]) -> list[int]:
        """Each term's value, added up over *batches*, given the values of the variables in each."""
        return list(map(sum, self.of_columns(list(zip(*batches, strict=True)), len(batches))))

    def powers_of(self, place: int) -> set[int]:
        """The powers in which the variable at *place* stands in the terms."""
        return {powers[place] for powers in self.terms}


class Scope:
    """Steps that a law is used for: their terms are a sum of those of counted steps, and their sizes lie among theirs.

    Args:
        part: the counted steps.
        ranges: for each variable, the values that the law is used for.
    """

    def __init__(self, part: Part, ranges: Sequence[Range]) -> None:
        self.ranges = tuple(ranges)
        self._constraints = part.constraints
        self._allowed = [(place, one.allowed) for place, one in enumerate(self.ranges) if one.allowed is not None]

    def outside(self, batches: Iterable[Sequence[Column]], terms: Sequence[Column]) -> set[int]:
        """Which of several steps are not in it, by their numbers.

        Args:
            batches: for each batch of a step, a column of values for each variable, with one value for each step.
            terms: for each term, such a column.
        """
        found: set[int] = set()
        for columns in batches:
            for place, allowed in self._allowed:
                column = columns[place]
                if not all(map(allowed.__contains__, column)):
                    found.update(number for number, value in enumerate(column) if value not in allowed)
        for constraint in self._constraints:
            off = _weighted(constraint, terms)
            if any(off):
                found.update(number for number, value in enumerate(off) if value)
        return found


def _weighted(weights: Sequence[int], terms: Sequence[Column]) -> Column:
    """For each step, the sum of its terms, each times its weight."""
    used = [(weight, column) for weight, column in zip(weights, terms, strict=True) if weight]
    products = [column if weight == 1 else tuple(map(weight.__mul__, column)) for weight, column in used]
    return products[0] if len(products) == 1 else tuple(map(sum, zip(*products, strict=True)))


class Law:
    """FLOPs of a step by bucket and dtype, as an exact function of the values of the variables in its batches.

    Args:
        monomials: the terms.
        believed: the coefficients, and how they were found.
        scopes: the steps that it is used for, those of each part of *believed*.
    """

    def __init__(self, monomials: Monomials, believed: Believed, scopes: Sequence[Scope]) -> None:
        self.monomials = monomials
        self.ranges = scopes[0].ranges
        """For each variable, the values that the law is used for: those of the part that most counted steps are in."""
        self.counted = sum(len(part.equations) for part in believed.parts)
        """Steps that it rests on."""
        self.checks = sum(part.checks for part in believed.parts)
        """How many of them were foretold by the others."""
        self.coefficients: Mapping[tuple[str, str], tuple[Fraction, ...]] = {
            key: unknowns for key, unknowns in believed.solution.unknowns.items() if any(unknowns)
        }
        self.is_settled = not believed.solution.constraints
        """The counted steps have settled every coefficient."""
        self._scopes = tuple(scopes)
        self._whole = [
            (key, scale := common_denominator(unknowns), [int(value * scale) for value in unknowns])
            for key, unknowns in self.coefficients.items()
        ]

    def uses(self, place: int) -> bool:
        """Whether FLOPs depend on the variable at *place*."""
        return any(
            powers[place] and value
            for values in self.coefficients.values()
            for powers, value in zip(self.monomials.terms, values, strict=True)
        )

    def flops(
        self, batches: Sequence[Sequence[int]], *, buckets: Collection[str] | None = None
    ) -> dict[tuple[str, str], int] | None:
        """What a step spends; None where the law is not used for it.

        Args:
            batches: for each batch of the step, the values of the variables.
            buckets: only these are asked for; None: all.
        """
        columns = [[(value,) for value in values] for values in batches]
        terms = self._terms(columns, 1)
        if self._outside(columns, terms, buckets):
            return None
        return self._spent([value for (value,) in terms], buckets)

    def add_up(
        self, batches: Sequence[Sequence[Column]], numbers: Sequence[int]
    ) -> tuple[dict[tuple[str, str], int], set[int]]:
        """What steps spend together. Their terms are added up first, and only the sums meet the coefficients.

        Args:
            batches: for each batch of a step, a column of values for each variable, with one value for each step.
            numbers: so many steps there are of each.

        Returns:
            FLOPs by bucket and dtype, and which steps are not in them, because the law is not used for them.
        """
        terms = self._terms(batches, len(numbers))
        outside = self._outside(batches, terms)
        if outside:
            numbers = [0 if place in outside else number for place, number in enumerate(numbers)]
        return self._spent([sum(map(mul, column, numbers)) for column in terms]), outside

    def _terms(self, batches: Sequence[Sequence[Column]], steps: int) -> list[Column]:
        """For each term a column of values, added up over the batches of each step."""
        each = [self.monomials.of_columns(columns, steps) for columns in batches]
        return each[0] if len(each) == 1 else [tuple(map(sum, zip(*of, strict=True))) for of in zip(*each, strict=True)]

    def _outside(
        self, batches: Sequence[Sequence[Column]], terms: Sequence[Column], buckets: Collection[str] | None = None
    ) -> set[int]:
        """Which steps the law is not used for: in none of its scopes, or of no whole number of FLOPs in *buckets*."""
        outside = self._scopes[0].outside(batches, terms)
        for scope in self._scopes[1:]:
            outside &= scope.outside(batches, terms)
        for key, scale, whole in self._whole:
            if scale != 1 and (buckets is None or key[0] in buckets):
                outside.update(number for number, value in enumerate(_weighted(whole, terms)) if value % scale)
        return outside

    def _spent(self, terms: Sequence[int], buckets: Collection[str] | None = None) -> dict[tuple[str, str], int]:
        spent = {}
        for key, scale, whole in self._whole:
            if buckets is None or key[0] in buckets:
                value = sum(map(mul, whole, terms)) // scale
                if value:
                    spent[key] = value
        return spent


_PLACES = {TOKENS: 1, SQUARES: 2, TRAINED: 3}
"""Where the coefficients of amounts stand in those of ``PerSequence``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerSequence:
    """What one sequence spends, forward and backward, as a function of its length."""

    batch: int | None
    """The variable that counts samples; None if every batch is one."""
    length: int
    """The variable that is the length."""
    coefficients: Mapping[str, tuple[Fraction, ...]]
    """By dtype, of the length's powers 0, 1 and 2, and of each token that is trained on."""

    def flops(self, tokens: BatchTokens) -> dict[str, int] | None:
        """By dtype, what the sequences of *tokens* spend, each by its own length; None if they are not known."""
        amounts = (tokens.sequences, tokens.real, tokens.squares, tokens.trained)
        found: dict[str, int] = {}
        for dtype, its in self.coefficients.items():
            total = Fraction(0)
            for coefficient, amount in zip(its, amounts, strict=True):
                if coefficient and amount is None:
                    return None
                total += coefficient * (amount or 0)
            if total.denominator != 1 or total < 0:
                return None
            found[dtype] = int(total)
        return found


class LawFinder:
    """Looks for the law of steps that have equally many batches, whose tensors have the same numbers of axes.

    Args:
        axes: for each place in a batch's ``Sizes``, its tensor and its axis.
    """

    def __init__(self, axes: Sequence[tuple[int, int]]) -> None:
        self.law: Law | None = None
        """What holds for the steps so far; None as long as there is none."""
        self.refused = False
        """No law agrees with every counted step, or one that was believed has failed: none is looked for any more."""
        self.variables: tuple[Variable, ...] = ()
        """What varied among the counted steps."""
        self._axes = tuple(axes)
        self._steps: list[tuple[tuple[Sizes, ...], BucketFlops]] = []
        self._fixed: Callable[[Sizes], Any] = len
        self._expected: Any = 0
        self._firsts: list[int] = []
        """Where each variable stands first."""
        self._first: Callable[[Sizes], tuple[int, ...]] = tuple
        """Gets from sizes the value of each variable, where it stands first."""
        self._again: Callable[[Sizes], Any] = len
        """Gets what stands in the other places of the variables, and ``_as_first`` what must stand there."""
        self._as_first: Callable[[Sizes], Any] = len
        self._constants: list[tuple[int, int]] = []
        """Each place where nothing varies, and what stands there. The functions above check this and the next."""
        self._repeated: list[tuple[int, int]] = []
        """Each further place of a variable, and its first one."""
        self._leading: list[int] = []
        self._families: Iterator[Monomials] = iter(())
        self._fit: tuple[Monomials, ExactFit] | None = None

    def add(self, batches: tuple[Sizes, ...], flops: BucketFlops) -> bool:
        """A step with *batches* was counted.

        Returns:
            False if a law was believed, and said otherwise.
        """
        foretold = self.flops(batches)
        self._steps.append((batches, flops))
        if self.refused:
            return True
        if foretold is not None and foretold != {key: value for key, value in flops.items() if value}:
            self._refuse()
            return False
        if self._fit is None or self._values(batches) is None:
            self._look_anew()
        else:
            self._take(*self._fit, batches, flops)
        self._choose()
        return True

    def flops(
        self, batches: tuple[Sizes, ...], *, buckets: Collection[str] | None = None
    ) -> dict[tuple[str, str], int] | None:
        """What a step with *batches* spends by the law, in these *buckets* or in all; None where it does not say."""
        law = self.law
        if law is None:
            return None
        values = self._values(batches)
        return None if values is None else law.flops(values, buckets=buckets)

    def values_of(self, batches: tuple[Sizes, ...]) -> list[tuple[int, ...]] | None:
        """The variables' values in each batch; None if the batches are none of this law's."""
        return self._values(batches)

    def add_up(
        self, batches: Sequence[Sequence[Column]], numbers: Sequence[int]
    ) -> tuple[dict[tuple[str, str], int], set[int]]:
        """What steps spend together by the law, if there is one.

        Args:
            batches: for each batch of a step, a column for each of its ``Sizes``, with one value for each step.
            numbers: so many steps there are of each.

        Returns:
            FLOPs by bucket and dtype, and which steps are not in them, because the law does not say.
        """
        law = self.law
        if law is None:
            return {}, set(range(len(numbers)))
        unlike: set[int] = set()
        for columns in batches:
            for place, expected in self._constants:
                if columns[place].count(expected) != len(numbers):
                    unlike.update(number for number, size in enumerate(columns[place]) if size != expected)
            for place, first in self._repeated:
                if columns[place] != columns[first]:
                    unlike.update(
                        number for number in range(len(numbers)) if columns[place][number] != columns[first][number]
                    )
        if unlike:
            numbers = [0 if place in unlike else number for place, number in enumerate(numbers)]
        values = [list(map(columns.__getitem__, self._firsts)) for columns in batches]
        flops, outside = law.add_up(values, numbers)
        return flops, outside | unlike

    @property
    def varies(self) -> bool:
        """Whether there is a law of something that varies, other than whether a batch has padding."""
        law = self.law
        return law is not None and any(
            one.axis >= 0 or (one.is_amount and law.uses(place)) for place, one in enumerate(self.variables)
        )

    @property
    def goes_by_sequences(self) -> bool:
        """Whether attention is between the tokens of one sequence alone, so that no size stands in a square."""
        law = self.law
        if law is None:
            return False
        amounts = [place for place, one in enumerate(self.variables) if one.is_of_lengths]
        sizes = [place for place, one in enumerate(self.variables) if one.is_size]
        linear = all(
            sum(powers[place] for place in sizes) < 2
            for values in law.coefficients.values()
            for powers, value in zip(law.monomials.terms, values, strict=True)
            if value
        )
        return linear and any(map(law.uses, amounts))

    def per_sequence(self) -> PerSequence | str:
        """What one sequence spends, by its length; in words, why that does not follow from the law.

        It follows under two conditions. A step's FLOPs are the sum over its samples: they are proportional to the
        batch, or every batch was one sample. And they depend on one other size alone, to the second power at most.
        """
        law = self.law
        if law is None:
            return self.why_no_law
        if not law.is_settled:
            return "the counted steps do not settle every term of the law of their FLOPs"
        batch = next((place for place, one in enumerate(self.variables) if one.is_batch), None)
        amounts = {place: one.axis for place, one in enumerate(self.variables) if one.is_amount}
        if batch is None and any(size != 1 for size in self._leading):
            # A product of two weights costs as much for one sample as for all of them, and nobody has seen which.
            return (
                "every counted step had the same number of samples, so it is not known what each of them spends: a "
                "counted step with another number of samples, such as an epoch's short last batch, would tell"
            )
        lengths: set[int] = set()
        sums: dict[str, list[Fraction]] = {}
        for (bucket, dtype), coefficients in law.coefficients.items():
            if bucket not in ("forward", "backward"):
                continue
            of_dtype = sums.setdefault(dtype, [Fraction(0)] * 4)
            for powers, value in zip(law.monomials.terms, coefficients, strict=True):
                others = {place: power for place, power in enumerate(powers) if power and place != batch}
                if not value:
                    continue
                if others.keys() & amounts.keys():  # they add up over the sequences
                    of_dtype[_PLACES[amounts[next(iter(others))]]] += value
                    continue
                # A part that a step spends once, whatever its samples, is no sample's.
                if not (bool(others) if batch is None else powers[batch] == 1):
                    return "a step's FLOPs are not proportional to its samples: a part of them is no sample's own"
                if len(others) > 1:
                    return "a sample's FLOPs depend on several sizes, and not on its length alone"
                if any(power > 2 for power in others.values()):
                    return "a sample's FLOPs grow faster than the square of its length"
                lengths |= others.keys()
                of_dtype[sum(others.values())] += value
        if len(lengths) > 1:
            return "a sample's FLOPs depend on several sizes, and not on its length alone"
        if not lengths:
            return "no counted step had samples of another length"
        return PerSequence(batch=batch, length=lengths.pop(), coefficients={one: (*its,) for one, its in sums.items()})

    @property
    def why_no_law(self) -> str:
        """Why there is no law, if there is none; without a full stop."""
        if self.refused:
            return (
                "the FLOPs of the counted steps follow no polynomial of their sizes (as with strided convolutions, and "
                "with work that depends on the data)"
            )
        places = [place for place, (_, axis) in enumerate(self._axes) if axis != FLAG]
        counted = len(
            {tuple(tuple(sizes[place] for place in places) for sizes in batches) for batches, _ in self._steps}
        )
        if counted < 2:
            return NO_OTHER_SIZE
        return f"steps of {counted} different sizes were counted, too few to find a law and check it"

    def tokens_by_shape(self, batches: tuple[Sizes, ...], one: PerSequence) -> int | None:
        """Samples times length of *batches*; None where they are none of this law's."""
        values = self._values(batches)
        if values is None:
            return None
        return sum((1 if one.batch is None else its[one.batch]) * its[one.length] for its in values)

    def _refuse(self) -> None:
        self.refused, self.law, self._fit = True, None, None

    def _values(self, batches: Iterable[Sizes]) -> list[tuple[int, ...]] | None:
        """The variables' values in each of *batches*; None if a constant differs, or the places of one variable do."""
        found = []
        for sizes in batches:
            if self._fixed(sizes) != self._expected or self._again(sizes) != self._as_first(sizes):
                return None
            found.append(self._first(sizes))
        return found

    def _look_anew(self) -> None:
        """Something varies that did not vary before: all counted steps are looked at again."""
        rows = [sizes for batches, _ in self._steps for sizes in batches]
        self.variables = variables_in(rows, self._axes)
        again = self._repeated = [(place, one.places[0]) for one in self.variables for place in one.places[1:]]
        self._firsts = [one.places[0] for one in self.variables]
        self._first = _getter(self._firsts)
        self._again, self._as_first = _getter([place for place, _ in again]), _getter([first for _, first in again])
        varying = {place for one in self.variables for place in one.places}
        fixed = [place for place in range(len(self._axes)) if place not in varying]
        self._fixed = _getter(fixed)
        self._expected = self._fixed(rows[0])
        self._constants = [(place, rows[0][place]) for place in fixed]
        self._leading = [rows[0][place] for place in fixed if self._axes[place][1] == 0]
        self._families = iter(families(self.variables))
        self._next_family()

    def _next_family(self) -> None:
        """Begin the fit of the next larger set of terms."""
        monomials = next(self._families, None)
        self._fit = None if monomials is None else (monomials, ExactFit(len(monomials)))
        if self._fit is not None:
            for batches, flops in self._steps:
                self._take(*self._fit, batches, flops)

    def _take(self, monomials: Monomials, fit: ExactFit, batches: tuple[Sizes, ...], flops: BucketFlops) -> None:
        values = self._values(batches)
        if values is None:
            raise LookupError("a counted step is outside of the variables that were made from it")
        of_sequences = [place for place, one in enumerate(self.variables) if one.axis <= TOKENS]
        fit.add(monomials.summed(values), flops, beside=[its[place] for its in values for place in of_sequences])

    def _choose(self) -> None:
        """Believe the smallest law that agrees with every step, if it was checked."""
        while self._fit is not None and not self._fit[1].agrees:
            self._next_family()
        if self._fit is None:
            self._refuse()
            return
        monomials, fit = self._fit
        believed = fit.believed()
        if believed is None:
            self.law = None
        else:
            scopes = [Scope(part, tuple(self._ranges(monomials, part))) for part in believed.parts]
            self.law = Law(monomials, believed, scopes)

    def _ranges(self, monomials: Monomials, part: Part) -> Iterator[Range]:
        steps = [self._values(self._steps[number][0]) or [] for number in part.equations]
        by_sequences = any(
            one.is_of_lengths and monomials.powers_of(place) != {0} for place, one in enumerate(self.variables)
        )
        for place, variable in enumerate(self.variables):
            seen = [{values[place] for values in step} for step in steps]
            counted = tuple(sorted({value for each in seen for value in each}))
            if variable.is_flag:  # one step alone may agree by chance
                counted = tuple(value for value in counted if sum(value in each for each in seen) >= NEEDED_CHECKS)
            powers = monomials.powers_of(place)
            enough, is_used = len(counted) >= len(powers) + NEEDED_CHECKS, powers != {0}
            apart = math.gcd(*(size - counted[0] for size in counted))
            yield Range(
                counted=counted,
                apart=1 if variable.is_amount else max(1, apart),
                between=enough,
                # An attention with a window goes by other numbers from some length on, and by these below it. And a
                # head may be computed for so many tokens at most.
                below=variable.axis == LONGEST or (variable.axis == TRAINED and enough),
                any_value=(variable.is_amount and enough and not (variable.axis == TRAINED and is_used))
                or (variable.axis == LONGEST and not by_sequences),
            )


def _getter(places: Sequence[int]) -> Callable[[Sizes], tuple[int, ...]]:
    """Gets from sizes what stands in *places*."""
    if not places:
        return itemgetter(slice(0))
    # An itemgetter of one place returns no tuple.
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))


def variables_in(rows: Sequence[Sizes], axes: Sequence[tuple[int, int]]) -> tuple[Variable, ...]:
    """What varies among *rows* of sizes: places that are always equal are one variable.

    Args:
        rows: the sizes of batches.
        axes: for each place, its tensor and its axis.
    """
    columns: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for place, (_, axis) in enumerate(axes):
        columns.setdefault((min(axis, 0), tuple(sizes[place] for sizes in rows)), []).append(place)
    leading = {place for place, (_, axis) in enumerate(axes) if axis == 0}
    found = []
    for (axis, column), places in columns.items():
        if len(set(column)) < 2 and axis != LONGEST:
            continue
        tensors = [axes[place][0] for place in places]
        found.append(
            Variable(
                places=tuple(places),
                is_batch=bool(leading) and leading <= set(places),
                axis=axis,
                degree=1 if axis < 0 else 2 * max(map(tensors.count, tensors)),
            )
        )
    return tuple(found)


def families(variables: Sequence[Variable]) -> list[Monomials]:
    """Sets of terms that a law of *variables* may have, from the smallest to the largest."""
    sizes = [place for place, one in enumerate(variables) if one.is_size]
    flags = [place for place, one in enumerate(variables) if one.is_flag]
    batch = next((place for place, one in enumerate(variables) if one.is_batch), None)
    amounts = [
        chosen
        for chosen in (
            [place for place, one in enumerate(variables) if one.is_of_lengths],
            [place for place, one in enumerate(variables) if one.is_amount and not one.is_of_lengths],
            [place for place, one in enumerate(variables) if one.is_amount],
        )
        if chosen
    ]
    degrees = [variables[place].degree for place in sizes]
    of_sizes = [
        _bounded([2] * len(sizes), most=2),
        _bounded(degrees, most=max(degrees, default=0)),
        _bounded([2] * len(sizes), most=None),
        _bounded(degrees, most=None),
    ]
    # Without any flag, and with each of their products beside each product of sizes.
    of_flags = [_bounded([0] * len(flags), most=None), _bounded([1] * len(flags), most=None)]
    if amounts:  # where attention goes by them, all else may be linear
        of_sizes.append(_bounded([1] * len(sizes), most=1))
    found: list[tuple[Powers, ...]] = []
    for wanted in _with_batch(batch is not None):
        found.extend(
            tuple(
                dict.fromkeys(
                    _placed((*powers, *raised), (*sizes, *flags), batch, of_batch, len(variables))
                    for of_batch, whole in wanted
                    for powers in (terms if whole else terms[:1])
                    for raised in (products if whole else products[:1])
                )
            )
            for terms in of_sizes
            for products in of_flags
        )
    if amounts:
        found += [
            (*terms, *(tuple(int(one == place) for one in range(len(variables))) for place in chosen))
            for terms in list(found)
            for chosen in amounts
        ]
    return [
        Monomials(terms)
        for terms in sorted(dict.fromkeys(found), key=lambda terms: (len(terms), terms))
        if len(terms) <= MOST_TERMS
    ]


def _with_batch(varies: bool) -> list[tuple[tuple[int, bool], ...]]:
    """Which powers of the batch stand with all the other terms, and which alone."""
    if not varies:
        return [((0, True),)]
    return [((1, True),), ((0, False), (1, True)), ((0, True), (1, True)), ((0, True), (1, True), (2, True))]


def _bounded(degrees: Sequence[int], *, most: int | None) -> list[Powers]:
    """All powers up to *degrees*, whose sum is at most *most*; the constant is the first."""
    powers = itertools.product(*(range(degree + 1) for degree in degrees))
    return sorted((one for one in powers if most is None or sum(one) <= most), key=lambda one: (sum(one), one))


def _placed(powers: Powers, others: Sequence[int], batch: int | None, of_batch: int, width: int) -> Powers:
    placed = [0] * width
    for place, power in zip(others, powers, strict=True):
        placed[place] = power
    if batch is not None:
        placed[batch] = of_batch
    return tuple(placed)
