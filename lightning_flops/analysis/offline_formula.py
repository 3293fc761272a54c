"""The formula of a model's FLOPs before any run, found by counting batches of sizes that are chosen here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import gcd
from typing import Literal, NamedTuple

from lightning_flops.analysis.formula import FormulaFit, Sizes
from lightning_flops.records import BucketFlops
from lightning_flops.schema import shown
from lightning_flops.schema.formula import (
    SCHEMA_VERSION,
    FormulaReport,
    FormulaSize,
    FormulaSum,
    FormulaTerm,
    SizedFlops,
)

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

    Args:
        sizes: of the example, by name.
        batch_names: those of them that count samples.
        count: counts a batch of the given sizes, by name.
    """

    def __init__(
        self, sizes: Mapping[str, int], batch_names: Sequence[str], count: Callable[[Mapping[str, int]], Counted]
    ) -> None:
        # The fit takes the first size for the number of samples.
        self._names = sorted(sizes, key=lambda name: name not in batch_names)
        self._is_batch = [name in batch_names for name in self._names]
        self._count = count
        self._counted: dict[tuple[int, ...], Counted] = {}
        self._asked: dict[tuple[int, ...], SizedFlops] = {}
        self._fit = FormulaFit()
        self._find(tuple(sizes[name] for name in self._names))

    @property
    def holds(self) -> bool:
        """Whether there is a formula. Without one, every batch is counted."""
        return self._fit.formula is not None

    @property
    def reason(self) -> str | None:
        """Why there is no formula; None if there is one."""
        if self.holds:
            return None
        return _NO_POLYNOMIAL if self._fit.refused or len(self._counted) > _MOST_COUNTS // 2 else _TOO_FEW

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
        formula, flops = self._fit.formula, None
        if values not in self._counted and formula is not None and formula.covers(Sizes((values,))):
            flops = formula.flops(Sizes((values,)))
        by_formula = flops is not None
        answer = _sized(sizes, self._take(values) if flops is None else flops, "formula" if by_formula else "counted")
        self._asked.pop(values, None)
        self._asked[values] = answer
        if len(self._asked) > _KEPT:
            del self._asked[next(iter(self._asked))]
        return answer

    def report(self) -> FormulaReport:
        """The formula, and the sizes it was asked for."""
        formula = self._fit.formula
        sizes, sums = [], []
        if formula is not None:
            names = [self._names[places[0]] for places in formula.columns.varying]
            for name, counts in zip(names, formula.counted, strict=True):
                least, greatest = min(counts), max(counts)
                apart = gcd(*(size - least for size in counts))
                sizes.append(FormulaSize(name=name, least=least, greatest=greatest, apart=apart))
            for (bucket, dtype), one in sorted(
                formula.sums.items(), key=lambda item: (item[0][1], item[0][0] != "forward")
            ):
                terms = []
                for powers, numerator in zip(formula.terms, one.numerators, strict=True):
                    if numerator:
                        shared = gcd(numerator, one.denominator)
                        terms.append(
                            FormulaTerm(
                                numerator=numerator // shared,
                                denominator=one.denominator // shared,
                                powers={name: power for name, power in zip(names, powers[:-2], strict=True) if power},
                            )
                        )
                sums.append(FormulaSum(bucket=bucket, dtype=dtype, terms=tuple(terms)))
        return FormulaReport(
            schema_version=SCHEMA_VERSION,
            holds=formula is not None,
            reason=self.reason,
            sizes=tuple(sizes),
            sums=tuple(sums),
            counted=len(self._counted),
            checks=0 if formula is None else self._fit.counted - len(formula.terms),
            lower_bound=any(one.lower_bound for one in self._counted.values()),
            asked=tuple(self._asked.values()),
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
        return shown.find().text(self.report())

    def _find(self, example: tuple[int, ...]) -> None:
        """Count batches near the example until there is a formula; then some that are much larger."""
        self._take(example)  # what it raises is raised
        for apart in self._distances(example):
            self._fit = FormulaFit()
            for values in _points(example, apart):
                self._try(values)
                if self._fit.refused or (self.holds and self._distances_counted() <= set(apart)):
                    break
            if self.holds:
                break
        for factor in _FAR if self.holds else ():
            self._try(tuple(factor * size for size in example))

    def _distances_counted(self) -> set[int]:
        """The greatest common distance of the counted values of each size."""
        counted = () if self._fit.formula is None else self._fit.formula.counted
        return {gcd(*(size - min(counts) for size in counts)) for counts in counted}

    def _distances(self, example: tuple[int, ...]) -> list[tuple[int, ...]]:
        """How far apart the tried sizes are: 1; if that gives no formula, as the sizes of images and paddings are."""
        ones = (1,) * len(example)
        powers = tuple(1 if is_batch else size & -size for is_batch, size in zip(self._is_batch, example, strict=True))
        wholes = tuple(1 if is_batch else size for is_batch, size in zip(self._is_batch, example, strict=True))
        return list(dict.fromkeys([ones, powers, wholes]))

    def _try(self, values: tuple[int, ...]) -> None:
        """Count a batch that nobody asked for; a model may refuse its size."""
        try:
            self._take(values)
        except Exception:  # of the user's model
            return

    def _take(self, values: tuple[int, ...]) -> BucketFlops:
        counted = self._counted.get(values)
        if counted is None:
            counted = self._counted[values] = self._count(dict(zip(self._names, values, strict=True)))
        self._fit.add(Sizes((values,)), counted.flops)
        return counted.flops


def _points(example: tuple[int, ...], apart: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Sizes near *example* that lie on no common line, from the example on."""
    numbers = random.Random(0)
    yield example
    for _ in range(_MOST_COUNTS - 1):
        yield tuple(size + numbers.randrange(9) * one for size, one in zip(example, apart, strict=True))


def _sized(sizes: Mapping[str, int], flops: BucketFlops, source: Literal["formula", "counted"]) -> SizedFlops:
    def bucket(name: str) -> int:
        return sum(value for (its, _), value in flops.items() if its == name)

    return SizedFlops(
        sizes=dict(sizes),
        forward=bucket("forward"),
        backward=bucket("backward"),
        recompute=bucket("recompute"),
        skipped=bucket("skipped"),
        source=source,
    )
