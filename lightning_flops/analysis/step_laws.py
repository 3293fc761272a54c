"""What each step of a run spends: counted, or foretold from steps that were counted, or not known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from typing import NamedTuple, TypeVar

from lightning_flops.analysis.law import FLAG, Column, Law, LawFinder, Sizes
from lightning_flops.records import (
    PADDING_MARK,
    UNKNOWN_SHAPE,
    WITH_PADDING,
    WITHOUT_PADDING,
    BatchTokens,
    BucketFlops,
)
from lightning_flops.schema.law import NO_OTHER_SIZE, NO_STEP_TIMED


class StepSeconds(NamedTuple):
    """How many steps there were, and how long they took together."""

    steps: int
    seconds: float


StepKey = tuple[tuple[tuple[tuple[int, ...], ...], ...], int]
"""The shapes of the tensors of each batch of a step, with what else tells of the batch (``known_by``), and the step's
optimizer attempts."""

_T = TypeVar("_T")
_Number = TypeVar("_Number", int, float)

_Kind = tuple[tuple[tuple[int, ...], ...], int]

_MODEL = ("forward", "backward")
"""The buckets of model FLOPs."""

_REMEMBERED = 10_000
"""Most steps whose FLOPs are kept ready."""

DEPENDS = (
    "Steps with the same batch shapes spent different FLOPs, so shapes do not tell what a step spends: the run's FLOPs "
    "and MFU are known for counted steps only."
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
        self._exact: dict[StepKey, BucketFlops] = {}
        self._finders: dict[_Kind, LawFinder] = {}
        self._unreliable: dict[_Kind, str] = {}
        """Kinds of steps of which nothing is foretold, and why, in words without a full stop."""
        self._beside_model: set[_Kind] = set()
        """Kinds of steps of which only model FLOPs are foretold: the others depend on more than shapes."""
        self._suspected: set[_Kind] = set()
        """Kinds of steps of which nothing is foretold until another one is counted whole."""
        self._samples: list[tuple[StepKey, BucketFlops]] = []
        self._samples_are_whole: bool | None = None
        self._ready: dict[StepKey, Foretold | None] = {}
        self._given_up = False

    @property
    def believes_samples(self) -> bool | None:
        """Whether steps that are counted outside of a window are known to be counted whole; None: not yet known."""
        return self._samples_are_whole

    def finders(self) -> Iterable[LawFinder]:
        """The laws, one for each kind of step."""
        return self._finders.values()

    @property
    def depends_beside_model(self) -> bool:
        """Whether steps of the same shapes spent different FLOPs beside forward and backward."""
        return bool(self._beside_model)

    @property
    def wants_check(self) -> bool:
        """Whether the next step that is counted whole decides what can be foretold."""
        return bool(self._suspected)

    def foretell(self, key: StepKey) -> BucketFlops | None:
        """All that a step spends; None where nobody knows."""
        known = self.known(key)
        return None if known is None or not known.whole else known.flops

    def is_settled(self, key: StepKey) -> bool:
        """Whether counting a step of this *key* would tell nothing new, if what is foretold is true."""
        kind = _kind_of(key)
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
        """How many more model FLOPs than foretold a step has spent that spent *flops*.

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
        unknown = 0
        # What the steps of one key spend is remembered; those of ever new keys are added up together.
        rest = self._add_by_law(sums, keys, numbers) if len(keys) > 1 else zip(keys, numbers, strict=True)
        for key, number in rest:
            known = self.known(key)
            if known is None:
                unknown += number
            else:
                sums.add(known, steps=number)
        return unknown

    def _add_by_law(
        self, sums: FlopSums, keys: Sequence[StepKey], numbers: Sequence[int]
    ) -> Iterable[tuple[StepKey, int]]:
        """Add to *sums* what steps have spent of which a law says it; returns the others, and how many of each."""
        rest: list[tuple[StepKey, int]] = []
        for alike, of_each, columns in _by_kind(keys, numbers):
            kind = _kind_of(alike[0])
            finder = self._finder_of(kind)
            if isinstance(finder, str) or finder.law is None:
                rest += zip(alike, of_each, strict=True)
                continue
            # It says of each step that was counted what the step has spent.
            flops, outside = finder.add_up(columns, of_each)
            steps = sum(of_each)
            for place in outside:
                steps -= of_each[place]
                rest.append((alike[place], of_each[place]))
            sums.add_all(flops, steps=steps, whole=kind not in self._beside_model)
        return rest

    def foretells_kinds(self, keys: Iterable[StepKey]) -> bool:
        """Whether something is foretold of steps of the kinds of some of these *keys*, or may be after a check."""
        return not self._given_up and any(_kind_of(key) not in self._unreliable for key in keys)

    def _foretell(self, key: StepKey) -> Foretold | None:
        kind = _kind_of(key)
        if self._given_up or kind in self._unreliable or kind in self._suspected:
            return None
        finder = self._finders.get(kind)
        flops = self._exact.get(key)
        if flops is None and finder is not None:
            flops = finder.flops(_sizes_of(key))
        if flops is not None:
            return Foretold(flops, whole=kind not in self._beside_model)
        if finder is not None and not self._padding_counts:
            for alike in _but_for_padding(key):
                flops = finder.flops(_sizes_of(alike), buckets=_MODEL)
                if flops is not None:
                    return Foretold(flops, whole=False)
        return None

    def report(self, seconds: Mapping[StepKey, StepSeconds]) -> RunLaw | str:
        """The law of the steps that most time was spent on, and its steps by length; in words, why there is none."""
        times: dict[_Kind, float] = {}
        for key, its in seconds.items():
            kind = _kind_of(key)
            times[kind] = times.get(kind, 0.0) + its.seconds
        if not times:
            return NO_STEP_TIMED
        kind = max(times, key=lambda one: times[one])
        finder = self._finder_of(kind)
        if isinstance(finder, str):
            return finder
        if finder.law is None:
            return finder.why_no_law
        if all(one.is_flag for one in finder.variables):
            return NO_OTHER_SIZE
        length = next((place for place, one in enumerate(finder.variables) if one.is_size), None)
        steps = []
        for key, its in seconds.items():
            known = self.known(key) if its.steps and _kind_of(key) == kind else None
            values = None if known is None else _first(map(finder.values_of, _alike(key)))
            if known is not None and values and length is not None:
                sums = FlopSums()
                sums.add(known, steps=its.steps)
                steps.append((max(one[length] for one in values), its, sums))
        return RunLaw(finder=finder, law=finder.law, steps=steps)

    def _finder_of(self, kind: _Kind) -> LawFinder | str:
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
        if _has_several_forms(kind):
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
        steps_of: Counter[_Kind] = Counter()
        for key, steps in keys.items():
            steps_of[_kind_of(key)] += steps
        if not steps_of:
            return "the steps are not known one by one"
        main = max(steps_of, key=lambda kind: steps_of[kind])
        finder = self._finder_of(main)
        one = finder if isinstance(finder, str) else finder.per_sequence()
        if isinstance(finder, str) or isinstance(one, str):
            return str(one)
        processed = 0
        for key, steps in keys.items():
            if _kind_of(key) != main and not self._batches_agree(finder, main, key):
                return "the run had steps of several forms, and one law does not hold for all"
            by_shape = _first(finder.tokens_by_shape(sizes, one) for sizes in _alike(key))
            if by_shape is None:
                return "a step had sizes that the law of the FLOPs does not cover"
            processed += steps * by_shape
        if processed != tokens.processed:
            return "the size that FLOPs depend on is not the length of the token ids"
        return one.flops(tokens) or "the law gives no whole number of FLOPs for these lengths"

    def _batches_agree(self, finder: LawFinder, kind: _Kind, key: StepKey) -> bool:
        """Whether the law of steps of *kind* gives what a step of another kind is known to spend, batch by batch.

        So it is with an epoch's last step, which has fewer batches.
        """
        if {*kind[0], *_kind_of(key)[0]} != {kind[0][0]}:
            return False
        # What an optimizer spends once in a step is no batch's, so it is not asked for.
        known = self.known(key)
        by_law = _first(finder.flops(sizes, buckets=_MODEL) for sizes in _alike(key))
        return known is not None and by_law == _of_model(known.flops)

    def counted(self, key: StepKey, flops: BucketFlops) -> None:
        """A step was counted from its first moment to its last."""
        self._ready.clear()
        kind = _kind_of(key)
        if kind in self._suspected:
            self._suspected.discard(kind)
            if self.known(key) is None:  # this step does not decide
                self._suspected.add(kind)
            self._ready.clear()
        known = self._exact.setdefault(key, flops)
        if known != flops:
            if _of_model(known) == _of_model(flops):
                self._doubt_beside_model(kind)
            else:
                self._doubt(kind)
        elif not _has_several_forms(kind) and not any(shape == UNKNOWN_SHAPE for shapes in key[0] for shape in shapes):
            sizes = _sizes_of(key)
            finder = self._finders.get(kind)
            if finder is None:
                finder = self._finders[kind] = LawFinder(_axes_of(key))
            if not finder.add(sizes, flops):
                self._note(GIVEN_UP)

    def sampled(self, key: StepKey, flops: BucketFlops) -> None:
        """A step was counted from the moment on at which its shapes were known.

        What it may have computed before is missing. So samples are believed only when one of them has shown what was
        foretold. If one shows something else, nothing is foretold until a step that is counted whole tells why.
        """
        if self._samples_are_whole:
            self.counted(key, flops)
            return
        if self._samples_are_whole is False:
            return
        kind, foretold = _kind_of(key), self.known(key)
        model_alone = kind in self._beside_model
        if foretold is None or not (foretold.whole or model_alone):
            self._samples.append((key, flops))
        elif foretold.flops == flops or (model_alone and _of_model(foretold.flops) == _of_model(flops)):
            self._samples_are_whole = True
            for sample in self._samples:
                self.counted(*sample)
        else:
            self._samples_are_whole = False
            self._samples.clear()
            self._ready.clear()
            self._suspected.add(kind)

    def doubt(self, key: StepKey) -> None:
        """Steps like this one are known to spend different FLOPs with the same shapes."""
        self._doubt(_kind_of(key))

    def foretell_nothing(self, sentence: str) -> None:
        """Nothing is foretold any more, because of what *sentence* says."""
        self._ready.clear()
        self._given_up = True
        self._note(sentence)

    def _doubt(self, kind: _Kind) -> None:
        self._ready.clear()
        self._unreliable.setdefault(kind, "steps with the same batch shapes spent different FLOPs")
        self._note(DEPENDS)

    def _doubt_beside_model(self, kind: _Kind) -> None:
        self._ready.clear()
        self._beside_model.add(kind)
        self._note(BESIDE_MODEL_DEPENDS)


