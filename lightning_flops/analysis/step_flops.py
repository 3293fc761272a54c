"""FLOPs of a run's steps: of a counted shape, by an exact formula, or an estimate whose error random checks measure."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from operator import mul, sub
from typing import Literal, NamedTuple

from lightning_flops.analysis.formula import Formula, Sizes
from lightning_flops.records import BatchTokens, BucketFlops, Shapes, StepSums, UnprofiledFlops

ENOUGH = 3
"""With fewer random checks nothing is said of the error."""

_MOST_SHAPES = 4096
"""More are kept as the sum of what is predicted of them."""

_MOST_NEAR = 32
_RECENT = 16
"""Random checks that correct what is logged, which follows a run that changes; all of them correct the run's sum."""

_FREE = 8
"""Steps that are counted whatever they cost."""

_SHARE = 0.005
"""Of the run's time, what counting further steps may add."""

_FIRST_GAP, _GROWTH = 4.0, 1.25
"""Steps between the first, free checks, and the growth of these gaps: six checks in about fifty steps."""

_LEAST_GAP = 0.01
"""Of the steps so far: cheap checks are no denser, so that there are some hundreds in the longest run."""

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
_How = Literal["counted", "formula", "varied", "nearest"]
"""By counts of their shape or by a formula; by either, where steps may differ; by the nearest counted shape."""


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
class _Known:
    """Counted steps of one shape."""

    kind: _Kind
    values: Counter[frozenset[tuple[tuple[str, str], int]]] = field(default_factory=Counter)
    """How often each count was found."""
    usual: BucketFlops = field(default_factory=dict)
    """The most frequent count, which is exact where others are rare, as of a first step that also logs a picture."""


@dataclass(slots=True)
class _Sum:
    """FLOPs of uncounted steps, as they are predicted."""

    flops: _Sums = field(default_factory=dict)
    useful: _Sums | None = field(default_factory=dict)
    """Without padding; None if not known of one."""
    steps: Counter[_How] = field(default_factory=Counter)
    estimated: float = 0.0
    """Model FLOPs that are estimates."""

    def add(self, flops: _Flops, how: _How, useful: BucketFlops | None, *, steps: int, times: int) -> None:
        for bucket, value in flops.items():
            self.flops[bucket] = self.flops.get(bucket, 0) + times * value
        self.useful = None if useful is None or self.useful is None else _add(self.useful, useful)
        self.steps[how] += steps
        if how in ("varied", "nearest"):
            self.estimated += times * _model(flops)

    def corrected(self, missed: Mapping[bool, _Missed]) -> _Sums:
        """The FLOPs, with what they miss on average."""
        flops = dict(self.flops)
        for how, steps in self.steps.items() if missed else ():
            if mean := missed[how == "nearest"].mean:
                _add(flops, mean, steps)
        return flops

    def unprofiled(self, missed: Mapping[bool, _Missed]) -> UnprofiledFlops:
        known = self.useful is not None and self.steps
        by_dtype: tuple[dict[str, float], dict[str, float]] = {}, {}
        for flops, sums in zip((self.corrected(missed), self.useful or {}), by_dtype, strict=True):
            for (bucket, dtype), value in flops.items():
                if bucket in _MODEL:
                    sums[dtype] = sums.get(dtype, 0) + value
        model = sum(by_dtype[0].values())
        ratio = min(1.0, self.estimated / model) if model else 0.0
        return UnprofiledFlops(by_dtype[0], by_dtype[1] if known else None, ratio)


@dataclass(slots=True)
class _Uncounted:
    """Steps that were not counted: how many of each shape, with their R and Q."""

    groups: dict[_Shape, tuple[int, int, int]] = field(default_factory=dict)
    folded: _Sum = field(default_factory=_Sum)
    """What was predicted of steps that are in no group any more."""


