"""FLOPs of a run's steps: of a counted shape, by an exact formula, or an estimate whose error random checks measure."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from operator import sub
from typing import NamedTuple

from lightning_flops.analysis.count_schedule import CountSchedule
from lightning_flops.analysis.differences import ENOUGH, mean_difference
from lightning_flops.analysis.formula import FormulaFit, Sizes
from lightning_flops.records import BatchTokens, BucketFlops, Shapes, StepSums

_MOST_SHAPES = 4096
_MOST_NEAR = 32
_MODEL = ("forward", "backward")


class StepKey(NamedTuple):
    """What a step's FLOPs are predicted by."""

    batches: tuple[Shapes, ...]
    """Shapes of the tensors of each batch."""
    tokens: tuple[BatchTokens | None, ...]
    """Tokens of each batch; None where it does not tell them."""
    updates: int
    """Optimizer updates in the step."""


class _Shape(NamedTuple):
    """What steps have in common that should have the same FLOPs."""

    batches: tuple[Shapes, ...]
    updates: int
    padded: bool | None
    """Kernels may skip work where no token is padding. None: not known."""


_Flops = tuple[tuple[tuple[str, str], int], ...]
"""By bucket and dtype."""


class _Count(NamedTuple):
    """One counted step."""

    shape: _Shape
    sizes: Sizes
    flops: _Flops
    random: bool


@dataclass(slots=True)
class _Learned:
    """Counted steps of one shape."""

    values: Counter[_Flops] = field(default_factory=Counter)
    """How often each count was found."""
    data_dependent: bool = False

    @property
    def agree(self) -> bool:
        return len(self.values) == 1 and not self.data_dependent

    @property
    def usual(self) -> _Flops:
        """The most frequent count.

        The checks' mean difference corrects a sum of any such value. This one makes it exact where others are rare, as
        the count of a first step that also logs a picture.
        """
        return self.values.most_common(1)[0][0]


class _Part(NamedTuple):
    """Predicted FLOPs of some steps, before they are corrected."""

    steps: int
    flops: Mapping[tuple[str, str], float]
    how: str
    """``counted``, ``formula`` or ``estimated``."""
    known: bool
    """By counts of the same shape, or by a formula between its sizes; if not, by steps of other sizes."""
    useful: Mapping[tuple[str, str], float] | None = None
    """Without padding."""


class _Difference(NamedTuple):
    """A counted step minus what is predicted of it. Where its count alone is of its shape, that is left out."""

    flops: Mapping[tuple[str, str], float]
    known: bool
    random: bool


@dataclass(slots=True)
class _Group:
    """Unprofiled steps of one shape; R and Q are their sums, None where one is not known."""

    steps: int = 0
    real: int | None = 0
    squares: int | None = 0

    def add(self, other: _Group) -> None:
        self.steps += other.steps
        self.real = None if self.real is None or other.real is None else self.real + other.real
        self.squares = None if self.squares is None or other.squares is None else self.squares + other.squares

    def sizes(self, shape: _Shape) -> Sizes:
        return Sizes(tuple(map(_flat, shape.batches)), self.real, self.squares, self.steps)


@dataclass(slots=True)
class _Steps:
    """Steps between two readings, or of the whole run."""

    groups: dict[_Shape, _Group] = field(default_factory=dict)
    """Unprofiled steps."""
    profiled: dict[_Shape, _Group] = field(default_factory=dict)
    """Steps that the profiler slowed down and did not count, such as traced ones."""
    folded: dict[tuple[str, bool], _Part] = field(default_factory=dict)
    """Unprofiled steps of which no more than their sum is kept."""
    counted: Counter[tuple[str, str]] = field(default_factory=Counter)
    """FLOPs of the counted steps themselves."""
    counted_steps: int = 0
    seconds: float = 0.0
    """Of the unprofiled steps."""

    def add(self, other: _Steps) -> None:
        for mine, others in ((self.groups, other.groups), (self.profiled, other.profiled)):
            for shape, group in others.items():
                mine.setdefault(shape, _Group()).add(group)
        self.fold(other.folded.values())
        self.counted.update(other.counted)
        self.counted_steps += other.counted_steps
        self.seconds += other.seconds

    def fold(self, parts: Iterable[_Part]) -> None:
        for part in parts:
            kind = part.how, part.known
            before = self.folded.get(kind)
            self.folded[kind] = part if before is None else _together(before, part)


