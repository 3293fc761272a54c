"""The law of a model's FLOPs, found by counting batches of sizes that we choose."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning_flops.analysis.law import FLAG, LONGEST, SQUARES, TOKENS, TRAINED, Law, LawFinder, Variable
from lightning_flops.analysis.rates import per_second
from lightning_flops.analysis.step_laws import FlopSums, RunLaw, StepSeconds
from lightning_flops.records import BucketFlops
from lightning_flops.schema import shown
from lightning_flops.schema.law import (
    LONGEST_LENGTH,
    REAL_TOKENS,
    SCHEMA_VERSION,
    SUM_OF_SQUARES,
    TRAINED_TOKENS,
    WHOLE,
    LawReport,
    LawSum,
    LawTerm,
    LawVariable,
    LengthRow,
    SizedFlops,
    StepLaw,
)

_MOST_COUNTS = 40
"""Batches that are counted in search of a law."""

_FAR = (4, 16)
"""When a law has been found, batches so many times the given one are counted, so that it holds for large ones."""


class Counted(NamedTuple):
    """What counting one batch gave."""

    flops: BucketFlops
    lower_bound: bool
    """An operator that may spend FLOPs could not be counted."""


class FlopsLaw:
    """FLOPs of one forward and backward of a model as an exact function of its batch's sizes.

    ``law(batch=8, sequence=4096)`` gives the FLOPs for these sizes: by the law, if they lie between sizes that were
    counted, else by counting a batch of these sizes on fake tensors, which the law must agree with from then on. So
    what it gives is exact for every size, also where there is no law.

    Args:
        names: of the variables, each with its size in the example.
        places: for each place that varies in the batch, the name of its variable, its tensor and its axis.
        count: counts a batch of the given sizes, by name.
    """

    def __init__(
        self,
        names: Mapping[str, int],
        places: Sequence[tuple[str, int, int]],
        count: Callable[[Mapping[str, int]], Counted],
    ) -> None:
        self._names = dict(names)
        self._places = tuple(places)
        self._count = count
        self._counted: dict[tuple[int, ...], Counted] = {}
        self._asked: list[SizedFlops] = []
        self._finder = self._new_finder()
        self._find()

    # ---- what it says

    @property
    def holds(self) -> bool:
        """Whether there is a law. Without one, ``law(...)`` counts each batch."""
        return self._law is not None

    @property
    def reason(self) -> str | None:
        """Why there is no law; None if there is one."""
        if self.holds:
            return None
        if self._finder.refused:
            return (
                "the FLOPs of the batches that were counted follow no polynomial of their sizes (strided convolutions "
                "and other roundings do this, and work that depends on the data): each size is counted by itself"
            )
        return "too few sizes could be counted to check a law: each size is counted by itself"

    def __call__(self, **sizes: int) -> SizedFlops:
        """FLOPs of a forward and backward on a batch of these *sizes*, by the names of the variables.

        Raises:
            TypeError: a size is missing, unknown or no integer above zero.
            Exception: whatever the model raises for a batch of these sizes, where it has to be counted.
        """
        for name in self._names:
            if name not in sizes:
                raise TypeError(f"law() needs a size for {name}")
        for name, size in sizes.items():
            if name not in self._names:
                raise TypeError(f"law() knows no size {name}, but {', '.join(self._names)}")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise TypeError(f"{name} must be an integer >= 1, got {size!r}")
        values = tuple(sizes[name] for name in self._names)
        flops = None if values in self._counted else self._finder.flops((self._sizes(values),))
        answer = _sized(self._named(values), flops if flops is not None else self._take(values), law=flops is not None)
        self._asked.append(answer)
        return answer

    def report(self) -> LawReport:
        """The law, and what it was asked so far."""
        law = self._law
        return LawReport(
            schema_version=SCHEMA_VERSION,
            holds=law is not None,
            reason=self.reason,
            variables=() if law is None else tuple(self._variables(law)),
            sums=() if law is None else tuple(law_sums(law, self._law_names())),
            counted=len(self._counted),
            checks=0 if law is None else law.checks,
            lower_bound=any(one.lower_bound for one in self._counted.values()),
            asked=tuple(self._asked),
        )

    def to_json(self) -> str:
        """The report as JSON."""
        return self.report().to_json()

    def __repr__(self) -> str:
        """Whether there is a law, and of what."""
        words = f"a function of {', '.join(self._law_names())}" if self.holds else "no law"
        return f"<FlopsLaw: {words}, {len(self._counted)} sizes counted>"

    def __str__(self) -> str:
        """The law in words, ending in a line break."""
        return shown.find().text(self.report())

    @property
    def _law(self) -> Law | None:
        return self._finder.law

    def _law_names(self) -> list[str]:
        return [self._places[variable.places[0]][0] for variable in self._finder.variables]

    def _variables(self, law: Law) -> Iterator[LawVariable]:
        for name, one in zip(self._law_names(), law.ranges, strict=True):
            yield LawVariable(
                name=name, least=one.counted[0], greatest=one.counted[-1], apart=one.apart, between=one.between
            )

    # ---- how it is found

    def _new_finder(self) -> LawFinder:
        return LawFinder([(tensor, axis) for _, tensor, axis in self._places])

    def _find(self) -> None:
        """Count batches near the example until there is a law; then some that are much larger."""
        example = tuple(self._names.values())
        self._take(example)  # what it raises is raised
        for apart in self._steps_to_try(example):
            self._finder = self._new_finder()
            for values in itertools.islice(_points(example, apart), _MOST_COUNTS):
                self._try(values)
                law = self._law
                if self._finder.refused or (law is not None and all(one.between for one in law.ranges)):
                    break
            if self._law is not None:
                break
        for factor in _FAR if self._law is not None else ():
            self._try(tuple(factor * size for size in example))

    def _steps_to_try(self, example: tuple[int, ...]) -> list[tuple[int, ...]]:
        """How far apart the tried sizes are: 1; if that gives no law, as far as the sizes of images and pads are."""
        samples = {name for name, _, axis in self._places if axis == 0}
        ones = (1,) * len(example)

        def apart(step: Callable[[int], int]) -> tuple[int, ...]:
            return tuple(1 if name in samples else step(size) for name, size in zip(self._names, example, strict=True))

        return list(dict.fromkeys([ones, apart(lambda size: size & -size), apart(lambda size: size)]))

    def _try(self, values: tuple[int, ...]) -> None:
        """Count a batch that nobody asked for; a model may refuse its size."""
        try:
            self._take(values)
        except Exception:  # of the user's model
            return

    def _take(self, values: tuple[int, ...]) -> BucketFlops:
        counted = self._counted.get(values)
        if counted is None:
            counted = self._counted[values] = self._count(self._named(values))
        self._finder.add((self._sizes(values),), counted.flops)
        return counted.flops

    def _named(self, values: tuple[int, ...]) -> dict[str, int]:
        return dict(zip(self._names, values, strict=True))

    def _sizes(self, values: tuple[int, ...]) -> tuple[int, ...]:
        named = self._named(values)
        return tuple(named[name] for name, _, _ in self._places)


def _points(example: tuple[int, ...], apart: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Sizes near *example* that lie on no common line, from the example on."""
    state = 1
    yield example
    while True:
        steps = []
        for _ in example:
            state = state * 1103515245 + 12345 & 0x7FFFFFFF  # any sequence without a pattern, always the same
            steps.append((state >> 16) % 9)
        yield tuple(size + step * one for size, step, one in zip(example, steps, apart, strict=True))


