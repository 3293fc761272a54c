"""FLOPs of a run's steps: of a counted shape, by an exact formula, or an estimate whose error random checks measure."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from operator import mul, sub
from typing import Literal, NamedTuple, cast

from lightning_flops.analysis.count_schedule import CountSchedule
from lightning_flops.analysis.formula import Formula, Sizes
from lightning_flops.records import BatchTokens, BucketFlops, Shapes, StepSums, UnprofiledFlops

ENOUGH = 3
"""With fewer random checks nothing is said of the error."""

_MOST_SHAPES = 4096
"""More are kept as the sum of what is predicted of them."""

_MOST_NOTED = 256
"""Steps that are alike are noted as one; this many notes are kept in a run that is not read."""

_MOST_NEAR = 32
_RECENT = 16
"""Random checks that correct what is logged, which follows a run that changes; all of them correct the run's sum."""

_MODEL = ("forward", "backward")
_T = (4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)
"""Student's t of 95%, two-sided, from two degrees of freedom on."""

Batches = tuple[Shapes, ...]
"""Shapes of the tensors of each batch of a step."""

Tokens = tuple[BatchTokens | None, ...]
"""Tokens of each batch of a step; None where one does not show them."""

_Flops = Mapping[tuple[str, str], float]
"""By bucket and dtype."""

_Sums = dict[tuple[str, str], float]


class _Shape(NamedTuple):
    """What steps have in common that should have the same FLOPs."""

    batches: Batches
    updates: int
    padded: bool | None
    """Kernels may skip work where no token is padding. None: not known."""

    @property
    def form(self) -> object:
        """The axes of each tensor of each batch: steps that have these in common may follow one formula."""
        forms = [tuple(map(len, batch)) for batch in self.batches]
        return (*(forms[:1] if len(set(forms)) == 1 else forms), self.padded)

    @property
    def elements(self) -> int:
        """Elements of all batches; 1 where none are seen. What begins below 0 is no tensor's shape."""
        return sum([math.prod(one) for batch in self.batches for one in batch if one and min(one) >= 0]) or 1

    @property
    def places(self) -> dict[object, tuple[float, ...]]:
        """Logarithms of the sizes, which place a step among those of its form, and of the elements, among all."""
        columns = zip(*map(_flat, self.batches), strict=False)
        return {self.form: tuple(math.log(max(1, sum(one))) for one in columns), None: (math.log(self.elements),)}

    def sizes(self, steps: int, real: int, squares: int) -> Sizes:
        known = self.padded is not None
        return Sizes(tuple(map(_flat, self.batches)), real if known else None, squares if known else None, steps)


class _Predicted(NamedTuple):
    """FLOPs of some steps."""

    flops: _Flops
    how: Literal["counted", "formula", "varied", "nearest"]
    """By counts of their shape or by a formula; by either, where steps may differ; by the nearest counted shape."""


class _Count(NamedTuple):
    """A counted step."""

    shape: _Shape
    flops: BucketFlops
    stands_for: int
    """Steps that a random check is the only one of; 0: it was not drawn at random."""


class _Difference(NamedTuple):
    """What a counted step has more than is predicted without its count."""

    flops: _Flops
    is_new: bool
    """Its shape was counted this once."""
    stands_for: int


class _Missed(NamedTuple):
    """What predictions miss of a step."""

    mean: _Flops
    half_width: float
    """Half of the 95% interval of the mean of model FLOPs."""
    checks: int


@dataclass(slots=True)
class _Kind:
    """Counted steps of one form."""

    formula: Formula = field(default_factory=Formula)
    near: deque[tuple[tuple[float, ...], _Shape]] = field(default_factory=lambda: deque(maxlen=_MOST_NEAR))
    """The latest shapes, with their places."""
    varies: bool = False
    """Values in tensors decided sizes, so another step of the same shape may cost something else."""
    grids: bool = True
    """The tokens of each batch are what the axes of a tensor make."""