class StepFlops:
    """FLOPs of all steps of one run, and which steps to count to know them."""

    def __init__(self, *, seed: int = 0) -> None:
        self.schedule = CountSchedule(seed)
        self._counts: list[_Count] = []
        self._known: dict[_Shape, _Known] = {}
        self._kinds: dict[object, _Kind] = {}
        """By form; under None all."""
        self._batches: set[tuple[Shapes, bool | None]] = set()
        """Every batch of a counted step."""
        self._usual, self._slowed, self._unread = _Uncounted(), _Uncounted(), _Uncounted()
        """All steps but those that the profiler slowed down; these; the usual ones since the last reading."""
        self._missed: dict[bool, _Missed] = {}
        """Corrected by recent checks."""
        self._lower_bound = False

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
        if shape not in self._known:
            self._known[shape] = _Known(kind)
            for form, place in shape.places.items():
                self._kinds.setdefault(form, _Kind()).near.append((place, shape))
        known = self._known[shape]
        known.values[frozenset(flops.items())] += 1
        known.usual = dict(known.values.most_common(1)[0][0])
        self._counts.append(_Count(shape, flops, self.schedule.stands_for if random else 0))
        self._batches.update((batch, shape.padded) for batch in batches)
        self._lower_bound |= lower_bound
        self.schedule.counted(seconds)
        self._missed = _missed(self._differences(), latest=_RECENT)

    def ran(self, batches: Batches, tokens: Tokens, updates: int, *, seconds: float, profiled: bool = False) -> None:
        """A step ran that was not counted; a *profiled* one was slowed down, and is in no rate."""
        shape, real, squares = _shape(batches, tokens, updates)
        for into in (self._slowed,) if profiled else (self._usual, self._unread):
            steps, reals, all_squares = into.groups.get(shape, (0, 0, 0))
            into.groups[shape] = steps + 1, reals + real, all_squares + squares
            if len(into.groups) > _MOST_SHAPES:
                into.folded, into.groups = self._sum(into), {}
        if not profiled:
            self.schedule.ran(seconds)

    # ---- predictions

    def _sum(self, uncounted: _Uncounted) -> _Sum:
        """What is predicted of these steps."""
        found = deepcopy(uncounted.folded)
        for shape, group in uncounted.groups.items():
            known, useful = self._known.get(shape), None
            kind = self._kind(shape) if known is None else known.kind
            if shape.padded is not None and kind.grids:
                useful = kind.formula.useful(shape.sizes(*group))
            if known is not None and not kind.formula.by_tokens:
                how: _How = "counted" if len(known.values) == 1 and not kind.varies else "varied"
                found.add(known.usual, how, useful, steps=group[0], times=group[0])
            else:
                found.add(*self._predicted(shape, kind, shape.sizes(*group)), useful, steps=group[0], times=1)
        return found

    def _predicted(self, shape: _Shape, kind: _Kind, sizes: Sizes) -> tuple[_Flops, _How]:
        """FLOPs of steps whose shape was not counted or does not decide them, and how they are known."""
        if (predicted := kind.formula.flops(sizes)) is None:
            return self._nearest(shape, sizes.steps), "nearest"
        if shape.form not in self._kinds or not kind.formula.covers(sizes):
            return predicted, "nearest"
        return predicted, "varied" if kind.varies and not kind.formula.by_tokens else "formula"

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
                counted, elements = self._known[other].usual, steps * shape.elements
                return {bucket: value * elements / other.elements for bucket, value in counted.items()}
        return {}

    def _differences(self) -> list[_Difference]:
        """Differences of every counted step from its prediction now: a better one leaves nothing of an older one."""
        found = []
        for shape, flops, stands_for in self._counts:
            known = self._known[shape]
            kind, values = known.kind, known.values
            predicted: _Flops = flops
            if kind.formula.solved is None:  # they agree, or it would be no formula
                predicted = known.usual if values.total() > 1 else self._nearest(shape, but=shape)
            if predicted:
                off = _add(dict(flops), predicted, -1)
                found.append(_Difference(off, values.total() == 1 and predicted is not flops, stands_for))
        return found

    # ---- sums

    def reading(self) -> UnprofiledFlops | None:
        """The unprofiled steps since the last reading; None before a step was counted."""
        if not self._counts:
            return None
        unread, self._unread = self._unread, _Uncounted()
        return self._sum(unread).unprofiled(self._missed)

    def totals(self) -> StepSums | None:
        """All steps of the run; None before a step was counted."""
        if not self._counts:
            return None
        usual, slowed, differences = self._sum(self._usual), self._sum(self._slowed), self._differences()
        missed, steps = _missed(differences), usual.steps + slowed.steps
        whole: _Sums = {}
        for part in (usual.corrected(missed), slowed.corrected(missed), *(one.flops for one in self._counts)):
            _add(whole, part)
        model, squares = _model(whole), 0.0
        new = len((self._usual.groups.keys() | self._slowed.groups.keys()) - self._known.keys()) or 1
        for is_new, found in missed.items():
            number = steps["nearest"] if is_new else steps.total() - steps["nearest"]
            # All steps that are predicted by one counted shape share what it has by chance.
            shared = found.checks / min(new, found.checks) if is_new else 0
            squares += (number * found.half_width) ** 2 * (1 + shared)
        return StepSums(
            model_flops=round(model),
            hardware_flops=round(sum(-flops if key[0] == "skipped" else flops for key, flops in whole.items())),
            unprofiled=usual.unprofiled(missed),
            error=None if steps and not missed else math.sqrt(squares) / model if model else 0.0,
            steps_counted=steps["counted"] + len(self._counts),
            steps_by_formula=steps["formula"],
            steps_estimated=steps["varied"] + steps["nearest"],
            checks=sum(one.stands_for > 0 for one in differences) if steps else 0,
            lower_bound=self._lower_bound,
        )


