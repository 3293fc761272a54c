"""Exclusive seconds of each part of a step, by a clock that the caller passes in.

At every boundary the timer stores one stamp and what happens there; the sums are worked out when the step has ended.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple, get_args

from lightning_flops.measure.parts import Parts
from lightning_flops.measure.timing.clocks import WallClock
from lightning_flops.records import PhaseSeconds, TimePhase, phase_of

_PHASES = frozenset(get_args(TimePhase))


class StepMarks(NamedTuple):
    """The boundaries of one step: part *i* runs from ``stamps[i]`` to ``stamps[i + 1]``."""

    stamps: tuple[Any, ...]
    parts: tuple[str, ...]
    phases: tuple[str, ...]  #: The phase that runs in each of them; empty: none.


class StepTimes(NamedTuple):
    """The times of one step, in seconds."""

    seconds: PhaseSeconds
    reader_sec: float
    excluded_sec: dict[str, float]
    phase_sec: dict[str, float]


class PhaseTimer(Parts):
    """Collects the boundaries of one step after the other; time belongs to the innermost part."""

    def __init__(self, clock: WallClock) -> None:
        super().__init__()
        self.clock = clock
        self.whole = False  # steps are timed between two stamps: only what belongs to no step has boundaries
        self._stamp = clock.stamp
        self._marks: list[tuple[str, str, Any]] = []  # the part and the phase that run from each stamp on
        self._open = ["other"]  # the parts that run, each as what its time is of
        self._phase = ""

    def begin(self) -> None:
        """Start the first step here."""
        self._open = ["other"]
        self.entered.clear()
        self._phase = ""
        self._start()

    def _start(self) -> None:
        self.clock.step_begins()
        self._marks.clear()
        self._mark()

    def _mark(self) -> None:
        """Another part, or another phase, runs from here on; the stamp is last: these lines are not in its time."""
        self._marks.append((self._open[-1], self._phase, self._stamp()))

    def enter(self, part: str, *, counts: bool = True) -> None:
        """As of ``Parts``; where its time is of what runs already, this is no boundary."""
        if counts:
            self.entered.append(part)
        running = self._open[-1]
        if running not in _PHASES or (self.whole and part in _PHASES):
            part = running
        self._open.append(part)
        if part != running:
            self._mark()

    def leave(self) -> None:
        """The part entered last ends."""
        if len(self._open) > 1 and self._open.pop() != self._open[-1]:
            self._mark()

    def phase(self, name: str) -> None:
        """As of ``Parts``."""
        if name != self._phase:
            self._phase = name
            self._mark()

    def claim(self, part: str) -> None:
        """As of ``Parts``."""
        if self.whole and part in _PHASES:
            return
        running, phase, stamp = self._marks[-1]
        if running == "other":
            self._marks[-1] = part, phase, stamp
        self._mark()

    def go_on(self) -> None:
        """The step begins here: since the last one ended only the profiler ran, and that time belongs to no step."""
        if len(self._marks) == 1:
            self._start()

    def cut(self) -> StepMarks:
        """End this step and start the next at the same stamp."""
        end = self._stamp()
        parts, phases, stamps = zip(*self._marks, strict=True)
        self._marks = [(self._open[-1], self._phase, end)]
        return StepMarks((*stamps, end), parts, phases)

    def read(self, marks: StepMarks) -> StepTimes:
        """Seconds of each part of *marks*, which have all passed; read them once, those of an earlier step first."""
        spent = dict.fromkeys(_PHASES, 0.0)
        excluded: dict[str, float] = {}
        of_phases: defaultdict[str, float] = defaultdict(float)
        reader_sec = 0.0
        for start, end, part, phase in zip(marks.stamps, marks.stamps[1:], marks.parts, marks.phases, strict=False):
            sums: dict[Any, float] = spent if part in _PHASES else excluded
            seconds = self.clock.seconds_between(start, end)
            sums[part] = sums.get(part, 0.0) + seconds
            if part in _PHASES:
                of_phases[phase_of(part, phase)] += seconds
            if part == "data_wait":
                reader_sec += self.clock.host_seconds_between(start, end)
        self.clock.reuse(marks.stamps[:-1])  # the last may be the first of the next step
        return StepTimes(PhaseSeconds(**spent), reader_sec, excluded, of_phases)