def _sized(sizes: Mapping[str, int], flops: BucketFlops, *, law: bool) -> SizedFlops:
    def bucket(name: str) -> int:
        return sum(value for (its, _), value in flops.items() if its == name)

    return SizedFlops(
        sizes=sizes,
        forward=bucket("forward"),
        backward=bucket("backward"),
        recompute=bucket("recompute"),
        optimizer=bucket("optimizer"),
        causal_skipped=bucket("causal_skipped"),
        source="law" if law else "counted",
    )


_BUCKETS = ("forward", "backward", "recompute", "optimizer", "causal_skipped")


def law_sums(law: Law, names: Sequence[str]) -> Iterator[LawSum]:
    """The sums of *law*, whose variables have these *names*, in the order of the buckets."""
    for bucket, dtype in sorted(law.coefficients, key=lambda key: (_BUCKETS.index(key[0]), key[1])):
        coefficients = law.coefficients[bucket, dtype]
        yield LawSum(
            bucket=bucket,
            dtype=dtype,
            terms=tuple(
                LawTerm(
                    numerator=value.numerator,
                    denominator=value.denominator,
                    powers={name: power for name, power in zip(names, powers, strict=True) if power},
                )
                for value, powers in zip(coefficients, law.monomials.terms, strict=True)
                if value
            ),
        )


