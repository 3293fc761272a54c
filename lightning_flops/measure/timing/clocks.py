"""Clocks that stamp the ends of the parts of a step.

A stamp is cheap and never waits for a device. The time between two stamps is read later, after ``settle``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lightning_flops import host_clock


class WallClock:
    """The host's clock: true for work that the calling thread does itself, as on a CPU. Others answer as it does."""

    def __init__(self, now: Callable[[], float] = host_clock.now) -> None:
        self._now = now

    def stamp(self) -> Any:
        """A stamp of this moment, in the order in which the device sees it."""
        return self._now()

    def settle(self) -> None:
        """Wait until every stamp taken so far has a time."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from *start* to *end* where the work of the step happens: on the device, if there is one."""
        return float(end - start)

    def host_seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from *start* to *end* on the host."""
        return float(end - start)


class CudaEventClock(WallClock):
    """CUDA events, with the host's time, on the current stream, which is the one that the training loop computes on.

    Intervals contain the device's work and its waits for the host, and add up, without a synchronization.
    """

    def __init__(
        self, *, new_event: Callable[[], Any] | None = None, now: Callable[[], float] = host_clock.now
    ) -> None:
        super().__init__(now)
        self._new_event = new_event or functools.partial(torch.cuda.Event, enable_timing=True)
        self._last: Any = None

    def stamp(self) -> tuple[Any, float]:
        """Record an event on the current stream."""
        event = self._last = self._new_event()
        event.record()
        return event, self._now()

    def settle(self) -> None:
        """Wait for the last event; every earlier one on the stream is then done too."""
        if self._last is not None:
            self._last.synchronize()

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
