"""Whether steps of the same shapes do the same work, as far as autograd tells.

Shapes do not tell what a step runs where chance or data decide: layers that are dropped at random, an early exit.
Counting shows it, but few steps can be counted. Every step tells how many nodes it has added to autograd's graph: that
is one number to read, and it is the same where the same is run. Other numbers of nodes need not be other FLOPs: tokens
may be sent to more experts, or to fewer, and be as many. So they are doubts, which counted steps can dispel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import compress, repeat
from operator import eq, not_
from typing import NamedTuple

from lightning_flops.analysis.law import Sizes
from lightning_flops.analysis.step_keys import AlikeSteps, Kind, kind_of
from lightning_flops.units import plain

_LEAST_STEPS = 5
_LEAST_SHARE = 0.01
"""Fewer steps that do other work, or a smaller share of all, raise no doubt: now and then a compiler may trace."""

_LEAST_SHARE_OF_NODES = 0.02
"""Nor does a smaller share of nodes that are too many or too few: somebody may log a few figures more."""

_LIKELY = 0.05
"""By luck, all counted steps may be usual ones although others spend something else. If the chance of that is smaller,
there is no doubt any more."""

_SEEN_ONCE = -1
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
        return (1.0 - self.steps / self.of_steps) ** confirmed < _LIKELY


class _Known(NamedTuple):
    """Steps of one kind, by all sizes in a step's batches."""

    usual: dict[Sizes, int]
    """The number of nodes that most of them have made; or ``_SEEN_ONCE``."""
    steps: Counter[Sizes]
    """So many have made it."""
    others: dict[Sizes, Counter[int]]
    """How many have made another number, by that number."""


class SameWork:
    """Looks at the autograd nodes of a run's steps."""

    def __init__(self) -> None:
        self._known: dict[Kind, _Known] = {}
        # Of all steps that were looked at, but for the first of each shape:
        self._steps = 0
        self._nodes = 0
        self._others = 0
        """Those that made another number of nodes than most of their shapes."""
        self._off = 0
        """So many nodes too many or too few."""

    def book(self, steps: AlikeSteps, nodes: Sequence[int | None]) -> None:
        """Steps of one kind have ended.

        Args:
            steps: one row for each, or one for all.
            nodes: how many each has made; None if nobody knows.
        """
        kind = kind_of(steps.example)
        if kind not in self._known:
            self._known[kind] = _Known({}, Counter(), {})
        known, rows = self._known[kind], list(steps.rows())
        if steps.number == 1:
            first = next((one for one in nodes if one is not None), None)
            if first is not None:
                self._add(known, rows[0], first, 1)
                numbers = Counter(nodes)
                numbers[first] -= 1
                for number, times in numbers.items():
                    if number is not None and times:
                        self._add(known, rows[0], number, times)
            return
        # That is so of most of them, and then no function of ours is called for each.
        as_usual = list(map(eq, map(known.usual.get, rows, repeat(_SEEN_ONCE)), nodes))
        known.steps.update(compress(rows, as_usual))
        self._steps += sum(as_usual)
        self._nodes += sum(compress(nodes, as_usual))  # type: ignore[arg-type]
        for sizes, one in compress(zip(rows, nodes, strict=True), map(not_, as_usual)):
            if one is not None:
                self._add(known, sizes, one, 1)

    def _add(self, known: _Known, sizes: Sizes, number: int, times: int) -> None:
        """So many steps of these *sizes* have made this *number* of nodes."""
        usual = known.usual.get(sizes)
        if usual is None:
            known.usual[sizes] = _SEEN_ONCE
            times -= 1
            if not times:
                return
        if usual is None or usual == _SEEN_ONCE:
            known.usual[sizes] = usual = number
        self._steps += times
        self._nodes += times * number
        if number == usual:
            known.steps[sizes] += times
            return
        self._others += times
        self._off += times * abs(number - usual)
        others = known.others.setdefault(sizes, Counter())
        others[number] += times
        if others[number] > known.steps[sizes]:
            self._becomes_usual(known, sizes, number)

    def _becomes_usual(self, known: _Known, sizes: Sizes, number: int) -> None:
        """Most steps of these *sizes* have made this *number* of nodes by now."""
        others, usual = known.others[sizes], known.usual[sizes]
        self._others -= others.total()
        self._off -= sum(times * abs(one - usual) for one, times in others.items())
        others[usual], known.steps[sizes], known.usual[sizes] = known.steps[sizes], others.pop(number), number
        self._others += others.total()
        self._off += sum(times * abs(one - number) for one, times in others.items())

    def forget(self) -> None:
        """The steps so far have too many shapes to remember; that some of them did other work still counts."""
        self._known.clear()

    def other_work(self) -> OtherWork | None:
        """Steps that do other work than most of their shapes; None if there are none, or next to none."""
        if self._others < max(_LEAST_STEPS, _LEAST_SHARE * self._steps):
            return None
        if self._off < _LEAST_SHARE_OF_NODES * self._nodes:
            return None
        return OtherWork(self._others, self._steps)
