"""The books of a run's steps: what each of them spent, as far as it was counted or is foretold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import sub
from typing import NamedTuple

from lightning_flops.analysis.law import Sizes
from lightning_flops.analysis.same_work import OtherWork, SameWork
from lightning_flops.analysis.step_keys import (
    AlikeSteps,
    Kind,
    StepKey,
    alike_without_lengths,
    all_sizes_of,
    by_kind,
    key_like,
    kind_of,
    of_one_batch_each,
    without_lengths,
)
from lightning_flops.analysis.step_laws import FlopSums, Foretold, StepLaws, StepSeconds
from lightning_flops.records import BucketFlops, Shapes

_MOST_LATEST = 1000
"""Most steps that are in no book yet."""

_MOST_KEYS = 20_000
"""Most different steps that a run's books hold; what is known of older ones is added up."""


class StepCounts(NamedTuple):
    """Steps by their keys."""

    alike: Sequence[tuple[AlikeSteps, Sequence[int]]]
    """Steps of one kind, and how many there are of each of their keys; a key may stand there several times."""
    whole: bool = True
    """No step is missing."""

    def keys(self) -> Iterator[StepKey]:
        """Every key; one may come several times."""
        return chain.from_iterable(steps.keys() for steps, _ in self.alike)

    def by_key(self) -> Mapping[StepKey, int]:
        """How many there are of each key."""
        found: dict[StepKey, int] = {}
        for steps, numbers in self.alike:
            _count(found, steps.keys(), numbers)
        return found


class _Booked(NamedTuple):
    """Steps of one kind that ended one after the other."""

    steps: AlikeSteps
    seconds: Sequence[float]
    """Of each row."""
    each: int
    """So many steps are in each row."""
    nodes: Sequence[int | None]
    """How many nodes each step has added to autograd's graph; None if nobody knows."""


class _KindBook(NamedTuple):
    """Steps of one kind, by all sizes in a step's batches."""

    example: StepKey
    """One of them."""
    steps: Counter[Sizes]
    """How many there are."""
    seconds: dict[Sizes, float]
    """How long they took together."""


