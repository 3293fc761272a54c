"""The formula of a model's FLOPs before any run, found by counting batches of sizes that are chosen here."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import NamedTuple

from lightning_flops.analysis.formula import Formula, Sizes
from lightning_flops.records import BucketFlops
from lightning_flops.schema import codec
from lightning_flops.schema.formula import SCHEMA_VERSION, FormulaReport, FormulaSize, FormulaTerm, SizedFlops

_MOST_COUNTS = 40
"""Batches that are counted in search of a formula."""

_FAR = (4, 16)
"""Batches so many times the given one are counted when a formula is found, so that it holds for large ones, too."""

_KEPT = 256
"""Latest answers that a report lists."""

_NO_POLYNOMIAL = (
    "the FLOPs of the batches that were counted follow no polynomial of their sizes (strided convolutions and other "
    "roundings do this, and work that depends on the data): each size is counted by itself"
)
_TOO_FEW = "too few sizes could be counted to check a formula: each size is counted by itself"


class Counted(NamedTuple):
    """FLOPs of one batch."""

    flops: BucketFlops
    lower_bound: bool
    """An operator that may have FLOPs could not be counted."""


class FlopsFormula:
    """FLOPs of one forward and backward of a model as an exact function of its batch's sizes.

    ``formula(batch=8, sequence=4096)`` gives the FLOPs for these sizes: by the formula, if they lie between sizes that
    were counted, else by counting a batch of these sizes on fake tensors. So the answer is exact for every size.
    """

    def __init__(
        self, sizes: Mapping[str, int], batch_names: Collection[str], count: Callable[[Mapping[str, int]], Counted]
    ) -> None:
        # The fit takes the first size for the number of samples.
        self._names = sorted(sizes, key=lambda name: name not in batch_names)
        self._count = count
        self._counted: dict[tuple[int, ...], Counted] = {}
        self._asked: dict[tuple[int, ...], SizedFlops] = {}
        example = tuple(sizes[name] for name in self._names)
        self._take(example, Formula())  # what it raises is raised
        self._formula = self._found(example, [name in batch_names for name in self._names])

    @property
    def holds(self) -> bool:
        """Whether there is a formula. Without one, every batch is counted."""
        return self._formula.solved is not None

    @property
    def reason(self) -> str | None:
        """Why there is no formula; None if there is one."""
        if self.holds:
            return None
        return _NO_POLYNOMIAL if self._formula.refused or len(self._counted) > _MOST_COUNTS // 2 else _TOO_FEW

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
        self._asked.pop(values, None)
        answer = self._asked[values] = self._answer(values)
        return answer

    def _answer(self, values: tuple[int, ...]) -> SizedFlops:
        predicted = None
        if values not in self._counted and self._formula.covers(Sizes((values,))):
            predicted = self._formula.flops(Sizes((values,)))
        flops = self._take(values, self._formula) if predicted is None else predicted
        buckets = dict.fromkeys(("forward", "backward", "recompute", "skipped"), 0)
        for (bucket, _), value in flops.items():
            buckets[bucket] += value
        sizes = dict(zip(self._names, values, strict=True))
        return SizedFlops(sizes=sizes, source="counted" if predicted is None else "formula", **buckets)

    def report(self) -> FormulaReport:
        """The formula, and the sizes it was asked for."""
        formula, terms = self._formula, list[FormulaTerm]()
        names = [self._names[place] for place in formula.varying]
        ranges = dict(zip(names, formula.ranges, strict=True)) if formula.solved else {}
        sums = formula.solved.sums if formula.solved else {}
        for (bucket, dtype), one in sorted(sums.items(), key=lambda item: (item[0][1], item[0][0] != "forward")):
            for powers, numerator in zip(formula.solved.terms if formula.solved else (), one.numerators, strict=True):
                value = Fraction(numerator, one.denominator)
                used = {name: power for name, power in zip(names, powers, strict=False) if power}
                whole = {"numerator": value.numerator, "denominator": value.denominator}
                if numerator:
                    terms.append(FormulaTerm(bucket=bucket, dtype=dtype, powers=used, **whole))
        return FormulaReport(
            schema_version=SCHEMA_VERSION,
            reason=self.reason,
            sizes=tuple(
                FormulaSize(name=name, least=one[0], greatest=one[-1], apart=one.step) for name, one in ranges.items()
            ),
            terms=tuple(terms),
            counted=len(self._counted),
            checks=formula.checks,
            lower_bound=any(one.lower_bound for one in self._counted.values()),
            asked=tuple(self._asked.values())[-_KEPT:],
        )

    def to_json(self) -> str:
        """The report as JSON."""
        return self.report().to_json()

    def __repr__(self) -> str:
        """Whether there is a formula, and of what."""
        words = f"a function of {', '.join(self._names)}" if self.holds else "no formula"
        return f"<FlopsFormula: {words}, {len(self._counted)} sizes counted>"

    def __str__(self) -> str:
        """The formula in words, ending in a line break."""
        return str(codec.above("report.text").render_text(self))

    def _found(self, example: tuple[int, ...], is_batch: Sequence[bool]) -> Formula:
        """Count batches near the example until there is a formula; then some that are much larger."""
        formula = Formula()
        # Sizes are 1 apart; if that gives no formula, as far as those of images and paddings are.
        powers, whole = [
            [1 if its else far for its, far in zip(is_batch, fars, strict=True)]
            for fars in ([size & -size for size in example], example)
        ]
        for apart in dict.fromkeys(map(tuple, ([1] * len(example), powers, whole))):
            formula = Formula()
            for values in _points(example, apart):
                with suppress(Exception):  # of the user's model, which may refuse a size
                    self._take(values, formula)
                found = formula.solved is not None and {one.step for one in formula.ranges} <= set(apart)
                if found or formula.refused:
                    break
            if formula.solved is not None:
                break
        for factor in _FAR if formula.solved is not None else ():
            with suppress(Exception):
                self._take(tuple(factor * size for size in example), formula)
        return formula

    def _take(self, values: tuple[int, ...], formula: Formula) -> BucketFlops:
        counted = self._counted.get(values)
        if counted is None:
            counted = self._counted[values] = self._count(dict(zip(self._names, values, strict=True)))
        formula.add(Sizes((values,)), counted.flops)
        return counted.flops


def _points(example: tuple[int, ...], apart: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Sizes near *example* that lie on no common line, from the example on."""
    numbers = random.Random(0)
    yield example
    for _ in range(_MOST_COUNTS - 1):
        yield tuple(size + numbers.randrange(9) * one for size, one in zip(example, apart, strict=True))
