"""FLOPs of a run's steps: of a counted shape, by an exact formula, or an estimate whose error random checks measure."""

from __future__ import annotations

import math
import os
import random
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from operator import mul, sub
from typing import Literal, NamedTuple

from lightning_flops.analysis.formula import Formula, Sizes
from lightning_flops.records import BatchTokens, BucketFlops, RunFlops, Shapes

_ENOUGH = 3  # with fewer random checks nothing is said of the error
_MOST_SHAPES = 4096  # more are kept as the sum of what is predicted of them
_MOST_NEAR = 32  # the latest counted shapes, among which the nearest one is sought
_RECENT = 16  # latest random checks, which correct what is logged, as runs change; all of them correct the run's sum
_FREE = 8  # steps that are counted whatever they cost
_SHARE = 0.005  # of the run's time, what counting further steps may add
_FIRST_GAP, _GROWTH = 4.0, 1.25  # steps between the first checks, and its growth: six checks in about fifty steps
_LEAST_GAP = 0.01  # of the steps so far: cheap checks are no denser, so that there are some hundreds in the longest run
_MODEL = ("forward", "backward")

Batches = tuple[Shapes, ...]  # shapes of the tensors of each batch of a step
Tokens = tuple[BatchTokens | None, ...]  # of each batch of a step; None where one does not show them
_Flops = Mapping[tuple[str, str], float]  # by bucket and dtype
_Sums = dict[tuple[str, str], float]
_Counts = Counter[frozenset[tuple[tuple[str, str], int]]]  # how often each count of a shape was found
# By counts of their shape or by a formula; by either, where steps may differ; by the nearest counted shape.
_How = Literal["counted", "formula", "varied", "nearest"]


class UnprofiledFlops(NamedTuple):
    """Model FLOPs of steps that ran unprofiled: what rates are of."""

    by_dtype: Mapping[str, float]
    useful_by_dtype: Mapping[str, float] | None  # what they would be without padding; None if not known
    estimated_ratio: float  # share of them that is an estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums(RunFlops):
    """The same, and those of the steps that no profiler slowed down."""

    unprofiled: UnprofiledFlops


class _Shape(NamedTuple):
    """What steps have in common that should have the same FLOPs."""

    batches: Batches
    updates: int
    padded: bool | None  # kernels may skip work where no token is padding; None: not known

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


class _Missed(NamedTuple):
    """What predictions miss of a step."""

    mean: _Flops
    half_width: float  # half of the 95% interval of the mean of model FLOPs
    checks: int


@dataclass(slots=True)
class _Kind:
    """Counted steps of one form."""

    formula: Formula = field(default_factory=Formula)
    near: deque[tuple[tuple[float, ...], _Shape]] = field(default_factory=lambda: deque(maxlen=_MOST_NEAR))
    varies: bool = False  # values in tensors decided sizes, so another step of the same shape may cost something else
    grids: bool = True  # the tokens of each batch are what the axes of a tensor make


@dataclass(slots=True)
class _Steps:
    """Steps that were not counted."""

    groups: dict[_Shape, tuple[int, int, int]] = field(default_factory=dict)  # how many of each shape, their R and Q
    # Of those that are in no group any more, what was predicted.
    flops: _Sums = field(default_factory=dict)
    useful: _Sums | None = field(default_factory=dict)  # without padding; None if not known of one
    number: Counter[_How] = field(default_factory=Counter)
    estimated: float = 0.0  # model FLOPs that are estimates

    def corrected(self, missed: Mapping[bool, _Missed]) -> _Sums:
        """The FLOPs, with what they miss on average."""
        flops = dict(self.flops)
        for how, steps in self.number.items() if missed else ():
            _add(flops, missed[how == "nearest"].mean, steps)
        return flops

    def unprofiled(self, missed: Mapping[bool, _Missed]) -> UnprofiledFlops:
        by_dtype, useful = (
            {dtype: _model({key: value for key, value in flops.items() if key[1] == dtype}) for _, dtype in flops}
            for flops in (self.corrected(missed), self.useful or {})
        )
        model = sum(by_dtype.values())
        ratio = min(1.0, self.estimated / model) if model else 0.0
        return UnprofiledFlops(by_dtype, useful if self.useful is not None and self.number else None, ratio)


