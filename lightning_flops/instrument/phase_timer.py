"""Exclusive seconds of each part of a step, from a clock handed in.

A step is a run of consecutive intervals. At every border the timer stores one stamp and the name of the part that
begins; nothing is added up before the window closes, so a border costs one stamp and one append.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from lightning_flops.instrument.clocks import Clock
from lightning_flops.records import PhaseSeconds, TimePhase

_PHASES = frozenset(get_args(TimePhase))


@dataclass(frozen=True, slots=True)
class StepMarks:
    """The borders of one step: part *i* runs from ``stamps[i]`` to ``stamps[i + 1]``."""

    stamps: tuple[Any, ...]
    parts: tuple[str, ...]


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
        self._open: list[str] = []
        self._stamps: list[Any] = []
        self._parts: list[str] = []
        self._pause: str | None = None

    def begin(self) -> None:
        """Start the first step here."""
        self._open.clear()
        self._pause = None
        self._stamps = [self._clock.stamp()]
        self._parts = [self._current()]

    def enter(self, part: str) -> None:
        """*part* begins, inside whatever is running."""
        self._open.append(part)
        self._border()

    def leave(self) -> None:
        """The part entered last ends."""
        self._stamps.append(self._clock.stamp())  # first: what follows is not in its time
        if self._open:
            self._open.pop()
        self._parts.append(self._current())

    def claim(self, part: str) -> None:
        """What ran since the last border was *part*, if no part was running."""
        if self._parts and self._parts[-1] == "other":
            self._parts[-1] = part

    def pause(self, name: str) -> None:
        """From here until ``resume`` the time belongs to no step; it is listed under *name*."""
        self._pause = name
        self._border()

    def resume(self) -> None:
        """Time is the step's again."""
        if self._pause is not None:
            self._pause = None
            self._border()

    def cut(self) -> StepMarks:
        """End this step and start the next at the same stamp."""
        end = self._clock.stamp()
        marks = StepMarks(stamps=(*self._stamps, end), parts=tuple(self._parts))
        self._stamps = [end]
        self._parts = [self._current()]
        return marks

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

    def _border(self) -> None:
        self._parts.append(self._current())
        self._stamps.append(self._clock.stamp())  # last: what came before is not in the part's time

    def _current(self) -> str:
        if self._pause is not None:
            return self._pause
        for part in self._open:
            if part not in _PHASES:
                return part
        return self._open[-1] if self._open else "other"