class RunFlops:
    """The books of a run: every step stands in them once.

    Args:
        laws: foretell what was not counted.
    """

    def __init__(self, laws: StepLaws) -> None:
        self.laws = laws
        self._counted = FlopSums()
        self._undisturbed: dict[Kind, _KindBook] = {}
        """Steps that nothing slowed down."""
        self._slowed: dict[StepKey, int] = {}
        """Steps that we have slowed down, and that were not counted themselves."""
        self._folded: dict[bool, FlopSums] = {False: FlopSums(), True: FlopSums()}
        """What is known of older steps: under True of the slowed ones, under False of the others."""
        self._folded_seconds: dict[StepKey, tuple[int, float]] = {}
        self._unknown = 0
        self._unseen = 0
        self._work = SameWork()
        self._latest: list[_Booked] = []
        """Undisturbed steps that are in no book yet: this is added to all the time, and entering many is quicker."""
        self._steps_of_latest = 0
        self._unread: list[tuple[AlikeSteps, Sequence[int]]] = []
        """Undisturbed steps of the next reading."""
        self._rows_unread = 0
        self._unread_before: dict[StepKey, int] = {}
        """Undisturbed steps before those, added up by key if they are many, because a run may never be read."""
        self._unread_is_whole = True

    def unseen(self, steps: int) -> None:
        """So many steps ran before anybody looked: they are in no figure of this rank but the number of steps."""
        self._unseen += steps

    def book(
        self, keys: Sequence[StepKey], seconds: Sequence[float], nodes: Sequence[int | None] | None = None
    ) -> None:
        """Steps have ended that nothing slowed down.

        Args:
            keys: of each.
            seconds: that each took.
            nodes: that autograd had in its graph at the end of each, of steps that followed one after the other; None
                where nobody has looked.
        """
        if keys:
            self._book_keys(keys, seconds, _differences([None] * len(keys) if nodes is None else nodes))

    def _book_keys(self, keys: Sequence[StepKey], seconds: Sequence[float], made: Sequence[int | None]) -> None:
        if keys.count(keys[0]) == len(keys):
            self._book_equal(keys[0], seconds, made)
            return
        for steps, its in by_kind(keys, range(len(keys))):
            self._book(_Booked(steps, [seconds[place] for place in its], 1, [made[place] for place in its]))

    def book_one_batch_each(
        self,
        batches: Sequence[Shapes],
        updates: Sequence[int],
        seconds: Sequence[float],
        nodes: Sequence[int | None],
    ) -> None:
        """As ``book``, for steps of one batch each. No object is made for each of them.

        Args:
            batches: the shapes of each.
            updates: optimizer attempts in each.
            seconds: of each.
            nodes: as for ``book``.
        """
        made = _differences(nodes)
        if batches.count(batches[0]) == len(batches) and updates.count(updates[0]) == len(updates):
            self._book_equal(((batches[0],), updates[0]), seconds, made)  # most steps
            return
        steps = of_one_batch_each(batches, updates)
        if steps is not None:
            self._book(_Booked(steps, seconds, 1, made))
        else:
            self._book_keys(list(zip(zip(batches, strict=True), updates, strict=True)), seconds, made)

    def _book_equal(self, key: StepKey, seconds: Sequence[float], made: Sequence[int | None]) -> None:
        ((steps, in_all),) = by_kind((key,), (sum(seconds),))
        self._book(_Booked(steps, in_all, len(seconds), made))

    def _book(self, booked: _Booked) -> None:
        rows = booked.steps.number
        self._latest.append(booked)
        self._unread.append((booked.steps, (booked.each,) * rows))
        self._steps_of_latest += rows * booked.each
        self._rows_unread += rows
        if self._rows_unread >= _MOST_KEYS:
            self._gather_unread()
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
        before, self._unread_before = self._unread_before, {}
        unread, self._unread, self._rows_unread = self._unread, [], 0
        whole, self._unread_is_whole = self._unread_is_whole, True
        if before:
            unread += by_kind(list(before), list(before.values()))
        return StepCounts(unread, whole)

    def _gather_unread(self) -> None:
        unread, self._unread, self._rows_unread = self._unread, [], 0
        for steps, numbers in unread:
            _count(self._unread_before, steps.keys(), numbers)
        if len(self._unread_before) > _MOST_KEYS:
            self._unread_before, self._unread_is_whole = {}, False

    def drop_lengths(self) -> None:
        """What steps spend does not depend on the lengths of sequences: what was booked is known without them."""
        self._enter_latest()
        self._merge_lengths()
        self._unread = [(alike_without_lengths(steps), numbers) for steps, numbers in self._unread]
        self._slowed, self._unread_before = _merged(self._slowed), _merged(self._unread_before)

    def _merge_lengths(self) -> None:
        books = list(self._of_books())
        self._undisturbed = {}
        for key, (steps, seconds) in books:
            bare = without_lengths(key)
            sizes = all_sizes_of(bare)
            book = self._undisturbed.setdefault(kind_of(bare), _KindBook(bare, Counter(), {}))
            book.steps[sizes] += steps
            book.seconds[sizes] = book.seconds.get(sizes, 0.0) + seconds

    def seconds_by_key(self) -> Mapping[StepKey, StepSeconds]:
        """How long the undisturbed steps of each key took."""
        self._enter_latest()
        every = dict(self._folded_seconds)
        for key, its in self._of_books():
            every[key] = _plus(every.get(key, _NO_STEPS), its)
        return {key: StepSeconds(*its) for key, its in every.items()}

    def _of_books(self) -> Iterator[tuple[StepKey, tuple[int, float]]]:
        for example, numbers, seconds in self._undisturbed.values():
            for sizes, number in numbers.items():
                yield key_like(example, sizes), (number, seconds[sizes])

    @property
    def _keys(self) -> int:
        return sum([len(book.steps) for book in self._undisturbed.values()])

    def _enter_latest(self) -> None:
        latest, self._latest, self._steps_of_latest = self._latest, [], 0
        for steps, its_sec, each, nodes in latest:
            self._work.book(alike_without_lengths(steps), nodes)  # the same operators run, whatever these are
            kind = kind_of(steps.example)
            if kind not in self._undisturbed:
                self._undisturbed[kind] = _KindBook(steps.example, Counter(), {})
            _, numbers, seconds = self._undisturbed[kind]
            rows = list(steps.rows())
            if each == 1:
                numbers.update(rows)
            else:
                numbers[rows[0]] += each
            for sizes, sec in zip(rows, its_sec, strict=True):
                seconds[sizes] = seconds.get(sizes, 0.0) + sec
        if self._keys > _MOST_KEYS and not self.laws.has_counted:
            self._merge_lengths()  # nobody knows yet whether they matter
        if self._keys > _MOST_KEYS:
            books = dict(self._of_books())
            self._undisturbed = {}
            self._work.forget()
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

    @property
    def doubt(self) -> OtherWork | None:
        """Why steps of counted shapes may not spend what is foretold; None if nothing suggests that."""
        found = self._work.other_work()
        return None if found is None or found.is_dispelled(confirmed=self.laws.confirmed) else found

    def sums(self, steps: StepCounts) -> FlopSums | None:
        """FLOPs of *steps*; None if the model FLOPs of one are not known, or if one is missing."""
        if self.doubt is not None:
            return None
        sums = FlopSums()
        unknown = sum([self.laws.add_alike(sums, alike, numbers) for alike, numbers in steps.alike])
        return sums if steps.whole and not unknown else None

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
        predicted = sums[False].steps + sums[True].steps
        doubt = self.doubt
        if doubt is not None:
            nobody_knows, predicted = nobody_knows + predicted, 0
        every = (self._counted, sums[False], sums[True])
        hardware = [one.hardware for one in every if one.hardware is not None]
        return RunTotals(
            model_flops=None if nobody_knows else sum(one.model for one in every),
            hardware_flops=None if nobody_knows or len(hardware) < len(every) else sum(hardware),
            steps_counted=self._counted.steps,
            steps_predicted=predicted,
            steps_unknown=nobody_knows,
            steps_unseen=self._unseen,
            steps_checked=self.laws.confirmed,
            undisturbed=None if unknown[False] or self._unknown or doubt is not None else sums[False],
            keys=undisturbed if not self._folded[False].steps else {},
            depends_beside_model=self.laws.depends_beside_model,
            doubt=doubt,
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
    steps_checked: int = 0
    """Those of the counted ones that had been foretold, and spent just that."""
    keys: Mapping[StepKey, int] = field(default_factory=dict)
    """How many of the undisturbed steps have each key; empty where the books were too long to keep."""
    depends_beside_model: bool = False
    """Steps of the same shapes spent different FLOPs beside forward and backward."""
    doubt: OtherWork | None = None
    """Why nothing is foretold, though there are counted steps of the same shapes."""


NOTHING_BOOKED = RunTotals(
    model_flops=None, hardware_flops=None, steps_counted=0, steps_predicted=0, steps_unknown=0, undisturbed=None
)
"""Of a run whose steps nobody booked."""

_NO_STEPS = (0, 0.0)


def _plus(one: tuple[int, float], other: tuple[int, float]) -> tuple[int, float]:
    return one[0] + other[0], one[1] + other[1]


def _count(found: dict[StepKey, int], keys: Iterable[StepKey], numbers: Sequence[int]) -> None:
    """Add so many *numbers* of steps of each of *keys* to those that were *found* before."""
    for key, number in zip(keys, numbers, strict=True):
        found[key] = found.get(key, 0) + number


def _merged(steps: Mapping[StepKey, int]) -> dict[StepKey, int]:
    """Numbers of *steps* by their keys, without the lengths of sequences."""
    found: dict[StepKey, int] = {}
    _count(found, map(without_lengths, steps), list(steps.values()))
    return found


def _differences(nodes: Sequence[int | None]) -> Sequence[int | None]:
    """How many nodes each step has made, given how many there were at the end of each; None for the first step."""
    if None in nodes:
        pairs = zip(nodes, nodes[1:], strict=False)
        return [None, *(None if one is None or next_one is None else next_one - one for one, next_one in pairs)]
    return [None, *map(sub, nodes[1:], nodes)]
