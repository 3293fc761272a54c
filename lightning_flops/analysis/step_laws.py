"""What each step of a run spends: counted, or foretold from steps that were counted, or not known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from lightning_flops.analysis.law import Law, LawFinder, Sizes
from lightning_flops.records import UNKNOWN_SHAPE, BatchTokens, BucketFlops
from lightning_flops.schema.law import NO_STEP_TIMED


class StepSeconds(NamedTuple):
    """How many steps there were, and how long they took together."""

    steps: int
    seconds: float


StepKey = tuple[tuple[tuple[tuple[int, ...], ...], ...], int]
"""The shapes of the tensors of each batch of a step, and the step's optimizer attempts."""

_Kind = tuple[tuple[tuple[int, ...], ...], int]

_MODEL = ("forward", "backward")
"""The buckets of model FLOPs."""

_REMEMBERED = 10_000
"""Most steps whose FLOPs are kept ready."""

DEPENDS = (
    "Steps with the same batch shapes spent different FLOPs, so shapes do not tell what a step spends: the run's FLOPs "
    "and MFU are known for counted steps only."
)
OTHERS_TRAIN = (
    "Other parameters are trained than when steps were counted, so the same shapes spend other FLOPs now: from here on "
    "the run's FLOPs and MFU are known for counted steps only."
)
GIVEN_UP = (
    "The law of the FLOPs was given up: a step was counted that spends something else than the steps before it "
    "foretold. Steps that were not counted have no FLOPs and no MFU any more."
)


class StepLaws:
    """Foretells the FLOPs of steps: of those whose shapes were counted, and of others by a law that was checked.

    Args:
        note: gets a sentence if what was foretold turns out to be wrong.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._exact: dict[StepKey, BucketFlops] = {}
        self._finders: dict[_Kind, LawFinder] = {}
        self._unreliable: set[_Kind] = set()
        self._samples: list[tuple[StepKey, BucketFlops]] = []
        self._samples_are_whole: bool | None = None
        self._ready: dict[StepKey, BucketFlops | None] = {}
        self._given_up = False

    @property
    def believes_samples(self) -> bool | None:
        """Whether steps that are counted outside of a window are known to be counted whole; None: not yet known."""
        return self._samples_are_whole

    def finders(self) -> Iterable[LawFinder]:
        """The laws, one for each kind of step."""
        return self._finders.values()

    def foretell(self, key: StepKey) -> BucketFlops | None:
        """What a step spends; None where nobody knows."""
        flops = self._ready.get(key)
        if flops is not None or key in self._ready:
            return flops
        if len(self._ready) >= _REMEMBERED:
            self._ready.clear()
        flops = self._ready[key] = self._foretell(key)
        return flops

    def _foretell(self, key: StepKey) -> BucketFlops | None:
        kind = _kind_of(key)
        if self._given_up or kind in self._unreliable:
            return None
        flops = self._exact.get(key)
        if flops is None and (finder := self._finders.get(kind)) is not None:
            return finder.flops(_sizes_of(key))
        return flops

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
        if finder.law is None or not finder.variables:
            return finder.why_no_law
        length = next((place for place, one in enumerate(finder.variables) if not one.is_batch), None)
        steps = []
        for key, its in seconds.items():
            flops = self.foretell(key) if its.steps and _kind_of(key) == kind else None
            values = None if flops is None else finder.values_of(_sizes_of(key))
            if flops is not None and values and length is not None:
                sums = FlopSums()
                sums.add(flops, steps=its.steps)
                steps.append((max(one[length] for one in values), its, sums))
        return RunLaw(finder=finder, law=finder.law, steps=steps)

    def _finder_of(self, kind: _Kind) -> LawFinder | str:
        """What looks for the law of steps of this *kind*; in words, why nothing does."""
        if self._given_up:
            return "other parameters are trained than when steps were counted"
        if kind in self._unreliable:
            return "steps with the same batch shapes spent different FLOPs"
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
            by_shape = finder.tokens_by_shape(_sizes_of(key), one)
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
        known, by_law = self.foretell(key), finder.flops(_sizes_of(key), buckets=_MODEL)
        return known is not None and by_law == {
            one: value for one, value in known.items() if value and one[0] in _MODEL
        }

    def counted(self, key: StepKey, flops: BucketFlops) -> None:
        """A step of a window was counted, from its first moment to its last."""
        self._ready.clear()
        kind = _kind_of(key)
        known = self._exact.setdefault(key, flops)
        if known != flops:
            self._doubt(kind)
        elif not any(shape == UNKNOWN_SHAPE for shapes in key[0] for shape in shapes):
            sizes = _sizes_of(key)
            finder = self._finders.get(kind)
            if finder is None:
                finder = self._finders[kind] = LawFinder(_axes_of(key))
            if not finder.add(sizes, flops):
                self._note(GIVEN_UP)

    def sampled(self, key: StepKey, flops: BucketFlops) -> None:
        """A step was counted from the moment on at which its shapes were known.

        What it may have computed before is missing. So samples are believed only when one of them has shown what the
        windows foretold.
        """
        if self._samples_are_whole:
            self.counted(key, flops)
            return
        if self._samples_are_whole is False:
            return
        foretold = self.foretell(key)
        if foretold is None:
            self._samples.append((key, flops))
        elif foretold == flops:
            self._samples_are_whole = True
            for sample in self._samples:
                self.counted(*sample)
        else:
            self._samples_are_whole = False
            self._doubt(_kind_of(key))

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
        self._unreliable.add(kind)
        self._note(DEPENDS)


@dataclass(slots=True, kw_only=True)
class FlopSums:
    """FLOPs of several steps."""

    steps: int = 0
    model: int = 0
    """Forward and backward."""
    hardware: int = 0
    """All that kernels execute."""
    model_by_dtype: dict[str, int] = field(default_factory=dict)

    def add(self, flops: BucketFlops, *, steps: int = 1) -> None:
        """So many *steps* have spent *flops* each."""
        self.steps += steps
        for (bucket, dtype), amount in flops.items():
            amount *= steps
            if bucket == "causal_skipped":
                self.hardware -= amount
                continue
            self.hardware += amount
            if bucket in ("forward", "backward"):
                self.model += amount
                self.model_by_dtype[dtype] = self.model_by_dtype.get(dtype, 0) + amount


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLaw:
    """The law of a run's steps."""

    finder: LawFinder
    law: Law
    steps: Sequence[tuple[int, StepSeconds, FlopSums]]
    """Steps of each length with their times and FLOPs; of several batches the longest counts."""


