"""Somebody's services that reports are written to in the middle of training, and that may be down."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)


class Services:
    """Several services, each written to whatever becomes of the others.

    One that raises costs one warning, however often it does, and keeps nothing from the others.

    Args:
        services: what is written to.
        name: what the warning calls the others, such as ``loggers``.
    """

    def __init__(self, services: Iterable[Any], *, name: str) -> None:
        self._services = tuple(services)
        self._name = name
        self._failed: set[int] = set()

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._services)

    def each(self, write: Callable[[Any], Any]) -> bool:
        """Call *write* with every service; whether any call returned True."""
        taken = [self._guarded(place, write) for place in range(len(self._services))]
        return any(taken)

    def _guarded(self, place: int, write: Callable[[Any], Any]) -> bool:
        service = self._services[place]
        try:
            return write(service) is True
        except Exception as error:  # a service of the user's, in the middle of training: whatever it raises stays here
            if place not in self._failed:
                self._failed.add(place)
                logger.warning(
                    "%s did not take the FLOPs report, the other %s did not notice: %s: %s",
                    type(service).__name__,
                    self._name,
                    type(error).__name__,
                    error,
                )
            return False