class StepFlops:
    """FLOPs of all steps of one run, and which steps to count to know them."""

    def __init__(self, *, seed: int = 0) -> None:
        self.notes: dict[str, None] = {}
        """Sentences about the run's FLOPs, each once."""
        self._schedule = CountSchedule(seed)
        self._counts: list[_Count] = []
        self._learned: dict[_Shape, _Learned] = {}
        self._near: dict[_Form | None, deque[tuple[tuple[float, ...], _Shape]]] = {}
        """The latest counted shapes of each form with their sizes, and under None all with their elements."""
        self._batches: set[tuple[Shapes, bool | None]] = set()
        """Every batch of a counted step."""
        self._fits: dict[_Form, FormulaFit] = {}
        self._no_grids: set[_Form] = set()
        """Forms whose tokens are not what the first two axes of a tensor make."""
        self._data_dependent: set[_Form] = set()
        self._differences: list[_Difference] | None = None
        self._lower_bound = False
        self._run, self._reading = _Steps(), _Steps()

    # ---- which steps to count

    def draws_check(self) -> bool:
        """Whether to count the step that begins now, drawn at random; asked once at each step outside windows."""
        return self._schedule.draws_check()

    def wants(self, batches: tuple[Shapes, ...], tokens: tuple[BatchTokens | None, ...]) -> bool:
        """Whether to count the step that begins with these batches: their shapes are new, and the run can afford it."""
        if not self._schedule.may_learn:
            return False
        padded = _padded(tokens)
        return not all(self._is_known(batch, padded) for batch in batches) and self._schedule.learns()

    def _is_known(self, batch: Shapes, padded: bool | None) -> bool:
        if (batch, padded) in self._batches:
            return True
        fit = self._fits.get(_form((batch,), padded))
        return fit is not None and fit.formula is not None and fit.formula.covers(Sizes((_flat(batch),)))

    # ---- the steps

    def counted(
        self,
        key: StepKey,
        flops: BucketFlops,
        *,
        seconds: float,
        random: bool,
        data_dependent: bool,
        lower_bound: bool,
    ) -> None:
        """A step was counted: in a window, because its shape was new, or at random.

        Args:
            key: of the step.
            flops: of the step.
            seconds: that it took.
            random: ``draws_check`` asked for it.
            data_dependent: values in tensors decided sizes in it, so another step of its shape may cost something else.
            lower_bound: an operator that may have FLOPs was not counted in it.
        """
        shape, group = _shape_and_group(key)
        form, sizes = _form_of(shape), group.sizes(shape)
        value = tuple(sorted((bucket, amount) for bucket, amount in flops.items() if amount))
        self._schedule.counted(seconds)
        self._counts.append(_Count(shape, sizes, value, random))
        if (learned := self._learned.get(shape)) is None:
            learned = self._learned[shape] = _Learned()
            for kind, place in _places(shape):
                self._near.setdefault(kind, deque(maxlen=_MOST_NEAR)).append((place, shape))
        learned.values[value] += 1
        if data_dependent:
            learned.data_dependent = True
            self._data_dependent.add(form)
        if not _are_grids(key):
            self._no_grids.add(form)
        self._batches.update((batch, shape.padded) for batch in shape.batches)
        self._fits.setdefault(form, FormulaFit()).add(sizes, flops)
        self._differences = None
        self._lower_bound |= lower_bound
        self._reading.counted.update(flops)
        self._reading.counted_steps += 1

    def ran(self, key: StepKey, *, seconds: float, profiled: bool = False) -> None:
        """A step ran that was not counted; a *profiled* one was slowed down, and is in no rate."""
        reading = self._reading
        shape, group = _shape_and_group(key)
        if profiled:
            reading.profiled.setdefault(shape, _Group()).add(group)
            return
        if (known := reading.groups.get(shape)) is None:
            reading.groups[shape] = group
            self._bound(reading)
        else:
            known.add(group)
        reading.seconds += seconds
        self._schedule.ran(seconds)

    def _bound(self, steps: _Steps) -> None:
        """Keep no more than the sum of *steps*, if they are of too many shapes."""
        if len(steps.groups) > _MOST_SHAPES and self._counts:
            parts = self._parts(steps)
            steps.groups.clear()
            steps.folded.clear()
            steps.fold(parts)
            self.notes[_FOLDED] = None

    def reading(self) -> StepSums | None:
        """The steps since the last reading; None before a step was counted."""
        reading, self._reading = self._reading, _Steps()
        sums = self._sums(reading)
        self._run.add(reading)
        self._bound(self._run)
        return sums

    def totals(self) -> StepSums | None:
        """All steps of the run; None before a step was counted."""
        run = _Steps()
        run.add(self._run)
        run.add(self._reading)
        return self._sums(run)

    # ---- predictions

    def _parts(self, steps: _Steps) -> list[_Part]:
        """The unprofiled ones of *steps*."""
        return [*steps.folded.values(), *self._parts_of(steps.groups)]

    def _parts_of(self, groups: Mapping[_Shape, _Group]) -> list[_Part]:
        parts = []
        for shape, group in groups.items():
            sizes = group.sizes(shape)
            part = self._predicted(shape, sizes)
            if part is not None:
                parts.append(part._replace(useful=self._useful(shape, sizes)))
        return parts

    def _predicted(self, shape: _Shape, sizes: Sizes, *, without: bool = False) -> _Part | None:
        """FLOPs of steps of *shape*; as they would be known *without* one count of it."""
        part = self._by_shape(shape, sizes, without=without)
        if part is None and shape.padded is not None:
            # Padding decides what kernels skip, and hardly ever what there is to compute.
            part = self._by_shape(shape._replace(padded=not shape.padded), sizes, without=False)
            part = None if part is None else part._replace(how="estimated", known=False)
        return part or self._by_nearest(shape, sizes.steps, but=shape if without else None)

    def _by_shape(self, shape: _Shape, sizes: Sizes, *, without: bool) -> _Part | None:
        """The same by counts of this shape, or by a formula of its sizes."""
        form, learned, steps = _form_of(shape), self._learned.get(shape), sizes.steps
        formula = fit.formula if (fit := self._fits.get(form)) is not None else None
        alone = without and learned is not None and learned.values.total() == 1
        if learned is not None and not alone and (formula is None or not formula.by_tokens):
            how = "counted" if learned.agree else "estimated"
            return _Part(steps, {bucket: steps * value for bucket, value in learned.usual}, how, known=True)
        if formula is None or (flops := formula.flops(sizes)) is None:
            return None
        known = formula.covers(sizes, without=without)
        is_exact = known and (formula.by_tokens or form not in self._data_dependent)
        return _Part(steps, flops, "formula" if is_exact else "estimated", known)

    def _by_nearest(self, shape: _Shape, steps: int, *, but: _Shape | None) -> _Part | None:
        """The counted shape whose sizes are nearest, scaled by its elements."""
        for form, sizes in _places(shape):
            near = [one for one in self._near.get(form, ()) if one[1] != but]
            if near:
                _, other = min(near, key=lambda one: sum(map(abs, map(sub, one[0], sizes))))
                elements, of_other = _elements(shape), _elements(other)
                scale, over = (elements, of_other) if elements and of_other else (1, 1)
                usual = self._learned[other].usual
                flops = {bucket: steps * value * scale / over for bucket, value in usual}
                return _Part(steps, flops, "estimated", known=False)
        return None

    def _useful(self, shape: _Shape, sizes: Sizes) -> BucketFlops | None:
        """FLOPs of steps without padding, where a formula tells."""
        form = _form_of(shape)
        fit = self._fits.get(form)
        if fit is None or fit.formula is None or form in self._no_grids:
            return None
        return fit.formula.useful(sizes)

    def _all_differences(self) -> list[_Difference]:
        """Of every counted step, as it would be predicted now: a better prediction leaves nothing of an older one."""
        if self._differences is None:
            self._differences = []
            for shape, sizes, flops, drawn in self._counts:
                part = self._predicted(shape, sizes, without=True)
                if part is not None:
                    off = Counter(dict(flops))
                    off.subtract(part.flops)
                    self._differences.append(_Difference(off, part.known, drawn))
        return self._differences

    # ---- sums

    def _sums(self, steps: _Steps) -> StepSums | None:
        if not self._counts:
            return None
        parts = self._parts(steps)
        every = [*parts, *self._parts_of(steps.profiled)]
        unprofiled, _, _ = self._corrected(parts)
        whole, half_width, checks = self._corrected(every)
        _add(whole, steps.counted)
        model = sum(_model(whole).values())
        estimated = sum([_model_sum(part.flops) for part in every if part.how == "estimated"])
        number = Counter[str]()
        for part in every:
            number[part.how] += part.steps
        useful: dict[tuple[str, str], float] | None = {} if parts else None
        for part in parts:
            useful = None if useful is None or part.useful is None else _add(useful, part.useful)
        return StepSums(
            steps=sum(number.values()) + steps.counted_steps,
            model_by_dtype=_model(whole),
            hardware_flops=round(sum(value * _SIGNS.get(bucket, 1) for (bucket, _), value in whole.items())),
            unprofiled_sec=steps.seconds,
            unprofiled_by_dtype=_model(unprofiled),
            useful_by_dtype=None if useful is None else _model(useful),
            error=None if half_width is None else half_width / model if model else 0.0,
            steps_counted=number["counted"] + steps.counted_steps,
            steps_by_formula=number["formula"],
            steps_estimated=number["estimated"],
            checks=checks,
            estimated_ratio=min(1.0, estimated / model) if model else 0.0,
            lower_bound=self._lower_bound,
        )

    def _corrected(self, parts: Sequence[_Part]) -> tuple[dict[tuple[str, str], float], float | None, int]:
        """The predicted FLOPs of *parts*, with what they miss on average, as random checks tell.

        Steps of known shapes are corrected by checks of known shapes, the others by checks of new ones.

        Returns:
            The FLOPs; half of the 95% interval of the model FLOPs, None if there are too few checks; and the checks.
        """
        flops: dict[tuple[str, str], float] = {}
        for part in parts:
            _add(flops, part.flops)
        differences = self._all_differences()
        drawn = [one for one in differences if one.random]
        steps = Counter[bool]()
        for part in parts:
            steps[part.known] += part.steps
        if not steps.total():
            return flops, 0.0, 0
        if len(drawn) < ENOUGH:
            return flops, None, len(drawn)
        squares, used = 0.0, set[int]()
        for known, number in steps.items():
            # What a shape costs that nobody counted is told as well by shapes that were counted because they were new.
            alike = [one for one in differences if one.known == known and (one.random or not known)]
            checks = alike if len(alike) >= ENOUGH else drawn
            others = [_model_sum(one.flops) for one in differences if one.known == known and not one.random]
            for bucket in {bucket for one in checks for bucket in one.flops}:
                missed = math.fsum(one.flops.get(bucket, 0) for one in checks) / len(checks)
                if missed:
                    flops[bucket] = flops.get(bucket, 0) + number * missed
            # All steps that are predicted by one counted shape share what it has by chance.
            shapes = number**2 / math.fsum(part.steps**2 for part in parts if part.known == known)
            shapes = math.inf if known else min(shapes, len(checks))
            found = mean_difference([_model_sum(one.flops) for one in checks], others=others, shapes=shapes)
            squares += (number * found.half_width) ** 2
            used.update(map(id, checks))
        return flops, math.sqrt(squares), len(used)