_NAMES = {
    FLAG: WHOLE,
    TOKENS: REAL_TOKENS,
    SQUARES: SUM_OF_SQUARES,
    LONGEST: LONGEST_LENGTH,
    TRAINED: TRAINED_TOKENS,
}


def letters(variables: Sequence[Variable]) -> list[str]:
    """What stands for *variables* whose names nobody knows.

    B for samples, then S, T, U ...; F for a flag; R, Q, L and N for what tells of sequences.
    """
    free = iter("STUVWXYZ")
    return ["B" if one.is_batch else _NAMES.get(one.axis) or next(free, "?") for one in variables]


_GROUPS = 6


def step_law(run: RunLaw, *, peak_sec: Callable[[Mapping[str, int]], float | None]) -> StepLaw:
    """The law of a run's steps for its report.

    Args:
        run: the law.
        peak_sec: seconds that FLOPs by dtype take at the device's peaks.
    """
    names = letters(run.finder.variables)
    sums = tuple(law_sums(run.law, names))
    used = {name for one in sums for term in one.terms for name in term.powers}
    if used & {REAL_TOKENS, SUM_OF_SQUARES}:
        used.add(LONGEST_LENGTH)
    return StepLaw(
        variables=tuple(
            LawVariable(name=name, least=one.counted[0], greatest=one.counted[-1], apart=one.apart, between=one.between)
            for name, one, variable in zip(names, run.law.ranges, run.finder.variables, strict=True)
            if variable.axis >= 0 or name in used
        ),
        sums=sums,
        counted=run.law.counted,
        checks=run.law.checks,
        lengths=tuple(_length_rows(run, peak_sec=peak_sec)),
    )


def _length_rows(run: RunLaw, *, peak_sec: Callable[[Mapping[str, int]], float | None]) -> Iterator[LengthRow]:
    """The steps by length, in groups of about as many steps each; all steps of one length are in one group."""
    by_length: dict[int, list[tuple[StepSeconds, FlopSums]]] = {}
    for length, seconds, flops in run.steps:
        by_length.setdefault(length, []).append((seconds, flops))
    whole = sum(its.steps for _, its, _ in run.steps)
    group: list[tuple[StepSeconds, FlopSums]] = []
    lengths: list[int] = []
    done = held = 0
    for length in sorted(by_length):
        lengths.append(length)
        group += by_length[length]
        held += sum(its.steps for its, _ in by_length[length])
        if (done + held) * _GROUPS >= whole * (done * _GROUPS // max(1, whole) + 1):
            yield _row(lengths, group, peak_sec=peak_sec)
            done, held, group, lengths = done + held, 0, [], []
    if group:
        yield _row(lengths, group, peak_sec=peak_sec)


def _row(
    lengths: Sequence[int],
    group: Sequence[tuple[StepSeconds, FlopSums]],
    *,
    peak_sec: Callable[[Mapping[str, int]], float | None],
) -> LengthRow:
    steps, seconds = sum(its.steps for its, _ in group), sum(its.seconds for its, _ in group)
    by_dtype: dict[str, int] = {}
    for _, flops in group:
        for dtype, amount in flops.model_by_dtype.items():
            by_dtype[dtype] = by_dtype.get(dtype, 0) + amount
    return LengthRow(
        shortest=lengths[0],
        longest=lengths[-1],
        steps=steps,
        model_flops=sum(by_dtype.values()) / steps,
        step_sec=seconds / steps,
        mfu=per_second(amount=peak_sec(by_dtype), seconds=seconds),
    )
