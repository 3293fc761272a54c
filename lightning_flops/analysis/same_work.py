"""Whether steps of the same shapes do the same work, as far as autograd tells.

Shapes do not tell what a step runs where chance or data decide: layers that are dropped at random, an early exit.
Counting shows it, but few steps can be counted. Every step tells how many nodes it has added to autograd's graph: that
is one number to read, and it is the same where the same is run. Other numbers of nodes need not be other FLOPs: tokens
may be sent to more experts, or to fewer, and be as many. So they are doubts, which counted steps can dispel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_flops.analysis.law import Sizes
from lightning_flops.analysis.step_keys import AlikeSteps, Kind, kind_of
from lightning_flops.units import plain

_LEAST_STEPS = 5
_LEAST_SHARE = 0.01
"""Steps that do other work count from so many on, and from this share of all: now and then a compiler may trace."""

_LEAST_OFF = 0.02
"""And if the nodes that are too many or too few are this share of all: somebody may log a few figures more."""

_CHANCE = 0.05
"""That counted steps were by chance none of those that spend something else: with less, the doubt is dispelled."""

_SEEN_ONCE: Mapping[int, int] = {}
"""Of the first step of its shapes nothing is kept: it may be one that was compiled."""


class OtherWork(NamedTuple):
    """Steps that do other work than most of the same shapes."""

    steps: int
    of_steps: int
    """So many were looked at."""

    def __str__(self) -> str:
        """Says so in a sentence."""
        return (
            f"{plain(self.steps)} of {plain(self.of_steps)} steps that were looked at added another number of nodes to "
            "autograd's graph than most steps of the same shapes. So chance or data may decide what a step spends, and "
            "too few steps were counted to tell that they do not: the run's FLOPs and MFU are n/a."
        )

    def is_dispelled(self, *, confirmed: int) -> bool:
        """Whether it is other work of as many FLOPs, if so many counted steps have spent what was foretold of them."""
        return (1.0 - self.steps / self.of_steps) ** confirmed < _CHANCE


class _Tally(NamedTuple):
    """Steps that were looked at, but for the first of each shape."""

    others: int = 0
    """Those that made another number of nodes than most of their shapes."""
    steps: int = 0
    off: int = 0
    """So many nodes too many or too few."""
    nodes: int = 0


class SameWork:
    """Looks at the autograd nodes of a run's steps."""

    def __init__(self) -> None:
        self._numbers: dict[Kind, dict[Sizes, Mapping[int, int]]] = {}
        """Of the steps of each shape: how many made so many nodes."""
        self._forgotten = _Tally()
        """Of steps whose shapes are not remembered any more."""
        self._found: OtherWork | None = None
        self._differ = False
        """Since that was found, one has made another number than those before it."""

    def book(self, steps: AlikeSteps, nodes: Sequence[int | None]) -> None:
        """Steps of one kind have ended.

        Args:
            steps: one row for each, or one for all.
            nodes: how many each has made; None if nobody knows.
        """
        known = self._numbers.setdefault(kind_of(steps.example), {})
        if steps.number == 1:
            numbers = Counter(nodes)
            del numbers[None]
            (sizes,) = steps.rows()
            if sizes not in known and numbers:
                known[sizes] = _SEEN_ONCE
                numbers[next(number for number in nodes if number is not None)] -= 1
            for number, times in numbers.items():
                if number is not None and times:
                    self._add(known, sizes, number, times)
            return
        for sizes, one in zip(steps.rows(), nodes, strict=True):
            if one is None:
                continue
            if sizes in known:
                self._add(known, sizes, one, 1)
            else:
                known[sizes] = _SEEN_ONCE

    def _add(self, known: dict[Sizes, Mapping[int, int]], sizes: Sizes, number: int, times: int) -> None:
        numbers = known[sizes]
        self._differ = self._differ or (bool(numbers) and number not in numbers)
        known[sizes] = {**numbers, number: numbers.get(number, 0) + times}

    def forget(self) -> None:
        """The steps so far have too many shapes to remember."""
        self._forgotten = self._tally()
        self._numbers.clear()

    def other_work(self) -> OtherWork | None:
        """Steps that do other work than most of their shapes; None if there are none, or next to none."""
        if self._differ:
            self._differ, self._found = False, self._look()
        return self._found

    def _look(self) -> OtherWork | None:
        others, steps, off, nodes = self._tally()
        if others < max(_LEAST_STEPS, _LEAST_SHARE * steps) or off < _LEAST_OFF * nodes:
            return None
        return OtherWork(others, steps)

    def _tally(self) -> _Tally:
        others, steps, off, nodes = self._forgotten
        for known in self._numbers.values():
            for numbers in known.values():
                usual = max(numbers, key=lambda number: numbers[number], default=0)
                for number, times in numbers.items():
                    steps += times
                    nodes += times * number
                    others += times * (number != usual)
                    off += times * abs(number - usual)
        return _Tally(others, steps, off, nodes)