_Form = tuple[object, ...]
"""What steps have in common whose FLOPs may be one formula: the axes of each tensor of each batch, and padding."""

_FOLDED = (
    f"The run had steps of more than {_MOST_SHAPES:,} shapes: the FLOPs of many are kept as a sum, as they were "
    "predicted then."
)

_SIGNS = {"skipped": -1}
"""Of what is no part of the hardware FLOPs, but less than them."""


@lru_cache(maxsize=256)
def _form(batches: tuple[Shapes, ...], padded: bool | None) -> _Form:
    forms = [tuple(map(len, batch)) for batch in batches]
    return (*(forms[:1] if len(set(forms)) == 1 else forms), padded)


def _form_of(shape: _Shape) -> _Form:
    return _form(shape.batches, shape.padded)


def _flat(batch: Shapes) -> tuple[int, ...]:
    return tuple(chain.from_iterable(batch))


def _places(shape: _Shape) -> tuple[tuple[_Form | None, tuple[float, ...]], ...]:
    """Where *shape* lies among those of its form, and among all: logarithms of its sizes, and of its elements."""
    sizes = [math.log(max(1, sum(column))) for column in zip(*map(_flat, shape.batches), strict=False)]
    return (_form_of(shape), tuple(sizes)), (None, (math.log(max(1, _elements(shape))),))


