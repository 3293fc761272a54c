"""Whether what steps spend goes by numbers in their tensors, or by their shapes alone."""

from __future__ import annotations

from lightning_flops.analysis.law_fit import NEEDED_CHECKS
from lightning_flops.analysis.step_keys import Kind, StepKey, kind_of, lengths_of, without_lengths
from lightning_flops.records import BucketFlops, Line, ValuesSeen

_Form = tuple[frozenset[tuple[int, ...]], int]
"""The forms of a step's batches, however many these are, and its optimizer attempts."""


class IdleValues:
    """Finds forms of steps in which numbers in tensors decide sizes on the way, and no FLOPs.

    So it is where a metric is computed on what a mask selects, and where experts share the same tokens in another way
    each time. The evidence is of steps of the same shapes, in each of which these sizes were others, and that have
    spent the same. It holds for the lines of the program that these sizes came from.
    """

    def __init__(self) -> None:
        self._spent: dict[StepKey, BucketFlops] = {}
        """What the first step has spent, by what steps are known by without lengths."""
        self._sizes: dict[StepKey, set[frozenset[tuple[Line, int]]]] = {}
        """The sizes that were seen in such steps."""
        self._lengths: dict[StepKey, list[set[int]]] = {}
        """And each number that tells of lengths, where they are known by such numbers."""
        self._lines: dict[Kind, set[Line]] = {}
        """Where sizes came from."""
        self._idle: dict[_Form, set[Line]] = {}
        """Where sizes came from that decide nothing."""
        self._deciding: set[_Form] = set()

    def add(self, key: StepKey, flops: BucketFlops, values: ValuesSeen) -> None:
        """A step was counted.

        Args:
            key: what it is known by.
            flops: that it has spent.
            values: what numbers in its tensors have decided. Where they decide what a kernel spends, no size tells
                whether they were others.
        """
        bare = without_lengths(key)
        form = _form_of(bare)
        self._lines.setdefault(kind_of(bare), set()).update(values.sized)
        seen = self._sizes.setdefault(bare, set())
        if values.spent or self._spent.setdefault(bare, flops) != flops:
            self._deciding.add(form)
        elif values.sized:
            lengths = lengths_of(key)
            of_each = self._lengths.setdefault(bare, [set() for _ in lengths])
            for numbers, number in zip(of_each, lengths, strict=False):
                numbers.add(number)
            seen.add(frozenset((line, sizes.squares) for line, sizes in values.sized.items()))
        if len(seen) > NEEDED_CHECKS and form not in self._deciding:
            self._idle.setdefault(form, set()).update(values.sized)

    def are_idle(self, key: StepKey, values: ValuesSeen | None = None) -> bool:
        """Whether steps like this one are known to spend the same, whatever these numbers are.

        Args:
            key: what it is known by.
            values: what they have decided in it; None: any of what they decide in steps of its kind.
        """
        bare = without_lengths(key)
        form = _form_of(bare)
        if form not in self._idle or form in self._deciding or (values is not None and values.spent):
            return False
        lines = self._lines.get(kind_of(bare), set()) if values is None else values.sized.keys()
        return lines <= self._idle[form]

    @property
    def lengths_are_idle(self) -> bool:
        """Whether lengths decide nothing, either.

        Every form of steps with such sizes has shown that they are idle, and in steps that were of different lengths: a
        length that was always the same may be another one later.
        """
        forms = {_form_of(bare) for bare, seen in self._sizes.items() if seen} | self._deciding
        shown = {
            _form_of(bare)
            for bare, of_each in self._lengths.items()
            if len(self._sizes[bare]) > NEEDED_CHECKS and all(len(numbers) > 1 for numbers in of_each)
        }
        return all(self.are_idle(bare) for bare, seen in self._sizes.items() if seen) and forms <= shown


def _form_of(key: StepKey) -> _Form:
    batches, updates = kind_of(key)
    return frozenset(batches), updates