@dataclass(slots=True)
class _Sum:
    """FLOPs of unprofiled steps, as they are predicted."""

    flops: _Sums = field(default_factory=dict)
    useful: _Sums | None = field(default_factory=dict)
    """Without padding; None if not known of one."""
    steps: Counter[str] = field(default_factory=Counter)
    """By how they are predicted."""
    estimated: float = 0.0
    """Model FLOPs that are estimates."""

    def add(self, one: _Predicted, useful: BucketFlops | None, *, steps: int, times: int) -> None:
        for bucket, value in one.flops.items():
            self.flops[bucket] = self.flops.get(bucket, 0) + times * value
        self.useful = None if useful is None or self.useful is None else _add(self.useful, useful)
        self.steps[one.how] += steps
        if one.how in ("varied", "nearest"):
            self.estimated += times * _model(one.flops)

    def corrected(self, missed: Mapping[bool, _Missed]) -> _Sums:
        """The FLOPs, with what they miss on average."""
        flops = dict(self.flops)
        for how, steps in self.steps.items() if missed else ():
            _add(flops, missed[how == "nearest"].mean, steps)
        return flops

    def unprofiled(self, missed: Mapping[bool, _Missed]) -> UnprofiledFlops:
        flops = _by_dtype(self.corrected(missed))
        model, useful = sum(flops.values()), self.useful if self.steps else None
        ratio = min(1.0, self.estimated / model) if model else 0.0
        return UnprofiledFlops(flops, None if useful is None else _by_dtype(useful), ratio)


