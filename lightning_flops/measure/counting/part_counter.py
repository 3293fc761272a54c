"""Counts the steps of a window part by part: what belongs to a part, and which parts cannot be separated."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from typing import get_args

from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.memory import MemoryWatch
from lightning_flops.measure.parts import Parts
from lightning_flops.records import BucketFlops, FlopRecord, PhaseFlops, TimePhase, phase_of

_COUNTED_PARTS = ("backward", "optimizer", "transfer", "other")
"""Parts of a step whose work counts as it comes; a forward's counts as the root's, that of anything else not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedStep:
    """FLOPs of one step."""

    flops: BucketFlops
    by_phase: PhaseFlops
    lower_bound: bool  #: An operator that may have FLOPs was not counted.
    #: Values in its tensors decided sizes: another step of its shapes may have other FLOPs.
    data_dependent: bool = False


class PartCounter(Parts):
    """Counts whole steps; they add up. *memory* follows their parts, too."""

    def __init__(self, counter: FlopCounter, memory: MemoryWatch | None = None) -> None:
        super().__init__()
        self._memory = memory
        self.counter = counter  # counts what runs inside of it
        self._open: list[tuple[str, ExitStack]] = []
        self._phase = ""
        self._seen = self._before_step = Counter[tuple[str, str]]()  # counted until the last look, and the last step
        self._spent: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)  # what of it each phase did
        self._total = PhaseFlops()
        self.flops = FlopRecord()  # what was counted until the last step ended
        self.phases: dict[str, BucketFlops] = {}  # what of that each phase did
        self.mixed: set[TimePhase] = set()  # phases whose work ran, in part, while the loop was in another of them

    def enter(self, part: str, *, counts: bool = True) -> None:
        """*part* of a step begins, inside whatever part is running."""
        super().enter(part, counts=counts)
        if self._memory is not None:
            self._memory.enter(part, counts=counts)
        self._look()
        scope = ExitStack()
        if part == "forward":
            scope.enter_context(self.counter.in_root())
        elif part not in _COUNTED_PARTS:
            scope.enter_context(self.counter.pause())
        self._open.append((part, scope))

    def leave(self) -> None:
        """The part entered last ends."""
        if self._open:
            self._look()
            self._open.pop()[1].close()
            if self._memory is not None:
                self._memory.leave()

    def phase(self, name: str) -> None:
        """What runs from here on is of this phase, whatever its parts; an empty *name* ends it."""
        self._look()
        self._phase = name

    def claim(self, part: str) -> None:
        """What ran since the last part was left, if none is running now, was *part* too."""
        if not self._open:
            self._look(outside=part)

    def step_ends(self) -> CountedStep:
        """What was counted of the step that ends here."""
        self._look()
        self.flops = self.counter.record()
        self.phases = {name: dict(spent) for name, spent in self._spent.items()}
        before, self._before_step = self._before_step, self._seen
        total, self._total = self._total, self.counter.total()
        return CountedStep(
            flops=self._seen - before,
            by_phase=self._total - total,
            lower_bound=any(one.may_have_flops for one in self.flops.uncounted.values()),
            data_dependent=self.counter.take_data_dependent(),
        )

    def give_up(self) -> None:
        """Every part that is still open ends."""
        while self._open:
            self._open.pop()[1].close()

    def _look(self, outside: str = "other") -> None:
        """Whose work ran since the last look: a phase's, and perhaps of another part than the loop is in."""
        part = self._open[-1][0] if self._open else outside
        before, self._seen = self._seen, self.counter.buckets()
        new = self._seen - before
        self._spent[phase_of(part, self._phase)].update(new)
        ran = {"backward" if phase == "recompute" else phase for phase, _ in new}  # the parts whose time it takes
        if ran - {part}:
            self.mixed.update(one for one in get_args(TimePhase) if one in ran | {part})