class StepFlops:
    """FLOPs of all steps of one run, and which steps to count to know them."""

    def __init__(self, *, seed: int = 0) -> None:
        self.schedule = CountSchedule(seed)
        # Every counted step, and the steps that it is the only random check of; 0: it was not drawn at random.
        self._counts: list[tuple[_Shape, BucketFlops, int]] = []
        self._known: dict[_Shape, _Counts] = {}
        self._kinds: defaultdict[object, _Kind] = defaultdict(_Kind)  # by form; under None all
        self._batches: set[tuple[Shapes, bool | None]] = set()  # of counted steps
        # All steps but those that the profiler slowed down; these; the usual ones since the last reading.
        self._usual, self._slowed, self._unread = _Steps(), _Steps(), _Steps()
        self._recent: dict[bool, _Missed] = {}
        self._lower_bound = False

    def wants(self, batch: Shapes, tokens: BatchTokens | None) -> bool:
        """Whether to count the step that begins with this batch: its shapes are new, and the run can afford it."""
        shape = _shape((batch,), (tokens,), 1)[0]
        is_known = (batch, shape.padded) in self._batches or self._kinds[shape.form].formula.covers(
            Sizes((_flat(batch),))
        )
        return not is_known and self.schedule.learns()

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
        kind = self._kinds[shape.form]
        kind.formula.add(shape.sizes(1, *tokens_of_it), flops)
        kind.varies |= data_dependent
        kind.grids &= shape.padded is not None and all(
            any(len(shape) == 2 and math.prod(shape) == one.processed for shape in batch)
            for batch, one in zip(batches, tokens, strict=True)
            if one is not None
        )
        if shape not in self._known:
            for form, place in shape.places.items():
                self._kinds[form].near.append((place, shape))
        self._known.setdefault(shape, Counter())[frozenset(flops.items())] += 1
        self._counts.append((shape, flops, self.schedule.stands_for if random else 0))
        self._batches.update((batch, shape.padded) for batch in batches)
        self._lower_bound |= lower_bound
        self.schedule.took(seconds, uncounted=0)
        self._recent = self._missed(_RECENT)

    def ran(self, batches: Batches, tokens: Tokens, updates: int, *, seconds: float, profiled: bool = False) -> None:
        """A step ran that was not counted; a *profiled* one was slowed down, and is in no rate."""
        shape, real, squares = _shape(batches, tokens, updates)
        for into in (self._slowed,) if profiled else (self._usual, self._unread):
            steps, reals, all_squares = into.groups.get(shape, (0, 0, 0))
            into.groups[shape] = steps + 1, reals + real, all_squares + squares
            if len(into.groups) > _MOST_SHAPES:
                self._predict(into)
        if not profiled:
            self.schedule.took(seconds, uncounted=1)

    # ---- predictions

    def by_formula(self, batches: Batches, tokens: Tokens, updates: int) -> tuple[BucketFlops | None, bool]:
        """FLOPs of one step by the formula of its form, None where none gives them; and whether it is an estimate."""
        shape, *tokens_of_it = _shape(batches, tokens, updates)
        sizes, kind = shape.sizes(1, *tokens_of_it), self._kinds[shape.form]
        holds = kind.formula.by_tokens or not kind.varies
        return kind.formula.flops(sizes) if holds else None, not kind.formula.covers(sizes)

    def _predict(self, steps: _Steps) -> _Steps:
        """Puts what is predicted in the place of the groups of these *steps*."""
        for shape, group in steps.groups.items():
            sizes, kind = shape.sizes(*group), self._kinds[shape.form]
            flops, how = self._predicted(shape, kind, sizes)
            _add(steps.flops, flops)
            useful = kind.formula.useful(sizes) if kind.grids else None
            steps.useful = None if useful is None or steps.useful is None else _add(steps.useful, useful)
            steps.number[how] += sizes.steps
            steps.estimated += _model(flops) if how in ("varied", "nearest") else 0
        steps.groups = {}
        return steps

    def _predicted(self, shape: _Shape, kind: _Kind, sizes: Sizes) -> tuple[_Flops, _How]:
        """FLOPs of the steps of one shape, and how they are known."""
        formula = kind.formula
        if (counts := self._known.get(shape)) is not None and not formula.by_tokens:
            agree = len(counts) == 1 and not kind.varies
            how: _How = "varied" if not agree else "counted" if formula.solved is None else "formula"
            return _add({}, _usual(counts), sizes.steps), how
        if (predicted := formula.flops(sizes)) is None:
            return self._nearest(shape, sizes.steps), "nearest"
        if not formula.covers(sizes):
            return predicted, "nearest"
        return predicted, "varied" if kind.varies and not formula.by_tokens else "formula"

    def _nearest(self, shape: _Shape, steps: int = 1, *, but: _Shape | None = None) -> _Flops:
        """FLOPs of the counted shape whose sizes are nearest, scaled by its elements; empty if there is no other."""
        for form, place in shape.places.items():
            if near := [one for one in self._kinds[form].near if one[1] != but]:
                _, other = min(near, key=lambda one: sum(map(abs, map(sub, one[0], place))))
                return _add({}, _usual(self._known[other]), steps * shape.elements / other.elements)
        return {}

    def _missed(self, latest: int = 0) -> dict[bool, _Missed]:
        """What predictions miss, of counted shapes and of new ones (True); empty with too few random checks."""
        checks, found = list(self._checks()), dict[bool, _Missed]()
        drawn = [one for one in checks if one[2]]
        for is_new in (False, True) if len(drawn) >= _ENOUGH else ():
            alike = [one for one in checks if one[1] == is_new]
            # The cost of an uncounted shape is known as well from shapes that were counted because they were new.
            used = [one for one in alike if is_new or one[2]]
            used = (used if len(used) >= _ENOUGH else drawn)[-latest:]
            weights, mean = [1 if is_new else stands_for for *_, stands_for in used], _Sums()
            for (off, *_), weight in zip(used, weights, strict=True):
                _add(mean, off, weight)
            width = _half_width([_model(one[0]) for one in used], weights, [_model(one[0]) for one in alike])
            found[is_new] = _Missed({key: one / sum(weights) for key, one in mean.items()}, width, len(used))
        return found

    def _checks(self) -> Iterator[tuple[_Flops, bool, int]]:
        """What each counted step has beyond its prediction of now, whether its shape is new, what it stands for."""
        for shape, flops, stands_for in self._counts:
            counts, is_exact = self._known[shape], self._kinds[shape.form].formula.solved is not None
            is_new = counts.total() == 1 and not is_exact
            predicted: _Flops = self._nearest(shape, but=shape) if is_new else _usual(counts)
            if predicted:
                yield {} if is_exact else _add(dict(flops), predicted, -1), is_new, stands_for

    # ---- sums

    def reading(self) -> UnprofiledFlops | None:
        """The unprofiled steps since the last reading; None before a step was counted."""
        if not self._counts:
            return None
        unread, self._unread = self._unread, _Steps()
        return self._predict(unread).unprofiled(self._recent)

    def totals(self) -> StepSums | None:
        """All steps of the run; None before a step was counted."""
        if not self._counts:
            return None
        usual, slowed = (self._predict(deepcopy(steps)) for steps in (self._usual, self._slowed))
        missed, number, whole, squares = self._missed(), usual.number + slowed.number, _Sums(), 0.0
        for part in (usual.corrected(missed), slowed.corrected(missed), *(flops for _, flops, _ in self._counts)):
            _add(whole, part)
        new = len((self._usual.groups.keys() | self._slowed.groups.keys()) - self._known.keys()) or 1
        for is_new, found in missed.items():
            steps = number["nearest"] if is_new else number.total() - number["nearest"]
            # All steps that are predicted by one counted shape share what it has by chance.
            shared = found.checks / min(new, found.checks) if is_new else 0
            squares += (steps * found.half_width) ** 2 * (1 + shared)
        model = _model(whole)
        is_covered = number.total() == number["formula"]  # which is exact; a step of a counted shape may still differ
        return StepSums(
            model_flops=round(model),
            hardware_flops=round(sum(whole.values())),
            unprofiled=usual.unprofiled(missed),
            flops_error=0.0 if is_covered else math.sqrt(squares) / model if squares and model else None,
            steps_counted=number["counted"] + len(self._counts),
            steps_by_formula=number["formula"],
            steps_estimated=number["varied"] + number["nearest"],
            checks=sum(stands_for > 0 for *_, stands_for in self._counts) if number else 0,
            lower_bound=self._lower_bound,
            checks_seed=self.schedule.seed,
        )


