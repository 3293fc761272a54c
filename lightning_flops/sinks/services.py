"""Somebody's services that reports are written to in the middle of training, and that may be down."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightning_flops.signals import is_of_signal_handler
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
        taken = False
        for place, service in enumerate(self._services):
            try:
                taken |= write(service) is True
            except Exception as error:  # of the user's, in the middle of training: whatever it raises stays here
                if is_of_signal_handler(error):
                    raise
                if place not in self._failed:
                    self._failed.add(place)
                    words = type(service).__name__, self._name, type(error).__name__, error
                    logger.warning(
                        "%s did not take the FLOPs report, the other %s did not notice: %s: %s",
                        *words,
                    )
        return taken


def add_text(writer: Any, tag: str, text: str, step: int) -> bool:
    """Add *text* to *writer* if that is TensorBoard's, and flush it so that it shows at once; whether it was."""
    # Asked of the class: the experiment of a DummyLogger, and of every rank but the first, answers to any name.
    if not callable(getattr(type(writer), "add_text", None)):
        return False
    writer.add_text(tag, text, step)
    if callable(getattr(type(writer), "flush", None)):
        writer.flush()
    return True