class CountSchedule:
    """Draws checks at random, and says when a step of a new shape may be counted, within what counting may cost.

    Args:
        seed: of a generator of our own.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.stands_for = 1
        """Steps since the random check before the latest one, which is the only one of these."""
        self._steps = self._drawn_at = 0
        self._gap = _FIRST_GAP
        self._next_at = self._later(_FIRST_GAP)
        self._checks = self._learned = 0
        self._is_paid = False
        """The running step is counted, and not for free."""
        self._all_seconds = self._usual_seconds = self._added = 0.0  # added by counting, beyond the free steps
        self._usual_steps = 0
        self._costs: deque[float] = deque(maxlen=3)
        """What the latest counts added; the least is what the next one costs, as torch compiles in some."""

    def draws_check(self) -> bool:
        """Whether the step that begins now is a random check; called at the start of every step outside windows."""
        self._steps += 1
        self._is_paid = False
        if self._steps < self._next_at:
            return False
        if drawn := self._may_count():
            self._checks += 1
            self.stands_for, self._drawn_at = self._steps - self._drawn_at, self._steps
        if self._is_free:
            self._gap *= _GROWTH
            self._next_at = self._later(self._gap)
        else:
            usual = self._usual_seconds / max(1, self._usual_steps)
            to_afford = max(0.0, self._missing()) / (_SHARE * usual) if usual > 0 else 0.0
            self._next_at = self._later(max(to_afford, _FIRST_GAP, _LEAST_GAP * self._steps))
        return drawn

    def learns(self) -> bool:
        """Whether to count the running step because its shape is new; no more such steps are counted than checks."""
        learns = self._learned <= self._checks and self._may_count()
        self._learned += learns
        return learns

    def ran(self, seconds: float) -> None:
        """An unprofiled step took so long."""
        self._all_seconds += seconds
        self._usual_seconds += seconds
        self._usual_steps += 1

    def counted(self, seconds: float) -> None:
        """A step that was counted took so long, in a window or outside."""
        self._all_seconds += seconds
        if self._usual_steps:
            self._costs.append(max(0.0, seconds - self._usual_seconds / self._usual_steps))
            if self._is_paid:
                self._added += self._costs[-1]

    @property
    def _is_free(self) -> bool:
        return self._checks + self._learned < _FREE

    def _may_count(self) -> bool:
        self._is_paid = not self._is_free
        return self._is_free or self._missing() <= 0

    def _missing(self) -> float:
        """Seconds that the next count would add beyond what it may."""
        return self._added + min(self._costs, default=0.0) - _SHARE * self._all_seconds

    def _later(self, gap: float) -> int:
        return self._steps + 1 + int(gap * self._random.uniform(0.5, 1.5))


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
    if (padded := _padded(tokens)) is None:
        return _Shape(batches, updates, None), 0, 0
    real, squares = (sum([getattr(one, name) for one in tokens]) for name in ("real", "squares"))
    return _Shape(batches, updates, padded), real, squares


def _add(sums: _Sums, more: _Flops, times: float = 1) -> _Sums:
    for bucket, value in more.items():
        if value:  # whole numbers stay whole
            sums[bucket] = sums.get(bucket, 0) + times * value
    return sums


def _model(flops: _Flops) -> float:
    return sum([value for (bucket, _), value in flops.items() if bucket in _MODEL])