_MOST_LATEST = 1000

_MOST_KEYS = 20_000
"""Most different steps that a run's books hold; what is known of older ones is added up."""


class RunFlops:
    """The books of a run: every step stands in them once.

    Args:
        laws: foretell what was not counted.
    """

    def __init__(self, laws: StepLaws) -> None:
        self.laws = laws
        self._counted = FlopSums()
        self._open: dict[bool, dict[StepKey, int]] = {False: {}, True: {}}
        """Steps that were not counted, apart by whether we slowed them down."""
        self._folded: dict[bool, FlopSums] = {False: FlopSums(), True: FlopSums()}
        self._unknown = 0
        self._latest: list[StepKey] = []
        """Undisturbed steps that are in no book yet: this is added to at every step."""

    def unseen(self, steps: int) -> None:
        """So many steps ran before anybody looked."""
        self._unknown += steps

    def book(self, key: StepKey, *, slowed: bool) -> None:
        """A step has ended; *slowed* if it was counted or traced, so that its time is not used."""
        if not slowed:
            self._latest.append(key)
            if len(self._latest) >= _MOST_LATEST:
                self._enter_latest()
            return
        books = self._open[True]
        books[key] = books.get(key, 0) + 1
        if len(books) > _MOST_KEYS:
            self._fold(slowed)

    def _enter_latest(self) -> None:
        books = self._open[False]
        for key in self._latest:
            books[key] = books.get(key, 0) + 1
        self._latest.clear()
        if len(books) > _MOST_KEYS:
            self._fold(False)

    def counted(self, key: StepKey, flops: BucketFlops) -> None:
        """A step that was booked as slowed has been counted."""
        books = self._open[True]
        left = books.get(key, 0) - 1
        if left > 0:
            books[key] = left
        else:
            books.pop(key, None)
        self._counted.add(flops)

    def _fold(self, slowed: bool) -> None:
        books, self._open[slowed] = self._open[slowed], {}
        for key, steps in books.items():
            flops = self.laws.foretell(key)
            if flops is None:
                self._unknown += steps
            else:
                self._folded[slowed].add(flops, steps=steps)

    def sums(self, keys: Mapping[StepKey, int]) -> FlopSums | None:
        """FLOPs of so many steps of each key; None if those of one are not known."""
        sums = FlopSums()
        for key, steps in keys.items():
            flops = self.laws.foretell(key)
            if flops is None:
                return None
            sums.add(flops, steps=steps)
        return sums

    def totals(self) -> RunTotals:
        """The whole run so far."""
        self._enter_latest()
        sums: dict[bool, FlopSums] = {}
        unknown = {False: 0, True: 0}
        for slowed, books in self._open.items():
            folded = self._folded[slowed]
            known = sums[slowed] = FlopSums(
                steps=folded.steps,
                model=folded.model,
                hardware=folded.hardware,
                model_by_dtype=dict(folded.model_by_dtype),
            )
            for key, steps in books.items():
                flops = self.laws.foretell(key)
                if flops is None:
                    unknown[slowed] += steps
                else:
                    known.add(flops, steps=steps)
        nobody_knows = self._unknown + unknown[False] + unknown[True]
        whole = not nobody_knows
        return RunTotals(
            model_flops=self._counted.model + sums[False].model + sums[True].model if whole else None,
            hardware_flops=self._counted.hardware + sums[False].hardware + sums[True].hardware if whole else None,
            steps_counted=self._counted.steps,
            steps_predicted=sums[False].steps + sums[True].steps,
            steps_unknown=nobody_knows,
            undisturbed=None if unknown[False] or self._unknown else sums[False],
            keys=self._open[False] if not self._folded[False].steps else {},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """FLOPs of all steps of a run, and how they are known."""

    model_flops: int | None
    """None if one step is not known."""
    hardware_flops: int | None
    steps_counted: int
    """Steps that were counted themselves."""
    steps_predicted: int
    """Steps whose FLOPs follow from those that were counted."""
    steps_unknown: int
    undisturbed: FlopSums | None
    """Of the steps that neither counting nor tracing slowed down; None if one of them is not known."""
    keys: Mapping[StepKey, int] = field(default_factory=dict)
    """So many of those steps of each key; empty where the books were too long to keep."""


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


def _sizes_of(key: StepKey) -> tuple[Sizes, ...]:
    batches = key[0]
    if len(batches) == 1:
        return (tuple(chain.from_iterable(batches[0])),)
    return tuple([tuple(chain.from_iterable(shapes)) for shapes in batches])


def _axes_of(key: StepKey) -> list[tuple[int, int]]:
    """The tensor and the axis of each size. What tells the loader of a batch is no tensor, and counts no samples."""
    return [
        (number, axis if shape[0] >= 0 else axis + 1)
        for number, shape in enumerate(key[0][0])
        for axis in range(len(shape))
    ]