def seed_of_run(world_size: int) -> int:
    """A seed that differs from run to run, so that no rhythm of a program's steps meets the same checks each time.

    The ranks of a job count the same steps, as a step takes as long as the slowest of them: their seed is made of what
    their launcher has set for all of them.
    """
    if world_size == 1:
        return int.from_bytes(os.urandom(4), "little")
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_ADDR", "MASTER_PORT")
    return zlib.crc32("|".join(os.environ.get(name, "") for name in names).encode())


class CountSchedule:
    """Draws checks at random, and says when a step of a new shape may be counted, within what counting may cost."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._random = random.Random(seed)  # the program's own generator is left alone
        self.stands_for = 1  # steps since the random check before the latest one, which is the only one of these
        self._steps = self._drawn_at = self._checks = self._learned = 0
        self._next_at = self._later()
        self._is_paid = False  # the running step is counted, and not for free
        self._all_seconds = self._usual_seconds = self._added = 0.0  # added by counting, beyond the free steps
        self._usual_steps = 0
        # What the latest counts added; the least is what the next one costs, as torch compiles in some.
        self._costs: deque[float] = deque(maxlen=3)

    def draws_check(self) -> bool:
        """Whether the step that begins now is a random check; called at the start of every step outside windows."""
        self._steps += 1
        self._is_paid = False
        if self._steps < self._next_at:
            return False
        if drawn := self._may_count():
            self._checks += 1
            self.stands_for, self._drawn_at = self._steps - self._drawn_at, self._steps
        self._next_at = self._later()
        return drawn

    def learns(self) -> bool:
        """Whether to count the running step because its shape is new; no more such steps are counted than checks."""
        learns = self._learned <= self._checks and self._may_count()
        self._learned += learns
        return learns

    def took(self, seconds: float, *, uncounted: int) -> None:
        """So many unprofiled steps took so long; 0: one that was counted, in a window or outside."""
        self._all_seconds += seconds
        if uncounted:
            self._usual_seconds += seconds
            self._usual_steps += uncounted
        elif self._usual_steps:
            self._costs.append(max(0.0, seconds - self._usual_seconds / self._usual_steps))
            self._added += self._costs[-1] if self._is_paid else 0.0

    def _may_count(self) -> bool:
        self._is_paid = self._checks + self._learned >= _FREE
        return not self._is_paid or self._added + min(self._costs, default=0.0) <= _SHARE * self._all_seconds

    def _later(self) -> int:
        gap = max(_FIRST_GAP * _GROWTH ** min(self._checks, _FREE), _LEAST_GAP * self._steps)
        return self._steps + 1 + int(gap * self._random.uniform(0.5, 1.5))


def _half_width(checks: Sequence[float], weights: Sequence[int], seen: Sequence[float]) -> float:
    """Half of the 95% interval of the mean of *checks*; all differences that were *seen* show the spread.

    Few draws of something rare, or of something that takes turns, are often all alike. So the spread is that of one
    draw more, at the farther end of what was seen; "plus four" intervals of proportions do much the same.
    """
    number, ends = len(checks), (*checks, *seen, 0.0)
    mean = math.fsum(map(mul, checks, weights)) / sum(weights)
    squares = math.fsum((one - mean) ** 2 for one in checks) + max((one(ends) - mean) ** 2 for one in (min, max))
    freedom = number - 1  # of Student's t of 95%, two-sided, as E. Cornish and R. Fisher expand it
    t = 1.96 + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3
    return t * math.sqrt(squares / number) * math.hypot(*weights) / sum(weights)


def _flat(batch: Shapes) -> tuple[int, ...]:
    return sum(batch, ())


def _shape(batches: Batches, tokens: Tokens, updates: int) -> tuple[_Shape, int, int]:
    """The shape of a step, its R and its Q; 0 where a batch does not show its tokens."""
    known = [one for one in tokens if one is not None and None not in one]
    if len(known) < len(tokens) or not known:
        return _Shape(batches, updates, None), 0, 0
    processed, real, squares = (sum(column) for column in zip(*known, strict=True))
    return _Shape(batches, updates, real < processed), real, squares


def _usual(counts: _Counts) -> BucketFlops:
    """The most frequent count, which is exact where others are rare, as of a first step that also logs a picture."""
    return dict(counts.most_common(1)[0][0])


def _add(sums: _Sums, more: _Flops, times: float = 1) -> _Sums:
    for bucket, value in more.items():
        if value:  # whole numbers stay whole
            sums[bucket] = sums.get(bucket, 0) + times * value
    return sums


def _model(flops: _Flops) -> float:
    return sum([value for (bucket, _), value in flops.items() if bucket in _MODEL])
