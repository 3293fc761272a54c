"""Clocks that stamp the ends of the parts of a step.

A stamp is cheap and never waits for a device. The time between two stamps is read later, after ``settle``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from lightning_flops import host_clock

StampT = TypeVar("StampT")


class Clock(Protocol[StampT]):
    """Takes stamps; gives the seconds between two of them after ``settle`` has returned."""

    def stamp(self) -> StampT:
        """A stamp of this moment, in the order in which the device sees it."""

    def settle(self) -> None:
        """Wait until every stamp taken so far has a time. Called once, when the window closes."""

    def seconds_between(self, start: StampT, end: StampT) -> float:
        """Seconds from *start* to *end* where the work of the step happens: on the device, if there is one."""

    def host_seconds_between(self, start: StampT, end: StampT) -> float:
        """Seconds from *start* to *end* on the host."""


class WallClock:
    """The host's clock: true for work that the calling thread does itself, as on a CPU."""

    def __init__(self, now: Callable[[], float] = host_clock.now) -> None:
        self.stamp = now

    def settle(self) -> None:
        """Host stamps have their time at once."""

    def seconds_between(self, start: float, end: float) -> float:
        """Seconds from *start* to *end*."""
        return end - start

    host_seconds_between = seconds_between


class DeviceStamp(NamedTuple):
    """An event on the compute stream, and the host's time when it was recorded."""

    event: Any
    host: float


class CudaEventClock:
    """CUDA events on the current stream, which is the one that the training loop computes on.

    The interval between two consecutive events contains the device's work between them, and the time that the device
    waited for the host. So the intervals add up to the device's time, without a synchronization before ``settle``.
    """

    def __init__(
        self, *, new_event: Callable[[], Any] | None = None, now: Callable[[], float] = host_clock.now
    ) -> None:
        self._new_event = new_event or functools.partial(torch.cuda.Event, enable_timing=True)
        self._now = now
        self._last: DeviceStamp | None = None

    def stamp(self) -> DeviceStamp:
        """Record an event on the current stream."""
        event = self._new_event()
        event.record()
        self._last = DeviceStamp(event, self._now())
        return self._last

    def settle(self) -> None:
        """Wait for the last event; every earlier one on the stream is then done too."""
        if self._last is not None:
            self._last.event.synchronize()

    def seconds_between(self, start: DeviceStamp, end: DeviceStamp) -> float:
        """Seconds of the compute stream from *start* to *end*."""
        return float(start.event.elapsed_time(end.event)) / 1e3  # elapsed_time is in milliseconds

    def host_seconds_between(self, start: DeviceStamp, end: DeviceStamp) -> float:
        """Seconds from *start* to *end* on the host."""
        return end.host - start.host


def clock_for(device: torch.device) -> Clock[Any] | None:
    """The clock that gives true times for *device*.

    None for a device that works asynchronously and has no events that we read: its phases cannot be timed.
    """
    return WallClock() if device.type == "cpu" else CudaEventClock() if device.type == "cuda" else None
