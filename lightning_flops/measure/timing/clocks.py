"""Clocks that stamp the ends of the parts of a step.

A stamp is cheap and never waits for a device. The time between two stamps is read later, after ``settle``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lightning_flops import host_clock


class WallClock:
    """The host's clock: true for work that the calling thread does itself, as on a CPU. Others answer as it does."""

    def __init__(self, now: Callable[[], float] = host_clock.now) -> None:
        self._now = now

    def step_begins(self) -> None:
        """A step begins, to which the stamps from here on belong."""

    def stamp(self) -> Any:
        """A stamp of this moment, in the order in which the device sees it."""
        return self._now()

    def has_passed(self, stamp: Any) -> bool:
        """Whether *stamp*, and every earlier one, has a time."""
        return True

    def reuse(self, stamps: Iterable[Any]) -> None:
        """The times of *stamps* are not asked for any more."""

    def settle(self) -> None:
        """Wait until every stamp taken so far has a time."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from *start* to *end* where the work of the step happens: on the device, if there is one."""
        return float(end - start)

    def host_seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from *start* to *end* on the host."""
        return float(end - start)


class CudaEventClock(WallClock):
    """CUDA events, with the host's time, on the stream that was current where the step began.

    Intervals contain the device's work and its waits for the host, and add up, without a synchronization. What runs on
    another stream for a while, as inside ``torch.cuda.stream``, is not waited for. Before any step it is the current
    stream.
    """

    def __init__(
        self,
        *,
        new_event: Callable[[], Any] | None = None,
        now: Callable[[], float] = host_clock.now,
        stream: Callable[[], Any] = torch.cuda.current_stream,
    ) -> None:
        super().__init__(now)
        self._new_event = new_event or functools.partial(torch.cuda.Event, enable_timing=True)
        self._ask_stream, self._stream = stream, None
        self._latest: Any = None
        self._left: list[Any] = []  # the latest event on each stream that was left
        self._free: list[Any] = []  # events to record again: to make one takes longer

    def step_begins(self) -> None:
        """Ask for the stream, once for all stamps of the step."""
        stream = self._ask_stream()
        if self._latest is not None and stream != self._stream:
            self._left.append(self._latest)
        self._stream = stream

    def stamp(self) -> tuple[Any, float]:
        """Record an event on the step's stream."""
        event = self._latest = self._free.pop() if self._free else self._new_event()
        event.record(self._stream)
        return event, self._now()

    def has_passed(self, stamp: Any) -> bool:
        """Whether the device has come to it."""
        return bool(stamp[0].query())

    def reuse(self, stamps: Iterable[Any]) -> None:
        """Their events are free."""
        self._free.extend(event for event, _ in stamps)

    def settle(self) -> None:
        """Wait for the latest event; every earlier one on its stream is then done too."""
        for event in (*self._left, self._latest):
            if event is not None:
                event.synchronize()
        self._left.clear()

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds of the compute stream from *start* to *end*."""
        return float(start[0].elapsed_time(end[0])) / 1e3  # elapsed_time is in milliseconds

    def host_seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from *start* to *end* on the host."""
        return float(end[1] - start[1])


def clock_for(device: torch.device) -> WallClock | None:
    """The clock that gives true times for *device*.

    None for a device that works asynchronously and has no events that we read: its phases cannot be timed.
    """
    return WallClock() if device.type == "cpu" else CudaEventClock() if device.type == "cuda" else None
