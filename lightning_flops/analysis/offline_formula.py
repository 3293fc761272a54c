"""The formula of a model's FLOPs before any run, found by counting batches of sizes that are chosen here."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

from lightning_flops.analysis.formula import Formula, Sizes
from lightning_flops.records import BucketFlops, FlopPhase
from lightning_flops.schema import codec
from lightning_flops.schema.plan import FormulaReport, FormulaSize, FormulaTerm, SizedFlops

_MOST_COUNTS = 40  # batches that are counted in search of a formula
_FAR = (4, 16)  # so many times the given batch is counted when a formula is found, so that it holds for large ones, too
_KEPT = 256  # latest answers that a report lists
_NO_POLYNOMIAL = (
    "no polynomial of the sizes gives the FLOPs of the batches that could be counted (strided convolutions and other "
    "roundings do this, and work that depends on the data): each size is counted by itself"
)


class Counted(NamedTuple):
    """FLOPs of one batch."""

    flops: BucketFlops
    lower_bound: bool  # an operator that may have FLOPs could not be counted


class FlopsFormula:
    """FLOPs of one forward and backward of a model as an exact function of its batch's sizes.

    ``formula(batch=8, sequence=4096)`` gives the FLOPs for these sizes: by the formula, if they lie between sizes that
    were counted, else by counting a batch of these sizes on fake tensors. So FLOPs are exact for every size.
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
        self._formula = self._searched(example, (1,) * len(example))
        if not self.holds:  # as with images and paddings
            wide = tuple(1 if name in batch_names else sizes[name] for name in self._names)
            self._formula = self._searched(example, wide)

    @property
    def holds(self) -> bool:
        """Whether there is a formula. Without one, every batch is counted."""
        return self._formula.solved is not None

    @property
    def reason(self) -> str | None:
        """Why there is no formula; None if there is one."""
        return None if self.holds else _NO_POLYNOMIAL

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
        predicted = None
        if values not in self._counted and self._formula.covers(Sizes((values,))):
            predicted = self._formula.flops(Sizes((values,)))
        flops = self._take(values, self._formula) if predicted is None else predicted
        buckets = dict.fromkeys(get_args(FlopPhase), 0)
        for (bucket, _), value in flops.items():
            buckets[bucket] += value
        source: Literal["counted", "formula"] = "counted" if predicted is None else "formula"
        self._asked[values] = SizedFlops(sizes=dict(zip(self._names, values, strict=True)), source=source, **buckets)
        return self._asked[values]

    def report(self) -> FormulaReport:
        """The formula, and the sizes it was asked for."""
        formula, terms, sizes = self._formula, list[FormulaTerm](), tuple[FormulaSize, ...]()
        if (solved := formula.solved) is not None:
            names = [self._names[place] for place in formula.varying]
            sizes = tuple(
                FormulaSize(name=name, least=one[0], greatest=one[-1], apart=one.step)
                for name, one in zip(names, formula.ranges, strict=True)
            )
            for bucket, dtype in sorted(solved.sums, key=lambda key: (key[1], key[0] != "forward")):
                one = solved.sums[bucket, dtype]
                for powers, numerator in zip(solved.terms, one.numerators, strict=True):
                    value = Fraction(numerator, one.denominator)
                    used = {name: power for name, power in zip(names, powers, strict=False) if power}
                    whole = {"numerator": value.numerator, "denominator": value.denominator}
                    if numerator:
                        terms.append(FormulaTerm(bucket=bucket, dtype=dtype, powers=used, **whole))
        return FormulaReport(
            reason=self.reason,
            sizes=sizes,
            terms=tuple(terms),
            counted=len(self._counted),
            checks=formula.checks,
            lower_bound=any(one.lower_bound for one in self._counted.values()),
            asked=tuple(self._asked.values())[-_KEPT:],
        )

    def to_json(self) -> str:
        """The report as JSON."""
        return self.report().to_json()

    def __str__(self) -> str:
        """The formula in words, ending in a line break."""
        return str(codec.above("report.text").render_text(self))

    def _searched(self, example: tuple[int, ...], apart: tuple[int, ...]) -> Formula:
        """The formula of batches near the example, whose sizes are so far *apart*; then some that are much larger."""
        formula, numbers = Formula(), random.Random(0)
        self._take(example, formula)  # what it raises is raised
        for _ in range(_MOST_COUNTS):
            values = tuple(size + numbers.randrange(9) * one for size, one in zip(example, apart, strict=True))
            with suppress(Exception):  # of the user's model, which may refuse a size
                self._take(values, formula)
            if formula.refused or (formula.solved and {one.step for one in formula.ranges} <= set(apart)):
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
