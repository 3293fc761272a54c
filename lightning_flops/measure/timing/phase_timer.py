"""Exclusive seconds of each part of a step, by a clock that the caller passes in.

At every boundary the timer stores one stamp and what happens there; the sums are worked out when the step has ended.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from lightning_flops.measure.timing.clocks import WallClock
from lightning_flops.records import PhaseSeconds, TimePhase

_PHASES = frozenset(get_args(TimePhase))


class StepMarks(NamedTuple):
    """The boundaries of one step: part *i* runs from ``stamps[i]`` to ``stamps[i + 1]``."""

    stamps: tuple[Any, ...]
    parts: tuple[str, ...]
    entered: tuple[str, ...]  #: Every part that began in this step and counts, in order.


class StepTimes(NamedTuple):
    """The times of one step, in seconds."""

    seconds: PhaseSeconds
    reader_sec: float
    excluded_sec: dict[str, float]


class PhaseTimer:
    """Collects the boundaries of one step after the other.

    Parts nest, and time belongs to the innermost. A part whose name is not a phase (``validation``, ``checkpoint``)
    does not belong to the step, and neither does anything inside it.
    """

    def __init__(self, clock: WallClock) -> None:
        self._clock = clock
        self._stamp = clock.stamp
        self._stamps: list[Any] = []
        self._events: list[tuple[str, bool] | str | None] = []
        """What happens at each boundary: a part begins, and whether it counts; what ran was a part; None: one ends."""
        self._open: list[str] = []  # at the step's beginning

    def begin(self) -> None:
        """Start the first step here."""
        self._open.clear()
        self._events.clear()
        self._stamps = [self._stamp()]

    def enter(self, part: str, *, counts: bool = True) -> None:
        """A part begins, inside whatever is running.

        *counts*: it is a forward, a backward or an update by itself, and not only something that belongs to one.
        """
        self._events.append((part, counts))
        self._stamps.append(self._stamp())  # last, so that the line before is not in the part's time

    def leave(self) -> None:
        """The part entered last ends."""
        self._stamps.append(self._stamp())  # first, so that the next line is not in the part's time
        self._events.append(None)

    def claim(self, part: TimePhase) -> None:
        """What ran since the last boundary was *part*, if no part was running."""
        self._events.append(part)
        self._stamps.append(self._stamp())

    def go_on(self) -> None:
        """The step begins here: since the last one ended only the profiler ran, and that time belongs to no step."""
        if not self._events:
            self._stamps = [self._stamp()]

    def cut(self) -> StepMarks:
        """End this step and start the next at the same stamp."""
        end = self._stamp()
        stamps, self._stamps = (*self._stamps, end), [end]
        parts = [self._current()]
        entered = []
        for event in self._events:
            if isinstance(event, tuple):
                self._open.append(event[0])
                if event[1]:
                    entered.append(event[0])
            elif event is None:
                if self._open:
                    self._open.pop()
            elif parts[-1] == "other":
                parts[-1] = event
            parts.append(self._current())
        self._events.clear()
        return StepMarks(stamps, tuple(parts), tuple(entered))

    def read(self, marks: StepMarks) -> StepTimes:
        """Seconds of each part of *marks*; call ``settle`` on the clock first."""
        spent = dict.fromkeys(_PHASES, 0.0)
        excluded: dict[str, float] = {}
        reader_sec = 0.0
        for start, end, part in zip(marks.stamps, marks.stamps[1:], marks.parts, strict=False):
            sums: dict[Any, float] = spent if part in _PHASES else excluded
            sums[part] = sums.get(part, 0.0) + self._clock.seconds_between(start, end)
            if part == "data_wait":
                reader_sec += self._clock.host_seconds_between(start, end)
        return StepTimes(PhaseSeconds(**spent), reader_sec, excluded)

    def _current(self) -> str:
        """The part that is running, by the events so far."""
        outside = (part for part in self._open if part not in _PHASES)
        return next(outside, self._open[-1] if self._open else "other")