class Foretold(NamedTuple):
    """What is known of what a step spends."""

    flops: BucketFlops
    whole: bool
    """Every bucket is known; otherwise model FLOPs alone: no step was counted that was like this one in its padding,
    which may decide what kernels skip, or what else such steps spend is known to depend on more than their shapes."""


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


_MOST_LATEST = 1000
"""Most steps that are in no book yet."""

_MOST_KEYS = 20_000
"""Most different steps that a run's books hold; what is known of older ones is added up."""


class StepCounts(NamedTuple):
    """Steps by their keys."""

    keys: Sequence[StepKey]
    """A key may stand there several times."""
    numbers: Sequence[int]
    """So many steps there are of each."""

    def by_key(self) -> Mapping[StepKey, int]:
        """How many there are of each key."""
        found: dict[StepKey, int] = {}
        for key, number in zip(self.keys, self.numbers, strict=True):
            found[key] = found.get(key, 0) + number
        return found


class _Booked(NamedTuple):
    """Steps of one kind that ended one after the other.

    Their sizes are columns: an object for each step would be looked at by every garbage collection.
    """

    first: StepKey
    columns: Sequence[Column]
    """One for each size in all batches of a step."""
    seconds: Sequence[float]
    """Of each row."""
    each: int
    """So many steps are in each row."""