class StepFlops:
    """FLOPs of all steps of one run, and which steps to count to know them."""

    def __init__(self, *, seed: int = 0) -> None:
        self.schedule = CountSchedule(seed)
        self._counts: list[_Count] = []
        self._values: dict[_Shape, Counter[frozenset[tuple[tuple[str, str], int]]]] = {}
        """How often each count of a shape was found."""
        self._kinds: dict[object, _Kind] = {}
        """By form; under None all."""
        self._batches: set[tuple[Shapes, bool | None]] = set()
        """Every batch of a counted step."""
        self._of_one: dict[_Shape, _Predicted] = {}
        """What is predicted of one step, until another one is counted."""
        self._missed: dict[bool, _Missed] = {}
        """Corrected by recent checks."""
        self._groups: dict[tuple[_Shape, bool], list[int]] = {}
        """Steps that were not counted, with their R and Q; True: the profiler slowed them down."""
        self._noted: dict[tuple[Batches, Tokens, int, bool], int] = {}
        """Steps that are in no group yet, by what ``ran`` was given: adding them up would cost each step some time."""
        self._folded = {profiled: _Sum() for profiled in (False, True)}
        """Steps that are in no group any more."""
        self._reading = _Sum()
        self._lower_bound = False

    # ---- the steps

    def wants(self, batch: Shapes, tokens: BatchTokens | None) -> bool:
        """Whether to count the step that begins with this batch: its shapes are new, and the run can afford it."""
        padded = None if tokens is None else _padded((tokens,))
        if (batch, padded) in self._batches:
            return False
        kind = self._kinds.get(_Shape((batch,), 1, padded).form)
        return not (kind and kind.formula.covers(Sizes((_flat(batch),)))) and self.schedule.learns()

    def counted(
        self,
        batches: Batches,
        tokens: Tokens,
        updates: int,
        flops: BucketFlops,
        *,
        seconds: float,
        random: bool,
        data_dependent: bool,
        lower_bound: bool,
    ) -> None:
        """A step was counted: in a window, because its shape was new, or because the schedule drew it (*random*).

        Where it was *data_dependent*, values in tensors decided sizes, and another step of its shape may cost more.
        """
        self._add_noted()
        shape, *tokens_of_it = _shape(batches, tokens, updates)
        flops = {bucket: value for bucket, value in flops.items() if value}
        kind = self._kinds.setdefault(shape.form, _Kind())
        kind.formula.add(shape.sizes(1, *tokens_of_it), flops)
        kind.varies |= data_dependent
        kind.grids &= shape.padded is not None and all(
            any(len(shape) == 2 and math.prod(shape) == one.processed for shape in batch)
            for batch, one in zip(batches, tokens, strict=True)
            if one is not None
        )
        if shape not in self._values:
            for form, place in shape.places.items():
                self._kinds.setdefault(form, _Kind()).near.append((place, shape))
        self._values.setdefault(shape, Counter())[frozenset(flops.items())] += 1
        self._counts.append(_Count(shape, flops, self.schedule.stands_for if random else 0))
        self._batches.update((batch, shape.padded) for batch in batches)
        self._lower_bound |= lower_bound
        self.schedule.counted(seconds)
        self._of_one.clear()
        self._missed = _missed(self._differences(), latest=_RECENT)
        if len(self._counts) == 1:
            for (earlier, profiled), group in self._groups.items():
                if not profiled:
                    self._predict(self._reading, earlier, *group)

    def ran(self, batches: Batches, tokens: Tokens, updates: int, *, seconds: float, profiled: bool = False) -> None:
        """A step ran that was not counted; a *profiled* one was slowed down, and is in no rate."""
        key = (batches, tokens, updates, profiled)
        self._noted[key] = self._noted.get(key, 0) + 1
        if not profiled:
            self.schedule.ran(seconds)
        if len(self._noted) >= _MOST_NOTED:
            self._add_noted()

    def _add_noted(self) -> None:
        noted, self._noted = self._noted, {}
        for (batches, tokens, updates, profiled), steps in noted.items():
            shape, real, squares = _shape(batches, tokens, updates)
            group = self._groups.setdefault((shape, profiled), [0, 0, 0])
            group[0] += steps
            group[1] += steps * real
            group[2] += steps * squares
            if self._counts and not profiled:
                self._predict(self._reading, shape, steps, steps * real, steps * squares)
        if len(self._groups) > _MOST_SHAPES:
            self._folded = self._sums()
            self._groups.clear()

    # ---- predictions

    def _predict(self, into: _Sum, shape: _Shape, steps: int, real: int, squares: int) -> None:
        """Add what is predicted of *steps* of one *shape*, with their R and Q."""
        useful = None
        if shape.padded is not None:
            kind, sizes = self._kind(shape), shape.sizes(steps, real, squares)
            useful = kind.formula.useful(sizes) if kind.grids else None
            if kind.formula.by_tokens:
                into.add(self._predicted(shape, sizes), useful, steps=steps, times=1)
                return
        if (one := self._of_one.get(shape)) is None:
            one = self._of_one[shape] = self._predicted(shape, shape.sizes(1, 0, 0))
        into.add(one, useful, steps=steps, times=steps)

    def _predicted(self, shape: _Shape, sizes: Sizes) -> _Predicted:
        kind, values = self._kind(shape), self._values.get(shape)
        formula = kind.formula
        if values is not None and not formula.by_tokens:
            return _Predicted(_usual(values), "counted" if len(values) == 1 and not kind.varies else "varied")
        if (predicted := formula.flops(sizes)) is None:
            return _Predicted(self._nearest(shape, sizes.steps), "nearest")
        if shape.form not in self._kinds or not formula.covers(sizes):
            return _Predicted(predicted, "nearest")
        return _Predicted(predicted, "varied" if kind.varies and not formula.by_tokens else "formula")

    def _kind(self, shape: _Shape) -> _Kind:
        """Counted steps of this form; if there are none, those that differ in padding alone.

        Padding decides what kernels skip, and hardly ever what there is to compute.
        """
        other = shape._replace(padded=not shape.padded)
        return self._kinds.get(shape.form) or self._kinds.get(other.form) or _Kind()

    def _nearest(self, shape: _Shape, steps: int = 1, *, but: _Shape | None = None) -> _Flops:
        """FLOPs of the counted shape whose sizes are nearest, scaled by its elements; empty if there is no other."""
        for form, place in shape.places.items():
            near = [one for one in self._kinds.get(form, _Kind()).near if one[1] != but]
            if near:
                _, other = min(near, key=lambda one: sum(map(abs, map(sub, one[0], place))))
                elements, of_other = steps * shape.elements, other.elements
                return {bucket: value * elements / of_other for bucket, value in _usual(self._values[other]).items()}
        return {}

    def _differences(self) -> list[_Difference]:
        """Differences of every counted step from its prediction now: a better one leaves nothing of an older one."""
        found = []
        for shape, flops, stands_for in self._counts:
            values, predicted = self._values[shape], cast("_Flops", flops)
            if self._kinds[shape.form].formula.solved is None:  # they agree, or it would be no formula
                predicted = _usual(values) if values.total() > 1 else self._nearest(shape, but=shape)
            if predicted:
                off = _add(dict(flops), predicted, -1)
                found.append(_Difference(off, values.total() == 1 and predicted is not flops, stands_for))
        return found

    # ---- sums

    def reading(self) -> UnprofiledFlops | None:
        """The unprofiled steps since the last reading; None before a step was counted."""
        self._add_noted()
        reading, self._reading = self._reading, _Sum()
        return reading.unprofiled(self._missed) if self._counts else None

    def _sums(self) -> dict[bool, _Sum]:
        """Sums of all uncounted steps; True: the profiler slowed them down."""
        sums = deepcopy(self._folded)
        for (shape, profiled), group in self._groups.items():
            self._predict(sums[profiled], shape, *group)
        return sums

    def totals(self) -> StepSums | None:
        """All steps of the run; None before a step was counted."""
        if not self._counts:
            return None
        self._add_noted()
        sums, differences = self._sums(), self._differences()
        missed, steps = _missed(differences), sums[False].steps + sums[True].steps
        whole: _Sums = {}
        for part in (*(one.corrected(missed) for one in sums.values()), *(one.flops for one in self._counts)):
            _add(whole, part)
        model, squares = _model(whole), 0.0
        new = len([1 for shape, _ in self._groups if shape not in self._values]) or 1
        for is_new, found in missed.items():
            number = steps["nearest"] if is_new else steps.total() - steps["nearest"]
            # All steps that are predicted by one counted shape share what it has by chance.
            shared = found.checks / min(new, found.checks) if is_new else 0
            squares += (number * found.half_width) ** 2 * (1 + shared)
        known = bool(missed) or not steps
        return StepSums(
            model_flops=round(model),
            hardware_flops=round(sum(-flops if key[0] == "skipped" else flops for key, flops in whole.items())),
            unprofiled=sums[False].unprofiled(missed),
            error=(math.sqrt(squares) / model if model else 0.0) if known else None,
            steps_counted=steps["counted"] + len(self._counts),
            steps_by_formula=steps["formula"],
            steps_estimated=steps["varied"] + steps["nearest"],
            checks=sum(one.stands_for > 0 for one in differences) if steps else 0,
            lower_bound=self._lower_bound,
        )


