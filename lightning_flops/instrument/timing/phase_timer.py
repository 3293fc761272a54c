"""Exclusive seconds of each part of a step, from a clock handed in.

A step is a run of consecutive intervals. At every border the timer stores one stamp and what happens there, and nothing
else: training runs inside the very parts that are timed, so what a border takes is in their time. What the borders come
to is worked out when the step has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from lightning_flops.instrument.timing.clocks import Clock
from lightning_flops.records import PhaseSeconds, TimePhase

_PHASES = frozenset(get_args(TimePhase))


class Mark(NamedTuple):
    """A part of a step begins."""

    part: TimePhase | str
    counts: bool = True
    """It is a forward, a backward or an update by itself, and not something that belongs to one."""


class _Pause(NamedTuple):
    name: str


class _Claim(NamedTuple):
    part: TimePhase


class _Resume:
    """The end of a pause."""


_RESUME = _Resume()

_Event = Mark | _Pause | _Claim | _Resume | None
"""What happens at a border; None: the part entered last ends."""


@dataclass(frozen=True, slots=True)
class StepMarks:
    """The borders of one step: part *i* runs from ``stamps[i]`` to ``stamps[i + 1]``."""

    stamps: tuple[Any, ...]
    parts: tuple[str, ...]
    entered: tuple[str, ...]
    """Every part that began in this step and counts, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What the borders of one step come to, in seconds."""

    seconds: PhaseSeconds
    reader_sec: float
    excluded_sec: dict[str, float]


class PhaseTimer:
    """Collects the borders of one step after the other.

    Parts nest, and the innermost counts: an optimizer step that calls a closure is optimizer time, less the forward
    and backward inside it. A part whose name is no phase (``validation``, ``checkpoint``) is time that the step does
    not own; everything inside such a part is left out with it.
    """

    def __init__(self, clock: Clock[Any]) -> None:
        self._clock = clock
        self._stamp = clock.stamp
        self._stamps: list[Any] = []
        self._events: list[_Event] = []
        self._open: list[str] = []  # at the step's beginning
        self._pause: str | None = None  # at the step's beginning

    def begin(self) -> None:
        """Start the first step here."""
        self._open.clear()
        self._pause = None
        self._events.clear()
        self._stamps = [self._stamp()]

    def enter(self, mark: Mark) -> None:
        """A part begins, inside whatever is running."""
        self._events.append(mark)
        self._stamps.append(self._stamp())  # last: what came before is not in the part's time

    def leave(self) -> None:
        """The part entered last ends."""
        self._stamps.append(self._stamp())  # first: what follows is not in its time
        self._events.append(None)

    def claim(self, part: TimePhase) -> None:
        """What ran since the last border was *part*, if no part was running."""
        self._happens(_Claim(part))

    def pause(self, name: str) -> None:
        """From here until ``resume`` the time belongs to no step; it is listed under *name*."""
        self._happens(_Pause(name))

    def resume(self) -> None:
        """Time is the step's again."""
        self._happens(_RESUME)

    def go_on(self) -> None:
        """The step begins here: what ran since the last one ended was the profiler's own, and belongs to neither."""
        if not self._events:
            self._stamps = [self._stamp()]

    def cut(self) -> StepMarks:
        """End this step and start the next at the same stamp."""
        end = self._stamp()
        stamps, self._stamps = (*self._stamps, end), [end]
        parts = [self._current()]
        entered = []
        for event in self._events:
            if isinstance(event, Mark):
                self._open.append(event.part)
                if event.counts:
                    entered.append(event.part)
            elif event is None:
                if self._open:
                    self._open.pop()
            elif isinstance(event, _Pause):
                self._pause = event.name
            elif isinstance(event, _Resume):
                self._pause = None
            elif parts[-1] == "other":
                parts[-1] = event.part
            parts.append(self._current())
        self._events.clear()
        return StepMarks(stamps=stamps, parts=tuple(parts), entered=tuple(entered))

    def read(self, marks: StepMarks) -> StepTimes:
        """Seconds of each part of *marks*; call ``settle`` on the clock first."""
        spent = dict.fromkeys(_PHASES, 0.0)
        excluded: dict[str, float] = {}
        reader_sec = 0.0
        for i, part in enumerate(marks.parts):
            start, end = marks.stamps[i], marks.stamps[i + 1]
            seconds = self._clock.seconds_between(start, end)
            if part in _PHASES:
                spent[part] += seconds
            else:
                excluded[part] = excluded.get(part, 0.0) + seconds
            if part == "data_wait":
                reader_sec += self._clock.host_seconds_between(start, end)
        return StepTimes(seconds=PhaseSeconds(**spent), reader_sec=reader_sec, excluded_sec=excluded)

    def _happens(self, event: _Event) -> None:
        self._events.append(event)
        self._stamps.append(self._stamp())

    def _current(self) -> str:
        """The part that runs now, by what has been gone through."""
        if self._pause is not None:
            return self._pause
        for part in self._open:
            if part not in _PHASES:
                return part
        return self._open[-1] if self._open else "other"