class _KindBook(NamedTuple):
    """Steps of one kind."""

    example: StepKey
    """One of them."""
    steps: dict[Sizes, tuple[int, float]]
    """By all sizes in a step's batches: how many there are, and how long they took together."""


def _key_like(example: StepKey, sizes: Sizes) -> StepKey:
    """The key of a step of the same kind as *example* with these *sizes*."""
    left = iter(sizes)
    batches, updates = example
    return tuple([tuple([tuple(islice(left, len(shape))) for shape in shapes]) for shapes in batches]), updates


class RunFlops:
    """The books of a run: every step stands in them once.

    Args:
        laws: foretell what was not counted.
    """

    def __init__(self, laws: StepLaws) -> None:
        self.laws = laws
        self._counted = FlopSums()
        self._undisturbed: dict[_Kind, _KindBook] = {}
        """Steps that nothing slowed down."""
        self._slowed: dict[StepKey, int] = {}
        """Steps that we have slowed down, and that were not counted themselves."""
        self._folded: dict[bool, FlopSums] = {False: FlopSums(), True: FlopSums()}
        """What is known of older ones, of both kinds: of the second if True."""
        self._folded_seconds: dict[StepKey, tuple[int, float]] = {}
        self._unknown = 0
        self._unseen = 0
        self._latest: list[_Booked] = []
        """Undisturbed steps that are in no book yet: this is added to all the time, and entering many is quicker."""
        self._steps_of_latest = 0
        self._unread: list[StepKey] = []
        """Undisturbed steps of the next reading."""

    def unseen(self, steps: int) -> None:
        """So many steps ran before anybody looked: they are in no figure of this rank but the number of steps."""
        self._unseen += steps

    def book(self, keys: Sequence[StepKey], seconds: Sequence[float]) -> None:
        """Steps have ended that nothing slowed down, after so many *seconds* each."""
        if not keys:
            return
        self._unread += keys
        self._steps_of_latest += len(keys)
        each = 1
        if keys.count(keys[0]) == len(keys):  # most steps are alike
            keys, seconds, each = keys[:1], (sum(seconds),), len(keys)
        for alike, its_sec, columns in _by_kind(keys, seconds):
            self._latest.append(_Booked(alike[0], list(chain.from_iterable(columns)), its_sec, each))
        if self._steps_of_latest >= _MOST_LATEST:
            self._enter_latest()

    def book_slowed(self, key: StepKey) -> None:
        """A step has ended that was counted or traced, so that its time is not used."""
        self._slowed[key] = self._slowed.get(key, 0) + 1
        if len(self._slowed) > _MOST_KEYS:
            slowed, self._slowed = self._slowed, {}
            self._unknown += self.laws.add(self._folded[True], list(slowed), list(slowed.values()))

    def reading(self) -> StepCounts:
        """The undisturbed steps since the last reading; the next reading begins here."""
        keys, self._unread = self._unread, []
        if keys and keys.count(keys[0]) == len(keys):
            return StepCounts(keys[:1], (len(keys),))
        return StepCounts(keys, (1,) * len(keys))

    def seconds_by_key(self) -> Mapping[StepKey, StepSeconds]:
        """How long the undisturbed steps of each key took."""
        self._enter_latest()
        every = dict(self._folded_seconds)
        for key, its in self._of_books():
            every[key] = _plus(every.get(key, _NO_STEPS), its)
        return {key: StepSeconds(*its) for key, its in every.items()}

    def _of_books(self) -> Iterator[tuple[StepKey, tuple[int, float]]]:
        for book in self._undisturbed.values():
            for sizes, its in book.steps.items():
                yield _key_like(book.example, sizes), its

    def _enter_latest(self) -> None:
        latest, self._latest, self._steps_of_latest = self._latest, [], 0
        for first, columns, seconds, each in latest:
            book = self._undisturbed.setdefault(_kind_of(first), _KindBook(first, {})).steps
            rows: Iterable[Sizes] = zip(*columns, strict=True) if columns else repeat((), len(seconds))
            for sizes, its_sec in zip(rows, seconds, strict=True):
                steps, before = book.get(sizes, _NO_STEPS)
                book[sizes] = steps + each, before + its_sec
        if sum([len(book.steps) for book in self._undisturbed.values()]) > _MOST_KEYS:
            books = dict(self._of_books())
            self._undisturbed = {}
            self._unknown += self.laws.add(self._folded[False], list(books), [steps for steps, _ in books.values()])
            for key, its in books.items():
                if len(self._folded_seconds) < _MOST_KEYS or key in self._folded_seconds:
                    self._folded_seconds[key] = _plus(self._folded_seconds.get(key, _NO_STEPS), its)

    def counted(self, key: StepKey, flops: BucketFlops) -> None:
        """A step that was booked as slowed has been counted."""
        left = self._slowed.get(key, 0) - 1
        if left > 0:
            self._slowed[key] = left
        else:
            self._slowed.pop(key, None)
        self._counted.add(Foretold(flops, whole=True))

    def sums(self, steps: StepCounts) -> FlopSums | None:
        """FLOPs of *steps*; None if the model FLOPs of one are not known."""
        sums = FlopSums()
        return None if self.laws.add(sums, *steps) else sums

    def totals(self) -> RunTotals:
        """The whole run so far."""
        self._enter_latest()
        sums: dict[bool, FlopSums] = {}
        unknown = {False: 0, True: 0}
        undisturbed = {key: steps for key, (steps, _) in self._of_books()}
        for slowed, books in ((False, undisturbed), (True, self._slowed)):
            folded = self._folded[slowed]
            of_these = sums[slowed] = replace(folded, model_by_dtype=dict(folded.model_by_dtype))
            unknown[slowed] = self.laws.add(of_these, list(books), list(books.values()))
        nobody_knows = self._unseen + self._unknown + unknown[False] + unknown[True]
        every = (self._counted, sums[False], sums[True])
        hardware = [one.hardware for one in every if one.hardware is not None]
        return RunTotals(
            model_flops=None if nobody_knows else sum(one.model for one in every),
            hardware_flops=None if nobody_knows or len(hardware) < len(every) else sum(hardware),
            steps_counted=self._counted.steps,
            steps_predicted=sums[False].steps + sums[True].steps,
            steps_unknown=nobody_knows,
            steps_unseen=self._unseen,
            undisturbed=None if unknown[False] or self._unknown else sums[False],
            keys=undisturbed if not self._folded[False].steps else {},
            depends_beside_model=self.laws.depends_beside_model,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """FLOPs of all steps of a run, and how they are known."""

    model_flops: int | None
    """None if one step is not known."""
    hardware_flops: int | None
    """None also if only model FLOPs are known of a step."""
    steps_counted: int
    """Steps that were counted themselves."""
    steps_predicted: int
    """Steps whose FLOPs follow from those that were counted."""
    steps_unknown: int
    """Steps whose FLOPs nobody knows."""
    undisturbed: FlopSums | None
    """Of the steps that neither counting nor tracing slowed down; None if one of those that were seen is not known."""
    steps_unseen: int = 0
    """Those of the unknown ones that ran before anybody looked."""
    keys: Mapping[StepKey, int] = field(default_factory=dict)
    """So many of those steps of each key; empty where the books were too long to keep."""
    depends_beside_model: bool = False
    """Steps of the same shapes spent different FLOPs beside forward and backward."""


NOTHING_BOOKED = RunTotals(
    model_flops=None, hardware_flops=None, steps_counted=0, steps_predicted=0, steps_unknown=0, undisturbed=None
)
"""Of a run whose steps nobody booked."""


def _kind_of(key: StepKey) -> _Kind:
    """What steps must have in common to have one law: numbers of batches, tensors, axes and updates."""
    batches, updates = key
    if len(batches) == 1:  # most steps
        return (tuple(map(len, batches[0])),), updates
    return tuple([tuple(map(len, shapes)) for shapes in batches]), updates


def _has_several_forms(kind: _Kind) -> bool:
    """Whether the batches of a step differ in their tensors or axes: what is a size of one is none of another."""
    return len(set(kind[0])) > 1


_NO_STEPS = (0, 0.0)


def _plus(one: tuple[int, float], other: tuple[int, float]) -> tuple[int, float]:
    return one[0] + other[0], one[1] + other[1]


def _of_model(flops: BucketFlops) -> dict[tuple[str, str], int]:
    return {one: value for one, value in flops.items() if value and one[0] in _MODEL}


def _sizes_of(key: StepKey) -> tuple[Sizes, ...]:
    batches = key[0]
    if len(batches) == 1:
        return (tuple(chain.from_iterable(batches[0])),)
    return tuple([tuple(chain.from_iterable(shapes)) for shapes in batches])


def _by_kind(
    keys: Sequence[StepKey], numbers: Sequence[_Number]
) -> Sequence[tuple[Sequence[StepKey], Sequence[_Number], Sequence[Sequence[Column]]]]:
    """Steps with these *keys*, by kind: their keys, those of *numbers* that belong to them, and their columns."""
    if not keys:
        return []
    try:
        return [(keys, numbers, _columns_of(keys))]
    except ValueError:  # they are of several kinds, which is rare
        found: dict[_Kind, tuple[list[StepKey], list[_Number]]] = {}
    for key, number in zip(keys, numbers, strict=True):
        its, of_each = found.setdefault(_kind_of(key), ([], []))
        its.append(key)
        of_each.append(number)
    return [(its, of_each, _columns_of(its)) for its, of_each in found.values()]


def _columns_of(keys: Sequence[StepKey]) -> list[list[Column]]:
    """For each batch of steps of one kind, a column for each of its sizes. No function of ours is called for each.

    Raises:
        ValueError: they are of several kinds.
    """
    batches, updates = zip(*keys, strict=True)
    if updates.count(updates[0]) < len(updates):
        raise ValueError("steps of different numbers of updates have no columns together")
    return [
        [axis for tensors in zip(*batch, strict=True) for axis in zip(*tensors, strict=True)]
        for batch in zip(*batches, strict=True)
    ]


def _axes_of(key: StepKey) -> list[tuple[int, int]]:
    """The tensor and the axis of each size. What tells of a whole batch is no tensor, and counts no samples."""
    return [
        (number, axis if shape[0] >= 0 else FLAG if _is_flag(shape, axis) else axis + 1)
        for number, shape in enumerate(key[0][0])
        for axis in range(len(shape))
    ]


def _but_for_padding(key: StepKey) -> Iterator[StepKey]:
    """The keys of steps that differ from that of *key* in nothing but their padding, of all batches alike."""
    batches, updates = key
    if not any(_is_flag(shape, 1) for shape in batches[0]):
        return
    for mark in (WITH_PADDING, WITHOUT_PADDING):
        yield tuple([tuple([mark if _is_flag(one, 1) else one for one in shapes]) for shapes in batches]), updates


def _alike(key: StepKey) -> Iterator[tuple[Sizes, ...]]:
    """The sizes of *key*, and then of the keys that differ from it in nothing but padding."""
    yield _sizes_of(key)
    yield from map(_sizes_of, _but_for_padding(key))


def _first(found: Iterable[_T | None]) -> _T | None:
    """The first that is not None."""
    return next((one for one in found if one is not None), None)


def _is_flag(shape: tuple[int, ...], axis: int) -> bool:
    """Whether it is not a size that stands there, but whether tokens of the batch are padding."""
    return shape[:1] == (PADDING_MARK,) and axis == 1