def _elements(shape: _Shape) -> int:
    """Of all batches; 0 where none are seen. What begins below 0 is no tensor's shape."""
    return sum([math.prod(one) for batch in shape.batches for one in batch if one and min(one) >= 0])


def _padded(tokens: Iterable[BatchTokens | None]) -> bool | None:
    """Whether a token is padding; None where a batch does not tell."""
    found = False
    for one in tokens:
        if one is None or one.real is None or one.processed is None:
            return None
        found |= one.real < one.processed
    return found


def _shape_and_group(key: StepKey) -> tuple[_Shape, _Group]:
    real: int | None = 0
    squares: int | None = 0
    for one in key.tokens:
        real = None if real is None or one is None or one.real is None else real + one.real
        squares = None if squares is None or one is None or one.squares is None else squares + one.squares
    return _Shape(key.batches, key.updates, _padded(key.tokens)), _Group(1, real, squares)


def _are_grids(key: StepKey) -> bool:
    """Whether the tokens of each batch are what the two axes of a tensor make."""
    return all(
        one is not None and any(len(shape) == 2 and shape[0] * shape[1] == one.processed for shape in batch)
        for batch, one in zip(key.batches, key.tokens, strict=True)
    )


def _add(sums: dict[tuple[str, str], float], more: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    for bucket, value in more.items():
        sums[bucket] = sums.get(bucket, 0) + value
    return sums


def _together(one: _Part, other: _Part) -> _Part:
    useful = None if one.useful is None or other.useful is None else _add(dict(one.useful), other.useful)
    return one._replace(steps=one.steps + other.steps, flops=_add(dict(one.flops), other.flops), useful=useful)


def _model_sum(flops: Mapping[tuple[str, str], float]) -> float:
    return sum([value for (bucket, _), value in flops.items() if bucket in _MODEL])


def _model(flops: Mapping[tuple[str, str], float]) -> dict[str, int]:
    """Forward and backward by dtype."""
    sums: dict[str, float] = {}
    for (bucket, dtype), value in flops.items():
        if bucket in _MODEL:
            sums[dtype] = sums.get(dtype, 0) + value
    return {dtype: round(value) for dtype, value in sums.items()}