def _missed(differences: Sequence[_Difference], *, latest: int = 0) -> dict[bool, _Missed]:
    """What predictions miss, of shapes that were counted and of new ones (True); empty with too few checks."""
    drawn = [one for one in differences if one.stands_for]
    if len(drawn) < ENOUGH:
        return {}
    found = {}
    for is_new in (False, True):
        alike = [one for one in differences if one.is_new == is_new]
        # The cost of an uncounted shape is known as well from shapes that were counted because they were new.
        checks = alike if is_new else [one for one in alike if one.stands_for]
        checks = (checks if len(checks) >= ENOUGH else drawn)[-latest:]
        weights = [1 if is_new else one.stands_for for one in checks]
        mean: _Sums = {}
        for one, weight in zip(checks, weights, strict=True):
            _add(mean, one.flops, weight / sum(weights))
        half_width = _half_width([_model(one.flops) for one in checks], weights, [_model(one.flops) for one in alike])
        found[is_new] = _Missed(mean, half_width, len(checks))
    return found


def _half_width(checks: Sequence[float], weights: Sequence[int], seen: Sequence[float]) -> float:
    """Half of the 95% interval of the mean of *checks*; all differences that were *seen* show the spread.

    Few draws of something rare, or of something that takes turns, are often all alike. So the spread is that of one
    draw more, half of it at each end of what was seen; "plus four" intervals of proportions do the same.
    """
    number, freedom, ends = len(checks), len(checks) - 1, (*checks, *seen, 0.0)
    mean = math.fsum(map(mul, checks, weights)) / sum(weights)
    squares = math.fsum((one - mean) ** 2 for one in checks) + sum((one(ends) - mean) ** 2 for one in (min, max)) / 2
    t = _T[freedom - 2] if freedom - 2 < len(_T) else 1.96 + 2.6 / freedom
    return t * math.sqrt(squares / number) * math.hypot(*weights) / sum(weights)


def _flat(batch: Shapes) -> tuple[int, ...]:
    return tuple(chain.from_iterable(batch))


def _padded(tokens: Tokens) -> bool | None:
    """Whether a token is padding; None where a batch does not show it."""
    padded = False
    for one in tokens:
        if one is None or one.real is None or one.processed is None or one.squares is None:
            return None
        padded |= one.real < one.processed
    return padded


def _shape(batches: Batches, tokens: Tokens, updates: int) -> tuple[_Shape, int, int]:
    """The shape of a step, its R and its Q."""
    if None in tokens or (padded := _padded(tokens)) is None:
        return _Shape(batches, updates, None), 0, 0
    real, squares = (sum([getattr(one, name) for one in tokens]) for name in ("real", "squares"))
    return _Shape(batches, updates, padded), real, squares


def _usual(values: Counter[frozenset[tuple[tuple[str, str], int]]]) -> BucketFlops:
    """The most frequent count.

    The checks' mean difference corrects a sum of any such value. This one makes it exact where others are rare, as the
    count of a first step that also logs a picture.
    """
    return dict(values.most_common(1)[0][0])


def _add(sums: _Sums, more: _Flops, times: float = 1) -> _Sums:
    for bucket, value in more.items():
        if value:  # whole numbers stay whole
            sums[bucket] = sums.get(bucket, 0) + times * value
    return sums


def _model(flops: _Flops) -> float:
    return sum([value for (bucket, _), value in flops.items() if bucket in _MODEL])


def _by_dtype(flops: _Flops) -> dict[str, float]:
    """Forward and backward by dtype."""
    sums: dict[str, float] = {}
    for (bucket, dtype), value in flops.items():
        if bucket in _MODEL:
            sums[dtype] = sums.get(dtype, 0) + value
    return sums
