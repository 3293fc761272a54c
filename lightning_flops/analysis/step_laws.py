"""Foretells what a step spends from steps that were counted, or says that nobody knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from lightning_flops.analysis.law import Law, LawFinder, Sizes
from lightning_flops.analysis.law_fit import NEEDED_CHECKS
from lightning_flops.analysis.step_keys import (
    AlikeSteps,
    Kind,
    StepKey,
    all_sizes_of,
    axes_of,
    but_for_padding,
    by_kind,
    has_several_forms,
    key_like,
    kind_of,
    sizes_alike,
    sizes_of,
    without_lengths,
)
from lightning_flops.records import HIDDEN_SHAPE, PADDING_MARK, UNKNOWN_SHAPE, BatchTokens, BucketFlops
from lightning_flops.schema.law import NO_OTHER_SIZE, NO_STEP_TIMED

_T = TypeVar("_T")


class StepSeconds(NamedTuple):
    """How many steps there were, and how long they took together."""

    steps: int
    seconds: float


_MODEL = ("forward", "backward")
"""The buckets of model FLOPs."""

_REMEMBERED = 10_000
"""Most steps whose FLOPs are kept ready."""

DEPENDS = (
    "Steps with the same batch shapes spent different FLOPs, so shapes do not tell what a step spends: the run's FLOPs "
    "and MFU are known for counted steps only."
)

HIDDEN_SIZES = (
    "Batches hold no tensors that could be seen, so nothing tells which steps are like the counted ones: the run's "
    "FLOPs and MFU are known for counted steps only."
)

BESIDE_MODEL_DEPENDS = (
    "Steps with the same batch shapes spent the same FLOPs in forward and backward, and different FLOPs beside them, "
    "in the optimizer for one: hardware FLOPs and HFU of the run are known for counted steps only."
)

OTHERS_TRAIN = (
    "Other parameters are trained than when steps were counted, so the same shapes spend other FLOPs now: from here on "
    "the run's FLOPs and MFU are known for counted steps only."
)

GIVEN_UP = (
    "The law of the FLOPs was given up: a step was counted that spends something else than the steps before it "
    "foretold. Steps that were not counted have no FLOPs and no MFU any more."
)

NOT_COUNTED = (
    "An operator that may have spent FLOPs could not be counted, so FLOPs and MFU are lower bounds; the report of a "
    "window says which."
)

MORE = (
    "Step {step} spent {flops} model FLOPs more than is foretold for its shapes. What runs in some steps only, as to "
    "draw samples, is in the time of these steps, and in their FLOPs only where they are counted: the run's FLOPs and "
    "MFU are lower bounds. In a loop of your own, profiler.outside_of_steps() leaves it out."
)


class StepLaws:
    """Foretells the FLOPs of steps: of those whose shapes were counted, and of others by a law that was checked.

    Args:
        note: gets a sentence if what was foretold turns out to be wrong.
        padding_counts: model FLOPs, too, may depend on whether a batch has padding: where only half of the scores of
            causal attention count, an operator is told to be causal only without a mask. Otherwise they are over all
            scores, whatever a mask rules out.
    """

    def __init__(self, note: Callable[[str], None], *, padding_counts: bool = False) -> None:
        self._note = note
        self._padding_counts = padding_counts
        self._exact: dict[Kind, dict[Sizes, BucketFlops]] = {}
        """FLOPs of the steps that were counted, by kind and by all their sizes."""
        self._finders: dict[Kind, LawFinder] = {}
        self._unreliable: dict[Kind, str] = {}
        """Kinds of steps of which nothing is foretold, and why, in words without a full stop."""
        self._times: dict[Kind, Counter[Sizes]] = {}
        """How many steps of each size were counted."""
        self._examples: dict[Kind, StepKey] = {}
        """One step of each kind that was counted."""
        self._by_values: set[Kind] = set()
        """Kinds of steps of which not shapes alone decide what is spent."""
        self._beside_model: set[Kind] = set()
        """Kinds of steps of which only model FLOPs are foretold: the others depend on more than shapes."""
        self._suspected: set[Kind] = set()
        """Kinds of steps of which nothing is foretold until another one is counted whole."""
        self._samples: list[tuple[StepKey, BucketFlops, bool]] = []
        self._samples_are_whole: bool | None = None
        self._ready: dict[StepKey, Foretold | None] = {}
        self._given_up = False
        self.confirmed = 0
        """Steps that were counted and had spent what was foretold of them, in every bucket."""

    @property
    def believes_samples(self) -> bool | None:
        """Whether steps that are counted outside of a window are known to be counted whole; None: not yet known."""
        return self._samples_are_whole

    @property
    def has_counted(self) -> bool:
        """Whether a step was counted."""
        return bool(self._exact)

    @property
    def depends_beside_model(self) -> bool:
        """Whether steps of the same shapes spent different FLOPs beside forward and backward."""
        return bool(self._beside_model)

    @property
    def wants_check(self) -> bool:
        """Whether the next step that is counted whole decides what can be foretold."""
        return bool(self._suspected)

    def is_settled(self, key: StepKey) -> bool:
        """Whether counting a step of this *key* would tell nothing new, if what is foretold is true."""
        kind = kind_of(key)
        if self._given_up or kind in self._unreliable:
            return True
        known = self.known(key)
        return known is not None and (known.whole or kind in self._beside_model)

    def known(self, key: StepKey) -> Foretold | None:
        """What is known of what a step spends; None where nobody knows even its model FLOPs."""
        known = self._ready.get(key)
        if known is not None or key in self._ready:
            return known
        if len(self._ready) >= _REMEMBERED:
            self._ready.clear()
        known = self._ready[key] = self._foretell(key)
        return known

    def beyond(self, key: StepKey, flops: BucketFlops) -> int:
        """How many model FLOPs more than foretold a step has spent, given all its *flops*.

        0 if nothing is foretold, or if it has spent less of something.
        """
        foretold = self.known(key)
        if foretold is None:
            return 0
        buckets = {*flops, *foretold.flops} if foretold.whole else {*_of_model(flops), *_of_model(foretold.flops)}
        more = {one: flops.get(one, 0) - foretold.flops.get(one, 0) for one in buckets}
        if min(more.values(), default=0) < 0:
            return 0
        return sum(value for one, value in more.items() if one[0] in _MODEL)

    def add(self, sums: FlopSums, keys: Sequence[StepKey], numbers: Sequence[int]) -> int:
        """Add to *sums* what steps have spent. Returns how many of them nobody knows.

        Args:
            sums: of model and hardware FLOPs.
            keys: of the steps; a key may stand there several times.
            numbers: so many steps there are of each.
        """
        return sum([self.add_alike(sums, alike, of_each) for alike, of_each in by_kind(keys, numbers)])

    def add_alike(self, sums: FlopSums, steps: AlikeSteps, numbers: Sequence[int]) -> int:
        """As ``add``, for *steps* of one kind."""
        before = sums.steps
        for place, key in self._add_by_law(sums, steps, numbers):
            known = self.known(key)
            if known is not None:
                sums.add(known, steps=numbers[place])
        return sum(numbers) - (sums.steps - before)

    def _add_by_law(self, sums: FlopSums, steps: AlikeSteps, numbers: Sequence[int]) -> Iterable[tuple[int, StepKey]]:
        """Add to *sums* the FLOPs of those *steps* for which a law gives them.

        No function of ours is called for each: lengths may be ever new.

        Returns:
            Places and keys of the others, whose FLOPs may be known from counting.
        """
        example = steps.example
        if steps.number == 1:  # what it spends is remembered
            return ((0, example),)
        kind = kind_of(example)
        exact = self._exact.get(kind, {})
        finder = self._finder_of(kind)
        if isinstance(finder, str) or finder.law is None:  # only those are known that were counted themselves
            return [(place, key_like(example, sizes)) for place, sizes in enumerate(steps.rows()) if sizes in exact]
        flops, outside = finder.add_up(steps.columns, numbers)
        by_law = sum(numbers) - sum([numbers[place] for place in outside])
        sums.add_all(flops, steps=by_law, whole=kind not in self._beside_model)
        if not outside:
            return ()
        # The law may know those among them that have padding as if they had none, and the other way round.
        return [
            (place, key_like(example, sizes))
            for place, sizes in enumerate(steps.rows())
            if place in outside and (sizes in exact or PADDING_MARK in sizes)
        ]

    def foretells_kinds(self, keys: Iterable[StepKey]) -> bool:
        """Whether something is foretold of steps of the kinds of some of these *keys*, or may be after a check."""
        return not self._given_up and any(kind_of(key) not in self._unreliable for key in keys)

    def _foretell(self, key: StepKey) -> Foretold | None:
        kind = kind_of(key)
        if self._given_up or kind in self._unreliable or kind in self._suspected:
            return None
        finder = self._finders.get(kind)
        sizes = all_sizes_of(key)
        flops = self._exact.get(kind, {}).get(sizes)
        if flops is not None and kind in self._by_values and self._times[kind][sizes] <= NEEDED_CHECKS:
            flops = None  # one step of its shapes may have spent something else than another
        if flops is None and finder is not None:
            flops = finder.flops(sizes_of(key))
        if flops is not None:
            return Foretold(flops, whole=kind not in self._beside_model)
        if finder is not None and not self._padding_counts:
            for alike in but_for_padding(key):
                flops = finder.flops(sizes_of(alike), buckets=_MODEL)
                if flops is not None:
                    return Foretold(flops, whole=False)
        return None

    def report(self, seconds: Mapping[StepKey, StepSeconds]) -> RunLaw | str:
        """The law of the steps that most time was spent on, and its steps by length; in words, why there is none."""
        times: dict[Kind, float] = {}
        for key, its in seconds.items():
            kind = kind_of(key)
            times[kind] = times.get(kind, 0.0) + its.seconds
        if not times:
            return NO_STEP_TIMED
        kind = max(times, key=lambda one: times[one])
        finder = self._finder_of(kind)
        if isinstance(finder, str):
            return finder
        if finder.law is None:
            return finder.why_no_law
        if not finder.varies:
            return NO_OTHER_SIZE
        length = next((place for place, one in enumerate(finder.variables) if one.is_size), None)
        steps = []
        for key, its in seconds.items():
            known = self.known(key) if its.steps and kind_of(key) == kind else None
            values = None if known is None else _first(map(finder.values_of, sizes_alike(key)))
            if known is not None and values and length is not None:
                sums = FlopSums()
                sums.add(known, steps=its.steps)
                steps.append((max(one[length] for one in values), its, sums))
        return RunLaw(finder=finder, law=finder.law, steps=steps)

    def _finder_of(self, kind: Kind) -> LawFinder | str:
        """What looks for the law of steps of this *kind*; in words, why nothing does."""
        if self._given_up:
            return "other parameters are trained than when steps were counted"
        if kind in self._unreliable:
            return self._unreliable[kind]
        if kind in self._suspected:
            return (
                "a step that was counted from its batch on spent something else than was foretold, and no step that "
                "was counted whole has told why"
            )
        if has_several_forms(kind):
            return "the batches of a step are of different forms"
        return self._finders.get(kind, "no step of this form was counted, or its shapes are hidden")

    def without_padding(self, keys: Mapping[StepKey, int], tokens: BatchTokens) -> dict[str, int] | str:
        """By dtype, the model FLOPs that these steps would have spent on their tokens alone, without padding.

        The sum over their sequences of the law for one sample of its length. Where there is no such law, or its length
        is not that of the tokens, why that is, in words without a full stop.

        Args:
            keys: so many steps of each key.
            tokens: of all of them.
        """
        if tokens.processed is None or tokens.real is None or tokens.sequences is None:
            return "not every batch tells which of its tokens are padding"
        steps_of: Counter[Kind] = Counter()
        for key, steps in keys.items():
            steps_of[kind_of(key)] += steps
        if not steps_of:
            return "the steps are not known one by one"
        main = max(steps_of, key=lambda kind: steps_of[kind])
        finder = self._finder_of(main)
        if isinstance(finder, str):
            return finder
        if tokens.real == tokens.processed and finder.goes_by_sequences:  # nothing was spent on padding, which is none
            sums = FlopSums()
            unknown = self.add(sums, list(keys), list(keys.values()))
            return "a step's FLOPs are not known" if unknown else sums.model_by_dtype
        one = finder.per_sequence()
        if isinstance(one, str):
            return one
        processed = 0
        for key, steps in keys.items():
            if kind_of(key) != main and not self._batches_agree(finder, main, key):
                return "the run had steps of several forms, and one law does not hold for all"
            by_shape = _first(finder.tokens_by_shape(sizes, one) for sizes in sizes_alike(key))
            if by_shape is None:
                return "a step had sizes that the law of the FLOPs does not cover"
            processed += steps * by_shape
        if processed != tokens.processed:
            return "the size that FLOPs depend on is not the length of the token ids"
        return one.flops(tokens) or "the law gives no whole number of FLOPs for these lengths"

    def _batches_agree(self, finder: LawFinder, kind: Kind, key: StepKey) -> bool:
        """Whether the law of steps of *kind* gives what a step of another kind is known to spend, batch by batch.

        So it is with an epoch's last step, which has fewer batches.
        """
        if {*kind[0], *kind_of(key)[0]} != {kind[0][0]}:
            return False
        # What an optimizer spends once in a step is no batch's, so it is not asked for.
        known = self.known(key)
        by_law = _first(finder.flops(sizes, buckets=_MODEL) for sizes in sizes_alike(key))
        return known is not None and by_law == _of_model(known.flops)

    def counted(self, key: StepKey, flops: BucketFlops, *, by_values: bool = False) -> None:
        """A step was counted from its first moment to its last.

        Args:
            key: what it is known by.
            flops: that it has spent.
            by_values: numbers in its tensors have decided that, and not shapes alone.
        """
        flops = _but_zeros(flops)
        kind = kind_of(key)
        if by_values:
            self._by_values.add(kind)
            self._ready.clear()
        if any(HIDDEN_SHAPE in shapes for shapes in key[0]):
            self._unreliable.setdefault(kind, "batches hold no tensors that could be seen")
            self._note(HIDDEN_SIZES)
        self.confirmed += self._foretells(key, flops)
        self._learn(key, flops)

    def _learn(self, key: StepKey, flops: BucketFlops) -> None:
        """A step of this *key* has spent *flops*."""
        flops, kind = _but_zeros(flops), kind_of(key)
        self._ready.clear()
        if kind in self._suspected:
            self._suspected.discard(kind)
            if self.known(key) is None:  # this step does not decide
                self._suspected.add(kind)
            self._ready.clear()
        sizes = all_sizes_of(key)
        self._examples.setdefault(kind, key)
        self._times.setdefault(kind, Counter())[sizes] += 1
        known = self._exact.setdefault(kind, {}).setdefault(sizes, flops)
        if known != flops:
            if _of_model(known) == _of_model(flops):
                self._doubt_beside_model(kind)
            else:
                self._doubt(kind)
        elif not has_several_forms(kind) and not any(shape == UNKNOWN_SHAPE for shapes in key[0] for shape in shapes):
            finder = self._finders.get(kind)
            if finder is None:
                finder = self._finders[kind] = LawFinder(axes_of(key))
            if not finder.add(sizes_of(key), flops):
                self._note(GIVEN_UP)

    def _foretells(self, key: StepKey, flops: BucketFlops) -> bool:
        known = self.known(key)
        return known is not None and known.whole and known.flops == flops

    def sampled(self, key: StepKey, flops: BucketFlops, *, by_values: bool = False) -> None:
        """A step was counted from the moment on at which its shapes were known; the arguments are as for ``counted``.

        What it may have computed before is missing. So samples are believed only when one of them has shown what was
        foretold. If one shows something else, nothing is foretold until a step that is counted whole tells why.
        """
        if self._samples_are_whole:
            self.counted(key, flops, by_values=by_values)
            return
        if self._samples_are_whole is False:
            return
        flops = _but_zeros(flops)
        kind, foretold = kind_of(key), self.known(key)
        model_alone = kind in self._beside_model
        if foretold is None or not (foretold.whole or model_alone):
            self._samples.append((key, flops, by_values))
        elif foretold.flops == flops or (model_alone and _of_model(foretold.flops) == _of_model(flops)):
            self._samples_are_whole = True
            self.confirmed += self._foretells(key, flops)
            for sampled, spent, decided in self._samples:
                self.counted(sampled, spent, by_values=decided)
        else:
            self._samples_are_whole = False
            self._samples.clear()
            self._ready.clear()
            self._suspected.add(kind)

    def trust_shapes(self, are_idle: Callable[[StepKey], bool]) -> None:
        """One counted step tells of its shapes, where numbers in tensors do not decide what it spends.

        Args:
            are_idle: says so, given a step of a kind.
        """
        idle = {kind for kind in self._by_values if are_idle(self._examples[kind])}
        if idle:
            self._by_values -= idle
            self._ready.clear()

    def drop_lengths(self) -> None:
        """What steps spend does not depend on the lengths of sequences: the counted ones are known without them."""
        exact, times, examples = self._exact, self._times, self._examples
        self._exact, self._times, self._examples = {}, {}, {}
        self._finders.clear()
        self._by_values.clear()
        self._samples = [(without_lengths(key), flops, by_values) for key, flops, by_values in self._samples]
        for kind, by_sizes in exact.items():
            bare_kind = kind_of(without_lengths(examples[kind]))
            if kind in self._unreliable:
                self._unreliable.setdefault(bare_kind, self._unreliable[kind])
            for kinds in (self._beside_model, self._suspected):
                if kind in kinds:
                    kinds.add(bare_kind)
            for sizes, flops in by_sizes.items():
                bare = without_lengths(key_like(examples[kind], sizes))
                for _ in range(times[kind][sizes]):
                    self._learn(bare, flops)
        self._ready.clear()

    def doubt(self, key: StepKey) -> None:
        """Steps like this one are known to spend different FLOPs with the same shapes."""
        self._doubt(kind_of(key))

    def foretell_nothing(self, sentence: str) -> None:
        """Nothing is foretold any more, because of what *sentence* says."""
        self._ready.clear()
        self._given_up = True
        self._note(sentence)

    def _doubt(self, kind: Kind) -> None:
        self._ready.clear()
        self._unreliable.setdefault(kind, "steps with the same batch shapes spent different FLOPs")
        self._note(DEPENDS)

    def _doubt_beside_model(self, kind: Kind) -> None:
        self._ready.clear()
        self._beside_model.add(kind)
        self._note(BESIDE_MODEL_DEPENDS)


class Foretold(NamedTuple):
    """What is known of what a step spends."""

    flops: BucketFlops
    whole: bool
    """Every bucket is known. Otherwise model FLOPs alone are known, for one of two reasons. No counted step was like
    this one in its padding, which may decide what kernels skip. Or what such steps spend beside model FLOPs depends on
    more than their shapes."""


@dataclass(slots=True, kw_only=True)
class FlopSums:
    """FLOPs of several steps."""

    steps: int = 0
    model: int = 0
    """Forward and backward."""
    hardware: int | None = 0
    """All that kernels execute; None if it is not known of one step."""
    model_by_dtype: dict[str, int] = field(default_factory=dict)

    def add(self, known: Foretold, *, steps: int = 1) -> None:
        """So many *steps* have each spent what is *known*."""
        self.add_all({one: steps * amount for one, amount in known.flops.items()}, steps=steps, whole=known.whole)

    def add_all(self, flops: BucketFlops, *, steps: int, whole: bool) -> None:
        """So many *steps* have spent *flops* together; *whole* as in ``Foretold``."""
        self.steps += steps
        hardware = 0
        for (bucket, dtype), amount in flops.items():
            if bucket == "causal_skipped":
                hardware -= amount
                continue
            hardware += amount
            if bucket in _MODEL:
                self.model += amount
                self.model_by_dtype[dtype] = self.model_by_dtype.get(dtype, 0) + amount
        if steps:
            self.hardware = self.hardware + hardware if whole and self.hardware is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLaw:
    """The law of a run's steps."""

    finder: LawFinder
    law: Law
    steps: Sequence[tuple[int, StepSeconds, FlopSums]]
    """Steps of each length with their times and FLOPs; of several batches the longest counts."""


def _but_zeros(flops: BucketFlops) -> dict[tuple[str, str], int]:
    return {one: value for one, value in flops.items() if value}


def _of_model(flops: BucketFlops) -> dict[tuple[str, str], int]:
    return {one: value for one, value in flops.items() if value and one[0] in _MODEL}


def _first(found: Iterable[_T | None]) -> _T | None:
    """The first that is not None."""
    return next((one for one in found if one is not None), None)
